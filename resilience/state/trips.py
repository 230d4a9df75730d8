"""When a circuit opens: conditions as data, and the tallies that evaluate them.

A condition (`ConsecutiveFailures(5)`) is immutable and may be shared; `tally()` returns the counts
of one closed period of one circuit. `a | b` trips on either condition. Each result is counted first,
and then compared with the threshold by `>=`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from resilience import checks
from resilience.circuit_state import TripCount
from resilience.formats import format_call
from resilience.state.windows import CountWindow, TimeWindow, Window

if TYPE_CHECKING:
    from resilience.checks import Duration

#: The default length of a window in seconds.
DEFAULT_WINDOW: Final = 30.0


class Tally(ABC):
    """The counts of one closed period of a circuit."""

    @abstractmethod
    def add(self, failed: bool, duration: float, now: float) -> bool:
        """Count one more result; return whether it trips the circuit."""

    def count(self) -> TripCount | None:
        """Return the counts that have tripped it, if the tally reports them."""
        return None

    def counts(self, now: float) -> tuple[TripCount, ...]:
        """Return all counts, without results that are too old by now."""
        count = self.count()
        return () if count is None else (count,)

    #: Whether a success would change nothing, so that it need not be recorded.
    quiet: bool = False


class Trip(ABC):
    """A condition under which a circuit opens. Combine two with `|`."""

    #: Seconds after which a call counts as slow; infinity if slowness does not count.
    slower_than: float = inf

    @abstractmethod
    def tally(self) -> Tally:
        """Return the counts of a new period."""

    def __or__(self, other: Trip) -> Trip:
        """Trip on either condition."""
        return AnyOf(self, other) if isinstance(other, Trip) else NotImplemented


@final
class ConsecutiveFailures(Trip):
    """Trip when `n` calls in a row have failed. An `int` will do in its place.

    :param n: at least 1.
    """

    def __init__(self, n: int) -> None:
        self.n: int = checks.whole("n", n)

    def __repr__(self) -> str:
        return f"ConsecutiveFailures({self.n})"

    @override
    def tally(self) -> Tally:
        return _Streak(self.n)


class _Windowed(Trip):
    """The common base of the conditions over the results in a window of time or of calls."""

    def __init__(self, window: Duration | None, last: int | None) -> None:
        self.last: int | None = None if last is None else checks.whole("last", last)
        self.window: float | None = None
        if self.last is None:
            self.window = checks.seconds("window", DEFAULT_WINDOW if window is None else window)
        elif window is not None:
            raise ValueError(f"give a window of time or of calls, not both: window={window!r}, last={last!r}")

    def _empty_window(self) -> Window:
        return CountWindow(self.last or 1) if self.window is None else TimeWindow(self.window)


@final
class FailureCount(_Windowed):
    """Trip when at least `n` of the calls in a window have failed, however many have succeeded.

    :param n: at least 1, and at most `last`.
    :param window: the window in seconds, 30 by default. Results leave it in steps of a 32nd of it.
    :param last: a window of that many calls instead.
    """

    def __init__(self, n: int, *, window: Duration | None = None, last: int | None = None) -> None:
        self.n: int = checks.whole("n", n)
        super().__init__(window, last)
        if self.last is not None and self.n > self.last:
            raise ValueError(f"n must be at most last={last!r}, as a window holds no more failures, not {n!r}")

    def __repr__(self) -> str:
        return format_call("FailureCount", self.n, last=(self.last, None), window=(self.window, None))

    @override
    def tally(self) -> Tally:
        return _Number(self._empty_window(), self.n)


class _Share(_Windowed):
    """The common base of `FailureRatio` and `SlowRatio`: a share of bad results in a window."""

    def __init__(
        self, ratio: float, *, min_calls: int = 10, window: Duration | None = None, last: int | None = None
    ) -> None:
        super().__init__(window, last)
        self.ratio: float = checks.ratio("ratio", ratio)
        self.min_calls: int = checks.whole("min_calls", min_calls)
        if self.last is not None:
            self.min_calls = min(self.min_calls, self.last)  # a window never holds more calls

    def __repr__(self) -> str:
        slower_than, min_calls = (self.slower_than, inf), (self.min_calls, None)
        last, window = (self.last, None), (self.window, None)
        name = type(self).__name__
        return format_call(name, self.ratio, slower_than=slower_than, min_calls=min_calls, last=last, window=window)

    @override
    def tally(self) -> Tally:
        return _Ratio(self._empty_window(), self.ratio, self.min_calls, self.slower_than)


@final
class FailureRatio(_Share):
    """Trip when at least `ratio` of the calls in a window have failed.

    :param ratio: more than 0, at most 1.
    :param min_calls: how many calls must be in the window before it can trip; 10 by default.
    :param window: the window in seconds, 30 by default. Results leave it in steps of a 32nd of it.
    :param last: a window of that many calls instead; `min_calls` is then at most `last`.
    """


@final
class SlowRatio(_Share):
    """Trip when at least `ratio` of the calls in a window were slow, whether they succeeded or failed.

    :param ratio: more than 0, at most 1.
    :param slower_than: a call that took at least this many seconds is slow.
    :param min_calls: how many calls must be in the window before it can trip; 10 by default.
    :param window: the window in seconds, 30 by default. Results leave it in steps of a 32nd of it.
    :param last: a window of that many calls instead; `min_calls` is then at most `last`.
    """

    def __init__(
        self,
        ratio: float,
        *,
        slower_than: Duration,
        min_calls: int = 10,
        window: Duration | None = None,
        last: int | None = None,
    ) -> None:
        super().__init__(ratio, min_calls=min_calls, window=window, last=last)
        self.slower_than: float = checks.seconds("slower_than", slower_than)


@final
class AnyOf(Trip):
    """Trip when either of two conditions does. Created by `a | b`."""

    def __init__(self, left: Trip, right: Trip) -> None:
        self._left = left
        self._right = right
        self.slower_than: float = min(left.slower_than, right.slower_than)

    def __repr__(self) -> str:
        return f"{self._left!r} | {self._right!r}"

    @override
    def tally(self) -> Tally:
        return _Either(self._left.tally(), self._right.tally())


def as_trip(value: object) -> Trip:
    """Return `value` as a condition; an `int` is a number of consecutive failures."""
    if isinstance(value, int) and not isinstance(value, bool):
        return ConsecutiveFailures(checks.whole("trip", value))
    if isinstance(value, Trip):
        return value
    hint = f"; did you mean FailureRatio({value!r})?" if isinstance(value, float) and 0 < value <= 1 else ""
    raise TypeError(f"trip must be a condition such as ConsecutiveFailures(5), or an int, not {value!r}{hint}")


@final
class _Streak(Tally):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self.quiet: bool = True

    @override
    def add(self, failed: bool, duration: float, now: float) -> bool:
        self._count = self._count + 1 if failed else 0
        self.quiet = not failed
        return self._count >= self._limit

    @override
    def count(self) -> TripCount:
        return TripCount("failures", self._count, self._limit)


@final
class _Number(Tally):
    def __init__(self, window: Window, limit: int) -> None:
        self._window = window
        self._limit = limit
        self.quiet: bool = True

    @override
    def add(self, failed: bool, duration: float, now: float) -> bool:
        self._window.add(failed, now)
        self.quiet = self._window.bad == 0
        return self._window.bad >= self._limit

    @override
    def count(self) -> TripCount:
        return TripCount("failures", self._window.bad, self._limit)

    @override
    def counts(self, now: float) -> tuple[TripCount, ...]:
        return (TripCount("failures", self._window.at(now)[0], self._limit),)


@final
class _Ratio(Tally):
    def __init__(self, window: Window, ratio: float, min_calls: int, slower_than: float) -> None:
        self._window = window
        self._ratio = ratio
        self._min_calls = min_calls
        self._slower_than = slower_than

    @override
    def add(self, failed: bool, duration: float, now: float) -> bool:
        window = self._window
        window.add(failed if self._slower_than == inf else duration >= self._slower_than, now)
        # Divided, not multiplied: in floats, 7 / 25 == 0.28, but 0.28 * 25 > 7.
        return window.total >= self._min_calls and window.bad / window.total >= self._ratio

    @override
    def count(self) -> TripCount:
        return self._counted(self._window.bad, self._window.total)

    @override
    def counts(self, now: float) -> tuple[TripCount, ...]:
        return (self._counted(*self._window.at(now)),)

    def _counted(self, bad: int, total: int) -> TripCount:
        return TripCount("failures" if self._slower_than == inf else "slow calls", bad, total, self._ratio)


@final
class _Either(Tally):
    def __init__(self, left: Tally, right: Tally) -> None:
        self._left = left
        self._right = right
        self._counting = left  # the tally that `count` reports, once one has tripped
        self.quiet: bool = left.quiet and right.quiet

    @override
    def add(self, failed: bool, duration: float, now: float) -> bool:
        left = self._left.add(failed, duration, now)
        right = self._right.add(failed, duration, now)  # not in an `or`: both must count
        self.quiet = self._left.quiet and self._right.quiet
        self._counting = self._left if left else self._right
        return left or right

    @override
    def count(self) -> TripCount | None:
        return self._counting.count()

    @override
    def counts(self, now: float) -> tuple[TripCount, ...]:
        return self._left.counts(now) + self._right.counts(now)
