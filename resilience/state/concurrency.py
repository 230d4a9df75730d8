"""Algorithms that learn the best limit on concurrent calls for a service from the calls themselves.

An algorithm gets a `Sample` of the recent calls about once a second, and returns a limit. By Little's law, the best
limit is the throughput times the duration of a call that does not queue: a lower one wastes capacity, and a higher one
only lets calls wait in the service.

    Aimd      adds one while calls are quick enough, and takes off a tenth while they are not. The default: it needs a
              latency from the user, which cannot drift, and it shares a server fairly with other clients.
    Seeking   raises and lowers the limit in turn, and moves to where more concurrency brings more throughput. It needs
              no number, but all calls to the service must go through one object.

Pure: no clock, no lock, no I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import exp, log
from typing import Any, Final, Protocol, TypeAlias, final

from resilience import checks
from resilience.formats import format_number

#: The quantile of the durations that is the latency of a sample.
_QUANTILE: Final = 0.9
#: The weight of a new value in a smoothed one.
_SMOOTHING: Final = 0.4
#: The maximum number of durations kept for a period, which bounds the memory for any window.
MAX_SAMPLES: Final = 10_000


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """A summary of the calls of a period.

    :param latency: seconds; a tenth of the calls that began under the current limit took longer.
    :param inflight: the largest number of calls that ran at once.
    :param full: whether a call was refused, or had to wait.
    :param dropped: whether a call failed because the service refused it or was too slow.
    :param throughput: how many calls that began under the current limit ended per second; 0 if unknown.
    :param latency_of_all: like `latency`, but for all calls that ended in the period, including those that began under
        an earlier limit. These say nothing about the current limit; but without them, very slow calls would be missed.
    """

    latency: float
    inflight: int
    full: bool
    dropped: bool
    throughput: float = 0.0
    latency_of_all: float = 0.0


#: The new limit, before it is bounded, and optionally the reason for it.
Answer: TypeAlias = "float | tuple[float, str]"


class Algorithm(Protocol):
    """An algorithm that learns a limit. One thread at a time calls it, without a lock."""

    def update(self, limit: float, sample: Sample, /) -> Answer:
        """Return the new limit, and optionally the reason for it."""
        ...

    def reset(self) -> object:
        """Discard everything that was learned."""
        ...


@final
class Aimd:
    """Additive increase, multiplicative decrease: plus one while calls are quick enough, minus a tenth otherwise.

    TCP (Chiu and Jain, 1989) and Netflix's `AIMDLimit` do the same. One rule is added: if eight decreases in a row have
    not made the calls a fifth quicker, a queue in the service is not what makes them slow. The limit then returns to
    its value before the decreases, and keeps it until the latency changes, calls are quick enough, or the service
    refuses a call. If calls get much slower under that limit, a queue fills up after all, such as that of several
    clients of one service.

    :param slower_than: seconds; nine tenths of the calls should take no longer.
    """

    _BACKOFF: Final = 0.9
    _TRIALS: Final = 8
    _QUICKER: Final = 0.8
    _UNCHANGED: Final = (0.6, 1.4)

    def __init__(self, slower_than: float) -> None:
        self.slower_than: float = slower_than
        self.reset()

    def reset(self) -> None:
        """Discard everything that was learned."""
        #: The last decreases in a row: the limit and the smoothed latency before each of them.
        self._decreases: deque[tuple[float, float]] = deque(maxlen=self._TRIALS + 1)
        self._latency = 0.0  # smoothed
        self._stays_at: float | None = None  # while the limit is kept: the latency under it; 0 if not measured yet

    def update(self, limit: float, sample: Sample) -> tuple[float, str]:
        """Return the new limit, and the reason for it."""
        self._latency += (sample.latency - self._latency) * (_SMOOTHING if self._latency else 1.0)
        if self._stays_at is not None:
            if not self._stays_at:
                self._stays_at = self._latency = sample.latency
            low, high = (share * self._stays_at for share in self._UNCHANGED)
            if max(low, self.slower_than) < self._latency < high and not sample.dropped:
                return limit, "slow anyway"
            self._stays_at = None
        if not sample.dropped and max(sample.latency, sample.latency_of_all) <= self.slower_than:
            self._decreases.clear()
            # Half of the whole number that is in use: 8 of 16 for a limit of 16.2.
            return (limit + 1, "room") if sample.inflight * 2 >= int(limit) else (limit, "idle")
        return self._step_down(limit, sample)

    def _step_down(self, limit: float, sample: Sample) -> tuple[float, str]:
        decreases = self._decreases
        decreases.append((limit, self._latency))
        if len(decreases) > self._TRIALS and not sample.dropped:
            began, before = decreases[0]
            if self._latency > self._QUICKER * before:
                decreases.clear()
                self._stays_at = 0.0
                return began, "slow anyway"
        return limit * self._BACKOFF, "dropped" if sample.dropped else "slow"

    def __repr__(self) -> str:
        return format_number(self.slower_than)


@final
class Seeking:
    """Raise and lower the limit a little in turn, and move to where more concurrency still brings more throughput.

    For `AdaptiveLimit(Seeking())`. It needs no number, but only works if all calls go through one object, as in the
    middleware of a server: each of several clients would only see its own share grow. While calls do not use the whole
    limit, there is nothing to learn, and the limit stays.

    It compares the throughputs of two periods, one with a higher and one with a lower limit. Their elasticity is 1
    below the knee, where workers of the service are idle, and 0 or less above it, where calls only wait. The limit
    settles where the elasticity is `target`. There is no latency baseline to learn again when the service changes.

    :param dither: by which share the limit is raised and lowered, more than 0 and less than 1; 0.15 by default.
    :param gain: how fast the limit moves, more than 0 and at most 1; 0.25 by default.
    :param target: the elasticity at which it settles, more than 0 and less than 1; 0.5 by default. Lower lets more run.
    """

    def __init__(self, dither: float = 0.15, gain: float = 0.25, target: float = 0.5) -> None:
        self._dither = checks.fraction("dither", dither)
        self._gain = checks.ratio("gain", gain)
        self._target = checks.fraction("target", target)
        self.reset()

    def reset(self) -> None:
        """Discard everything that was learned."""
        self._centre: float | None = None
        self._answer: float | None = None  # to the last sample of calls that used the whole limit
        self._is_high = True
        self._before: tuple[float, float] | None = None  # limit and throughput of the first period of a pair
        self._elasticity: float | None = None  # smoothed

    def update(self, limit: float, sample: Sample) -> tuple[float, str]:
        """Return the new limit, and the reason for it."""
        centre = limit if self._centre is None else self._centre
        reason = "probing"
        if not sample.full:
            self._before, self._answer, self._centre = None, None, centre
            return centre, "idle"
        if self._before is None:
            self._before = (limit, sample.throughput)
        else:
            compared = _elasticity(self._before, (limit, sample.throughput))
            self._before = None
            if compared is not None:
                old = self._elasticity
                self._elasticity = elasticity = compared if old is None else old + (compared - old) * _SMOOTHING
                centre *= exp(self._gain * max(-1.0, min(1.0, elasticity - self._target)))
                reason = "more brings more" if elasticity > self._target else "more brings nothing"
        if self._answer is not None and limit != self._answer:  # a bound: beyond it, both limits would be the same
            centre = min(centre, limit) if limit < self._answer else max(centre, limit)
        self._centre = centre = max(1.0, centre)
        self._is_high = not self._is_high
        delta = max(1.0, centre * self._dither)
        self._answer = max(1.0, centre + delta if self._is_high else centre - delta)
        return self._answer, reason

    def __reduce__(self) -> Any:
        """Refuse to be copied: each copy would see only some of the calls."""
        raise TypeError(f"{self!r} cannot be copied or pickled, because it learns from all calls: build another one")

    def __repr__(self) -> str:
        return f"Seeking(dither={self._dither:g}, gain={self._gain:g}, target={self._target:g})"


def _elasticity(one: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Return the exponent with which throughput grows with the limit, from -2 to 2; None if they cannot be compared."""
    (limit1, throughput1), (limit2, throughput2) = one, other
    if limit1 == limit2 or not (throughput1 > 0 and throughput2 > 0):
        return None
    return max(-2.0, min(2.0, (log(throughput1) - log(throughput2)) / log(limit1 / limit2)))


@final
class Period:
    """The calls under one limit since its last evaluation. Each call keeps the period in which it began.

    The identity of a period is the epoch: a call that ends in another period than it began in is not used to compare
    limits. `note` takes no lock; the owner lets one thread at a time take a `sample`.
    """

    __slots__ = ("dropped", "earlier", "full", "inflight", "next_evaluation", "samples", "since", "until")

    def __init__(self, next_evaluation: float = float("-inf")) -> None:
        self.next_evaluation: float = next_evaluation
        self.since: float = 0.0  # when the first of `samples` ended
        self.until: float = 0.0  # when the last one ended: no more than `MAX_SAMPLES` are kept
        self._begin()

    def _begin(self) -> None:
        self.samples: list[float] = []  # durations of the calls that began in this period
        self.earlier: list[float] = []  # durations of the calls that began before it
        self.full: bool = False
        self.dropped: bool = False
        self.inflight: int = 0

    def note(self, seconds: float, began_in: Period, inflight: int, waiters: bool, now: float) -> int:
        """Record a call that has ended; return how many recorded calls have both begun and ended in this period."""
        if waiters:
            self.full = True
        samples = self.samples if began_in is self else self.earlier
        if len(samples) < MAX_SAMPLES:
            samples.append(seconds)
            if began_in is self:
                self.until = now
                if len(samples) == 1:
                    self.since = now
        if inflight > self.inflight:
            self.inflight = inflight
        return len(self.samples)

    def sample(self, now: float, window: float, rejected: bool) -> Sample:
        """Return a summary of the recorded calls, discard them, and set the instant of the next evaluation."""
        full, dropped, inflight = self.full, self.dropped, self.inflight
        samples, earlier, span = self.samples, self.earlier, self.until - self.since
        self._begin()
        here, all_of_them = sorted(samples), sorted(samples + earlier)
        sample = Sample(
            latency=_quantile(here),
            inflight=inflight,
            full=full or rejected,
            dropped=dropped,
            throughput=(len(here) - 1) / span if span > 0 else 0.0,
            latency_of_all=_quantile(all_of_them),
        )
        self.next_evaluation = now + max(window, 2 * here[0])
        return sample


def _quantile(ordered: list[float]) -> float:
    return ordered[int(_QUANTILE * len(ordered))]
