"""The current task of asyncio, and of trio. Neither is imported here: code that runs in a task has imported it.

`asyncio_task` is None under trio, even if trio is a guest in an asyncio loop.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

if sys.version_info >= (3, 12):  # pragma: no cover (measured on 3.11)

    def asyncio_task() -> asyncio.Task[Any] | None:
        """Return the current asyncio task; None in other code."""
        tasks: Any = sys.modules.get("asyncio.tasks")
        try:
            return None if tasks is None else tasks.current_task()
        except (AttributeError, RuntimeError):  # another thread is importing asyncio; no event loop runs in this one
            return None

else:

    def asyncio_task() -> asyncio.Task[Any] | None:
        """Return the current asyncio task; None in other code."""
        tasks: Any = sys.modules.get("asyncio.tasks")
        try:  # `asyncio.current_task` is written in Python there, and would be 4 % of a call under five policies
            return None if tasks is None else tasks._current_tasks.get(tasks.events._get_running_loop())
        except AttributeError:  # another thread is importing asyncio
            return None


def trio_task() -> Any:
    """Return the current trio task; None in other code."""
    lowlevel: Any = sys.modules.get("trio.lowlevel")
    try:
        return None if lowlevel is None else lowlevel.current_task()
    except (AttributeError, RuntimeError):  # as above; `in_trio_task`, which would tell, needs trio 0.29
        return None
