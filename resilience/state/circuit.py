"""The circuit: a state machine with four states, and the rules for its transitions.

    CLOSED     calls pass and are counted.             A tally that trips opens the circuit.
    OPEN       calls are refused.                      The first call after the open period makes it half-open.
    HALF_OPEN  a limited number of probes may run.     One failure opens it again, enough successes close it.
    ISOLATED   calls are refused.                      Only `isolate` and `close` change that.

Each period of a state is an object, and its identity is the *epoch*: an admitted call keeps the
period that admitted it, and a result that arrives in a later period changes nothing. So a stale
success can never close a circuit, and a stale failure can never open one.

Michael Nygard, "Release It!" (2007), named the pattern. The machine is pure: it takes the time as an
argument, takes no lock, and calls no user code. The owner holds a lock around every method (reading
`period` needs none), and reports the returned transition after it has released the lock. The lock
has to be reentrant: the garbage collector may finalize an abandoned coroutine in the middle of any
method, and the coroutine then releases its probe in the same thread.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, TypeAlias, final

from resilience.circuit_state import CircuitState, TripCount
from resilience.formats import format_number
from resilience.state.trips import Tally, Trip


@final
class Closed:
    """A period in which calls pass and are counted."""

    __slots__ = ("latest_failure", "quiet", "tally")
    state: ClassVar[CircuitState] = CircuitState.CLOSED
    why: ClassVar[str] = "the circuit has closed meanwhile"
    last_failure: ClassVar[str | None] = None  # that for which calls are refused

    def __init__(self, tally: Tally) -> None:
        self.tally: Tally = tally
        self.quiet: bool = tally.quiet  # whether a success would change nothing
        self.latest_failure: str | None = None


@final
class Open:
    """A period in which calls are refused, up to the instant `until`."""

    __slots__ = ("last_failure", "lasts", "until", "why")
    state: ClassVar[CircuitState] = CircuitState.OPEN
    quiet: ClassVar[bool] = False

    def __init__(self, lasts: float, until: float, last_failure: str) -> None:
        self.lasts: float = lasts
        self.until: float = until
        self.last_failure: str = last_failure
        self.why: str = f"the circuit is open, after {_without_message(last_failure)}"


@final
class HalfOpen:
    """A period in which a few probes test whether the service has recovered."""

    __slots__ = ("last_failure", "probe_timeout", "probes", "successes", "why")
    state: ClassVar[CircuitState] = CircuitState.HALF_OPEN
    quiet: ClassVar[bool] = False

    def __init__(self, probe_timeout: float, last_failure: str) -> None:
        self.probe_timeout: float = probe_timeout
        self.last_failure: str = last_failure
        self.why: str = (
            f"the circuit is half-open and all its probes are running, after {_without_message(last_failure)}"
        )
        self.probes: dict[Probe, float] = {}  # probe -> the instant at which it loses its slot
        self.successes: int = 0


@final
class Isolated:
    """A period in which the circuit is held open manually."""

    __slots__ = ()
    state: ClassVar[CircuitState] = CircuitState.ISOLATED
    quiet: ClassVar[bool] = False
    why: ClassVar[str] = "the circuit was opened manually"
    last_failure: ClassVar[str | None] = None


Period: TypeAlias = Closed | Open | HalfOpen | Isolated


@final
class Probe:
    """A call that was admitted by a half-open period."""

    __slots__ = ("period",)
    quiet: ClassVar[bool] = False

    def __init__(self, period: HalfOpen) -> None:
        self.period: HalfOpen = period


#: What an admitted call passes to `record` or `release` when it ends.
Admission: TypeAlias = Closed | Probe


class Transition(NamedTuple):
    """One change of state."""

    old: CircuitState
    new: CircuitState
    retry_after: float | None
    last_failure: str | None
    reason: str
    failure_type: str | None
    counted: TripCount | None


@final
class Circuit:
    """The state machine. Every method that can change the state returns the transition, or None if there was none."""

    __slots__ = (
        "_checks_first",
        "_probe_successes",
        "_probe_timeout",
        "_probes",
        "_trip",
        "opens_first_for",
        "opens_for",
        "period",
    )

    def __init__(
        self,
        trip: Trip,
        opens_for: float,
        probes: int,
        probe_successes: int,
        probe_timeout: float | None,
        checks_first: bool,
    ) -> None:
        self._trip = trip
        self._checks_first = checks_first  # whether a user's function is the first probe of each half-open period
        #: The length in seconds of the next open period, and of the first one after the circuit has closed. Both are
        #: plain numbers here; the owner takes new ones from its backoff between two openings.
        self.opens_for: float = opens_for
        self.opens_first_for: float = opens_for
        self._probes = probes
        self._probe_successes = probe_successes
        self._probe_timeout = probe_timeout
        self.period: Period = Closed(trip.tally())

    # --- calls ---

    def admit(self, now: float) -> tuple[Admission | None, Transition | None]:
        """Return the admission of a call, or None if the call is refused; and the transition."""
        period, transition = self.period, None
        if isinstance(period, Open) and now >= period.until:
            timeout = max(period.lasts, 30.0) if self._probe_timeout is None else self._probe_timeout
            was, period = period, HalfOpen(timeout, period.last_failure)
            transition = self._move(period, f"the {format_number(was.lasts)} s of the open period have passed")
        if isinstance(period, Closed):
            return period, transition
        if isinstance(period, HalfOpen):
            _remove_expired_probes(period, now)
            allowed = 1 if self._checks_first and not period.successes else self._probes
            if len(period.probes) < allowed:
                probe = Probe(period)
                period.probes[probe] = now + period.probe_timeout
                return probe, transition
        return None, transition

    def keep_slot(self, probe: Probe, until: float) -> None:
        """Change the instant at which a probe loses its slot."""
        if probe in probe.period.probes:
            probe.period.probes[probe] = until

    def record(self, admission: Admission, failure: str | None, duration: float, now: float) -> Transition | None:
        """Count the result of an admitted call.

        :param failure: the failure as text; None for a success.
        :param duration: the seconds that the call took.
        """
        if isinstance(admission, Closed):
            if admission is not self.period:
                return None
            admission.latest_failure = failure or admission.latest_failure
            tripped = admission.tally.add(failure is not None, duration, now)
            admission.quiet = admission.tally.quiet
            return self._trip_closed(admission, now) if tripped else None
        period = admission.period
        _remove_expired_probes(period, now)
        if period.probes.pop(admission, None) is None or period is not self.period:
            return None
        if failure is not None or duration >= self._trip.slower_than:
            ended = "was slow" if failure is None else f"failed with {_without_message(failure)}"
            return self._open(now, failure or "a slow probe", f"a probe {ended}")
        period.successes += 1
        needed = self._probe_successes
        return self._close(f"probes succeeded, {needed} of {needed}") if period.successes >= needed else None

    def release(self, admission: Admission) -> None:
        """Free the slot of a call that ended without a result: it was cancelled, interrupted or ignored."""
        if isinstance(admission, Probe):
            admission.period.probes.pop(admission, None)

    # --- manual control ---

    def isolate(self) -> Transition | None:
        """Refuse all calls until the circuit is closed."""
        return None if isinstance(self.period, Isolated) else self._move(Isolated(), "it was isolated manually")

    def close(self) -> Transition | None:
        """Let calls pass, and count from zero."""
        return self._close("it was closed manually")

    # --- private ---

    def _trip_closed(self, period: Closed, now: float) -> Transition | None:
        count, failure = period.tally.count(), period.latest_failure
        parts = [] if count is None else [str(count)]
        parts += [] if failure is None else [f"the last failure was {_without_message(failure)}"]
        return self._open(now, failure or "slow calls", "; ".join(parts), count)

    def _open(self, now: float, failure: str, reason: str, count: TripCount | None = None) -> Transition | None:
        lasts = self.opens_for
        return self._move(Open(lasts, now + lasts, failure), reason, lasts, count)

    def _close(self, reason: str) -> Transition | None:
        self.opens_for = self.opens_first_for
        return self._move(Closed(self._trip.tally()), reason)

    def _move(
        self, period: Period, reason: str, retry_after: float | None = None, count: TripCount | None = None
    ) -> Transition | None:
        old, self.period = self.period, period
        if old.state is period.state:
            return None  # a new epoch of the same state: `close` was called while the circuit was closed
        failure = period.last_failure
        return Transition(old.state, period.state, retry_after, failure, reason, failure_type_of(failure), count)


def failure_type_of(failure: str | None) -> str | None:
    """Return the name of the exception type of a failure text; None for a text without one, such as "slow calls"."""
    kind, separator, _ = (failure or "").partition(": ")
    return kind if separator else None


def _without_message(failure: str) -> str:
    """Return only the type of a failure: its message may contain what other callers must not see, such as a token."""
    kind = failure.partition(": ")[0]
    return "a result that was not good enough" if kind == "result" else kind


def _remove_expired_probes(period: HalfOpen, now: float) -> None:
    for probe, expires_at in list(period.probes.items()):
        if now >= expires_at:
            period.probes.pop(probe, None)
