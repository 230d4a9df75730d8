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


Outcome: TypeAlias = Success[T_co] | Failure

#: What an attempt failed with, inside the library: its error, or a result that was not good enough. Only users see the
#: error in a `Failure`, so that one is made only for them.
Failed: TypeAlias = Exception | Success[Any]


def as_outcome(failed: Failed) -> Outcome[Any]:
    """Return what an attempt failed with as users see it."""
    return Failure(failed) if isinstance(failed, Exception) else failed


class StoppedIteration(Exception):
    """Carries a `StopIteration` of the user's through a coroutine, which may not raise one (PEP 479).

    It begins where blocking code is called from a coroutine that is driven, and ends where that one ends.
    """

    def __init__(self, error: StopIteration) -> None:
        super().__init__(error)
        self.error = error


def unwrap_stop_iteration(error: Exception) -> Exception:
    """Return the user's own exception, also where it had to travel in a carrier."""
    return error.error if type(error) is StoppedIteration else error


#: Characters of a message that are kept where many are kept: it may be a whole page of HTML.
LONGEST_MESSAGE: Final = 200


def describe_error(error: BaseException) -> str:
    """Return the message of `error`; an exception whose `__str__` raises has none."""
    try:
        return str(error)
    except Exception:
        return "<no message: its __str__ raised>"


def describe(failed: Failed) -> tuple[str, str]:
    """Return type and message of an attempt that was not good enough. Of a result, only its type is given."""
    if isinstance(failed, Exception):
        return type(failed).__name__, describe_error(failed)
    return "result", type(failed.value).__name__


def closable(failed: Failed) -> Any:
    """Return what is to be closed if this is discarded: the result, or the response that an error carries."""
    if not isinstance(failed, Exception):
        return failed.value
    try:
        return getattr(failed, "response", None)
    except Exception:  # a property that raises says nothing
        return None
