"""Clean-ups that are shielded from cancellation: a transaction is rolled back before its connection is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import anyio

from resilience.clock import clock
from resilience.events.dispatch import logger
from resilience.runtimes.tasks import asyncio_task

#: The tasks of the clean-ups: an event loop keeps only weak references to its tasks.
_tasks: set[asyncio.Task[None]] = set()

_TIMED_OUT = "%s has not ended within %g s; its caller waits no longer"


async def shielded_cleanup(name: str, grace: float, *steps: Callable[[], Awaitable[None]]) -> None:
    """Run the steps of a clean-up for at most `grace` seconds, shielded from cancellation.

    A step that has not ended by then is cancelled, the steps after it still run, and a warning with the name is
    logged. Under asyncio the clean-up runs in its own task, for whose end the caller does not wait: cancelling a step
    may take long, too (psycopg asks the server to cancel, and waits ten seconds for that). Under trio, where no task
    outlives its parent, each step has `grace` seconds, and the caller waits for all of them.

    :param steps: coroutine functions that raise no `Exception`.
    """
    if asyncio_task() is None:
        for step in steps:
            with anyio.move_on_after(grace, shield=True) as scope:
                await step()
            if scope.cancelled_caught:
                logger.warning(_TIMED_OUT, name, grace)
        return
    task = asyncio.get_running_loop().create_task(_run_all(steps))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    try:
        with anyio.CancelScope(shield=True):  # an outer scope of anyio would cancel repeatedly
            await _wait_despite_cancellation(task, clock.now() + grace)
    finally:
        if not task.done():
            logger.warning(_TIMED_OUT, name, grace)
            task.cancel()


async def _run_all(steps: Sequence[Callable[[], Awaitable[None]]]) -> None:
    async with AsyncExitStack() as stack:  # it runs the other steps even if one is cancelled
        for step in reversed(steps):
            stack.push_async_callback(step)


async def _wait_despite_cancellation(task: asyncio.Task[None], deadline: float) -> None:
    """Wait for a task until the deadline; raise a cancellation of the waiting task only afterwards."""
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
