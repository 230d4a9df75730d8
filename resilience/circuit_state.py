"""The four states of a circuit, its counts and its statistics, as errors, events and users see them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, final


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
    :param of: the number of calls in the window; for `ConsecutiveFailures` and `FailureCount`, the number of failures
        that trips it.
    :param threshold: the ratio that trips it; None for those two.
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


@final
@dataclass(frozen=True, slots=True)
class CircuitStats:
    """A snapshot of a breaker.

    :param state: the state of the circuit.
    :param retry_after: seconds until an open circuit admits a probe; None in the other states.
    :param last_failure: type and message of the failure that opened it; None while it is closed. Not shown by `repr`,
        because the message may contain anything.
    :param probes: how many probes are running.
    :param opened: how many times it has opened so far.
    :param rejected: how many calls it has refused so far.
    :param failure_type: the name of the type of `last_failure`; None if there is none, as after slow calls.
    :param counted: what each condition has counted while the circuit is closed, as `TripCount`s: how near it is to
        opening. Empty in the other states.
    """

    state: CircuitState
    retry_after: float | None
    last_failure: str | None = field(repr=False)
    probes: int
    opened: int
    rejected: int
    failure_type: str | None = None
    counted: tuple[TripCount, ...] = ()
