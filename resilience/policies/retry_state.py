"""The state of a Retry in one execution: the attempts, the time since the first one, the failures and the delays.

Part of Retry: after each failure it decides whether another attempt follows, and after which delay. The policy and the
block form both use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeAlias, final

from resilience.backoff import Backoff, Randomness
from resilience.checks import Duration
from resilience.clock import FOREVER, clock
from resilience.context import Context, derive
from resilience.errors import DeadlineExceeded, RetriesExhausted, closable, is_refusal
from resilience.events.dispatch import emit, subscribers
from resilience.events.kinds import AttemptFailed, BudgetSpent, RetryGaveUp, RetryScheduled
from resilience.formats import format_seconds
from resilience.hints import allows, as_delay, asked_delay, is_repeatable
from resilience.info import Listener
from resilience.matching import Matcher, OnResult
from resilience.notes import annotate, is_handled_outside
from resilience.outcome import Failed, Outcome, StoppedIteration, Success, as_outcome
from resilience.policies.copies import without_frames
from resilience.record import History
from resilience.repeats import RETRY_NOTE, Budget, Refuser, give_back_refused, give_back_repeat, take_repeat
from resilience.runtimes.base import Runtime
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.tasks import ends_cancellation

_Reason: TypeAlias = (
    Literal["attempts", "deadline", "max_elapsed", "unrepeatable", "retry_after", "circuit_open"] | Refuser
)


#: Reads from a failure how many seconds to wait at least; None if it does not say.
Asked: TypeAlias = Callable[[Outcome[Any]], Duration | None]


@final
@dataclass(slots=True)  # reading a field of a named tuple takes ten times as long
class RetryRules:
    """The settings of a retried call. The fields are the parameters of `Retry`."""

    policy: str
    attempts: int | None
    failures: Matcher
    on_result: OnResult | None
    backoff: Backoff
    rng: Randomness | None
    max_elapsed: float | None
    retry_after: bool | Asked
    max_retry_after: float
    budget: Budget | None
    wrap: bool
    on_retry: Listener | None


@final
class RetryState:
    """The attempts of one execution, from its first failure on.

    It holds the last failure. So a frame that holds it has to let go of one of them before it ends: otherwise there is
    a cycle of the error, its traceback, the frame and this object.
    """

    __slots__ = ("_began", "_ctx", "_delay", "_delays", "_earlier", "_last", "_rules", "_since", "attempt")

    _delay: float  # the wait before the next attempt, in seconds; 0 after it

    def __init__(self, rules: RetryRules, ctx: Context, began: float | None) -> None:
        self._rules = rules
        self._ctx = ctx
        #: When the first attempt began. If nothing needed that instant, the clock is first read after its failure.
        self._began = clock.now() if began is None else began
        self._since = " after the first failure" if began is None else ""
        self._delays = rules.backoff.delays(rules.rng)
        self._last: Any = None  # the last failure, a `Failed`, until it is released
        self._earlier: History | None = None  # the failures before the last one, which most executions do not have
        self.attempt: int = 1  # the number of the running attempt, or of the next one

    def decide(self, failed: Failed, refused_until: float = -inf) -> bool:
        """Plan another attempt after this failure, or give up, and report which; return true if one is planned.

        :param refused_until: an instant before which every attempt would be refused.
        """
        rules, ctx, info = self._rules, self._ctx, self._ctx._info
        if type(failed) is StoppedIteration:
            failed = failed.error
        if self.attempt > 1:
            self.release_last()
            if isinstance(failed, Exception) and is_refusal(failed):
                give_back_refused(failed, info.cap, rules.budget)
        self._last = failed
        if info.record is not None and ctx._function is not None:  # a block is no attempt of the execution around it
            info.record.add_failure(failed)
        is_observed = subscribers.retries or info.listeners
        if is_observed:
            outcome = as_outcome(failed)
            emit(AttemptFailed, rules.policy, ctx, attempt=self.attempt, outcome=outcome, elapsed=self._elapsed())
        reason = self._plan_next(failed, refused_until)
        if reason is not None:
            self._give_up(reason)
            return False
        if is_observed or rules.on_retry is not None:
            fields = {"attempt": self.attempt, "delay": self._delay, "outcome": as_outcome(failed)}
            try:
                emit(RetryScheduled, rules.policy, ctx, rules.on_retry, **fields)
            except BaseException:  # interrupted in a listener
                self.give_back()
                raise
            return not self.give_up_if_late()
        return True

    def _plan_next(self, failed: Failed, refused_until: float) -> _Reason | None:
        """Set the wait before the next attempt, and pay for it; return the reason instead if none follows."""
        rules, ctx = self._rules, self._ctx
        if self.attempt == rules.attempts:
            return "attempts"
        carrier = failed if isinstance(failed, Exception) else failed.value
        if not (ctx.runtime.is_repeatable and allows(ctx._function, "repeatable") and is_repeatable(carrier)):
            return "unrepeatable"
        if isinstance(failed, Exception) and ends_cancellation(failed):
            return "unrepeatable"
        delay, read = next(self._delays), rules.retry_after
        if read is not False:  # an error of the user's function is raised
            asked = asked_delay(carrier) if read is True else as_delay(read(as_outcome(failed)))
            if asked > delay:
                if asked > rules.max_retry_after:
                    return "retry_after"
                delay = min(asked, FOREVER)
        self._delay = delay
        if refused_until > -inf and clock.now() + delay < refused_until:
            return "circuit_open"
        if (late := self._why_late()) is not None:
            return late
        if rules.budget is None and ctx._info.cap is None:
            return None
        refused = take_repeat(ctx._info.cap, rules.budget)
        if refused == "budget":
            emit(BudgetSpent, rules.policy, ctx, repeat="retry")
        return refused

    def begins_at_once(self, runtime: Runtime) -> bool:
        """Whether the next attempt begins at once, as there is no delay and nothing to close.

        From the second retry on, it is always false in a task, which must let others run: otherwise, endless retries
        could starve them, and the timers and cancellations that the event loop delivers.
        """
        if self._delay or (self.attempt > 1 and runtime is not BLOCKING):
            return False
        return closable(self._last) is None

    async def wait(self, runtime: Runtime) -> bool:
        """Close the discarded result or response, and wait; return false if it is then too late for another attempt."""
        failed = self._last
        try:
            discarded = closable(failed)
            if discarded is not None:
                await runtime.close(discarded)
            if discarded is None or self._why_late() is None:  # to close it may have taken long
                await runtime.sleep(self._delay, self._ctx._timer)
                self._delay = 0.0
        except BaseException:
            self.give_back()
            raise
        if not self.give_up_if_late():
            return True
        if isinstance(failed, Success) and not self._rules.wrap:
            raise DeadlineExceeded(
                "time ran out in a wait that took too long, and the last result was closed before it",
                policy=self._rules.policy,
            )
        return False

    def give_up_if_late(self) -> bool:
        """Give up if the next attempt would begin too late, after a callback, a wait or the caller's code."""
        reason = self._why_late()
        if reason is None:
            return False
        self.give_back()
        self._give_up(reason)
        return True

    def _why_late(self) -> _Reason | None:
        """Return the limit that passes before the next attempt begins; None if none does."""
        last, most = self._ctx.deadline, self._rules.max_elapsed
        if last != inf and clock.now() + self._delay >= last:
            return "deadline"
        if most is not None and clock.now() + self._delay - self._began >= most:
            return "max_elapsed"
        return None

    def begin_next(self) -> Context:
        """Return the context of the next attempt, which begins now."""
        ctx = self._ctx
        if ctx._info.record is not None:
            ctx._info.record.expect_failure()
        if not ctx.runtime.is_shareable and isinstance(self._last, Exception):
            self._last = without_frames(self._last)  # they would keep a stream alive
        self.attempt += 1
        return derive(ctx, ctx.deadline, self.attempt, ctx._timer)

    def release_last(self) -> None:
        """Keep only the type and message of the last failure."""
        if self._last is not None:
            if self._earlier is None:
                self._earlier = History()
            self._earlier.add(self._last)
            self._last = None

    def give_back(self) -> None:
        """Refund the cost of a retry that was not made."""
        give_back_repeat(self._ctx._info.cap, self._rules.budget)

    def _elapsed(self) -> float:
        """Return the seconds since the first attempt began; never negative, even if a test replaces the clock."""
        return max(0.0, clock.now() - self._began)

    def _give_up(self, reason: _Reason) -> None:
        if subscribers.retries or self._ctx._info.listeners:
            outcome = as_outcome(self._last)
            fields = {"attempts": self.attempt, "elapsed": self._elapsed(), "outcome": outcome, "reason": reason}
            emit(RetryGaveUp, self._rules.policy, self._ctx, **fields)

    # --- the end ---

    def conclude(self) -> None:
        """Add the note to the last exception, or accept the last result as it is.

        With `wrap`, raise `RetriesExhausted` instead.
        """
        failed = self._last
        error = failed if isinstance(failed, Exception) else None
        if self._rules.wrap:
            attempts, last = self.attempt, as_outcome(failed)
            summary = self._summary(attempts)
            raise RetriesExhausted(summary, policy=self._rules.policy, attempts=attempts, last=last) from error
        if error is not None:
            annotate(error, self._summary(self.attempt), replaces=RETRY_NOTE)

    def explain(self, refusal: Exception) -> None:
        """Add the history of the attempts to the refusal that ended them, and set the last failure as its context."""
        failed = self._last
        give_back_refused(refusal, self._ctx._info.cap, self._rules.budget)
        annotate(refusal, self._summary(self.attempt - 1), replaces=RETRY_NOTE)  # the refused attempt made no call
        context = refusal.__context__
        if isinstance(failed, Exception) and (context is None or is_handled_outside(context)):
            refusal.__context__ = failed

    def _summary(self, attempts: int) -> str:
        self.release_last()
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        took = f" in {format_seconds(self._elapsed())}{self._since}"
        return f"{times}{'' if attempts == 1 and self._since else took}{RETRY_NOTE}{self._earlier}"


def too_late(policy: str) -> DeadlineExceeded:
    """Return the error for an execution whose deadline had passed before it began."""
    return DeadlineExceeded("the deadline of the execution had passed before the first attempt", policy=policy)
