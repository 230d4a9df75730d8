"""A repair of httpcore's connection pool, which can lose slots for ever when tasks are cancelled.

The pool assigns an unconnected connection to a task that waits for one. If the task is cancelled before it connects, or
after it has connected and before it sends, the pool keeps a connection that is never used or closed. A `Timeout`
cancels many tasks at once if a server hangs: then the pool is used up, and every later request ends with `PoolTimeout`,
even after the server has recovered. See https://github.com/encode/httpcore/issues/1093. The pool of httpx2 has been
fixed. A slot is also lost if a task is cancelled while it closes a response.

Under HTTP/2, both pools forget the stream of a request that is cut off, and h2 counts it for ever. Once there are as
many as the server allows, the connection refuses every request: https://github.com/encode/httpcore/issues/1022. A
server that is about to stop allows none, and both pools would still use its connection.

httpcore has no public access to these connections. If its internals are not those expected here, nothing is done.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Coroutine, Generator
from typing import Any, Final

from resilience.runtimes.current import asyncio_task

_CANCEL: Final = 8  # the error code of HTTP/2 for a stream that is no longer needed
_INTERNALS: Final = ("_connections", "_requests", "_assign_requests_to_connections", "_close_connections")


async def reclaim_slots(transport: Any) -> None:
    """After a request has failed, return the slots of lost connections to the transport's pool, and end its stream."""
    pool: Any = getattr(transport, "_pool", None)
    if not all(hasattr(pool, name) for name in _INTERNALS):
        return
    for it in pool._connections:
        _repair_http2(_innermost(it))
    wanted = {id(it.connection) for it in pool._requests}
    lost = [it for it in pool._connections if id(it) not in wanted and _is_unused(_innermost(it))]
    for connection in lost:
        _innermost(connection)._connect_failed = True  # so that the pool treats an unconnected one as closed
    if lost:
        await pool._close_connections(lost)  # closes those that have connected
        await pool._close_connections(pool._assign_requests_to_connections())


@types.coroutine
def close_completely(closing: Coroutine[Any, Any, None], stream: Any) -> Generator[Any, Any, None]:
    """Await the close of a response with this stream to its end, and raise a cancellation by asyncio afterwards.

    httpcore shields the close with a cancel scope of anyio, which has no effect on a cancellation by asyncio: the
    connection would stay in use for ever.
    """
    asyncio: Any = sys.modules.get("asyncio")
    awaited = cancelled = None
    try:
        if not hasattr(stream, "_httpcore_stream") or asyncio_task() is None:
            yield from closing
            return
        while True:
            if awaited is None or awaited.done():
                try:
                    awaited = closing.send(None)
                except StopIteration:
                    break
            try:
                if awaited is None:
                    yield
                else:
                    yield from asyncio.wait([awaited]).__await__()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
    finally:
        closing.close()
        del cancelled  # no cycle: error -> traceback -> this frame -> error
        for name in ("_httpcore_stream", "_stream", "_connection"):
            stream = getattr(stream, name, None)
        _repair_http2(stream)


def _repair_http2(connection: Any) -> None:
    """Reset streams that have no request (the next one tells the server); give up a connection that allows none."""
    h2 = getattr(connection, "_h2_state", None)
    if h2 is None or not connection.is_available():
        return
    for number in [it for it, stream in h2.streams.items() if it not in connection._events and not stream.closed]:
        h2.reset_stream(number, _CANCEL)
    if h2.remote_settings.max_concurrent_streams == 0:
        connection._connection_error = True  # so that the pool uses another one


def _is_unused(part: Any) -> bool:
    """Whether the innermost part of a connection, which has no request, is neither idle nor closed."""
    if getattr(part, "_connect_failed", None) is False:
        return True
    return getattr(getattr(part, "_state", None), "name", None) in {"NEW", "ACTIVE"}


def _innermost(connection: Any) -> Any:
    """Return the innermost part of a connection; with a proxy, several are nested."""
    inner = getattr(connection, "_connection", None)
    return connection if inner is None else _innermost(inner)
