"""What an execution leaves behind for code that asks afterwards: how many attempts, how long, what failed."""

from __future__ import annotations

from typing import NamedTuple, Protocol, final

from resilience.clock import clock
from resilience.errors import Misuse
from resilience.outcome import LONGEST_MESSAGE, Failed, describe

__all__ = ["FailedAttempt"]


class FailedAttempt(NamedTuple):
    """What one attempt failed with, as text: an exception here would keep its frames alive."""

    type: str
    message: str

    def __str__(self) -> str:
        return _on_one_line(*self)


def _on_one_line(kind: str, message: str) -> str:
    """Describe a failure where several are listed."""
    return f"{kind}({' '.join(message.split())})"


class History:
    """The first few and the last few failures of many: bounded, however long one keeps trying."""

    __slots__ = ("_kept", "count")

    FIRST = 3
    LAST = 3

    def __init__(self) -> None:
        self.count: int = 0
        self._kept: list[tuple[str, str]] = []  # made `FailedAttempt`s when they are asked for

    def add(self, failed: Failed) -> None:
        """Remember one more failure."""
        kind, message = describe(failed)
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[:LONGEST_MESSAGE]}..."
        self.count += 1
        self._kept.append((kind, message))
        if len(self._kept) > self.FIRST + self.LAST:
            del self._kept[self.FIRST]

    def forget_last(self) -> None:
        """Forget the latest failure."""
        self.count -= 1
        self._kept.pop()

    @property
    def failures(self) -> tuple[FailedAttempt, ...]:
        """The first few and the last few, in the order in which they happened."""
        return tuple([FailedAttempt(*it) for it in self._kept])

    def __str__(self) -> str:
        texts = [_on_one_line(*it) for it in self._kept]
        left_out = self.count - len(texts)
        if left_out:
            texts.insert(self.FIRST, f"... {left_out} more ...")
        return ", ".join(texts)


class Executed(Protocol):
    """What is executed: a policy, or a pipeline of them, outermost first."""

    @property
    def name(self) -> str:
        """What errors and events call it."""
        ...


@final
class Record:
    """What happened in one execution. Kept only where it can be read afterwards."""

    __slots__ = ("_history", "_noted", "attempts", "began", "ended", "executed", "idempotency_key")

    def __init__(self, executed: Executed) -> None:
        self.executed: Executed = executed
        self.attempts: int = 0
        self.began: float = clock.now()
        self.ended: float | None = None
        self._history: History | None = None
        #: What all attempts send, once one of them has asked for it.
        self.idempotency_key: str | None = None
        self._noted: int | None = None  # the `id` of the error that this attempt's failure was noted for

    @property
    def history(self) -> History:
        """What failed. Made when it is first asked for: most executions have nothing to remember."""
        if self._history is None:
            self._history = History()
        return self._history

    def begin_attempt(self) -> None:
        """Count an attempt that enters the function."""
        self.attempts += 1
        self._noted = None  # as in `expect_failure`

    def expect_failure(self) -> None:
        """Note the next failure as one of its own, even if its error is made where the last one lay."""
        self._noted = None

    def note(self, failed: Failed, *, instead_of: Exception | None = None) -> None:
        """Remember why an attempt failed, once: an error passes several policies that could note it.

        :param instead_of: the error that was noted before a policy made this one of it.
        """
        if not isinstance(failed, Exception):
            self.history.add(failed)
        elif self._noted != id(failed) and not isinstance(failed, Misuse):
            if instead_of is not None and self._noted == id(instead_of):
                self.history.forget_last()
            self.history.add(failed)
            self._noted = id(failed)

    def was_noted(self, error: Exception) -> None:
        """Know this error again, though another one was noted after it: of attempts that were made at once."""
        self._noted = id(error)

    @property
    def elapsed(self) -> float:
        """Seconds from the beginning to the end, or to now; never negative, should a clock be put back meanwhile."""
        elapsed = (clock.now() if self.ended is None else self.ended) - self.began
        return elapsed if elapsed > 0 else 0.0
