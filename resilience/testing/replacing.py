"""Attributes that are replaced for a block: the functions of the process clock and of event loops, the randomness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of an object, a class or a module in this block, and restore them at its end."""
    before = {name: getattr(target, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
