"""Resets in the child of a fork, which has a single thread, and a copy of everything that the other threads held.

In the child, a lock that another thread held at the fork is never released, and a permit or a probe of another thread
is never returned. So each object that shares such things between threads is reset.
"""

from __future__ import annotations

import logging  # first, so that its own locks are free before anything is reset
import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

logger: logging.Logger = logging.getLogger("resilience")

_shared: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def reset_after_fork(thing: object, reset: Callable[[Any], None]) -> None:
    """Call `reset(thing)` in the child of every fork, as long as `thing` exists. Does not keep it alive."""
    _shared[thing] = reset


def lock_of(thing: object) -> threading.RLock:
    """Make the `_lock` of an object or module: reentrant, as a finalizer may run while it is held; new after a fork."""
    reset_after_fork(thing, _replace_lock)
    return threading.RLock()


def _replace_lock(thing: Any) -> None:  # pragma: no cover (in the child of a fork)
    thing._lock = threading.RLock()


def _in_child() -> None:  # pragma: no cover (in the child of a fork)
    for thing, reset in list(_shared.items()):
        try:
            reset(thing)
        except Exception:  # the algorithm of an `AdaptiveLimit` may be a user's own
            logger.exception("resetting %s in the child of a fork raised", type(thing).__name__)


if hasattr(os, "register_at_fork"):  # pragma: no branch (there is no fork on Windows)
    os.register_at_fork(after_in_child=_in_child)
