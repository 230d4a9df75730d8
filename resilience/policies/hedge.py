"""Hedge: if a call takes long, start another attempt beside the first, and use the first good result."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar, Final, Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.backoff import listed_delays
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import closable, ends_with_the_deadline, is_refusal
from resilience.events.dispatch import emit, optional_listener
from resilience.events.kinds import BudgetSpent, HedgeFinished, HedgeStarted
from resilience.formats import format_number, format_percent
from resilience.hints import allows, forbid_repeat, is_repeatable, may_overlap
from resilience.info import Listener
from resilience.matching import Matcher, On, OnResult, optional_predicate, rejects
from resilience.network_errors import transient
from resilience.notes import annotate
from resilience.outcome import Failure, Outcome, StoppedIteration, Success
from resilience.policies.latencies import Latencies, Quantile
from resilience.policy import Call, Policy
from resilience.record import History
from resilience.repeats import Budget, as_budget, give_back_refused, give_back_repeat, take_repeat
from resilience.runtimes.base import close_each
from resilience.runtimes.tasks import ends_cancellation

T = TypeVar("T")

_DEFAULT_DELAY = Quantile()

_BESIDE: Final = " beside it failed with "


@final
class Hedge(Policy[Never]):
    """Start another attempt beside one that takes long, and answer with the first good result.

    That shortens the longest waits for a service with a few slow calls among fast ones (Dean, Barroso: "The Tail at
    Scale", CACM 2013). It must be safe to make the call twice.

    :param delay: seconds without an answer after which another attempt begins, and so on every `delay`; 0 is all at
        once. Or a sequence, with the seconds before each further attempt; its last value repeats. Or a `Quantile` of
        the durations of calls, the default.
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
    `Quantile` is warm, after the deadline, or if the function is a callable object with `repeatable = False`. After
    a failure that carries `repeatable = False` no further attempt begins; if the call then fails, no Retry repeats it.

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
        delay: Duration | Sequence[Duration] | Quantile = _DEFAULT_DELAY,
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
        delay = listed_delays("delay", delay) or delay  # a copy, in seconds
        self._resilience_set_up(locals())
        checks.not_bare("@Hedge()", delay)
        self._latencies = Latencies(delay) if isinstance(delay, Quantile) else None
        self._delays: tuple[float, ...] = ()
        if not isinstance(delay, Quantile):
            self._delays = delay if isinstance(delay, tuple) else (checks.seconds("delay", delay, zero=True),)
        self._hedges = checks.whole("hedges", hedges)
        if len(self._delays) > self._hedges:
            count = len(self._delays)
            raise ValueError(f"delay has {count} values for hedges={hedges!r}: {delay!r}; did you mean hedges={count}?")
        self._failures = Matcher(on, ignore)
        self._on_result = optional_predicate("on_result", on_result)
        self._eager = checks.flag("eager", eager)
        self._budget = as_budget("budget", budget)
        self._on_hedge = optional_listener("on_hedge", on_hedge)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        delay = self.delay() if allows(ctx._function, "repeatable") else inf
        if delay == inf:
            return await self._alone(call, ctx)
        plan = HedgePlan(self, ctx, delay)
        try:
            await ctx.runtime.race(call, ctx, plan)
            if plan.won is not None and self._budget is not None:
                self._budget.succeeded()
            plan.finish()
            if plan.discarded:
                await close_each(ctx.runtime.close, plan.discarded)
            answer, plan.answer = plan.answer, None
        except BaseException as error:  # no caller will see the answer
            plan.give_up(error)
            await close_each(ctx.runtime.close, plan.discarded)
            raise
        if isinstance(answer, Success):
            return answer.value  # type: ignore[no-any-return]
        assert answer is not None  # an attempt that is cut off while no other runs raises out of `race`
        failed = answer.error
        if not plan.is_repeatable:
            forbid_repeat(failed)
        try:
            raise StoppedIteration(failed) if isinstance(failed, StopIteration) else failed
        finally:
            del answer, failed  # no cycle: error -> traceback -> this frame -> error

    async def _alone(self, call: Call[T], ctx: Context) -> T:
        """Make a call that is not hedged, and record how long it takes."""
        began = clock.now()
        result = await call(ctx)
        try:
            if self._on_result is None or not rejects(self._on_result, result):
                if self._latencies is not None:
                    now = clock.now()
                    self._latencies.add(now - began, now)
                if self._budget is not None:
                    self._budget.succeeded()
        except BaseException:  # no caller will see the result
            await ctx.runtime.close(result)
            raise
        return result

    def delay(self) -> float:
        """Return the seconds after which a call is hedged now; infinity if too few calls have been observed.

        Of several delays, it is the first: how long the first attempt runs alone.
        """
        return self._delays[0] if self._latencies is None else self._latencies.delay(clock.now())

    @override
    def describe(self) -> str:
        after = ", then ".join(f"{format_number(delay)} s" for delay in self._delays)
        if self._latencies is not None:
            quantile = self._latencies.quantile
            after = f"{format_percent(quantile.share)} of the calls take, by {quantile!r}"
        when = f"beside one that {'fails or ' if self._eager else ''}takes longer than {after}"
        several = f"up to {self._hedges} more attempts, one after another,"
        if self._delays == (0.0,):
            when, several = "at once with the first", f"up to {self._hedges} more attempts"
        what = "another attempt" if self._hedges == 1 else several
        paid = "" if self._budget is None else f"; paid for by {self._budget!r}"
        return f"{self.name}: {what} {when}{paid}"


@final
class HedgePlan:
    """The plan of one call, for the race of the runtime: a `Plan`."""

    __slots__ = (
        "_began",
        "_ctx",
        "_delay",
        "_first_runs",
        "_has_losers",
        "_others",
        "_policy",
        "_running",
        "answer",
        "attempts",
        "discarded",
        "due",
        "is_repeatable",
        "won",
    )

    def __init__(self, policy: Hedge, ctx: Context, delay: float) -> None:
        self._policy = policy
        self._ctx = ctx
        self._delay = delay
        self._began = clock.now()
        self._running = 0
        self._first_runs = True
        self._has_losers = False  # whether the call was decided while other attempts ran
        self._others = History()  # the failures of the attempts beside the first
        self.due: float = self._began + delay
        self.attempts: int = 0
        #: The outcome of the call: the deciding one, or else that of the first attempt.
        self.answer: Outcome[Any] | None = None
        #: The number of the attempt whose good result is the answer.
        self.won: int | None = None
        #: What must be closed of outcomes that are not the answer: results, and responses that errors carry.
        self.discarded: list[Any] = []
        #: Whether no outcome forbids that the call is made again.
        self.is_repeatable: bool = True

    def begin(self) -> Context | None:
        """Return the context of the next attempt, the first one included; None if there is none."""
        policy, ctx, number = self._policy, self._ctx, self.attempts
        if number:
            now = clock.now()
            if number < len(policy._delays):
                self._delay = policy._delays[number]
            if now >= ctx.deadline or not may_overlap(ctx._function) or not self._may_repeat():
                self.due = inf
                return None
            self.due = now + self._delay if number < policy._hedges else inf
            elapsed = now - self._began
            try:
                emit(HedgeStarted, policy.name, ctx, policy._on_hedge, number=number, elapsed=elapsed)
            except BaseException:  # interrupted in a listener
                give_back_repeat(ctx._info.cap, policy._budget)
                raise
            ctx = ctx.child(hedge=number)
        self.attempts += 1
        self._running += 1
        return ctx

    def _may_repeat(self) -> bool:
        refused = take_repeat(self._ctx._info.cap, self._policy._budget)
        if refused == "budget":
            emit(BudgetSpent, self._policy.name, self._ctx, repeat="hedge")
        return refused is None

    def ended(self, number: int, outcome: Outcome[Any]) -> bool:
        """Record the outcome of an attempt; return true if the call is decided."""
        policy, now = self._policy, clock.now()
        self._running -= 1
        if number == 0:
            self._first_runs = False
        if isinstance(outcome, Success):
            decides = is_answer = self._is_good(outcome)
            if decides:
                self.won = number
                if policy._latencies is not None and (number == 0 or self._first_runs):
                    policy._latencies.add(now - self._began, now)  # if another one wins, the first took longer
            carrier = outcome.value
        else:
            carrier = error = outcome.error
            others_run = self._running > 0 or self.due <= now
            is_inconclusive = is_refusal(error) or ends_with_the_deadline(error)
            decides = not (policy._failures.judge(error) or (others_run and is_inconclusive))
            is_answer = decides and not is_inconclusive
            if ends_cancellation(error):  # of the caller: nothing else would end the other attempts
                decides = is_answer = True
            if number and is_refusal(error):
                give_back_refused(error, self._ctx._info.cap, policy._budget)
        if not (decides or is_repeatable(carrier)):  # the attempt may have done its work
            self.due, self.is_repeatable = inf, False
        if number == 0 or is_answer:
            if self.answer is not None:
                self._discard(self.answer)
            self.answer = outcome
        else:  # it is inconclusive, or no better than that of the first attempt, which remains the answer
            self._others.add(outcome if isinstance(outcome, Success) else outcome.error)
            self._discard(outcome)
        record = self._ctx._info.record
        if record is not None and self._running:  # another attempt may raise the same error
            record.expect_failure()
            if decides:
                self._has_losers = True
                record.decided_races += 1
        return decides or not self._continues(now)

    def _is_good(self, outcome: Success[Any]) -> bool:
        on_result = self._policy._on_result
        try:
            return on_result is None or not rejects(on_result, outcome.value)
        except BaseException:  # no caller will see the result
            self._discard(outcome)
            raise

    def _continues(self, now: float) -> bool:
        """After an outcome that does not decide the call: whether another attempt runs, or begins at once.

        One may be due already, and not yet started: without a delay, or if the event loop was busy.
        """
        if self.due <= now or (self._policy._eager and self.due != inf):
            self.due = min(self.due, now)
            return True
        return self._running > 0

    def _discard(self, outcome: Outcome[Any]) -> None:
        resource = closable(outcome)
        if resource is not None:
            self.discarded.append(resource)

    def give_up(self, error: BaseException) -> None:
        """Discard the answer, because `error`, such as a cancellation, ends the call; report the call."""
        answer, self.answer = self.answer, None  # no cycle: a failure -> traceback -> frame -> this plan
        self.won = None
        if isinstance(error, GeneratorExit):
            self.discarded.clear()  # closing them may have to wait, which a closed coroutine cannot do
        elif answer is not None:
            self._discard(answer)
        self.finish()

    def finish(self) -> None:
        """Report a hedged call, once. If it failed, add the failures of the other attempts to the error as a note."""
        attempts, self.attempts = self.attempts, 0
        if attempts < 2:
            return
        record = self._ctx._info.record
        if record is not None and self._has_losers:
            record.decided_races -= 1
        fields = {"won": self.won, "attempts": attempts, "elapsed": clock.now() - self._began}
        emit(HedgeFinished, self._policy.name, self._ctx, **fields)
        if not isinstance(self.answer, Failure):
            return
        if record is not None:
            record.ignore_failure(self.answer.error)
        count = len(self._others) + self._others.left_out
        if count:
            times = "1 attempt" if count == 1 else f"{count} attempts"
            annotate(self.answer.error, times + _BESIDE + str(self._others), replaces=_BESIDE)
