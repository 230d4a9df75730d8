"""Stores that several parts of a program share; stores for several processes are in the integrations."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any, final

from resilience import forks

__all__ = ["MemoryStore"]


@final
class MemoryStore:
    """A store in the memory of this process: for tests, and for programs that run in one process.

    :param entries: the mapping that holds the stored entries, a new dictionary by default.
    """

    def __init__(self, entries: MutableMapping[str, Any] | None = None) -> None:
        if entries is not None and not isinstance(entries, MutableMapping):
            raise TypeError(f"entries must be a mutable mapping, not {entries!r}")
        self.entries: MutableMapping[str, Any] = {} if entries is None else entries
        """The stored entries."""
        self.lock: AbstractContextManager[object] = threading.RLock()
        """Held during each step that reads or changes the entries."""
        forks.reset_after_fork(self, MemoryStore._reset)

    def __repr__(self) -> str:
        return f"<MemoryStore entries={len(self.entries)}>"

    def _reset(self) -> None:  # pragma: no cover (in the child of a fork)
        """Replace the lock: another thread may have held it at the fork, and does not exist in the child."""
        self.lock = threading.RLock()
