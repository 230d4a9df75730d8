"""The error of an integration whose third-party package is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def missing(extra: str, needs: str) -> ModuleNotFoundError:
    """Return the error for an integration that needs a package, which its extra installs."""
    return ModuleNotFoundError(
        f"resilience.integrations.{extra} needs {needs}: pip install 'resilience-pipeline[{extra}]'", name=needs
    )


@contextmanager
def needed_by(extra: str) -> Iterator[None]:
    """Import the packages of an extra in this block. If one is missing, the error says how to install it.

    :param extra: the extra, which has the same name as its integration.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.startswith("resilience"):
            raise
        raise missing(extra, name) from error
