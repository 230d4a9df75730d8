"""The limit for repeated lines: each is written a few times in an interval, further repeats are counted.

The next event after the interval reports the count. There is no thread that would report it earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

from resilience import forks
from resilience.events import CircuitChanged, Event, Parked
from resilience.formats import format_seconds
from resilience.integrations.telemetry.words import Fact, Line

Key: TypeAlias = tuple[object, ...]

#: How many different lines are tracked: names are few, unless they contain ids.
_MAX_KEYS = 1000


def key_of(event: Event) -> Key | None:
    """Return the key that repeats of a line share; None for a kind that is never left out."""
    if isinstance(event, (CircuitChanged, Parked)):
        return None
    return type(event), event.pipeline, event.policy, event.operation


@final
@dataclass(slots=True)
class _Interval:
    """The lines of one key since `began`: how many, and the latest one."""

    began: float
    latest: Line
    lines: int = 0


@final
class Repeats:
    """Decides which lines are written: of each key, `limit` lines in an interval of `seconds`."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._lock = forks.lock_of(self)
        self._intervals: dict[Key, _Interval] = {}  # in the order in which they began

    @property
    def has_open(self) -> bool:
        """Whether an interval is open: only then may a count have to be reported."""
        return bool(self._intervals)

    def due(self, line: Line | None, key: Key | None, now: float) -> list[Line]:
        """Return the lines to write now: counts of intervals that have ended, then this line unless it is left out."""
        if line is None and not self._intervals:
            return []
        with self._lock:
            lines = list(self._over(now))
            if line is not None and (key is None or self._admits(line, key, now)):
                lines.append(line)
        return lines

    def all_left_out(self) -> list[Line]:
        """Return lines with all counts that have not been reported, and end all intervals."""
        with self._lock:
            lines = [line for interval in tuple(self._intervals.values()) for line in self._count(interval, None)]
            self._intervals.clear()
        return lines

    def _over(self, now: float) -> Iterator[Line]:
        while (oldest := next(iter(self._intervals.items()), None)) is not None:
            key, first = oldest
            elapsed = now - first.began  # far below zero if it began in another virtual time
            if -self._seconds < elapsed < self._seconds and len(self._intervals) <= _MAX_KEYS:
                return
            if self._intervals.pop(key, None) is first:
                yield from self._count(first, now if elapsed > 0 else None)

    def _admits(self, line: Line, key: Key, now: float) -> bool:
        interval = self._intervals.setdefault(key, _Interval(now, line))
        interval.latest = line
        interval.lines += 1
        return interval.lines <= self._limit

    def _count(self, interval: _Interval, now: float | None) -> Iterator[Line]:
        """Yield the latest line that was left out, with the count; nothing if none was."""
        line, count = interval.latest, interval.lines - self._limit
        if count <= 0:
            return
        known: dict[str, Fact] = {**line.facts, "left_out": count}
        since = ""
        if now is not None:
            known["seconds"] = round(now - interval.began, 3)
            since = f" in {format_seconds(now - interval.began)}"
        more = "" if count == 1 else f" (and {count - 1} more{since})"
        yield line._replace(text=f"{line.text}{more}", facts=known)
