"""A repair of the pool of httpcore, from which a cancelled task can take a place away for ever.

A task that waits for a connection is given a new one, which is still to be made. If it is cancelled before it begins to
make it, or has made it and not begun to send, the pool keeps it: a connection that is never used or closed. A `Timeout`
cancels, and where a server hangs it cancels many at once: the pool is used up, and every later request ends with
`PoolTimeout`, also when the server is well again. See https://github.com/encode/httpcore/issues/1093. The pool of
httpx2 has been repaired. So does one that is cancelled while it closes a response.

Nothing public of httpcore leads to these connections. Where its inside is another one, nothing is done here.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Coroutine, Generator
from typing import Any, Final

from resilience.runtimes.tasks import asyncio_task

_INSIDE: Final = ("_connections", "_requests", "_assign_requests_to_connections", "_close_connections")


async def reclaim_places(transport: Any) -> None:
    """After a request has failed: give back the places of connections that will not be made to the pool."""
    pool: Any = getattr(transport, "_pool", None)
    if not all(hasattr(pool, name) for name in _INSIDE):
        return
    wanted = {id(it.connection) for it in pool._requests}
    lost = [it for it in pool._connections if id(it) not in wanted and _is_unused(_innermost(it))]
    for connection in lost:
        _innermost(connection)._connect_failed = True  # now the pool takes one that was never made for what it is
    if lost:
        await pool._close_connections(lost)  # and this closes one that was made, and then not used
        await pool._close_connections(pool._assign_requests_to_connections())


@types.coroutine
def completed(closing: Coroutine[Any, Any, None], stream: Any) -> Generator[Any, Any, None]:
    """Await the close of a response with this stream to its end, also where asyncio cancels the task meanwhile.

    The cancellation comes out after it. httpcore shields the close with a scope of anyio, which a cancellation of
    asyncio's own does not know: it leaves the connection in use for ever.
    """
    asyncio: Any = sys.modules.get("asyncio")
    if asyncio_task() is None or not hasattr(stream, "_httpcore_stream"):
        yield from closing
        return
    cancelled = None
    try:
        while True:
            try:
                future = closing.send(None)
            except StopIteration:
                break
            is_over = False
            while not is_over:
                try:
                    yield from _nothing() if future is None else asyncio.wait([future]).__await__()
                except asyncio.CancelledError as error:
                    cancelled = error
                is_over = future is None or future.done()
        if cancelled is not None:
            raise cancelled
    finally:
        closing.close()
        del cancelled  # no cycle


def _nothing() -> Generator[None]:
    yield


def _is_unused(part: Any) -> bool:
    """Whether the innermost part of a connection without a request is to be connected, to be used, or to be closed."""
    if getattr(part, "_connect_failed", None) is False:
        return True
    return getattr(getattr(part, "_state", None), "name", None) in {"NEW", "ACTIVE"}


def _innermost(connection: Any) -> Any:
    """Return the part that a connection has made last; with a proxy, there are several."""
    inner = getattr(connection, "_connection", None)
    return connection if inner is None else _innermost(inner)
