"""A request that a server answers within a budget: the context of its steps, and whether its time was over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias, final

from resilience.ambient import block_context, get_ambient, set_ambient
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import DeadlineExceeded
from resilience.network_errors import grpc_status, transient
from resilience.runtimes.base import has_come

# The types of ASGI.
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


def budget(seconds: float) -> Context:
    """Return the context of a request that has this many seconds from now. An earlier ambient deadline is kept."""
    return block_context(None, clock.now() + seconds)


def ran_out(error: Exception, ctx: Context) -> bool:
    """Whether a request failed because its time was over.

    `DeadlineExceeded` means that. After the deadline, so does a network error (`transient`), `DEADLINE_EXCEEDED` of
    gRPC, or the end of a statement: a client in the app, or a database, that gets the time left as its timeout raises
    an exception of its own. A group of errors, as a task group raises it, means that only if each of them does.
    """
    if isinstance(error, ExceptionGroup):
        return all(ran_out(each, ctx) for each in error.exceptions)
    if isinstance(error, DeadlineExceeded):
        return True
    return has_come(ctx.deadline) and (
        transient(error) or grpc_status(error) == "DEADLINE_EXCEEDED" or _is_ended_statement(error)
    )


def _is_ended_statement(error: Exception) -> bool:
    """Whether PostgreSQL or SQLite has ended a statement. SQLAlchemy and Django make the driver's error a cause."""
    names = "sqlstate", "pgcode", "sqlite_errorname"
    codes = [getattr(each, name, None) for each in (error, error.__cause__) for name in names]
    return "57014" in codes or "SQLITE_INTERRUPT" in codes


@final
class Steps:
    """Make `ctx` the ambient context (None for no context) of work that is done in steps: a body that is iterated.

    Each step is a `with` block. Between two steps, the thread or task belongs to the server, which may begin another
    request in it. If a step leaves another context ambient (a block inside a generator, held open across its `yield`),
    the next step restores it, in any thread.
    """

    __slots__ = ("_inside", "_outside")

    def __init__(self, ctx: Context | None) -> None:
        self._inside = ctx

    def __enter__(self) -> None:
        self._outside = get_ambient()
        set_ambient(self._inside)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not GeneratorExit:  # raised by the collector or another task, in context variables of its own
            self._inside = get_ambient()
            set_ambient(self._outside)
