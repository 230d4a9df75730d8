"""The context of an execution: how much time is left, which attempt this is, what it is for.

A context is handed inwards and never changed. A policy that gives less time, or starts another
attempt, derives a child; so hedged attempts, worker threads and abandoned calls cannot corrupt each
other. And so all executions that inherit nothing, of functions that are not handed it, can begin with
one and the same context, that of their world: to make one each would take 140 ns.

The others are made often enough to be slotted, and made without an `__init__` (half the time on
CPython 3.11 to 3.13, where `object.__new__(Context)` would be the longer way, too).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from math import inf, isinf
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, cast, final

from resilience import checks
from resilience.checks import Duration
from resilience.clock import clock
from resilience.errors import DeadlineExceeded
from resilience.record import FailedAttempt, Record

if TYPE_CHECKING:
    from resilience.events import Listener
    from resilience.outcome import Outcome
    from resilience.runtimes.base import Runtime, Timer

__all__ = ["Context", "current_context"]

NOTHING: Mapping[str, Any] = MappingProxyType({})


@final
class Facts:
    """What is common to an execution: what it is for, who listens, and the record of it, where one is kept.

    Nobody writes to one. A named tuple would be, but takes twice as long to make, and to read.
    """

    __slots__ = ("listeners", "operation", "properties", "record")

    def __init__(
        self,
        operation: str | None = None,
        properties: Mapping[str, Any] = NOTHING,
        listeners: tuple[Listener, ...] = (),
        record: Record | None = None,
    ) -> None:
        self.operation: str | None = operation
        self.properties: Mapping[str, Any] = properties
        self.listeners: tuple[Listener, ...] = listeners
        self.record: Record | None = record

    def heard_by(self, listeners: tuple[Listener, ...]) -> Facts:
        """Return the same for these listeners."""
        return Facts(self.operation, self.properties, listeners, self.record)


@final
class Context:
    """What travels with an execution, from the outermost policy to the function.

    :param timeout: the budget of the whole execution in seconds from now; ``0`` is already over,
        None (the default) and infinity are no limit. A budget obliges everything that waits or tries
        again; what cuts a running call off is a `Timeout`, or `async with deadline(...)`.
    :param operation: what is being done, for logs and metrics. Of low cardinality: ``"get-user"``, not
        ``"get-user-4711"``.
    :param properties: values that travel with the execution, visible in every callback and event.

    After an execution the context that was passed in tells what happened:

    >>> from resilience import Context, Retry
    >>> ctx = Context(timeout=2.0, operation="greet")
    >>> Retry().execute(lambda ctx: "hello", ctx)
    'hello'
    >>> ctx.attempts, ctx.failures
    (1, ())
    """

    __slots__ = ("_facts", "_function", "_is_over", "_outer", "_report", "_timer", "attempt", "deadline", "runtime")

    #: Instant on the process clock (`time.monotonic`) at which the budget is used up; infinity for none.
    deadline: float
    #: 1 for the first attempt.
    attempt: int
    #: The world in which this execution runs: what a policy may ask for besides the rest of the chain. Outside an
    #: execution, the world of the code that asks: that of tasks where an event loop runs.
    runtime: Runtime

    _facts: Facts
    _timer: Timer | None  # the tightest one that will cut off what runs under this context
    _function: weakref.ref[Any] | None  # the object that is executed, where it is one that has something to say
    _report: Record  # set where this very context was passed to an execution: what happened in that
    _is_over: bool  # of a block, whether it was closed out of its turn
    _outer: Context | None  # set where it was: what was ambient before it

    def __init__(
        self,
        *,
        timeout: Duration | None = None,
        operation: str | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        self.deadline = inf
        if timeout is not None:
            self.deadline = clock.now() + checks.seconds("timeout", timeout, zero=True, infinite=True)
        if operation is not None and not isinstance(operation, str):
            raise TypeError(f"operation must be a string, not {operation!r}")
        if properties is not None and not isinstance(properties, Mapping):
            raise TypeError(f"properties must be a mapping, not {properties!r}")
        self._facts = NO_FACTS  # to make the same anew takes 250 ns
        if operation is not None or properties is not None:
            self._facts = Facts(operation, NOTHING if properties is None else MappingProxyType(dict(properties)))
        self.attempt = 1
        self.runtime = world_of_caller
        self._timer = self._function = None
        self._is_over = False

    def __repr__(self) -> str:
        parts = [] if self.operation is None else [f"operation={self.operation!r}"]
        if not isinf(self.deadline):
            parts.append(f"remaining={self.remaining():.3f}")
        parts.append(f"attempt={self.attempt}")
        return f"<Context {' '.join(parts)}>"

    def __reduce__(self) -> Any:
        """Refuse to be pickled or copied: its deadline is an instant on the clock of this process."""
        raise TypeError("a context cannot be copied or pickled; hand over ctx.remaining(), and make another one there")

    # --- what it is for ---

    @property
    def operation(self) -> str | None:
        """What is being done; None where nobody has said."""
        return self._facts.operation

    @property
    def properties(self) -> Mapping[str, Any]:
        """The values that travel with the execution. Read-only."""
        return self._facts.properties

    # --- time ---

    def remaining(self) -> float:
        """Return the seconds left; infinity where there is no limit, never negative."""
        return inf if self.deadline == inf else max(0.0, self.deadline - clock.now())

    @property
    def expired(self) -> bool:
        """Whether the budget is used up."""
        return self.deadline != inf and clock.now() >= self.deadline

    def check(self) -> None:
        """Raise `DeadlineExceeded` if the budget is used up."""
        if self.expired:
            raise DeadlineExceeded("the deadline of the execution has passed")

    def timeout(self, limit: Duration | None = None) -> float | None:
        """Return the timeout to hand to a client: the smaller of `limit` and what is left, in seconds.

        None where there is neither. Where nothing is left it raises `DeadlineExceeded`: a timeout of 0
        means "for ever" to aiohttp, redis, grpc and SQL drivers.
        """
        seconds = inf if limit is None else checks.seconds("limit", limit, infinite=True)
        if self.deadline != inf:
            self.check()
            seconds = min(seconds, self.deadline - clock.now())
            if seconds <= 0:  # it passed between the two readings
                raise DeadlineExceeded("the deadline of the execution has passed")
        return None if seconds == inf else seconds

    # --- what happened ---

    @property
    def attempts(self) -> int:
        """How many times the function has been entered in the execution that this context was passed to."""
        record = self._find_record()
        return 0 if record is None else record.attempts

    @property
    def elapsed(self) -> float:
        """Seconds that the execution took, or has taken so far; 0 before it."""
        record = self._find_record()
        return 0.0 if record is None else record.elapsed

    @property
    def failures(self) -> tuple[FailedAttempt, ...]:
        """Type and message of the attempts that failed: the first three and the last three."""
        record = self._find_record()
        return () if record is None else record.history.failures

    def _find_record(self) -> Record | None:
        return getattr(self, "_report", self._facts.record)

    # --- for authors of policies ---

    def child(
        self, *, deadline: float | None = None, attempt: int | None = None, timer: Timer | None = None
    ) -> Context:
        """Derive the context to hand inwards.

        :param deadline: an instant on the process clock; it can only shorten what is there.
        :param attempt: the number of the attempt that is about to start.
        :param timer: the timer (`ctx.runtime.timer(...)`) that now cuts off what runs inside.
        """
        return derive(
            self,
            self.deadline if deadline is None else min(deadline, self.deadline),
            self.attempt if attempt is None else attempt,
            timer or self._timer,
        )

    async def sleep(self, seconds: float) -> None:
        """Wait, in whatever way this world waits, for `seconds` (zero or more)."""
        await self.runtime.sleep(checks.seconds("seconds", seconds, zero=True), self)

    def _note(self, outcome: Outcome[object], *, instead_of: Exception | None = None) -> None:
        """Remember a failed attempt, if anybody can ask for it afterwards."""
        if self._facts.record is not None:
            self._facts.record.note(outcome, instead_of=instead_of)


#: The runtime outside an execution. Put in place by the runtimes, which stand above this module.
world_of_caller: Runtime = cast("Runtime", None)

NO_FACTS = Facts()
_ambient: ContextVar[Context | None] = ContextVar("resilience.context", default=None)

# Bound once: called as a method of an imported name, each makes a bound method anew (40 ns).
get_ambient: Callable[[], Context | None] = _ambient.get
set_ambient: Callable[[Context | None], Token[Context | None]] = _ambient.set
reset_ambient: Callable[[Token[Context | None]], None] = _ambient.reset


class _Derived(Context):  # type: ignore[misc]  # final to everybody else
    """A context that comes into being without the `__init__`, in half the time. It is no other in anything else."""

    __slots__ = ()
    __init__ = object.__init__


def derive(parent: Context, deadline: float, attempt: int, timer: Timer | None) -> Context:
    """Make the context to hand inwards."""
    child: Context = _Derived()
    child.deadline = deadline
    child.attempt = attempt
    child._facts = parent._facts
    child._timer = timer
    child.runtime = parent.runtime
    child._function = parent._function
    child._is_over = False
    return child


def own_context(parent: Context, function: Callable[..., Any] | None) -> Context:
    """Make the context of one execution: of `function`, where that is handed its context."""
    ctx = derive(parent, parent.deadline, parent.attempt, parent._timer)
    # Weakly: what a client begins meanwhile copies the ambient context, and an event loop keeps that with a pooled
    # connection. (A plain function has nothing to say, and what cannot be referred to weakly goes without.)
    ctx._function = None
    if function is not None and type(function) is not FunctionType:
        with contextlib.suppress(TypeError):
            ctx._function = weakref.ref(function)
    return ctx


def executed_object(ctx: Context) -> object:
    """Return the callable object that is executed with this context; None for a plain function."""
    return None if ctx._function is None else ctx._function()


#: A timer of an event loop may fire that much before its time, in seconds.
_EARLIEST = 0.005


def is_over(ctx: Context) -> bool:
    """Whether the budget is used up, as far as somebody can tell whose timer was set to its end."""
    return ctx.remaining() <= _EARLIEST


def unlimited(runtime: Runtime) -> Context:
    """Make the context with which every execution in a world begins that inherits nothing. Nobody may write to it."""
    ctx = Context()
    ctx._facts = NO_FACTS
    ctx.runtime = runtime
    return ctx


def restore_ambient(ctx: Context, token: Token[Context | None]) -> None:
    """Make ambient again what was so before a block that made `ctx` the ambient context, which gave `token`.

    A coroutine that is closed by another task, or by the collector, runs its `finally` in other variables than the
    block has set; and generators that are consumed in turn end in any order. Where the context stays ambient then,
    whoever finds it takes the outer one: see `still_open`.
    """
    outer = None if token.old_value is Token.MISSING else token.old_value
    if get_ambient() is not ctx:
        ctx._outer, ctx._is_over = outer, True
        return
    try:
        reset_ambient(token)
    except ValueError:  # these variables are a copy
        ctx._outer, ctx._is_over = outer, True
    set_ambient(still_open(outer))


def leave_ambient(token: Token[Context | None]) -> None:
    """Make ambient again what was so before `token`, past the blocks that a function has left open.

    In other variables than those in which the token was made (see `restore_ambient`) there is nothing to restore.
    """
    try:
        reset_ambient(token)
    except ValueError:
        return


def still_open(ctx: Context | None) -> Context | None:
    """Return an ambient context, or the one around it where it is that of a block which is over."""
    while ctx is not None and ctx._is_over:
        ctx = ctx._outer
    return ctx


def block_context() -> Context:
    """Return the ambient context for a block: with its deadline, but without its timer and its function.

    A context follows new tasks and threads; the timer cuts off only the one that armed it. And a block is no call.
    """
    ctx = current_context()
    block = derive(ctx, ctx.deadline, ctx.attempt, None)
    block._function = None
    return block


def current_context() -> Context:
    """Return the context of the execution that surrounds this code; a fresh, unlimited one where there is none.

    It follows tasks and `anyio.to_thread` (it is a `contextvars` variable) and the workers of `Timeout`.
    """
    ctx = get_ambient()
    return Context() if ctx is None else still_open(ctx) or Context()
