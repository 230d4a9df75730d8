"""A repair of the pool of httpcore, from which a cancelled task can take a place away for ever.

A task that waits for a connection is given a new one, which is still to be made. If it is cancelled before it begins to
make it, or has made it and not begun to send, the pool keeps it: a connection that is never used or closed. A `Timeout`
cancels, and where a server hangs it cancels many at once: the pool is used up, and every later request ends with
`PoolTimeout`, also when the server is well again. See https://github.com/encode/httpcore/issues/1093. The pool of
httpx2 has been repaired.

Nothing public of httpcore leads to these connections. Where its inside is another one, nothing is done here.
"""

from __future__ import annotations

from typing import Any, Final

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


def _is_unused(part: Any) -> bool:
    """Whether the innermost part of a connection is still to be connected, or to be sent its first request."""
    if getattr(part, "_connect_failed", None) is False:
        return True
    return getattr(getattr(part, "_state", None), "name", None) == "NEW"


def _innermost(connection: Any) -> Any:
    """Return the part that a connection has made last; with a proxy, there are several."""
    inner = getattr(connection, "_connection", None)
    return connection if inner is None else _innermost(inner)
