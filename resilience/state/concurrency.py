"""The best number of concurrent calls for a service: algorithms that learn it from the calls.

Each gets, about once a second, a `Sample` of the calls of that time, and answers with a limit. By Little's law, the
best one is the throughput times the time of a call that does not queue: with fewer, capacity is wasted; with more,
calls only wait in the service.

    Aimd      one more while calls are quick enough, a tenth less while they are not. The one to use: it needs a number
              from you, which cannot drift, and it shares a server fairly with other clients.
    Seeking   raises and lowers the limit in turn, and goes where more at once brings more throughput. It needs no
              number, but everything has to go through one object.

Pure: no clock, no lock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import Final, Protocol, TypeAlias, final, runtime_checkable

from resilience import checks
from resilience.checks import format_number

#: Which share of the calls may take longer than the latency of a sample.
_QUANTILE: Final = 0.9
#: How many samples of one period are kept: memory is bounded, whatever the window.
_KEPT: Final = 10_000


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """What the calls of a period were like.

    :param latency: the seconds that a tenth of the calls exceeded, of those that began under the present limit.
    :param inflight: the most that ran at once.
    :param full: whether a call was refused, or had to wait.
    :param dropped: whether the service has refused a call, or was too slow for one.
    :param throughput: how many calls that began under the present limit have ended in a second; 0 if not known.
    :param latency_of_all: as `latency`, but of all calls that have ended in the period, also those that began under an
        earlier limit. They say nothing about the present one; but without them, the slowest would never be seen.
    """

    latency: float
    inflight: int
    full: bool
    dropped: bool
    throughput: float = 0.0
    latency_of_all: float = 0.0


#: The new limit, not yet bounded; and why, if the algorithm says so.
Answer: TypeAlias = "float | tuple[float, str]"


@runtime_checkable
class Algorithm(Protocol):
    """Learns a limit. Called by one thread at a time, and under no lock."""

    def update(self, limit: float, sample: Sample, /) -> Answer:
        """Return the new limit, and what has moved it."""
        ...

    def reset(self) -> object:
        """Forget everything."""
        ...


@final
class Aimd:
    """One more while calls are quick enough, a tenth less while they are not.

    Additive increase, multiplicative decrease: as TCP (Chiu and Jain, 1989) and Netflix's `AIMDLimit`. What is new:
    after eight steps down that have not made calls a fifth quicker, it goes back to where they began, and stays until
    the latency changes. Then it is not the queue of the service that is slow.

    :param slower_than: seconds that nine tenths of the calls should take at most.
    """

    _BACKOFF: Final = 0.9
    _TRIALS: Final = 8
    _QUICKER: Final = 0.8
    _SMOOTHING: Final = 0.4
    _UNCHANGED: Final = (0.6, 1.6)

    def __init__(self, slower_than: float) -> None:
        self.slower_than: float = slower_than
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._steps = 0  # down, in a row
        self._from = (0.0, 0.0)  # the limit, and the smoothed latency, where they began
        self._latency = 0.0  # smoothed
        self._stays_at: float | None = None  # the latency under the limit where it stays; 0: not known yet

    def update(self, limit: float, sample: Sample) -> tuple[float, str]:
        """Return the new limit, and what has moved it."""
        self._latency += (sample.latency - self._latency) * (self._SMOOTHING if self._latency else 1.0)
        if self._stays_at is not None:
            if not self._stays_at:
                self._stays_at = self._latency = sample.latency
            low, high = (share * self._stays_at for share in self._UNCHANGED)
            if low < self._latency < high and not sample.dropped:
                return limit, "slow anyway"
            self._stays_at = None
        if not sample.dropped and max(sample.latency, sample.latency_of_all) <= self.slower_than:
            self._steps = 0
            return (limit + 1, "room") if sample.inflight * 2 >= limit else (limit, "idle")
        return self._step_down(limit, sample)

    def _step_down(self, limit: float, sample: Sample) -> tuple[float, str]:
        if self._steps == 0:
            self._from = (limit, self._latency)
        self._steps += 1
        if self._steps > self._TRIALS and not sample.dropped:
            began, before = self._from
            self._steps = 0
            if self._latency > self._QUICKER * before:
                self._stays_at = 0.0
                return began, "slow anyway"
        return limit * self._BACKOFF, "dropped" if sample.dropped else "slow"

    def __repr__(self) -> str:
        return format_number(self.slower_than)


@final
class Seeking:
    """Raise and lower the limit a little in turn, and go where more at once still brings more throughput.

    For `AdaptiveLimit(Seeking())`. It needs no number, but only works where everything goes through one object, as in
    the middleware of a server: each of several clients would only see its own share grow. Where the limit does not bind
    there is nothing to learn, and it stays.

    Of two periods, with a higher and a lower limit, it compares the throughputs. Their elasticity is 1 below the knee,
    where workers of the service are idle, and 0 or less above it, where calls only wait. It settles where that is
    `target`. There is no baseline of latency, which would have to be learned again whenever the service changes.

    :param dither: by which share the limit is raised and lowered, more than 0 and less than 1; 0.15 by default.
    :param gain: how fast it goes, more than 0 and at most 1; 0.25 by default.
    :param target: the elasticity where it settles, more than 0 and less than 1; 0.5 by default. Lower lets more run.
    """

    def __init__(self, dither: float = 0.15, gain: float = 0.25, target: float = 0.5) -> None:
        self._dither = _between("dither", dither)
        self._gain = checks.ratio("gain", gain)
        self._target = _between("target", target)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._centre: float | None = None
        self._is_high = True
        self._before: tuple[float, float] | None = None  # limit and throughput of the first of two periods
        self._elasticity: float | None = None  # smoothed

    def update(self, limit: float, sample: Sample) -> tuple[float, str]:
        """Return the new limit, and what has moved it."""
        centre = limit if self._centre is None else self._centre
        reason = "probing"
        if not sample.full:
            self._before, self._centre = None, centre
            return centre, "idle"
        if self._before is None:
            self._before = (limit, sample.throughput)
        else:
            compared = _elasticity(self._before, (limit, sample.throughput))
            self._before = None
            if compared is not None:
                old = self._elasticity
                self._elasticity = elasticity = compared if old is None else old + (compared - old) * 0.4
                centre *= exp(self._gain * max(-1.0, min(1.0, elasticity - self._target)))
                reason = "more brings more" if elasticity > self._target else "more brings nothing"
        self._centre = centre
        self._is_high = not self._is_high
        delta = max(1.0, centre * self._dither)
        return max(1.0, centre + delta if self._is_high else centre - delta), reason

    def __repr__(self) -> str:
        numbers = (self._dither, self._gain, self._target)
        return f"Seeking(dither={numbers[0]:g}, gain={numbers[1]:g}, target={numbers[2]:g})"


def _elasticity(one: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Return by which power of the limit the throughput grows, from -2 to 2; None where there is nothing to compare."""
    (limit1, throughput1), (limit2, throughput2) = one, other
    if limit1 == limit2 or not (throughput1 > 0 and throughput2 > 0):
        return None
    return max(-2.0, min(2.0, (log(throughput1) - log(throughput2)) / log(limit1 / limit2)))


def _between(name: str, value: object) -> float:
    converted = checks.number(name, value)
    if not 0 < converted < 1:
        raise ValueError(f"{name} must be more than 0 and less than 1, not {value!r}")
    return converted


@final
class Period:
    """What is known of the calls since the last look, under one limit. A call gets the period in which it began.

    Its identity is the epoch: a call that ends in another period than it began in counts in no comparison of limits.
    Appending takes no lock; its owner lets one thread at a time take a `sample`.
    """

    __slots__ = ("dropped", "earlier", "full", "inflight", "next_look", "samples", "since")

    def __init__(self, next_look: float = float("-inf")) -> None:
        self.next_look: float = next_look
        self.since: float = 0.0  # when the first call ended that began in this period
        self._begin()

    def _begin(self) -> None:
        self.samples: list[float] = []  # seconds of calls that began in this period
        self.earlier: list[float] = []  # and of those that did not
        self.full: bool = False
        self.dropped: bool = False
        self.inflight: int = 0

    def note(self, seconds: float, began_in: Period, inflight: int, waiters: bool, now: float) -> int:
        """Note a call that has ended; return how many have begun and ended in this period."""
        if waiters:
            self.full = True
        samples = self.samples if began_in is self else self.earlier
        if len(samples) < _KEPT:
            samples.append(seconds)
        if began_in is self and len(samples) == 1:
            self.since = now
        if inflight > self.inflight:
            self.inflight = inflight
        return len(self.samples)

    def sample(self, now: float, window: float, turned_away: bool) -> Sample:
        """Return what the calls were like, and begin to note anew."""
        full, dropped, inflight = self.full, self.dropped, self.inflight
        samples, earlier = self.samples, self.earlier
        self._begin()
        here, all_of_them = sorted(samples), sorted(samples + earlier)
        span = now - self.since
        sample = Sample(
            latency=_quantile(here),
            inflight=inflight,
            full=full or turned_away,
            dropped=dropped,
            throughput=(len(here) - 1) / span if span > 0 else 0.0,
            latency_of_all=_quantile(all_of_them),
        )
        self.next_look = now + max(window, 2 * here[0])
        return sample


def _quantile(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))]
