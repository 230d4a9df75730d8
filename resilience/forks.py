"""The child of a fork: it has one thread, the one that forked, and a copy of everything that the others held.

A lock that another thread held at that moment is never released in the child, a permit or a probe that another
thread had never comes back. So what shares such things between threads is reset there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_shared: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def reset_after_fork(thing: object, reset: Callable[[Any], None]) -> None:
    """Call `reset(thing)` in the child of every fork, for as long as `thing` is there."""
    _shared[thing] = reset


def lock_of(thing: object) -> threading.RLock:
    """Make the `_lock` of a thing: reentrant, as a finalizer may come in the middle; another one in a child."""
    reset_after_fork(thing, _replace_lock)
    return threading.RLock()


def _replace_lock(thing: Any) -> None:  # pragma: no cover (in the child of a fork)
    thing._lock = threading.RLock()


def _in_child() -> None:  # pragma: no cover (in the child of a fork)
    for thing, reset in list(_shared.items()):
        reset(thing)


if hasattr(os, "register_at_fork"):  # pragma: no branch (there is no fork on Windows)
    os.register_at_fork(after_in_child=_in_child)
