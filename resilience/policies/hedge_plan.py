"""One hedged call: which attempts begin, when, and which one decides. Part of Hedge."""

from __future__ import annotations

import threading
from math import inf
from typing import Any, NamedTuple, final

from resilience.clock import clock
from resilience.context import Context
from resilience.errors import DeadlineExceeded, Rejected
from resilience.events.dispatch import emit
from resilience.events.kinds import BudgetSpent, HedgeFinished, HedgeStarted
from resilience.info import Listener
from resilience.matching import Matcher, OnResult, is_repeatable
from resilience.outcome import Failure, Outcome, Success, closable, unwrap_stop_iteration
from resilience.record import History
from resilience.repeats import Budget, give_back_repeat, take_repeat
from resilience.state.quantiles import Histogram


class HedgeRules(NamedTuple):
    """What decides a hedged call. The fields are the parameters of `Hedge`."""

    policy: str
    hedges: int
    failures: Matcher
    on_result: OnResult | None
    eager: bool
    budget: Budget | None
    on_hedge: Listener | None


@final
class Latencies:
    """How long calls take; as many threads and tasks observe it as there are."""

    def __init__(self, share: float, window: float) -> None:
        self._settings = share, window
        self.reset()

    def reset(self) -> None:
        """Forget all, as in the child of a fork."""
        self._lock = threading.RLock()
        self._histogram = Histogram(*self._settings)

    def add(self, seconds: float, now: float) -> None:
        """Note a duration."""
        with self._lock:
            self._histogram.add(seconds, now)

    def value(self, warm_up: int, now: float) -> float:
        """Return the quantile, infinity where fewer than `warm_up` durations are known."""
        with self._lock:
            self._histogram.forget(now)
            return inf if self._histogram.count < warm_up else self._histogram.value()


@final
class HedgePlan:
    """The course of one call; a `Plan` of the runtime."""

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
        self._others = History()  # what the attempts beside the first failed with
        self.due: float = self._began + delay
        self.attempts: int = 0
        #: What the call ends with: of what has not decided it, the outcome of the first attempt.
        self.answer: Outcome[Any] | None = None
        #: The number of the attempt whose good result it is.
        self.won: int | None = None
        #: What is to be closed of outcomes that are not the answer: results, and responses that errors carry.
        self.discarded: list[Any] = []

    def begin(self) -> Context | None:
        """Return the context of another attempt, the first one included, unless there is to be none."""
        number = self.attempts
        ctx = self._ctx
        if number:
            now = clock.now()
            if now >= ctx.deadline or not is_repeatable(ctx._function) or not self._may_repeat():
                self.due = inf
                return None
            self.due = now + self._delay if number < self._rules.hedges else inf
            emit(HedgeStarted, self._rules.policy, ctx, self._rules.on_hedge, number=number, elapsed=now - self._began)
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
        """Take what an attempt ended with; true where the call is decided."""
        rules, now = self._rules, clock.now()
        self._running -= 1
        if number == 0:
            self._first_runs = False
        if isinstance(outcome, Success):
            try:
                decides = is_good = rules.on_result is None or not rules.on_result(outcome.value)
            except BaseException:  # no caller will see the result
                self._discard(outcome)
                raise
        else:
            is_good = False
            decides = not (rules.failures.handles(outcome.error) or (self._running and _says_nothing(outcome.error)))
            if number and isinstance(outcome.error, Rejected):  # it called nothing
                give_back_repeat(self._ctx._info.cap, rules.budget)
        if is_good:
            self.won = number
            if number == 0 or self._first_runs:  # where another has won, the first took at least as long
                self.observe(now)
        if number == 0 or (decides and not (isinstance(outcome, Failure) and _says_nothing(outcome.error))):
            self._answer_with(outcome)
        else:  # the last one was refused, or it was no better than the first: the first one's outcome stands
            self._others.add(outcome if isinstance(outcome, Success) else outcome.error)
            self._discard(outcome)
        return decides or not self._goes_on(now)

    def observe(self, now: float) -> None:
        """Note how long the first attempt has taken."""
        if self._latencies is not None:
            self._latencies.add(now - self._began, now)

    def _goes_on(self, now: float) -> bool:
        """Whether another attempt runs, or begins at once; whatever has ended was not good enough."""
        if self._rules.eager and self.due != inf:
            self.due = now
            return True
        if self._running:
            return True
        self.due = inf
        return False

    def _answer_with(self, outcome: Outcome[Any]) -> None:
        if self.answer is not None:
            self._discard(self.answer)
        self.answer = outcome

    def _discard(self, outcome: Outcome[Any]) -> None:
        resource = closable(outcome if isinstance(outcome, Success) else outcome.error)
        if resource is not None:
            self.discarded.append(resource)

    def give_up(self, error: BaseException) -> None:
        """Discard the answer, as this ends the call: cancelled, or interrupted."""
        answer, self.answer = self.answer, None  # no cycle: a failure -> traceback -> frame -> this plan
        if isinstance(error, GeneratorExit):
            self.discarded.clear()  # closing them might have to wait, which a closed coroutine cannot
        elif answer is not None:
            self._discard(answer)

    def finish(self) -> None:
        """Report a call that was hedged; note on the first failure what the others failed with."""
        if self.attempts < 2:
            return
        numbers = {"won": self.won, "attempts": self.attempts, "elapsed": clock.now() - self._began}
        emit(HedgeFinished, self._rules.policy, self._ctx, **numbers)
        if not isinstance(self.answer, Failure):
            return
        record = self._ctx._info.record
        if record is not None:
            record.mark_noted(self.answer.error)
        if self._others.count:
            times = "1 attempt" if self._others.count == 1 else f"{self._others.count} attempts"
            _annotate(self.answer.error, f"resilience: {times} beside it failed with {self._others}")


def _says_nothing(error: Exception) -> bool:
    return isinstance(unwrap_stop_iteration(error), (Rejected, DeadlineExceeded))


def _annotate(error: Exception, note: str) -> None:
    try:
        error.add_note(note)
    except Exception:  # an exception that refuses attributes goes without
        return
