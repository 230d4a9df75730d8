"""Retry: repeat a failed call, after a wait, while attempts and time are left."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, ClassVar, Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.backoff import BackoffLike, Exponential, Randomness, as_backoff
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import CircuitOpen, is_refusal
from resilience.events.dispatch import optional_listener, subscribers
from resilience.formats import format_number
from resilience.info import BARE, Listener
from resilience.matching import Matcher, On, OnResult, optional_predicate, rejects
from resilience.network_errors import transient
from resilience.outcome import Success
from resilience.policies.attempts import USAGE, Attempts
from resilience.policies.retry_state import Asked, RetryRules, RetryState, too_late
from resilience.policy import Call, Policy
from resilience.repeats import Budget, as_budget

T = TypeVar("T")

_DEFAULT_BACKOFF = Exponential(0.1, cap=10.0)


@final
class Retry(Policy[Never]):
    """Retry a call that failed for a reason that may not persist.

    The caller gets the call's own last exception (or result), with a note that says how many attempts were made, in
    what time, and what each failed with. The time is that after the first failure if nothing needs the clock before: no
    deadline, no `max_elapsed`, no listener.

    :param attempts: the maximum number of calls, the first one included: 3 by default, at least 1, which is no retry;
        None is as many as time allows.
    :param on: which exceptions are retried: an exception type, a tuple of them, or a predicate over the exception.
        `transient` by default: connection and timeout errors of the standard library and of the well-known clients.
        `Rejected` and `DeadlineExceeded` only if they are named here as types: a predicate is not asked about them.
    :param on_result: a predicate over the result; true means that it is not good enough. A discarded result is closed,
        if it can be.
    :param ignore: exceptions that are never retried, even if `on` matches.
    :param backoff: how long to wait before each retry: a backoff, a sequence of seconds, or a callable that
        returns an iterable of them. Exponential from 0.1 s with full jitter, at most 10 s, by default.
    :param max_elapsed: seconds after the beginning of the first attempt within which every further one must begin; no
        limit by default.
    :param retry_after: whether an error or result that carries a delay (`.retry_after`, in seconds) raises
        the wait to at least that; it does by default. Or a function of the outcome that returns the seconds, or None,
        for failures that carry the delay elsewhere; what it raises reaches the caller.
    :param max_retry_after: the longest such delay that it waits for, 300 seconds by default. If more is asked for, it
        gives up at once with the failure: a server cannot make a caller wait for a day.
    :param budget: what pays for retries, across all calls: a `RetryBudget`, which other policies may share; a ratio,
        such as 0.1, for its own budget; any object with the three methods of one. None, the default, is no limit. A
        retry is paid before its wait. If the budget is used up, the failure is raised at once.
    :param wrap: whether to raise `RetriesExhausted` in the end instead of the last failure itself; not by default.
    :param on_retry: called with a `RetryScheduled` before each wait; never after the last failure.
    :param name: the name of this policy in errors and events; "Retry" by default.
    :param rng: source of randomness for the backoff: `random.Random(seed)` makes it repeatable. Its `uniform` must
        return seconds, zero or more: anything else raises a `ValueError` or `TypeError`.
    :raises RetriesExhausted: with `wrap=True`, when it gives up.
    :raises DeadlineExceeded: if the time is up before the first attempt, or at the end of a wait that took too long
        if the last attempt returned a result, which is discarded before the wait.

    The first retry of an execution begins at once if it has no delay, and nothing has to be closed. From the second on,
    a task lets other tasks run before a retry without a delay: even `Retry(None, backoff=[0])` starves no event loop,
    and can be cancelled and timed out. In a thread, every retry without a delay begins at once.

    It never waits in vain: if the next delay does not fit into the time left of the deadline or of `max_elapsed`, it
    stops at once with the last failure. No attempt starts after the deadline, and there is no wait after the last
    attempt. It does not wait for a refusal that it can foresee either: if a circuit inside will still be open when the
    wait ends, it stops at once with the last failure. A refusal after failed attempts carries their history as a note,
    and the last failure as its context.

    A failure that carries `repeatable = False` (an error or a result with that attribute, or a group with such an
    error) is never retried, even if `on` matches: a client uses it for a request that may have been executed, or whose
    body cannot be sent twice. A callable object with that attribute is not called again either, because a call that a
    `Timeout` cut off leaves no failure that could carry it.

    >>> from resilience import Retry
    >>> answers = iter([ConnectionError("reset"), "fine"])
    >>> def fetch():
    ...     answer = next(answers)
    ...     if isinstance(answer, Exception):
    ...         raise answer
    ...     return answer
    >>> Retry(backoff=[0]).call(fetch)
    'fine'
    """

    _resilience_repeats: ClassVar[bool] = True
    _resilience_blocks = (
        "for attempt in retry.attempts(): with attempt:",
        "async for attempt in retry.attempts(): with attempt:",
    )

    def __init__(
        self,
        attempts: int | None = 3,
        *,
        on: On = transient,
        on_result: OnResult | None = None,
        ignore: On = (),
        backoff: BackoffLike = _DEFAULT_BACKOFF,
        max_elapsed: Duration | None = None,
        retry_after: bool | Asked = True,
        max_retry_after: Duration = 300.0,
        budget: Budget | float | None = None,
        wrap: bool = False,
        on_retry: Listener | None = None,
        name: str | None = None,
        rng: Randomness | None = None,
    ) -> None:
        checks.not_bare("@Retry()", attempts)
        self._resilience_set_name(name)
        self._rules = rules = RetryRules(
            policy=self.name,
            attempts=None if attempts is None else checks.whole("attempts", attempts),
            failures=Matcher(on, ignore),
            on_result=optional_predicate("on_result", on_result),
            backoff=as_backoff("backoff", backoff),
            rng=checks.optional_randomness("rng", rng),
            max_elapsed=checks.optional_seconds("max_elapsed", max_elapsed),
            retry_after=_as_asked(retry_after),
            max_retry_after=checks.seconds("max_retry_after", max_retry_after, infinite=True),
            budget=as_budget("budget", budget),
            wrap=checks.flag("wrap", wrap),
            on_retry=optional_listener("on_retry", on_retry),
        )
        self._given_budget = budget
        self._earn = None if rules.budget is None else rules.budget.succeeded

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        began: float | None = None  # read only if something needs it before the first failure
        if self._rules.max_elapsed is not None or ctx._info is not BARE or subscribers.retries:
            began = clock.now()
            if began >= ctx.deadline:
                raise too_late(self.name)
        state: RetryState | None = None
        attempt = ctx if ctx.attempt == 1 else ctx.child(attempt=1)
        try:
            while True:
                try:
                    result = await call(attempt)
                except Exception as error:
                    if not self._rules.failures.judge(error):
                        if state is not None and is_refusal(error):
                            state.explain(error)
                        raise
                    state = state or RetryState(self._rules, ctx, began)
                    if not (
                        state.decide(error, self._refused_until(ctx))
                        and (state.begins_at_once(ctx.runtime) or await state.wait(ctx.runtime))
                    ):
                        state.conclude()
                        raise
                else:
                    try:
                        if self._rules.on_result is None or not rejects(self._rules.on_result, result):
                            if self._earn is not None:
                                self._earn()
                            return result
                        state = state or RetryState(self._rules, ctx, began)
                        is_planned = state.decide(Success(result), self._refused_until(ctx))
                    except BaseException:  # no caller will see the result
                        await ctx.runtime.close(result)
                        raise
                    if not (is_planned and (state.begins_at_once(ctx.runtime) or await state.wait(ctx.runtime))):
                        state.conclude()
                        return result
                attempt = state.begin_next()
        finally:
            state = None  # no cycle: error -> traceback -> this frame -> state -> error

    def _refused_until(self, ctx: Context) -> float:
        """Return the instant until which every attempt would fail with a refusal; minus infinity if none is known."""
        executed, until = ctx._executed, -inf
        if executed is None or not (executed._resilience_foresees or ctx._info.foreseeing):
            return until
        if self._rules.failures.names(CircuitOpen):
            return until
        for pipeline in (executed, *ctx._info.foreseeing):
            is_inside = False
            for policy in pipeline._resilience_chain():
                if is_inside and policy._resilience_answers:
                    break
                is_inside = is_inside or policy is self
                if is_inside:
                    until = max(until, policy._resilience_refuses_until())
        return until

    def attempts(self) -> Attempts:
        """Return the attempts for a block: `for attempt in retry.attempts(): with attempt: ...`, or `async for`.

        An exception of the block that this policy handles is suppressed while another attempt can be made. The deadline
        of the ambient context applies. `on_result` does not: a block has no result.

        >>> from resilience import Retry
        >>> for attempt in Retry(on=ValueError, backoff=[0]).attempts():
        ...     with attempt:
        ...         print("attempt", attempt.number)
        ...         if attempt.number < 2:
        ...             raise ValueError("not yet")
        attempt 1
        attempt 2
        """
        return Attempts(self._rules)

    if not TYPE_CHECKING:  # pragma: no branch (type checkers know that it is not iterable)

        def __iter__(self) -> Never:
            raise TypeError(f"{type(self).__name__} is not iterated itself: {USAGE}")

        __aiter__ = __iter__

    @override
    def settings(self) -> Mapping[str, object]:
        rules = self._rules
        return {
            "attempts": rules.attempts,
            "on": rules.failures.on,
            "on_result": rules.on_result,
            "ignore": rules.failures.ignore,
            "backoff": rules.backoff,
            "max_elapsed": rules.max_elapsed,
            "retry_after": rules.retry_after,
            "max_retry_after": rules.max_retry_after,
            "budget": self._given_budget,
            "wrap": rules.wrap,
            "on_retry": rules.on_retry,
            "name": self._resilience_given_name,
            "rng": rules.rng,
        }

    @override
    def describe(self) -> str:
        limit = self._rules.attempts
        how_often = "as many attempts as time allows" if limit is None else f"up to {limit} attempts"
        parts = [
            f"{self.name}: 1 attempt" if limit == 1 else f"{self.name}: {how_often}, waiting {self._rules.backoff!r}"
        ]
        if self._rules.max_elapsed is not None:
            parts.append(f"none begins after {format_number(self._rules.max_elapsed)} s")
        if self._rules.retry_after is not False and self._rules.max_retry_after not in (300.0, inf):
            parts.append(f"gives up if asked to wait more than {format_number(self._rules.max_retry_after)} s")
        if self._rules.budget is not None:
            parts.append(f"paid for by {self._rules.budget!r}")
        return "; ".join(parts)


def _as_asked(retry_after: bool | Asked) -> bool | Asked:
    if isinstance(retry_after, bool):
        return retry_after
    if not callable(retry_after):
        raise TypeError(f"retry_after must be True, False or a function of the outcome, not {retry_after!r}")
    return checks.plain_function("retry_after", retry_after, ("outcome",))
