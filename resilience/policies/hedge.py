"""Hedge: if a call takes long, start another attempt beside the first, and use the first good result."""

from __future__ import annotations

from contextlib import AsyncExitStack
from math import inf
from typing import ClassVar, Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.events.dispatch import optional_listener
from resilience.formats import format_number, format_percent
from resilience.hints import allows
from resilience.info import Listener
from resilience.matching import Matcher, On, OnResult, optional_predicate, rejects
from resilience.network_errors import transient
from resilience.outcome import StoppedIteration, Success
from resilience.policies.hedge_plan import HedgePlan, HedgeRules
from resilience.policies.latencies import Latencies, Quantile
from resilience.policy import Call, Policy
from resilience.repeats import Budget, as_budget

T = TypeVar("T")


_DEFAULT_DELAY = Quantile()


@final
class Hedge(Policy[Never]):
    """Start another attempt beside one that takes long, and answer with the first good result.

    That shortens the longest waits for a service with a few slow calls among fast ones (Dean, Barroso: "The Tail at
    Scale", CACM 2013). It must be safe to make the call twice.

    :param delay: seconds without an answer after which another attempt begins, and so on every `delay`; 0 is all at
        once. Or a `Quantile` of the durations of calls, the default.
    :param hedges: how many attempts beside the first, at least 1, the default.
    :param on: failures that do not end the call while another attempt runs; `transient` by default. Any other failure
        ends the call at once. A `Rejected` or `DeadlineExceeded` of one attempt never ends it while another runs.
    :param on_result: a predicate over the result; true means that it does not end the call either. A discarded result
        is closed, if it can be; so is the response that a discarded failure carries.
    :param ignore: failures that end the call at once, even if `on` matches.
    :param eager: whether a failure or result that does not end the call begins the next attempt at once; it does not
        by default.
    :param budget: what pays for hedges, across all calls: a `RetryBudget`, which a `Retry` may share; a ratio, for its
        own budget (0.1 by default); any object with the three methods of one; None is no limit. If it is used up, the
        running attempts continue.
    :param on_hedge: called with a `HedgeStarted` when another attempt begins.
    :param name: the name of this policy in events; "Hedge" by default.

    Losing attempts are cut off before the answer is returned: tasks are cancelled and awaited; in threads the policies
    inside are unwound, so that permits are released, and the function is abandoned, as by a `Timeout`, and counted in
    `Timeout.abandoned()`. At `Timeout.max_abandoned` no hedge begins. In threads each attempt runs on a worker.

    If all fail, the caller gets the first attempt's failure, with a note on the others. A call is not hedged before a
    `Quantile` is warm, after the deadline, or if the function is a callable object with `repeatable = False`.

    >>> from resilience import Hedge
    >>> import time
    >>> def fetch(ctx):
    ...     time.sleep(0.5 if ctx.hedge == 0 else 0)
    ...     return f"replica {ctx.hedge}"
    >>> Hedge(0.02).execute(fetch)
    'replica 1'
    """

    races: ClassVar[bool] = True
    _resilience_uses_workers = True
    _resilience_shares = "budget and observations"
    _resilience_repeats: ClassVar[bool] = True
    _resilience_streams: ClassVar[bool] = False

    def __init__(
        self,
        delay: Duration | Quantile = _DEFAULT_DELAY,
        *,
        hedges: int = 1,
        on: On = transient,
        on_result: OnResult | None = None,
        ignore: On = (),
        eager: bool = False,
        budget: Budget | float | None = 0.1,
        on_hedge: Listener | None = None,
        name: str | None = None,
    ) -> None:
        self._resilience_set_up(locals())
        checks.not_bare("@Hedge()", delay)
        self._latencies = Latencies(delay) if isinstance(delay, Quantile) else None
        self._delay = inf if isinstance(delay, Quantile) else checks.seconds("delay", delay, zero=True)
        self._rules = HedgeRules(
            policy=self.name,
            hedges=checks.whole("hedges", hedges),
            failures=Matcher(on, ignore),
            on_result=optional_predicate("on_result", on_result),
            eager=checks.flag("eager", eager),
            budget=as_budget("budget", budget),
            on_hedge=optional_listener("on_hedge", on_hedge),
        )

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        delay = self.delay() if allows(ctx._function, "repeatable") else inf
        if delay == inf:
            return await self._alone(call, ctx)
        plan = HedgePlan(self._rules, ctx, delay, self._latencies)
        try:
            await ctx.runtime.race(call, ctx, plan)
            if plan.won is not None and self._rules.budget is not None:
                self._rules.budget.succeeded()
            plan.finish()
            await _close_discarded(plan, ctx)
            answer, plan.answer = plan.answer, None
        except BaseException as error:  # no caller will see the answer
            plan.give_up(error)
            await _close_discarded(plan, ctx)
            raise
        if isinstance(answer, Success):
            return answer.value  # type: ignore[no-any-return]
        assert answer is not None  # an attempt that is cut off while no other runs raises out of `race`
        failed = answer.error
        try:
            raise StoppedIteration(failed) if isinstance(failed, StopIteration) else failed
        finally:
            del answer, failed  # no cycle: error -> traceback -> this frame -> error

    async def _alone(self, call: Call[T], ctx: Context) -> T:
        """Make a call that is not hedged, and record how long it takes."""
        rules, began = self._rules, clock.now()
        result = await call(ctx)
        try:
            if rules.on_result is None or not rejects(rules.on_result, result):
                if self._latencies is not None:
                    now = clock.now()
                    self._latencies.add(now - began, now)
                if rules.budget is not None:
                    rules.budget.succeeded()
        except BaseException:  # no caller will see the result
            await ctx.runtime.close(result)
            raise
        return result

    def delay(self) -> float:
        """Return the seconds after which a call is hedged now; infinity if too few calls have been observed."""
        return self._delay if self._latencies is None else self._latencies.delay(clock.now())

    @override
    def describe(self) -> str:
        rules = self._rules
        what = "another attempt" if rules.hedges == 1 else f"up to {rules.hedges} more attempts, one after another,"
        after = f"{format_number(self._delay)} s"
        if self._latencies is not None:
            quantile = self._latencies.quantile
            after = f"{format_percent(quantile.share)} of the calls take, by {quantile!r}"
        paid = "" if rules.budget is None else f"; paid for by {rules.budget!r}"
        return f"{self.name}: {what} beside one that takes longer than {after}{paid}"


async def _close_discarded(plan: HedgePlan, ctx: Context) -> None:
    """Close all discarded results, even if closing one of them is cancelled."""
    if not plan.discarded:
        return
    async with AsyncExitStack() as closing:
        while plan.discarded:
            closing.push_async_callback(ctx.runtime.close, plan.discarded.pop())
