"""The outcome of a call as a value: `Success(value)` or `Failure(error)`.

Inside the library, exceptions travel as exceptions. Outcomes are for code that observes a call: predicates and
handlers, listeners, `Policy.capture`, and tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, Never, TypeAlias, final

from typing_extensions import TypeVar

T_co = TypeVar("T_co", covariant=True)


@final
@dataclass(frozen=True, slots=True)
class Success(Generic[T_co]):
    """The call returned `value`."""

    value: T_co

    @property
    def error(self) -> None:
        """None, so that code that observes calls may read `outcome.error` of any outcome."""
        return None

    def unwrap(self) -> T_co:
        """Return the value."""
        return self.value


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """The call raised `error`."""

    error: Exception

    def unwrap(self) -> Never:
        """Raise the error."""
        try:
            raise self.error
        finally:
            del self  # the error's traceback now holds this frame, and this frame must not hold the error


#: How a call ended.
Outcome: TypeAlias = Success[T_co] | Failure

#: How an attempt failed, inside the library: its error, or a result that was not good enough. A `Failure` around the
#: error is made only for users.
Failed: TypeAlias = Exception | Success[Any]


def as_outcome(failed: Failed) -> Outcome[Any]:
    """Return the outcome of a failed attempt, for users."""
    return Failure(failed) if isinstance(failed, Exception) else failed


class StoppedIteration(Exception):
    """Carries a user's `StopIteration` through a coroutine, which may not raise one (PEP 479).

    It is raised where a driven coroutine calls blocking code, and is unwrapped where that coroutine ends.
    """

    def __init__(self, error: StopIteration) -> None:
        super().__init__(error)
        self.error = error


def unwrap_stop_iteration(error: Exception) -> Exception:
    """Return the user's exception, taken out of its carrier if there is one."""
    return error.error if type(error) is StoppedIteration else error


@final
class ErrorAnswer:
    """An error with which a working service has answered: a result for the policies, an exception for the caller."""

    __slots__ = ("_error", "_kind")

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error
        self._kind = type(error).__name__

    def __repr__(self) -> str:
        return f"<answered with {self._kind}>"

    def take(self) -> Exception | None:
        """Return the error and release it: its traceback refers to frames of policies, which refer to this result."""
        error, self._error = self._error, None
        return error


#: How many characters of an error message are stored: it may be a whole page of HTML.
LONGEST_MESSAGE: Final = 200


def message_of(error: BaseException) -> str:
    """Return the message of `error`, or a placeholder if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "<no message: its __str__ raised>"


def type_and_message(failed: Failed) -> tuple[str, str]:
    """Return the type and message of a failed attempt; for a result, "result" and the name of its type."""
    if isinstance(failed, Exception):
        return type(failed).__name__, message_of(failed)
    return "result", type(failed.value).__name__
