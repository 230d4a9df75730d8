"""The attempts of a Retry: the course that they take in one execution, and their form as blocks.

A part of Retry's room. A `Course` decides, after each failure, whether there is another attempt and
how long to wait for it; the policy and the blocks both follow it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from resilience import checks, events
from resilience.clock import FOREVER, clock
from resilience.context import (
    Context,
    block_context,
    executed_object,
    restore_ambient,
    set_ambient,
)
from resilience.errors import DeadlineExceeded, RetriesExhausted
from resilience.events import watched
from resilience.outcome import Failure, Outcome, Success, genuine
from resilience.record import History
from resilience.runtimes.blocking import BLOCKING, drive
from resilience.runtimes.tasks import TASKS

if TYPE_CHECKING:
    from resilience.policies.retry import Retry
    from resilience.runtimes.base import Runtime

_NOTE = "resilience: "
_Reason: TypeAlias = Literal["attempts", "deadline", "max_elapsed", "unrepeatable"]


@final
class Course:
    """One execution's attempts, from its first failure on: how many, since when, what failed, how long to wait."""

    __slots__ = ("_began", "_ctx", "_delays", "_history", "_retry", "attempt")

    def __init__(self, retry: Retry, ctx: Context, began: float) -> None:
        self._retry = retry
        self._ctx = ctx
        self._began = began
        self._delays = retry._backoff.delays(retry._rng)
        self._history = History()
        self.attempt: int = 1  # the one that is running, or will be next

    async def goes_on_after(self, outcome: Outcome[Any], runtime: Runtime) -> bool:
        """Wait for the next attempt (true), unless this failure is the last (false)."""
        delay = self.delay_after(outcome)
        if delay is None:
            return False
        rubbish = discarded(outcome)
        if rubbish is not None:
            await runtime.close(rubbish)
        await runtime.sleep(delay, self._ctx)
        if self.may_start(outcome):
            return True
        if isinstance(outcome, Success) and not self._retry._wrap:
            raise DeadlineExceeded(
                "time ran out in a wait that took too long, and the last result was closed before it",
                policy=self._retry.name,
            )
        return False

    def delay_after(self, outcome: Outcome[Any]) -> float | None:
        """Return the seconds to wait after this failure, None if it is the last; tell the listeners which."""
        retry, ctx = self._retry, self._ctx
        self._history.add(outcome)
        if ctx._facts.record is not None:
            ctx._facts.record.note(outcome)
        elapsed = clock.now() - self._began
        if watched.retries or ctx._facts.listeners:
            events.emit(events.AttemptFailed, retry.name, ctx, attempt=self.attempt, outcome=outcome, elapsed=elapsed)
        delay = self._next_delay(outcome, elapsed)
        if isinstance(delay, str):
            self._give_up(delay, outcome)
            return None
        if watched.retries or ctx._facts.listeners or retry._on_retry is not None:
            told = {"attempt": self.attempt, "delay": delay, "outcome": outcome}
            events.emit(events.RetryScheduled, retry.name, ctx, retry._on_retry, **told)
        return delay

    def _next_delay(self, outcome: Outcome[Any], elapsed: float) -> float | _Reason:
        """Return the seconds to wait, or why there is no other attempt."""
        retry, ctx = self._retry, self._ctx
        if self.attempt == retry._attempts:
            return "attempts"
        carrier = outcome.value if isinstance(outcome, Success) else outcome.error
        if _read(carrier, "repeatable") is False or _read(executed_object(ctx), "repeatable") is False:
            return "unrepeatable"
        delay = next(self._delays)
        if retry._retry_after and (asked := _asked_delay(carrier)) > delay:
            delay = asked
        if delay >= ctx.remaining():
            return "deadline"
        if retry._max_elapsed is not None and elapsed + delay >= retry._max_elapsed:
            return "max_elapsed"
        return delay

    def may_start(self, outcome: Outcome[Any]) -> bool:
        """Begin the next attempt; false if the wait took so long that its time is over."""
        retry, ctx = self._retry, self._ctx
        if ctx.expired:
            self._give_up("deadline", outcome)
            return False
        if retry._max_elapsed is not None and clock.now() - self._began >= retry._max_elapsed:
            self._give_up("max_elapsed", outcome)
            return False
        if ctx._facts.record is not None:
            ctx._facts.record.expect_failure()
        self.attempt += 1
        return True

    def _give_up(self, reason: _Reason, outcome: Outcome[Any]) -> None:
        events.emit(
            events.RetryGaveUp,
            self._retry.name,
            self._ctx,
            attempts=self.attempt,
            elapsed=clock.now() - self._began,
            outcome=outcome,
            reason=reason,
        )

    # --- the end ---

    def conclude(self, error: Exception) -> None:
        """Put the note on the last exception, or raise what stands for it."""
        if self._retry._wrap:
            raise self._exhausted(Failure(genuine(error))) from genuine(error)
        _annotate(genuine(error), _NOTE + self._summary())

    def conclude_with(self, result: object) -> None:
        """Leave the last result as it is, or raise what stands for it."""
        if self._retry._wrap:
            raise self._exhausted(Success(result))

    def _exhausted(self, last: Outcome[Any]) -> RetriesExhausted:
        return RetriesExhausted(self._summary(), policy=self._retry.name, attempts=self.attempt, last=last)

    def _summary(self) -> str:
        times = "1 attempt" if self.attempt == 1 else f"{self.attempt} attempts"
        return f"{times} in {clock.now() - self._began:.3g} s, failed with {self._history}"


@final
class Attempts:
    """The attempts of one block, for `for` and `async for`. Each is a context manager."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._ctx = block_context()
        self._began = clock.now()
        self._course: Course | None = None
        self._failed: tuple[Failure, float] | None = None  # what the last block failed with, and the delay after it
        self._begun = False

    def __iter__(self) -> Iterator[Attempt]:
        return self

    def __next__(self) -> Attempt:
        attempt = drive(self._next(BLOCKING), "Retry.attempts()")
        if attempt is None:
            raise StopIteration
        return attempt

    def __aiter__(self) -> AsyncIterator[Attempt]:
        return self

    async def __anext__(self) -> Attempt:
        attempt = await self._next(TASKS)
        if attempt is None:
            raise StopAsyncIteration
        return attempt

    async def _next(self, runtime: Runtime) -> Attempt | None:
        if not self._begun:
            if self._began >= self._ctx.deadline:
                raise too_late(self._retry.name)
            self._begun = True
            return Attempt(self, 1)
        failed, self._failed = self._failed, None
        if failed is None or self._course is None:
            return None
        failure, delay = failed
        try:
            rubbish = discarded(failure)
            if rubbish is not None:
                await runtime.close(rubbish)
            await runtime.sleep(delay, self._ctx)
            if not self._course.may_start(failure):
                self._course.conclude(failure.error)
                raise failure.error
        finally:
            del failed, failure
        return Attempt(self, self._course.attempt)

    def holds_back(self, error: Exception) -> bool:
        """Decide what follows a block that failed: another attempt (true), or its error."""
        if not self._retry._failures.handles(error):
            return False
        self._course = self._course or Course(self._retry, self._ctx, self._began)
        delay = self._course.delay_after(Failure(error))
        if delay is None:
            self._course.conclude(error)
            return False
        self._failed = Failure(error), delay
        return True


@final
class Attempt:
    """One attempt: what its block raises is held back while there is another one to make."""

    def __init__(self, attempts: Attempts, number: int) -> None:
        self._attempts = attempts
        self._ctx = attempts._ctx.child(attempt=number)
        self._token: Token[Context | None] | None = None
        #: 1 for the first attempt.
        self.number: int = number

    def __enter__(self) -> Attempt:
        self._token = set_ambient(self._ctx)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._token is not None:
            restore_ambient(self._ctx, self._token)
            self._token = None
        return isinstance(error, Exception) and self._attempts.holds_back(error)


def too_late(policy: str) -> DeadlineExceeded:
    """Return the error for an execution whose time was over before it began."""
    return DeadlineExceeded("the deadline of the execution had passed before the first attempt", policy=policy)


def discarded(outcome: Outcome[Any]) -> Any:
    """Return what nobody will see, and is to be closed: the result, or the response that an error carries."""
    return outcome.value if isinstance(outcome, Success) else _read(outcome.error, "response")


def _asked_delay(carrier: object) -> float:
    """Return the delay in seconds that an error or a result asks for, 0 for none or for rubbish."""
    asked = _read(carrier, "retry_after")
    if asked is None:
        return 0.0
    try:
        return min(checks.seconds("retry_after", asked, zero=True), FOREVER)
    except (TypeError, ValueError):
        return 0.0


def _read(carrier: object, attribute: str) -> Any:
    """Read an attribute that a foreign object may or may not have. A property that raises has nothing to tell."""
    try:
        return getattr(carrier, attribute, None)
    except Exception:
        return None


def _annotate(error: Exception, note: str) -> None:
    """Put our note on an exception, in the place of an earlier one of ours."""
    try:
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list):
            notes[:] = [it for it in notes if not (isinstance(it, str) and it.startswith(_NOTE))]
        error.add_note(note)
    except Exception:  # an exception that refuses attributes (a frozen dataclass, say) goes without
        return
