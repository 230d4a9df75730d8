"""A quantile of recent durations: a histogram with logarithmic buckets, for two halves of a window.

Two durations in one bucket differ by at most 2 %, so the quantile is accurate to 2 % (Masson, Rim, Lee: "DDSketch",
VLDB 2019). It is the upper end of a bucket, so that no call counts as slow if all calls take the same time. The memory
is bounded: 1,100 buckets cover a microsecond to an hour, and one service uses a few dozen of them.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import ceil, log
from typing import Final, final

_GROWTH: Final = 1.02
_SHORTEST: Final = 1e-6

#: After how many new durations the quantile is computed again.
REFRESH: Final = 32


@final
class Histogram:
    """Recent durations, and a quantile of them. Threads that share one must hold a lock around each method.

    :param share: the quantile, more than 0, less than 1.
    :param window: for how many seconds a duration counts at most; it counts for at least half of that.
    """

    __slots__ = ("_began", "_cached", "_half", "_latest", "_older", "_share", "_until_refresh", "count")

    def __init__(self, share: float, window: float) -> None:
        self._share = share
        self._half = window / 2
        self._began = 0.0  # when the latest half began
        self._latest: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._cached = 0.0
        self._until_refresh = 0  # new durations until the quantile is computed again
        #: The number of durations in the window.
        self.count: int = 0

    def add(self, seconds: float, now: float) -> None:
        """Add a duration."""
        self.forget(now)
        bucket = ceil(log(max(seconds, _SHORTEST), _GROWTH))
        self._latest[bucket] = self._latest.get(bucket, 0) + 1
        self.count += 1
        self._until_refresh -= 1

    def forget(self, now: float) -> None:
        """Discard the durations that have left the window."""
        age = now - self._began
        if age >= self._half:
            is_recent = age < 2 * self._half
            self._older = self._latest if is_recent else {}
            self._latest = {}
            self._began = self._began + self._half if is_recent else now  # so that no duration outlives the window
            self._until_refresh = 0
            self.count = sum(self._older.values())

    def value(self) -> float:
        """Return the quantile. The histogram must not be empty."""
        if self._until_refresh <= 0:
            self._until_refresh = REFRESH
            self._cached = self._compute()
        return self._cached

    def _compute(self) -> float:
        counts = dict(self._older)
        for bucket, count in self._latest.items():
            counts[bucket] = counts.get(bucket, 0) + count
        buckets = sorted(counts)
        place = bisect_left(list(accumulate(counts[bucket] for bucket in buckets)), self._share * self.count)
        return float(_GROWTH ** buckets[place])
