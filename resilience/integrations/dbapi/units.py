"""Units of work: everything from a new connection to its commit, repeated as a whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from math import inf
from typing import Any, Concatenate, Final, Generic, Never, ParamSpec, TypeVar, final, overload

from typing_extensions import override

from resilience import checks
from resilience.ambient import ambient_deadline
from resilience.callables import (
    close_coroutine,
    is_awaitable,
    is_coroutine_function,
    is_generator_function,
    maybe_await,
    name_of,
    refuse_arguments,
)
from resilience.clock import clock
from resilience.errors import AwaitableMisuse, DeadlineExceeded, TimeoutExceeded
from resilience.hints import forbid_repeat
from resilience.integrations._calls import ClientCall
from resilience.integrations.dbapi.cleanup import close, undo, undo_shielded
from resilience.integrations.dbapi.drivers import is_aborted, is_autocommit
from resilience.integrations.dbapi.errors import AutocommitMisuse, OutcomeUnknown, TransactionAborted, is_undone
from resilience.integrations.dbapi.limits import StatementLimits
from resilience.policy import Policy, as_pipeline

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")
W = TypeVar("W")

IN_DOUBT: Final = "the unit of work may have been committed when it was cut off; it is not done again"
ABORTED: Final = (
    "a statement of the unit of work has failed, so nothing can be committed: let its error out of the function, or "
    "put the statement into a savepoint"
)
AUTOCOMMIT: Final = "a unit of work cannot be rolled back in autocommit mode: connect without autocommit"


@overload  # mypy finds no `W` in the union of both for a coroutine function
def unit_of_work(
    policy: Policy[D],
    connect: Callable[[], Awaitable[W]],
    *,
    repeat_unknown_commits: bool = ...,
    limit_statements: bool = ...,
) -> UnitOfWork[W, D]: ...
@overload
def unit_of_work(
    policy: Policy[D], connect: Callable[[], W], *, repeat_unknown_commits: bool = ..., limit_statements: bool = ...
) -> UnitOfWork[W, D]: ...
def unit_of_work(
    policy: Policy[D],
    connect: Callable[[], W | Awaitable[W]],
    *,
    repeat_unknown_commits: bool = False,
    limit_statements: bool = True,
) -> UnitOfWork[W, D]:
    """Return a decorator: every call of the function is a transaction under the policy, repeated as a whole.

    :param policy: the policy around the unit. `Retry(on=transient)`, with this package's `transient`, repeats it
        after deadlocks and lost connections; a plain `Retry()` after lost connections only.
    :param connect: returns the connection for an attempt, with `commit`, `rollback` and `close`, or an awaitable of it.
    :param repeat_unknown_commits: whether to repeat a unit whose commit may have happened; False by default. Use it
        for units that have the same effect if they are executed twice. A `Hedge` needs it, as both attempts may commit.
    :param limit_statements: whether to set the deadline in the database: see `StatementLimits`. True by default.

    The function gets the connection before its own arguments. When it returns, the unit is committed; when it raises,
    it is rolled back; in any case the connection is closed. Nothing is committed after the deadline. The function may
    be called several times, so it should do nothing outside of the transaction, and it must not commit. If it swallows
    the error of a statement that made PostgreSQL abort the transaction, the call raises `TransactionAborted`. A plain
    function with an asynchronous connection raises `TypeError` if called, a generator function if decorated. A
    connection of psycopg, psycopg2 or sqlite3 with `autocommit=True` raises `ValueError`.

    If an `async def` fails or is cut off, rollback and close are shielded from cancellation. The caller waits for them
    one second at most (in trio, for each). Then they are cancelled, a warning is logged, and in asyncio they may end
    after the call.

    >>> import sqlite3
    >>> from resilience import Retry
    >>> from resilience.integrations.dbapi import transient, unit_of_work
    >>> @unit_of_work(Retry(on=transient), lambda: sqlite3.connect(":memory:"))
    ... def add(connection, a, b):
    ...     return connection.execute("select ? + ?", (a, b)).fetchone()[0]
    >>> add(2, 3)
    5
    """
    return UnitOfWork(policy, connect, repeat_unknown_commits=repeat_unknown_commits, limit_statements=limit_statements)


class UnitOfWork(Generic[W, D]):
    """The decorator that `unit_of_work` returns."""

    def __init__(
        self,
        policy: Policy[D],
        connect: Callable[[], W | Awaitable[W]],
        *,
        repeat_unknown_commits: bool,
        limit_statements: bool,
    ) -> None:
        self._policy: Policy[Any] = as_pipeline(checks.instance("policy", policy, Policy, "a policy"))
        if hasattr(type(connect), "cursor"):  # one of sqlite3 is callable; a mock of a function has any attribute
            raise TypeError(f"connect must be a function that opens a connection, not a connection: {connect!r}")
        self._connect: Callable[[], Any] = checks.function("connect", connect)
        self._repeat_unknown_commits = checks.flag("repeat_unknown_commits", repeat_unknown_commits)
        self._limit_statements = checks.flag("limit_statements", limit_statements)

    @overload  # mypy would take a function that returns a bare type variable for a coroutine function
    def __call__(  # type: ignore[overload-overlap]
        self: UnitOfWork[W, Never], fn: Callable[Concatenate[W, P], T], /
    ) -> Callable[P, T]: ...
    @overload
    def __call__(
        self, fn: Callable[Concatenate[W, P], Coroutine[Any, Any, T]], /
    ) -> Callable[P, Coroutine[Any, Any, T | D]]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[W, P], T], /) -> Callable[P, T | D]: ...
    def __call__(self, fn: Callable[..., Any], /) -> Callable[..., Any]:
        """Decorate a function of a connection and its own arguments.

        :raises TypeError: for a generator function, which would do its work after the commit, and for a function whose
            first parameter is not the connection.
        """
        if is_generator_function(fn):
            raise TypeError(
                f"{name_of(fn)} is a generator function: it would do its work after the commit; return a list instead"
            )

        def blocking(*args: Any, **kwargs: Any) -> Any:
            return _Execution(self, fn, args, kwargs, in_tasks=False).run()

        async def tasks(*args: Any, **kwargs: Any) -> Any:
            return await _Execution(self, fn, args, kwargs, in_tasks=True).run()

        wrapper = functools.wraps(fn)(tasks if is_coroutine_function(fn) else blocking)
        signature = inspect.signature(fn)
        passed = list(signature.parameters.values())
        if not passed or passed[0].name in ("self", "cls"):
            raise TypeError(
                f"the first parameter of {name_of(fn)} must be the connection or session; `self` or `cls` comes second"
            )
        own = passed[1:]  # without the connection, which the caller does not pass
        wrapper.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return wrapper

    def connection_of(self, made: W) -> W:
        """Return the connection to commit and close, if `connect` returns an object that only refers to one."""
        return made

    def watch(self, connection: W, committed: Callable[[], None]) -> None:
        """Refuse a connection in autocommit mode; have `committed` called after a commit of the function itself.

        That is only possible if the connection reports it.
        """
        if is_autocommit(connection):
            raise AutocommitMisuse(AUTOCOMMIT)

    def limits(self, connection: W) -> AbstractAsyncContextManager[object]:
        """Return a context manager that limits the statements of a connection to the deadline."""
        return StatementLimits(connection)

    async def prepare(self, connection: W) -> None:
        """Run the checks that may fail before the commit."""
        if is_aborted(connection):
            raise TransactionAborted(ABORTED)

    def is_undone(self, error: Exception) -> bool:
        """Whether a commit that failed with this error has certainly not happened."""
        return is_undone(error)


@final
class _Execution(ClientCall):
    """One execution of a unit of work, with the state that its attempts share.

    For the policies it is the called function, and the executions of one function are equal, as parts of a key.
    """

    def __init__(self, unit: UnitOfWork[Any, Any], fn: Callable[..., Any], *arguments: Any, in_tasks: bool) -> None:
        self.in_tasks: bool = in_tasks
        self._unit = unit
        self._fn = fn
        self._arguments = arguments  # a tuple, and a dictionary by keyword
        self._commits: list[float] = []  # of the attempts that may have committed, their deadlines
        self._resilience_may_overlap = unit._repeat_unknown_commits  # a Hedge reads this; both attempts would commit

    @property
    def _resilience_operation(self) -> str:
        """The default operation of the execution, which is built only if something reads it."""
        return name_of(self._fn)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Execution) and (self._unit, self._fn) == (other._unit, other._fn)

    @override
    def __hash__(self) -> int:
        return hash((self._unit, self._fn))

    @property
    def repeatable(self) -> bool:
        """Whether another attempt may be made; a Retry reads this."""
        return not self._commits or self._unit._repeat_unknown_commits

    @override
    async def _run(self) -> Any:
        try:
            result = self._execute(self._unit._policy, *self._arguments)
            return await result if self.in_tasks else result
        except Exception as error:
            if not self.repeatable:  # no Retry around the unit may repeat it
                if isinstance(error, TimeoutExceeded):
                    raise OutcomeUnknown(IN_DOUBT) from error
                forbid_repeat(error)
            raise

    @override
    async def _attempt(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.repeatable:
            raise OutcomeUnknown(IN_DOUBT)
        deadline = ambient_deadline()
        connect = self._unit._connect
        made = await maybe_await(connect()) if self.in_tasks else _connect_for_plain(connect, self._fn)
        connection = self._unit.connection_of(made)
        limits = None
        try:
            self._unit.watch(connection, partial(self._commits.append, deadline))
            if self._unit._limit_statements and deadline < inf:
                limits = self._unit.limits(connection)
                await limits.__aenter__()  # if an interrupt ends this early, `undo` removes what it has set
            result = await maybe_await(self._enter(made, *args, **kwargs))
            await self._unit.prepare(connection)
            await self._commit(connection, deadline)
            if limits is not None:
                await limits.__aexit__(None, None, None)
            await close(connection)
            return result
        except BaseException:
            await (undo_shielded if self.in_tasks else undo)(connection, limits)
            raise

    def _enter(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; raise a misuse if it cannot take these arguments."""
        try:
            return self._fn(*args, **kwargs)
        except TypeError as error:
            refuse_arguments(self._fn, args, kwargs, error, takes_context=False)
            raise

    async def _commit(self, connection: Any, deadline: float) -> None:
        # After a timeout in a thread, the next attempt may run while this one continues. The commit is noted before the
        # clock is read, so either the next attempt sees it, or this one sees that its deadline has passed.
        self._commits.append(deadline)
        if clock.now() >= deadline:
            self._commits.remove(deadline)
            raise DeadlineExceeded("the deadline of the execution has passed, nothing is committed")
        try:
            await maybe_await(connection.commit())
        except Exception as error:
            if self._unit.is_undone(error):
                self._commits.remove(deadline)
            raise


def _connect_for_plain(connect: Callable[[], Any], fn: Callable[..., Any]) -> Any:
    """Make a connection for a plain function; refuse an asynchronous one."""
    connection = connect()
    if is_awaitable(connection) or is_coroutine_function(connection.commit):
        close_coroutine(connection)
        kind = type(connection).__name__
        raise AwaitableMisuse(
            f"{name_of(fn)} is a plain function, and its connection is asynchronous ({kind}): write `async def`, "
            "or connect with a blocking driver"
        )
    return connection
