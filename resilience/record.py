"""The record of an execution, which can be read afterwards: the number of attempts, the time taken, the failures."""

from __future__ import annotations

from typing import Final, NamedTuple, final

from resilience.clock import clock
from resilience.errors import Misuse
from resilience.outcome import LONGEST_MESSAGE, Failed, type_and_message

__all__ = ["FailedAttempt"]

_HALF: Final = 3  # how many of the first failures a history keeps, and how many of the last ones


class FailedAttempt(NamedTuple):
    """The failure of one attempt, as text: the exception itself would keep its frames alive."""

    type: str
    message: str

    def __str__(self) -> str:
        return _on_one_line(*self)


def _on_one_line(kind: str, message: str) -> str:
    """Describe a failure in a list of several."""
    return f"{kind}({' '.join(message.split())})"


class History(list[tuple[str, str]]):
    """Type and message of the first three and the last three failures, so that its size is bounded."""

    left_out: int = 0  # how many failures between them are not in it

    def add(self, failed: Failed) -> None:
        """Add a failure."""
        kind, message = type_and_message(failed)
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[:LONGEST_MESSAGE]}..."
        self.append((kind, message))
        if len(self) > 2 * _HALF:
            del self[_HALF]
            self.left_out += 1

    @property
    def failures(self) -> tuple[FailedAttempt, ...]:
        """The failures, in the order in which they happened."""
        return tuple([FailedAttempt(*it) for it in self])

    def __str__(self) -> str:
        texts = [_on_one_line(*it) for it in self]
        if self.left_out:
            texts.insert(_HALF, f"... {self.left_out} more ...")
        return ", ".join(texts)


@final
class Record:
    """The record of one execution. Kept only if anything can read it."""

    __slots__ = (
        *("_history", "_last", "attempts", "began", "decided_races", "ended", "idempotency_key", "policy"),
        "was_cut_off",
    )

    def __init__(self, policy: str) -> None:
        self.policy: str = policy  # the name of the policy or pipeline that is executed
        self.attempts: int = 0
        self.began: float = clock.now()
        self.ended: float | None = None
        self._history: History | None = None
        #: The key that all attempts send; None until one of them asks for it.
        self.idempotency_key: str | None = None
        #: Whether an attempt was cancelled or abandoned while it ran: it may have done its work, or do it later.
        self.was_cut_off: bool = False
        #: How many races of hedged attempts are decided, and now cut off the losers.
        self.decided_races: int = 0
        self._last: Exception | None = None  # the error last added for the current attempt, until the execution ends

    @property
    def history(self) -> History:
        """The failures. Created on first access, because most executions have none."""
        if self._history is None:
            self._history = History()
        return self._history

    def begin_attempt(self) -> None:
        """Count an attempt that enters the function."""
        self.attempts += 1
        self._last = None  # as in `expect_failure`

    def expect_failure(self) -> None:
        """Let the next failure be added as a new one, even if its error is the same as the last one."""
        self._last = None

    def add_failure(self, failed: Failed) -> None:
        """Add the failure of an attempt. The same error is added once, although it passes several policies."""
        if not isinstance(failed, Exception):
            self.history.add(failed)
        elif self._last is not failed and not isinstance(failed, Misuse):
            self.history.add(failed)
            self._last = failed

    def replace_failure(self, old: Exception | None, new: Exception) -> None:
        """Add an error that a policy has just made in place of another one. If that was added last, remove it."""
        if old is not None and self._last is old:
            self.history.pop()
        self.add_failure(new)

    def ignore_failure(self, error: Exception) -> None:
        """Do not add this error again, even if the error of a concurrent attempt was added after it."""
        self._last = error

    def end(self) -> None:
        """Record that the execution has ended. The record may live longer, and keeps no error and its frames alive."""
        self.ended = clock.now()
        self._last = None

    @property
    def elapsed(self) -> float:
        """Seconds from the beginning to the end, or to now; never negative, even if a test replaces the clock."""
        elapsed = (clock.now() if self.ended is None else self.ended) - self.began
        return elapsed if elapsed > 0 else 0.0
