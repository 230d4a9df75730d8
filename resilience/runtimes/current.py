"""The current asyncio task. This module is imported only after asyncio: see tasks.py."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

if sys.version_info >= (3, 12):  # pragma: no cover (measured on 3.11)

    def current_task() -> asyncio.Task[Any] | None:
        """Return the current asyncio task; None if no event loop runs."""
        try:
            return asyncio.current_task()
        except RuntimeError:
            return None

else:
    # In Python 3.11, `asyncio.current_task` is written in Python, and takes 250 ns.
    from asyncio.events import _get_running_loop
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]

    def current_task() -> asyncio.Task[Any] | None:
        """Return the current asyncio task; None if no event loop runs."""
        return _current_tasks.get(_get_running_loop())  # type: ignore[no-any-return]
