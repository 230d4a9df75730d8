"""The errors that the library raises. Your own exceptions reach the caller unwrapped.

    ResilienceError
    ├── Rejected                          the call was not made; .policy, .retry_after
    │   ├── CircuitOpen                   .state, .last_failure
    │   │   └── CircuitIsolated           opened manually; retry_after is None
    │   ├── BulkheadFull                  .limit, .queue
    │   ├── RateLimited                   its turn would come too late
    │   ├── LimitExceeded                 .limit
    │   ├── Throttled                     .rejection_rate
    │   └── WorkersExhausted              too many abandoned calls are still running
    ├── TimeoutExceeded (TimeoutError)    .timeout, .policy
    │   └── DeadlineExceeded              the execution's own budget is used up
    └── RetriesExhausted                  only with Retry(wrap=True): .attempts, .last

Each raise creates a new exception, which carries its numbers as attributes and can be pickled and copied (pickled, in
the case of `RetriesExhausted`, if its `last` can be). This also holds for your own subclasses, regardless of their
parameters. Its text begins with the name of the policy that raised it: a log often has nothing else of an error.
"""

from __future__ import annotations

from typing import Any, cast

from typing_extensions import override

from resilience.circuit_state import CircuitState
from resilience.outcome import Failure, Outcome, Success

__all__ = [
    "BulkheadFull",
    "CircuitIsolated",
    "CircuitOpen",
    "DeadlineExceeded",
    "LimitExceeded",
    "RateLimited",
    "Rejected",
    "ResilienceError",
    "RetriesExhausted",
    "Throttled",
    "TimeoutExceeded",
    "WorkersExhausted",
]


class ResilienceError(Exception):
    """The base class of all errors that the library raises about a call.

    :param policy: the name of the policy that raised it, if one did.
    """

    def __init__(self, message: str = "", *, policy: str | None = None) -> None:
        super().__init__(message)
        self.policy: str | None = policy

    @override
    def __str__(self) -> str:
        message, policy = super().__str__(), getattr(self, "policy", None)
        return f"{policy}: {message}" if policy and message else message

    @override
    def __reduce__(self) -> Any:
        """Pickle and copy all attributes, without `__init__`: a subclass may take other arguments."""
        state: Any = self.__getstate__()
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        return _without_init, (type(self),), {"args": self.args, **slots, **(attributes or {})}


def _without_init(kind: type[ResilienceError]) -> ResilienceError:
    return kind.__new__(kind)


class Rejected(ResilienceError):
    """The call was not made: a policy refused it before the function was entered.

    :param retry_after: seconds after which another attempt may be admitted; None if that is unknown.
    """

    # The attributes are slots, because refusals must be fast: see `blank`.

    __slots__ = ("policy", "retry_after")

    def __init__(self, message: str = "", *, policy: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, policy=policy)
        self.retry_after: float | None = retry_after


#: Makes a refusal from its class and message, without `__init__`; the caller sets every attribute. With this, an open
#: circuit refuses a call in two thirds of the time.
blank: Any = Exception.__new__


class CircuitOpen(Rejected):
    """The circuit breaker refuses calls to let the service recover.

    :param state: the state that refused: `OPEN`, `HALF_OPEN` (all probes are running) or `ISOLATED`.
    :param last_failure: type and message of the failure that opened the circuit, as text. Never the
        exception itself: it would keep every frame of that call alive for as long as the circuit is open.
    """

    __slots__ = ("last_failure", "state")

    def __init__(
        self,
        message: str = "",
        *,
        policy: str | None = None,
        retry_after: float | None = None,
        state: CircuitState | None = None,
        last_failure: str | None = None,
    ) -> None:
        super().__init__(message, policy=policy, retry_after=retry_after)
        self.state: CircuitState | None = state
        self.last_failure: str | None = last_failure


class CircuitIsolated(CircuitOpen):
    """The circuit was opened manually (`CircuitBreaker.isolate`) and stays open until it is closed manually."""


class BulkheadFull(Rejected):
    """All permits are taken, and the queue is full or the wait in it was too long.

    :param limit: how many calls may run at once.
    :param queue: how many may wait.
    """

    __slots__ = ("limit", "queue")

    def __init__(
        self,
        message: str = "",
        *,
        policy: str | None = None,
        retry_after: float | None = None,
        limit: int | None = None,
        queue: int | None = None,
    ) -> None:
        super().__init__(message, policy=policy, retry_after=retry_after)
        self.limit: int | None = limit
        self.queue: int | None = queue


class RateLimited(Rejected):
    """The turn of the call would come after its `max_wait`, or after its deadline.

    `retry_after` is the number of seconds until that turn; None if the call costs more than is ever allowed at once.
    """


class LimitExceeded(Rejected):
    """As many calls run as the current limit allows, and the queue is full or the wait in it was too long.

    :param limit: how many calls could run at once when it was refused. It adapts.
    """

    __slots__ = ("limit",)

    def __init__(
        self,
        message: str = "",
        *,
        policy: str | None = None,
        retry_after: float | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message, policy=policy, retry_after=retry_after)
        self.limit: int | None = limit


class Throttled(Rejected):
    """An `AdaptiveThrottle` rejected this call locally, because the service refuses too many.

    :param rejection_rate: the share of the calls that it rejected at that time.
    """

    __slots__ = ("rejection_rate",)

    def __init__(
        self,
        message: str = "",
        *,
        policy: str | None = None,
        retry_after: float | None = None,
        rejection_rate: float | None = None,
    ) -> None:
        super().__init__(message, policy=policy, retry_after=retry_after)
        self.rejection_rate: float | None = rejection_rate


class WorkersExhausted(Rejected):
    """Too many abandoned calls are still running, or the system cannot start a thread.

    The function was not entered.
    """


class TimeoutExceeded(ResilienceError, TimeoutError):
    """The call did not end within the limit of a `Timeout`.

    :param timeout: the limit that was exceeded, in seconds.
    """

    def __init__(self, message: str = "", *, policy: str | None = None, timeout: float | None = None) -> None:
        super().__init__(message, policy=policy)
        self.timeout: float | None = timeout


class DeadlineExceeded(TimeoutExceeded):
    """The budget of the whole execution is used up, regardless of the limits of single policies."""


class RetriesExhausted(ResilienceError):
    """A `Retry(wrap=True)` gave up.

    :param attempts: how many attempts were made.
    :param last: the outcome of the last one, `Failure(error)` or the `Success(value)` that was not good enough.
    """

    def __init__(
        self,
        message: str = "",
        *,
        policy: str | None = None,
        attempts: int = 0,
        last: Outcome[Any] | None = None,
    ) -> None:
        super().__init__(message, policy=policy)
        self.attempts: int = attempts
        self.last: Outcome[Any] = cast("Outcome[Any]", last)  # None only in an error that a user's test makes


class Misuse(Exception):
    """A usage error of the library. It is not an outcome: no policy retries, counts or answers it."""


class ArgumentMisuse(Misuse, TypeError):
    """A policy was given a function, arguments or a context that it cannot execute."""


class AwaitableMisuse(Misuse, TypeError):
    """A blocking execution was given an awaitable, or an asynchronous one a result that cannot be awaited."""


class KeyMisuse(Misuse, TypeError):
    """A call has no key, or one that cannot be hashed."""


class BlockMisuse(Misuse, RuntimeError):
    """A block was entered a second time, or in a place where it could not be left."""


class RaceMisuse(Misuse, TypeError):
    """A policy runs its call several times at once, without `races = True` in its class or around a stream."""


class SuspensionMisuse(Misuse, RuntimeError):
    """In blocking code, a policy awaited something other than its call and the runtime; or a call waits in no task."""


def is_refusal(error: Exception) -> bool:
    """Whether an error is a `Rejected`, or a group of these, as raised by child tasks."""
    if isinstance(error, ExceptionGroup):
        return all(is_refusal(leaf) for leaf in error.exceptions)
    return isinstance(error, Rejected)


def ends_with_the_deadline(error: BaseException) -> bool:
    """Whether an error is a `DeadlineExceeded`, or a group of these, as raised by child tasks."""
    if isinstance(error, BaseExceptionGroup):
        return all(ends_with_the_deadline(leaf) for leaf in error.exceptions)
    return isinstance(error, DeadlineExceeded)


def closable(ended: BaseException | Outcome[Any]) -> Any:
    """Return what has to be closed if an outcome is discarded: the result, or the response that its error carries."""
    if type(ended) is Success:
        return ended.value
    error: Any = ended.error if type(ended) is Failure else ended
    if issubclass(type(error), RetriesExhausted):
        return closable(error.last)
    try:
        return getattr(error, "response", None)
    except Exception:  # a property that raises counts as no response
        return None
