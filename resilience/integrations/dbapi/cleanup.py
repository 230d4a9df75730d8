"""Clean-ups that no cancellation reaches: a transaction is undone before its connection goes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import anyio

from resilience.clock import clock
from resilience.events.dispatch import logger
from resilience.runtimes.tasks import asyncio_task

#: Clean-ups that were left behind: an event loop alone remembers its tasks by weak references.
_left_behind: set[asyncio.Task[None]] = set()

_LET_GO = "%s has not ended within %g s; its caller waits no longer"


async def shielded_cleanup(name: str, grace: float, *steps: Callable[[], Awaitable[None]]) -> None:
    """Run the steps of a clean-up, which no cancellation reaches, for at most `grace` seconds.

    What has not ended by then is cancelled, the steps after it are still taken, and a warning names it. Under
    asyncio it has a task of its own, which is left behind then: what does not answer may take its time with a
    cancellation, too (psycopg asks the server to cancel, and waits ten seconds for it).
    Under trio, where no task outlives the one that began it, each step has the grace, and is waited for.

    :param steps: coroutine functions that let no `Exception` out.
    """
    if asyncio_task() is None:
        for step in steps:
            with anyio.move_on_after(grace, shield=True) as scope:
                await step()
            if scope.cancelled_caught:
                logger.warning(_LET_GO, name, grace)
        return
    task = asyncio.get_running_loop().create_task(_one_after_another(steps))
    _left_behind.add(task)
    task.add_done_callback(_left_behind.discard)
    try:
        with anyio.CancelScope(shield=True):  # a scope of anyio's cancels again and again
            await _outlast_cancellation(task, clock.now() + grace)
    finally:
        if not task.done():
            logger.warning(_LET_GO, name, grace)
            task.cancel()


async def _one_after_another(steps: Sequence[Callable[[], Awaitable[None]]]) -> None:
    async with AsyncExitStack() as stack:  # a step that is cancelled is not the end
        for step in reversed(steps):
            stack.push_async_callback(step)


async def _outlast_cancellation(task: asyncio.Task[None], deadline: float) -> None:
    """Wait for a task, also where this one is cancelled meanwhile; it is cancelled afterwards then."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (left := deadline - clock.now()) > 0:
        try:
            await asyncio.wait([task], timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled  # no cycle: error -> traceback -> this frame -> error
