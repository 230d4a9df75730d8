"""The context of an execution: what is called, the time left, the number of the attempt, the operation.

A context is passed inwards and never changed. A policy that sets an earlier deadline, or starts another attempt,
derives a child, so hedged attempts, worker threads and abandoned calls cannot affect each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isinf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

from resilience import checks
from resilience.callables import name_of
from resilience.checks import Duration
from resilience.clock import MAX_CLIENT_TIMEOUT, clock
from resilience.errors import DeadlineExceeded
from resilience.info import BARE, NO_INFO, Called, Composable, Executed, ExecutionInfo, Listener
from resilience.record import FailedAttempt, Record
from resilience.repeats import Cap
from resilience.runtimes.base import Runtime, Timer
from resilience.runtimes.tasks import DETECTED

__all__ = ["Context"]


@final
class Context:
    """What travels with an execution, from the outermost policy to the function.

    :param timeout: the budget of the whole execution in seconds from now; ``0`` is already over, None (the default) and
        infinity are no limit. Everything that waits or retries respects a budget; only a `Timeout` or `async with
        deadline(...)` cuts a running call off.
    :param operation: a name for logs and metrics, with few different values: ``"get-user"``, not ``"get-user-4711"``.
    :param properties: values that travel with the execution, visible in every callback and event.

    After an execution, the context that was passed in contains what happened:

    >>> from resilience import Context, Retry
    >>> ctx = Context(timeout=2.0, operation="greet")
    >>> Retry().execute(lambda ctx: "hello", ctx)
    'hello'
    >>> ctx.attempts, ctx.failures
    (1, ())
    """

    __slots__ = (
        "_arguments",
        "_executed",
        "_function",
        "_info",
        "_keywords",
        "_record",
        "_timer",
        "attempt",
        "deadline",
        "runtime",
    )

    deadline: float
    """Instant on the process clock (`time.monotonic`) at which the budget is used up; infinity for none."""
    attempt: int
    """1 for the first attempt."""
    runtime: Runtime
    """The waits, timers and races that a policy may await, for threads, tasks or simulated time. Outside an execution,
    it is detected at each use: tasks in an event loop, threads elsewhere."""

    _function: Any  # the function that is called; None outside an execution
    _arguments: tuple[Any, ...] | None  # None: the function is called with its context
    _keywords: Mapping[str, Any]
    _executed: Executed | None  # the policy or pipeline that is executed; None outside an execution
    _info: ExecutionInfo
    _timer: Timer | None  # the earliest timer that cuts off the code under this context
    _record: Record  # the record of the execution that this context was passed to; unset without one

    def __init__(
        self,
        *,
        timeout: Duration | None = None,
        operation: str | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        self.deadline = inf
        if timeout is not None:
            self.deadline = clock.now() + checks.budget("timeout", timeout)
        if operation is not None and not isinstance(operation, str):
            raise TypeError(f"operation must be a string, not {operation!r}")
        if properties is not None and not isinstance(properties, Mapping):
            raise TypeError(f"properties must be a mapping, not {properties!r}")
        self._info = NO_INFO
        if operation is not None or properties:
            self._info = ExecutionInfo(operation, MappingProxyType(dict(properties or {})))
        self.attempt = 1
        self.runtime = DETECTED
        self._function = self._arguments = self._executed = self._timer = None
        self._keywords = NO_KEYWORDS

    def __repr__(self) -> str:
        parts = [] if self.operation is None else [f"operation={self.operation!r}"]
        if not isinf(self.deadline):
            parts.append(f"remaining={self.remaining():.3f}")
        parts.append(f"attempt={self.attempt}")
        return f"<Context {' '.join(parts)}>"

    def __reduce__(self) -> Any:
        """Refuse to be pickled or copied: the deadline is an instant on the clock of this process."""
        raise TypeError("a context cannot be copied or pickled; pass on ctx.remaining(), and make another one there")

    # --- the call and its operation ---

    @property
    def called(self) -> Called | None:
        """The function that is called, with its arguments and keywords; None outside an execution and in a block.

        For a function that is called with the context (`execute`), `arguments` is this context alone.
        """
        if self._function is None:
            return None
        return Called(self._function, (self,) if self._arguments is None else self._arguments, self._keywords)

    @property
    def operation(self) -> str | None:
        """The name of the operation, for logs and metrics: by default the qualified name of the function."""
        if self._info.operation is not None or self._function is None:
            return self._info.operation
        return name_of(self._function)

    @property
    def hedge(self) -> int:
        """The number of the attempt that a `Hedge` started beside the first, for choosing a replica; otherwise 0."""
        return self._info.hedge

    @property
    def properties(self) -> Mapping[str, Any]:
        """The values that travel with the execution. Read-only."""
        return self._info.properties

    # --- time ---

    def remaining(self) -> float:
        """Return the seconds left; infinity if there is no limit, never negative."""
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
        """Return the timeout to pass to a client: the smaller of `limit` and the time left, in seconds.

        None if there is neither. If no time is left, it raises `DeadlineExceeded`, because a timeout of 0 means "for
        ever" to aiohttp, redis, grpc and SQL drivers. It is at most 2,147,483 seconds (24 days), because many clients
        count milliseconds in 31 bits, and fail with longer timeouts.
        """
        seconds = inf if limit is None else checks.seconds("limit", limit, infinite=True)
        if self.deadline != inf:
            left = self.deadline - clock.now()
            if left <= 0:
                raise DeadlineExceeded("the deadline of the execution has passed")
            if left < seconds:
                seconds = left
        if seconds > MAX_CLIENT_TIMEOUT:
            return None if seconds == inf else MAX_CLIENT_TIMEOUT
        return seconds

    # --- the record ---

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
        return getattr(self, "_record", self._info.record)

    # --- for authors of policies ---

    def child(
        self,
        *,
        deadline: float | None = None,
        attempt: int | None = None,
        timer: Timer | None = None,
        hedge: int | None = None,
    ) -> Context:
        """Derive the context to pass inwards.

        :param deadline: an instant on the process clock; it can only make the deadline earlier.
        :param attempt: the number of the attempt that is about to start.
        :param timer: the timer (`ctx.runtime.timer(...)`) that cuts off everything inside, unless one around it is
            due earlier.
        :param hedge: the number of the attempt that is about to start beside the first one.
        """
        ends_at = self.deadline if deadline is None else min(deadline, self.deadline)
        outer = self._timer
        if timer is None or (outer is not None and outer.deadline <= timer.deadline):
            timer = outer
        child = derive(self, ends_at, self.attempt if attempt is None else attempt, timer)
        return child if hedge is None else child._with(hedge=hedge)

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` (zero or more): a thread blocks, a task is suspended."""
        await self.runtime.sleep(checks.seconds("seconds", seconds, zero=True), self._timer)

    def _with(
        self,
        *,
        listeners: tuple[Listener, ...] | None = None,
        properties: Mapping[str, Any] | None = None,
        cap: Cap | None = None,
        hedge: int | None = None,
        foreseeing: tuple[Executed, ...] | None = None,
        limiters: tuple[Composable, ...] | None = None,
    ) -> Context:
        """Derive a context with other data of the execution. See `ExecutionInfo`; None keeps what it is."""
        info, child = self._info, derive(self, self.deadline, self.attempt, self._timer)
        child._info = ExecutionInfo(
            info.operation,
            info.properties if properties is None else properties,
            info.listeners if listeners is None else listeners,
            info.record,
            info.cap if cap is None else cap,
            info.hedge if hedge is None else hedge,
            info.foreseeing if foreseeing is None else foreseeing,
            info.limiters if limiters is None else limiters,
        )
        return child


NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class BlankContext(Context):  # type: ignore[misc]  # final for users
    """A context whose attributes are all set by the code that makes it: the public constructor takes twice the time."""

    __slots__ = ()
    if not TYPE_CHECKING:  # pragma: no branch (to type checkers, it would be another signature)
        __init__ = object.__init__


def new_context(
    executed: Executed,
    function: Callable[..., Any],
    arguments: tuple[Any, ...] | None,
    keywords: Mapping[str, Any],
    info: ExecutionInfo,
    runtime: Runtime,
) -> Context:
    """Make the first context of an execution, without a limit."""
    ctx: Context = BlankContext()
    ctx.deadline = inf
    ctx.attempt = 1
    ctx.runtime = runtime
    ctx._function = function
    ctx._arguments = arguments
    ctx._keywords = keywords
    ctx._info = info
    ctx._executed = executed
    ctx._timer = None
    return ctx


def derive(parent: Context, deadline: float, attempt: int, timer: Timer | None) -> Context:
    """Make the context to pass inwards."""
    child: Context = BlankContext()
    child.deadline = deadline
    child.attempt = attempt
    child.runtime = parent.runtime
    child._function = parent._function
    child._arguments = parent._arguments
    child._keywords = parent._keywords
    child._executed = parent._executed
    child._info = parent._info if parent._info is not BARE else NO_INFO
    child._timer = timer
    return child


def waits_until(ctx: Context) -> float:
    """Return the instant at which a policy must give up a wait: the deadline, or infinity if a timer ends it by then.

    In the second case, the timer raises its own error.
    """
    return inf if ctx._timer is not None and ctx._timer.deadline <= ctx.deadline else ctx.deadline
