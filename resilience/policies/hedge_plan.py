"""One hedged call: when attempts begin, and which one decides the call. Part of Hedge."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Final, final

from resilience.clock import clock
from resilience.context import Context
from resilience.errors import ends_with_the_deadline, is_refusal
from resilience.events.dispatch import emit
from resilience.events.kinds import BudgetSpent, HedgeFinished, HedgeStarted
from resilience.hints import may_overlap
from resilience.info import Listener
from resilience.matching import Matcher, OnResult, rejects
from resilience.notes import annotate
from resilience.outcome import Failure, Outcome, Success, closable
from resilience.policies.latencies import Latencies
from resilience.record import History
from resilience.repeats import Budget, give_back_refused, give_back_repeat, take_repeat

_BESIDE: Final = " beside it failed with "


@final
@dataclass(slots=True)  # as `RetryRules`
class HedgeRules:
    """The settings of a hedged call. The fields are the parameters of `Hedge`."""

    policy: str
    hedges: int
    failures: Matcher
    on_result: OnResult | None
    eager: bool
    budget: Budget | None
    on_hedge: Listener | None


@final
class HedgePlan:
    """The plan of one call, for the race of the runtime: a `Plan`."""

    __slots__ = (
        *("_began", "_ctx", "_delay", "_first_runs", "_latencies", "_others", "_rules", "_running"),
        *("answer", "attempts", "discarded", "due", "won"),
    )

    def __init__(self, rules: HedgeRules, ctx: Context, delay: float, latencies: Latencies | None) -> None:
        self._rules = rules
        self._ctx = ctx
        self._delay = delay
        self._latencies = latencies
        self._began = clock.now()
        self._running = 0
        self._first_runs = True
        self._others = History()  # the failures of the attempts beside the first
        self.due: float = self._began + delay
        self.attempts: int = 0
        #: The outcome of the call: the deciding one, or else that of the first attempt.
        self.answer: Outcome[Any] | None = None
        #: The number of the attempt whose good result is the answer.
        self.won: int | None = None
        #: What must be closed of outcomes that are not the answer: results, and responses that errors carry.
        self.discarded: list[Any] = []

    def begin(self) -> Context | None:
        """Return the context of the next attempt, the first one included; None if there is none."""
        number = self.attempts
        ctx = self._ctx
        if number:
            now = clock.now()
            if now >= ctx.deadline or not may_overlap(ctx._function) or not self._may_repeat():
                self.due = inf
                return None
            self.due = now + self._delay if number < self._rules.hedges else inf
            elapsed = now - self._began
            try:
                emit(HedgeStarted, self._rules.policy, ctx, self._rules.on_hedge, number=number, elapsed=elapsed)
            except BaseException:  # interrupted in a listener
                give_back_repeat(ctx._info.cap, self._rules.budget)
                raise
            ctx = ctx.child(hedge=number)
        self.attempts += 1
        self._running += 1
        return ctx

    def _may_repeat(self) -> bool:
        refused = take_repeat(self._ctx._info.cap, self._rules.budget)
        if refused == "budget":
            emit(BudgetSpent, self._rules.policy, self._ctx, repeat="hedge")
        return refused is None

    def ended(self, number: int, outcome: Outcome[Any]) -> bool:
        """Record the outcome of an attempt; return true if the call is decided."""
        rules, now = self._rules, clock.now()
        self._running -= 1
        if number == 0:
            self._first_runs = False
        if isinstance(outcome, Success):
            decides = is_answer = self._is_good(outcome)
            if decides:
                self.won = number
                if self._latencies is not None and (number == 0 or self._first_runs):
                    self._latencies.add(now - self._began, now)  # if another one wins, the first took longer
        else:
            error, others_run = outcome.error, self._running > 0 or self.due <= now
            is_inconclusive = is_refusal(error) or ends_with_the_deadline(error)
            decides = not (rules.failures.handles(error) or (others_run and is_inconclusive))
            is_answer = decides and not is_inconclusive
            if number and is_refusal(error):
                give_back_refused(error, self._ctx._info.cap, rules.budget)
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
        return decides or not self._continues(now)

    def _is_good(self, outcome: Success[Any]) -> bool:
        on_result = self._rules.on_result
        try:
            return on_result is None or not rejects(on_result, outcome.value)
        except BaseException:  # no caller will see the result
            self._discard(outcome)
            raise

    def _continues(self, now: float) -> bool:
        """After an outcome that does not decide the call: whether another attempt runs, or begins at once.

        One may be due already, and not yet started: without a delay, or if the event loop was busy.
        """
        if self.due <= now or (self._rules.eager and self.due != inf):
            self.due = min(self.due, now)
            return True
        return self._running > 0

    def _discard(self, outcome: Outcome[Any]) -> None:
        resource = closable(outcome if isinstance(outcome, Success) else outcome.error)
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
        numbers = {"won": self.won, "attempts": attempts, "elapsed": clock.now() - self._began}
        emit(HedgeFinished, self._rules.policy, self._ctx, **numbers)
        if not isinstance(self.answer, Failure):
            return
        record = self._ctx._info.record
        if record is not None:
            record.mark_noted(self.answer.error)
        count = len(self._others) + self._others.left_out
        if count:
            times = "1 attempt" if count == 1 else f"{count} attempts"
            annotate(self.answer.error, times + _BESIDE + str(self._others), replaces=_BESIDE)
