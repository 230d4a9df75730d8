"""The current asyncio task. Imported where asyncio has been imported before: see tasks.py."""

from __future__ import annotations

import sys

__all__ = ["current_task"]

if sys.version_info >= (3, 12):  # pragma: no cover (measured on 3.11)
    from asyncio import current_task

else:
    # `asyncio.current_task` is written in Python there, and takes 250 ns.
    import asyncio
    from asyncio.events import _get_running_loop
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]
    from typing import Any

    def current_task() -> asyncio.Task[Any] | None:
        """Return the current asyncio task, None where there is no loop."""
        return _current_tasks.get(_get_running_loop())  # type: ignore[no-any-return]
