"""The end of an attempt that has failed: its transaction is rolled back, and its connection closed."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Final

import anyio

from resilience.callables import maybe_await
from resilience.clock import clock
from resilience.integrations.dbapi.drivers import is_of
from resilience.log import logger
from resilience.runtimes.current import asyncio_task

#: How many seconds the caller of an asynchronous unit waits, after a failure or a cancellation, until its connection is
#: rolled back and closed. A server that works needs milliseconds; one that hangs may never answer.
ROLLBACK_GRACE: Final = 1.0

#: The tasks of the clean-ups: an event loop keeps only weak references to its tasks.
_tasks: set[asyncio.Task[None]] = set()


async def close(connection: Any) -> None:
    """Close a connection, or return it to its pool: the `close` of psycopg does not always do that."""
    pool: Any = getattr(connection, "_pool", None)
    is_pooled = pool is not None and is_of("psycopg", "BaseConnection", connection)
    try:
        await maybe_await(pool.putconn(connection) if is_pooled else connection.close())
    except Exception:  # the transaction has already been committed or rolled back
        logger.exception("closing a %s raised", type(connection).__name__)


async def undo(connection: Any, limits: AbstractAsyncContextManager[object] | None) -> None:
    """Roll back and close the connection of an attempt whose error is being raised."""
    try:
        await _roll_back(connection, limits)
    finally:
        await close(connection)


async def undo_shielded(connection: Any, limits: AbstractAsyncContextManager[object] | None) -> None:
    """Roll back and close, shielded from cancellation, while the caller waits for at most `ROLLBACK_GRACE` seconds.

    What has not ended by then is cancelled, and a warning is logged. Under asyncio it runs in its own task, for whose
    end the caller does not wait: cancelling may take long, too (psycopg asks the server to cancel, and waits ten
    seconds for that). Under trio, where no task outlives its parent, rollback and close have that time each.
    """
    if is_of("aiosqlite", "Connection", connection):
        with suppress(Exception):
            await connection.interrupt()  # otherwise its thread would first finish the cancelled statement
    if asyncio_task() is None:
        for step in (partial(_roll_back, connection, limits), partial(close, connection)):
            with anyio.move_on_after(ROLLBACK_GRACE, shield=True) as scope:
                await step()
            if scope.cancelled_caught:
                _warn_of(connection)
        return
    task = asyncio.get_running_loop().create_task(undo(connection, limits))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    try:
        with anyio.CancelScope(shield=True):  # an outer scope of anyio would cancel repeatedly
            await _wait_despite_cancellation(task, clock.now() + ROLLBACK_GRACE)
    finally:
        if not task.done():
            _warn_of(connection)
            task.cancel()


async def _roll_back(connection: Any, limits: AbstractAsyncContextManager[object] | None) -> None:
    if limits is not None:
        with suppress(Exception):
            await limits.__aexit__(None, None, None)
    with suppress(Exception):  # a broken connection raises
        await maybe_await(connection.rollback())


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


def _warn_of(connection: object) -> None:
    name = type(connection).__name__
    logger.warning("the rollback of a %s has not ended within %g s; its caller waits no longer", name, ROLLBACK_GRACE)
