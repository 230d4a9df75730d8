"""The four states of a circuit, and its counts, as they appear in errors, events and statistics."""

from __future__ import annotations

import enum
from typing import NamedTuple


class CircuitState(enum.StrEnum):
    """The state of a circuit, also as text: `breaker.state == "open"`."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    ISOLATED = "isolated"


class TripCount(NamedTuple):
    """The counts of a trip condition: `bad` results out of `of`.

    :param what: ``"failures"`` or ``"slow calls"``.
    :param bad: how many there were; in a row, for `ConsecutiveFailures`.
    :param of: the number of calls in the window; for `ConsecutiveFailures`, the number of failures that trips it.
    :param threshold: the ratio that trips it; None for `ConsecutiveFailures`.
    """

    what: str
    bad: int
    of: int
    threshold: float | None = None

    def __str__(self) -> str:
        text = f"{self.what} {self.bad} of {self.of}"
        return text if self.threshold is None else f"{text}, a ratio of {self.ratio:.3g} of at least {self.threshold:g}"

    @property
    def ratio(self) -> float:
        """The share of `bad` in `of`."""
        return self.bad / self.of if self.of else 0.0
