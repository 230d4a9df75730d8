"""Retry: call again what failed, after a wait, for as long as there are attempts and time left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, TypeAlias, TypeVar, final

from typing_extensions import override

from resilience import checks, events
from resilience.backoff import BackoffLike, Exponential, Randomness, as_backoff
from resilience.checks import exact
from resilience.clock import FOREVER, clock
from resilience.context import Context, History, block_context, get_ambient, restore_ambient, set_ambient
from resilience.errors import DeadlineExceeded, RetriesExhausted
from resilience.matching import Matcher, On, OnResult, optional_predicate, transient
from resilience.outcome import Failure, Outcome, Success, genuine
from resilience.policy import Call, Policy
from resilience.runtimes.blocking import BLOCKING, drive
from resilience.runtimes.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilience.checks import Duration
    from resilience.events import Listener
    from resilience.runtimes.base import Runtime

T = TypeVar("T")

_DEFAULT_BACKOFF = Exponential(0.1, cap=10.0)
_NOTE = "resilience: "
_Reason: TypeAlias = Literal["attempts", "deadline", "max_elapsed"]


@final
class Retry(Policy[Never]):
    """Call again when a call failed in a way that may be gone at the next try.

    The call's own last exception (or result) comes out, not one of ours, with one note on it that says
    how many attempts were made, in what time, and what each failed with.

    :param attempts: how many calls to make at most, the first one included; 1 is no retry, None is as
        many as time allows.
    :param on: what is tried again: an exception type, a tuple of them, or a predicate over the exception.
        `transient` by default: connection and timeout errors of the standard library and of the well-known
        clients. `Rejected` and `DeadlineExceeded` only where they are named here.
    :param on_result: a predicate over the result; true means that it is not good enough. A result that is
        thrown away is closed, if it can be.
    :param ignore: exceptions that are never tried again, whatever `on` says.
    :param backoff: how long to wait before each retry: a backoff, a sequence of seconds, or a callable that
        returns an iterable of them. Exponential from 0.1 s with full jitter, at most 10 s, by default.
    :param max_elapsed: seconds after the first attempt began in which every further one has to begin.
    :param retry_after: whether an error or result that carries a delay (`.retry_after`, in seconds) raises
        the wait to at least that.
    :param wrap: raise `RetriesExhausted` in the end instead of the last failure itself.
    :param on_retry: called with a `RetryScheduled` before each wait; never after the last failure.
    :param name: what errors and events call this policy.
    :param rng: source of randomness for the backoff: `random.Random(seed)` makes it repeatable.

    It never waits for nothing: where the next delay does not fit in what is left of the deadline or of
    `max_elapsed`, it stops at once with the failure that it has. No attempt starts after the deadline, and
    nothing is waited for after the last attempt.

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

    def __init__(
        self,
        attempts: int | None = 3,
        *,
        on: On = transient,
        on_result: OnResult | None = None,
        ignore: On = (),
        backoff: BackoffLike = _DEFAULT_BACKOFF,
        max_elapsed: Duration | None = None,
        retry_after: bool = True,
        wrap: bool = False,
        on_retry: Listener | None = None,
        name: str | None = None,
        rng: Randomness | None = None,
    ) -> None:
        self._attempts = None if attempts is None else checks.whole("attempts", attempts)
        self._failures = Matcher(on, ignore)
        self._on_result = optional_predicate("on_result", on_result)
        self._backoff = as_backoff("backoff", backoff)
        self._max_elapsed = checks.optional_seconds("max_elapsed", max_elapsed)
        self._retry_after = checks.flag("retry_after", retry_after)
        self._wrap = checks.flag("wrap", wrap)
        self._on_retry = events.optional_listener("on_retry", on_retry)
        self.name: str = checks.optional_name(name) or "Retry"
        if rng is not None and not callable(getattr(rng, "uniform", None)):
            raise TypeError(f"rng must have a method uniform(a, b), as random.Random has; {rng!r} has not")
        self._rng = rng
        self._settings = {
            "attempts": attempts,
            "on": on,
            "on_result": on_result,
            "ignore": ignore,
            "backoff": self._backoff,
            "max_elapsed": self._max_elapsed,
            "retry_after": retry_after,
            "wrap": wrap,
            "on_retry": on_retry,
            "name": name,
            "rng": rng,
        }

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        began = clock.now()
        if began >= ctx.deadline:
            raise _too_late(self.name)
        course: _Course | None = None
        attempt = ctx if ctx.attempt == 1 else ctx.child(attempt=1)
        while True:
            try:
                result = await call(attempt)
            except Exception as error:
                if not self._failures.handles(error):
                    raise
                course = course or _Course(self, ctx, began)
                if not await course.goes_on_after(Failure(genuine(error)), ctx.runtime):
                    course.conclude(error)
                    raise
            else:
                if self._on_result is None or not self._on_result(result):
                    return result
                course = course or _Course(self, ctx, began)
                if not await course.goes_on_after(Success(result), ctx.runtime):
                    course.conclude_with(result)
                    return result
            attempt = ctx.child(attempt=course.attempt)

    def attempts(self) -> Attempts:
        """Return the attempts for a block: `for attempt in retry.attempts(): with attempt: ...`, or `async for`.

        An exception of the block that this policy handles is held back while there is another attempt to
        make. The deadline of the ambient context holds. `on_result` does not: a block has no result.

        >>> from resilience import Retry
        >>> for attempt in Retry(on=ValueError, backoff=[0]).attempts():
        ...     with attempt:
        ...         print("attempt", attempt.number)
        ...         if attempt.number < 2:
        ...             raise ValueError("not yet")
        attempt 1
        attempt 2
        """
        return Attempts(self)

    @override
    def settings(self) -> Mapping[str, object]:
        return self._settings

    @override
    def describe(self) -> str:
        how_often = "as many attempts as time allows" if self._attempts is None else f"up to {self._attempts} attempts"
        parts = [f"{self.name}: {how_often}, waiting {self._backoff!r}"]
        if self._max_elapsed is not None:
            parts.append(f"none begins after {exact(self._max_elapsed)} s")
        return "; ".join(parts)


@final
class _Course:
    """One execution's attempts, from its first failure on: how many, since when, what failed, how long to wait."""

    __slots__ = ("_began", "_ctx", "_delays", "_history", "_retry", "attempt")

    def __init__(self, retry: Retry, ctx: Context, began: float) -> None:
        self._retry = retry
        self._ctx = ctx
        self._began = began
        self._delays = retry._backoff.delays(retry._rng)
        self._history = History()
        self.attempt = 1  # the one that is running, or will be next

    async def goes_on_after(self, outcome: Outcome[Any], runtime: Runtime) -> bool:
        """Wait for the next attempt (true), unless this failure is the last (false)."""
        delay = self.delay_after(outcome)
        if delay is None:
            return False
        await self.discard(outcome, runtime)
        await runtime.sleep(delay, self._ctx)
        if self.may_start(outcome):
            return True
        if isinstance(outcome, Success) and not self._retry._wrap:
            raise DeadlineExceeded("time ran out in a wait that took too long; the last result was closed before it")
        return False

    def delay_after(self, outcome: Outcome[Any]) -> float | None:
        """Return the seconds to wait after this failure, None if it is the last; tell the listeners which."""
        retry, ctx = self._retry, self._ctx
        self._history.add(outcome)
        ctx._note(outcome)
        elapsed = clock.now() - self._began
        events.emit(events.AttemptFailed, retry.name, ctx, attempt=self.attempt, outcome=outcome, elapsed=elapsed)
        reason: _Reason
        if self.attempt == retry._attempts:
            reason = "attempts"
        else:
            delay = next(self._delays)
            if retry._retry_after:
                delay = max(delay, _asked_delay(outcome))
            if delay >= ctx.remaining():
                reason = "deadline"
            elif retry._max_elapsed is not None and elapsed + delay >= retry._max_elapsed:
                reason = "max_elapsed"
            else:
                told = {"attempt": self.attempt, "delay": delay, "outcome": outcome}
                events.emit(events.RetryScheduled, retry.name, ctx, retry._on_retry, **told)
                return delay
        self._give_up(reason, outcome)
        return None

    async def discard(self, outcome: Outcome[Any], runtime: Runtime) -> None:
        """Close what nobody will see: the result, or the response that an error carries."""
        rubbish = outcome.value if isinstance(outcome, Success) else _read(outcome.error, "response")
        if rubbish is not None:
            await runtime.close(rubbish)

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
        self._course: _Course | None = None
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
                raise _too_late(self._retry.name)
            self._begun = True
            return Attempt(self, 1)
        failed, self._failed = self._failed, None
        if failed is None or self._course is None:
            return None
        failure, delay = failed
        try:
            await self._course.discard(failure, runtime)
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
        self._course = self._course or _Course(self._retry, self._ctx, self._began)
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
        self._outer: Context | None = None
        #: 1 for the first attempt.
        self.number: int = number

    def __enter__(self) -> Attempt:
        self._outer = get_ambient()
        set_ambient(self._ctx)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        restore_ambient(self._ctx, self._outer)
        return isinstance(error, Exception) and self._attempts.holds_back(error)


def _too_late(policy: str) -> DeadlineExceeded:
    return DeadlineExceeded("the deadline of the execution had passed before the first attempt", policy=policy)


def _asked_delay(outcome: Outcome[Any]) -> float:
    """Return the delay in seconds that an error or a result asks for, 0 for none or for rubbish."""
    carrier = outcome.value if isinstance(outcome, Success) else outcome.error
    asked = _read(carrier, "retry_after")
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
