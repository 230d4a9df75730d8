"""A repair of the pool of httpcore, from which a cancelled task can take a place away for ever.

A task that waits for a connection is given a new one, which is still to be made. If it is cancelled before it begins to
make it, the pool keeps it: a connection that is neither connecting nor closed, and of nobody. A `Timeout` cancels, and
where a server hangs it cancels many at once: the pool is used up, and every later request ends with `PoolTimeout`, also
when the server is well again. See https://github.com/encode/httpcore/issues/1093. The pool of httpx2 has been repaired.

Nothing public of httpcore leads to these connections. Where its inside is another one, nothing is done here.
"""

from __future__ import annotations

from typing import Any, Final

_INSIDE: Final = ("_connections", "_requests", "_assign_requests_to_connections", "_close_connections")


async def reclaim_places(transport: Any) -> None:
    """After a request has failed: give the places of connections that nobody makes back to the pool of a transport."""
    pool: Any = getattr(transport, "_pool", None)
    if not all(hasattr(pool, name) for name in _INSIDE):
        return
    unmade = [(it, part) for it in pool._connections if (part := _unmade_part(it)) is not None]
    if not unmade:
        return
    wanted = {id(it.connection) for it in pool._requests}
    lost = [part for connection, part in unmade if id(connection) not in wanted]
    for part in lost:
        part._connect_failed = True  # now the pool takes it for what it is
    if lost:
        await pool._close_connections(pool._assign_requests_to_connections())


def _unmade_part(connection: Any) -> Any:
    """Return the part of a connection that is still to be connected (with a proxy, it has several), None for none."""
    inner = getattr(connection, "_connection", connection)
    if inner is None:
        return connection if getattr(connection, "_connect_failed", None) is False else None
    return None if inner is connection else _unmade_part(inner)
