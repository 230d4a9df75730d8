"""What an integration needs, and how to install it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["missing", "needed_by"]


def missing(extra: str, needs: str) -> ModuleNotFoundError:
    """Return the error for an integration whose third party is not installed."""
    return ModuleNotFoundError(
        f"resilience.integrations.{extra} needs {needs}: pip install 'resilience-pipeline[{extra}]'", name=needs
    )


@contextmanager
def needed_by(extra: str) -> Iterator[None]:
    """Import in this block what an extra installs; where that is missing, the error says how to install it.

    :param extra: the extra, which is named as its module is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.startswith("resilience"):
            raise
        raise missing(extra, name) from error
