"""Attributes that are replaced for a block: the functions of the process clock and of event loops, the randomness."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from resilience import forks

_lock = forks.lock_of(sys.modules[__name__])  # held while a block begins or ends
_values: dict[tuple[int, str], list[Any]] = {}  # of each replaced attribute: the original, then those of open blocks


@contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of an object, a class or a module in this block, and restore them at its end.

    Blocks of several threads or tasks may end in any order: the value of the latest open one counts.
    """
    with _lock:
        for name, value in attributes.items():
            _values.setdefault((id(target), name), [getattr(target, name)]).append(value)
            setattr(target, name, value)
    try:
        yield
    finally:
        with _lock:
            for name, value in attributes.items():
                values = _values[id(target), name]
                values.remove(value)
                setattr(target, name, values[-1])
                if len(values) == 1:
                    del _values[id(target), name]
