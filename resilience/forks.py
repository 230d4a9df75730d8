"""Resets in the child of a fork, which has a single thread, and a copy of everything that the other threads held.

In the child, a lock that another thread held at the fork is never released, and a permit or a probe of another thread
is never returned. So each object that shares such things between threads is reset.

The child of a bare `os.fork` continues the call that forked it. A process that multiprocessing forks does not: it may
be one of a pool, which outlives the call that starts it. So there, no code counts as part of that call.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar
from weakref import ref

from resilience.log import logger  # imports `logging`, whose own locks are then free before anything is reset

T = TypeVar("T")

#: In a process that multiprocessing has forked: the frame that started it, where the calls of its parent begin.
starting_frame: FrameType | None = None

_variables: list[tuple[ContextVar[Any], Any]] = []
_shared: dict[ref[Any], Callable[[Any], None]] = {}  # a `WeakKeyDictionary` takes three times as long


def reset_after_fork(thing: object, reset: Callable[[Any], None]) -> None:
    """Call `reset(thing)` in the child of every fork, as long as `thing` exists. Does not keep it alive."""
    _shared[ref(thing, _shared.pop)] = reset


def lock_of(thing: object) -> threading.RLock:
    """Make the `_lock` of an object or module: reentrant, as a finalizer may run while it is held; new after a fork."""
    reset_after_fork(thing, _replace_lock)
    return threading.RLock()


def context_variable(name: str, default: T) -> ContextVar[T]:
    """Make a variable about the calls around the running code, which multiprocessing does not pass to a process."""
    variable = ContextVar(name, default=default)
    _variables.append((variable, default))
    return variable


def _replace_lock(thing: Any) -> None:  # pragma: no cover (in the child of a fork)
    thing._lock = threading.RLock()


def _in_child() -> None:  # pragma: no cover (in the child of a fork)
    for reference, reset in _shared.copy().items():  # copied in one step, as the garbage collector may remove some
        thing = reference()
        try:
            if thing is not None:
                reset(thing)
        except Exception:  # the algorithm of an `AdaptiveLimit` may be a user's own
            logger.exception("resetting %s in the child of a fork raised", type(thing).__name__)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # multiprocessing calls this after the hooks of the fork itself
        util.register_after_fork(sys.modules[__name__], _in_process)


def _in_process(module: object) -> None:  # pragma: no cover (in the child of a fork)
    global starting_frame
    starter = sys._getframe(1)
    while starter.f_back is not None and starter.f_globals.get("__name__", "").startswith("multiprocessing."):
        starter = starter.f_back
    starting_frame = starter
    for variable, default in _variables:
        variable.set(default)


if hasattr(os, "register_at_fork"):  # pragma: no branch (there is no fork on Windows)
    os.register_at_fork(after_in_child=_in_child)
