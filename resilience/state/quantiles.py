"""The quantile of the latest durations: a histogram with logarithmic buckets, in two halves of a window.

Two durations in one bucket differ by at most 2 %, so an answer is off by no more (Masson, Rim, Lee: "DDSketch", VLDB
2019). It is the upper end of a bucket: where all calls take the same time, none of them is slow. Memory is bounded by
the range: there are 1,100 buckets from a microsecond to an hour, of which a service uses a few dozen.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import ceil, log
from typing import Final, final

_GROWTH: Final = 1.02
_SHORTEST: Final = 1e-6

#: After how many further durations a known answer is looked up anew.
REFRESH: Final = 32


@final
class Histogram:
    """The latest durations, and the one that a share of them did not exceed. What shares one holds a lock around it.

    :param share: more than 0, less than 1.
    :param window: for how many seconds a duration counts at the most; it counts for half of that at the least.
    """

    __slots__ = ("_began", "_fresh", "_half", "_known", "_latest", "_older", "_share", "count")

    def __init__(self, share: float, window: float) -> None:
        self._share = share
        self._half = window / 2
        self._began = 0.0  # of the latest half
        self._latest: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._known = 0.0
        self._fresh = 0  # durations that may come before the answer is looked up anew
        #: How many durations count now.
        self.count: int = 0

    def add(self, seconds: float, now: float) -> None:
        """Note a duration."""
        self.forget(now)
        bucket = ceil(log(max(seconds, _SHORTEST), _GROWTH))
        self._latest[bucket] = self._latest.get(bucket, 0) + 1
        self.count += 1
        self._fresh -= 1

    def forget(self, now: float) -> None:
        """Forget the durations that have left the window."""
        age = now - self._began
        if age >= self._half:
            self._older = self._latest if age < 2 * self._half else {}
            self._latest = {}
            self._began = now
            self._fresh = 0
            self.count = sum(self._older.values())

    def value(self) -> float:
        """Return the quantile; there has to be a duration."""
        if self._fresh <= 0:
            self._fresh = REFRESH
            self._known = self._find()
        return self._known

    def _find(self) -> float:
        counts = dict(self._older)
        for bucket, count in self._latest.items():
            counts[bucket] = counts.get(bucket, 0) + count
        buckets = sorted(counts)
        place = bisect_left(list(accumulate(counts[bucket] for bucket in buckets)), self._share * self.count)
        return float(_GROWTH ** buckets[place])
