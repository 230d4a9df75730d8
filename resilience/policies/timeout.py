"""Timeout: a limit on the duration of a call, and the deadline that everything inside it respects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context, derive
from resilience.errors import DeadlineExceeded, TimeoutExceeded, ends_with_the_deadline
from resilience.events.dispatch import emit, optional_listener, subscribers
from resilience.events.kinds import TimedOut
from resilience.formats import format_number, format_seconds
from resilience.info import Listener
from resilience.policy import Call, Policy
from resilience.runtimes.base import has_come, timeout_exceeded
from resilience.runtimes.workers import DEFAULT_MAX_ABANDONED, pool

T = TypeVar("T")


@final
class Timeout(Policy[Never]):
    """Limit how long a call may take; when the time is up, its caller gets `TimeoutExceeded`.

    :param seconds: the limit in seconds for everything inside this policy: retries and their waits, queues, the
        function. More than zero, and finite. In blocking code, other code of policies inside, such as the handler of a
        `Fallback`, a predicate, a callback or a store, is not cut off: a result that it makes late is returned.
    :param cooperative: whether only to set the deadline; not by default. Nothing is cut off; code that reads the
        context (our own policies, `ctx.timeout()` passed to a client) respects it. It uses no thread and no scope,
        costs almost nothing, and is the right choice for clients that belong to one thread (sqlite3, Django's ORM). A
        late result is returned; a function that took more than twice its limit, and over a second more than it, is
        reported by a `RuntimeWarning`.
    :param on_timeout: called with a `TimedOut` when the limit cut a call off, or was already over.
    :param name: the name of this policy in errors and events; "Timeout" by default.
    :raises TimeoutExceeded: when the limit is over.
    :raises DeadlineExceeded: if the budget of the context ends earlier, or at the same instant.
    :raises WorkersExhausted: in threads, if too many abandoned functions are still running.

    Under asyncio the task is cancelled once, as `asyncio.timeout` does; under trio by a cancel scope. In blocking code
    only the function runs on a worker thread, and is abandoned: it continues until it ends by itself, and
    `Timeout.abandoned()` counts it until then. At `Timeout.max_abandoned` of them in the process, the next call is
    refused with `WorkersExhausted`. While the interpreter shuts down and can start no thread, the function runs in the
    calling thread, with its deadline, but cannot be cut off; a warning is logged.

    >>> from resilience import Timeout
    >>> Timeout(2.0).execute(lambda ctx: ctx.remaining() <= 2.0)
    True
    """

    _resilience_blocks = ("timeout.call(fn, *args)", "async with deadline(5.0):")

    max_abandoned: ClassVar[int] = DEFAULT_MAX_ABANDONED
    """How many abandoned calls may be running in this process before new ones are refused; 128 by default."""

    def __init__(
        self,
        seconds: Duration,
        *,
        cooperative: bool = False,
        on_timeout: Listener | None = None,
        name: str | None = None,
    ) -> None:
        checks.not_bare("@Timeout(2.0)", seconds)
        self._seconds = checks.seconds("seconds", seconds)
        self._cooperative = checks.flag("cooperative", cooperative)
        self._resilience_uses_workers = not cooperative
        self._on_timeout = optional_listener("on_timeout", on_timeout)
        self._resilience_set_name(name)

    @staticmethod
    def abandoned() -> int:
        """Return how many abandoned blocking calls are still running in this process."""
        return len(pool.abandoned)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        began = clock.now()
        deadline = began + self._seconds
        if deadline > ctx.deadline:
            deadline = ctx.deadline
        deadline_error: Exception | None = None
        try:
            if self._cooperative:
                result = await call(ctx if deadline == ctx.deadline else derive(ctx, deadline, ctx.attempt, ctx._timer))
                if clock.now() - deadline > 1.0:
                    self._warn_of_overrun(ctx, began, deadline)
                return result
            if began < deadline:
                if ctx._timer is not None and ctx._timer.deadline <= deadline:
                    return await call(ctx)  # the outer timer fires first, so this one is not needed
                timer = ctx.runtime.timer(deadline, self._seconds if deadline < ctx.deadline else None, self.name)
                try:  # not `with`, which calls the methods of the timer through C: 5 % of a call
                    timer.start()
                    result = await call(derive(ctx, deadline, ctx.attempt, timer))
                except BaseException as error:
                    if not timer.stop(error):
                        raise
                else:
                    timer.stop(None)
                    return result
        except Exception as error:
            # Code inside found no time left. If our own limit has passed, not that of the execution, it is our timeout.
            if not ends_with_the_deadline(error):
                if self._cooperative:
                    self._warn_of_overrun(ctx, began, deadline)
                raise
            if deadline == ctx.deadline or not has_come(deadline):
                raise
            deadline_error = error
        try:
            raise self._exceeded(ctx, None if deadline < ctx.deadline else deadline - began, deadline_error)
        finally:
            del deadline_error

    def _exceeded(self, ctx: Context, budget: float | None, deadline_error: Exception | None) -> TimeoutExceeded:
        """Report the timeout and return its error: `DeadlineExceeded` if the `budget` (seconds) of `ctx` ran out."""
        error: TimeoutExceeded
        if budget is None:
            limit = self._seconds
            error = timeout_exceeded(limit, self.name)
        else:
            limit = max(0.0, budget)
            error = DeadlineExceeded("the deadline of the execution has passed", policy=self.name, timeout=limit)
        if ctx._info.record is not None:
            ctx._info.record.replace_failure(deadline_error, error)
        if self._on_timeout is not None or ctx._info.listeners or subscribers.by_kind[TimedOut]:
            fields = {"timeout": limit, "by_deadline": budget is not None, "scope": self._scope(ctx)}
            emit(TimedOut, self.name, ctx, self._on_timeout, **fields)
        return error

    def _scope(self, ctx: Context) -> Literal["attempt", "total"] | None:
        """Return what this policy limits in an execution, from its position in the executed pipeline.

        None if it is not in the pipeline, because another policy has passed its call to it, or is in it twice.
        """
        found: set[Literal["attempt", "total"]] = set()
        is_repeated = False
        for policy in () if ctx._executed is None else ctx._executed._resilience_chain():
            if policy is self:
                found.add("attempt" if is_repeated else "total")
            is_repeated = is_repeated or policy._resilience_repeats
        return found.pop() if len(found) == 1 else None

    def _warn_of_overrun(self, ctx: Context, began: float, deadline: float) -> None:
        """Warn of a call that took more than twice its time, and over a second more than it."""
        limit = max(0.0, deadline - began)
        late = clock.now() - began - limit
        if late > max(1.0, limit) and ctx.runtime.is_answerable:  # a consumer of a stream may be slow
            call = self.name if ctx.operation is None else f"{self.name} ({ctx.operation})"
            checks.warn(
                f"{call}: a call that had {format_seconds(limit)} took {format_seconds(late)} more, so it ignores its "
                "deadline; pass `ctx.timeout()` to the client, or use Timeout(cooperative=False)"
            )

    @override
    def settings(self) -> Mapping[str, object]:
        return {
            "seconds": self._seconds,
            "cooperative": self._cooperative,
            "on_timeout": self._on_timeout,
            "name": self._resilience_given_name,
        }

    @override
    def describe(self) -> str:
        how = "carried as a deadline, nothing is cut off" if self._cooperative else "then it is cut off"
        return f"{self.name}: {format_number(self._seconds)} s for everything inside, {how}"


pool.limited_by = Timeout
