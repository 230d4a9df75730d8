"""The durations of recent calls, and the delay of a hedge that follows from them. Part of Hedge."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import inf
from typing import final

from resilience import checks, forks
from resilience.checks import Duration
from resilience.formats import format_call, format_number
from resilience.state.quantiles import Histogram


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Quantile:
    """An observed delay: this quantile of the latency of the calls.

    :param share: more than 0, less than 1; 0.95 by default: in the long run, one call in twenty is hedged.
    :param least: the shortest delay in seconds, 1 ms by default.
    :param most: the longest delay in seconds; no limit (infinity) by default.
    :param window: for how many seconds a call is remembered, 60 by default.
    :param warm_up: how many calls must be remembered before one is hedged, 20 by default.

    >>> from resilience import Hedge, Quantile
    >>> Hedge(Quantile(0.99, most=0.5)).delay()  # nothing is known yet
    inf
    """

    share: float
    least: float
    most: float
    window: float
    warm_up: int

    def __init__(
        self,
        share: float = 0.95,
        *,
        least: Duration = 0.001,
        most: Duration | None = None,
        window: Duration = 60.0,
        warm_up: int = 20,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "share", checks.fraction("share", share))
        set_field(self, "least", checks.seconds("least", least))
        set_field(self, "most", inf if most is None else checks.seconds("most", most, infinite=True))
        set_field(self, "window", checks.seconds("window", window))
        set_field(self, "warm_up", checks.whole("warm_up", warm_up))
        if self.most < self.least:
            raise ValueError(f"most must be at least as long as least, {format_number(self.least)} s, not {most!r}")

    def __repr__(self) -> str:
        least, most, window = (self.least, 0.001), (self.most, inf), (self.window, 60)
        return format_call("Quantile", self.share, least=least, most=most, window=window, warm_up=(self.warm_up, 20))


@final
class Latencies:
    """The durations of recent calls, recorded by any number of threads and tasks."""

    def __init__(self, quantile: Quantile) -> None:
        self.quantile: Quantile = quantile
        self._reset()
        forks.reset_after_fork(self, Latencies._reset)

    def _reset(self) -> None:
        """Discard all durations, as in the child of a fork."""
        self._lock = threading.RLock()
        self._histogram = Histogram(self.quantile.share, self.quantile.window)

    def add(self, seconds: float, now: float) -> None:
        """Record a duration."""
        with self._lock:
            self._histogram.add(seconds, now)

    def delay(self, now: float) -> float:
        """Return the delay of a hedge; infinity if too few durations are known."""
        quantile, histogram = self.quantile, self._histogram
        with self._lock:
            histogram.forget(now)
            if histogram.count < quantile.warm_up:
                return inf
            return min(max(histogram.value(), quantile.least), quantile.most)
