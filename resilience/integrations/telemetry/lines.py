"""What is worth a line of a log: its level, its words, and how often it is repeated.

A line that would come again and again is written a few times in each interval; the others are counted, and the
count is told once the interval is over, by the next event that comes. There is no thread that would do it earlier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, final

from resilience import checks, events
from resilience.checks import Duration
from resilience.events import (
    CallRejected,
    CircuitChanged,
    Event,
    ExecutionFinished,
    FallbackUsed,
    RetryGaveUp,
    RetryScheduled,
    TimedOut,
)
from resilience.integrations.telemetry.words import Fact, facts, kind_of, scope_of
from resilience.outcome import Failure
from resilience.state.circuit import CircuitState


class Line(NamedTuple):
    """A line for a log.

    :param level: as `logging` counts: 10 is debug, 40 is error.
    :param kind: the kind of the event in snake case.
    :param text: what happened, in one sentence.
    :param facts: the same as values.
    """

    level: int
    kind: str
    text: str
    facts: Mapping[str, Fact]


#: Kind of event -> level, or None for no line at all.
Levels: TypeAlias = Mapping[type[Event], int | None]

#: An opened circuit is somebody's outage. A wait, an answer instead, a circuit that closes is what policies are for.
#: Cancellation is no error, and how an execution ended is its caller's business: both are for debugging.
DEFAULT_LEVELS: dict[type[Event], int | None] = {
    RetryScheduled: logging.INFO,
    RetryGaveUp: logging.WARNING,
    TimedOut: logging.WARNING,
    CallRejected: logging.WARNING,
    CircuitChanged: logging.ERROR,  # to open; to the other states as below
    FallbackUsed: logging.INFO,
    ExecutionFinished: logging.DEBUG,
}
_AT_MOST = {
    CircuitState.ISOLATED: logging.WARNING,  # somebody has done it by hand, and knows
    CircuitState.HALF_OPEN: logging.INFO,
    CircuitState.CLOSED: logging.INFO,
}


@final
class Lines:
    """Makes lines of events and writes them, the repeated ones now and then.

    :param write: called with each line, in the thread in which the event happens.
    :param is_enabled: whether lines of a level are wanted; asked before anything is made.
    :param levels: levels of kinds that differ from `DEFAULT_LEVELS`; None for no line.
    :param repeats: how many lines of one kind, pipeline, policy and operation are written in an interval.
    :param interval: its length in seconds.
    :param messages: whether the messages of errors are told.
    """

    def __init__(
        self,
        write: Callable[[Line], object],
        is_enabled: Callable[[int], bool],
        *,
        levels: Levels | None = None,
        repeats: int,
        interval: Duration,
        messages: bool,
    ) -> None:
        self._write = write
        self._is_enabled = is_enabled
        self._levels = {**DEFAULT_LEVELS, **_checked(levels or {})}
        self._repeats = _Repeats(checks.whole("repeats", repeats), checks.seconds("interval", interval))
        self._messages = checks.flag("messages", messages)

    def begin(self) -> Callable[[], None]:
        """Write lines of all policies in the process, until the function that is returned is called."""
        unsubscribe = events.subscribe(self, *DEFAULT_LEVELS)

        def end() -> None:
            unsubscribe()
            for line in self._repeats.all_left_out():
                self._write(line)

        return end

    def __call__(self, event: Event) -> None:
        """Write the line of an event, and those that tell what was left out before."""
        level = self._level(event)
        wanted = level is not None and self._is_enabled(level)
        line = self._line(event, level) if wanted and level is not None else None
        for each in self._repeats.due(line, _key(event), event.time):
            self._write(each)

    def _level(self, event: Event) -> int | None:
        level = self._levels[type(event)]
        if level is not None and isinstance(event, CircuitChanged):
            return min(level, _AT_MOST.get(event.new, level))
        return level

    def _line(self, event: Event, level: int) -> Line:
        text = _WORDS[type(event)](event)
        told = facts(event, messages=self._messages)
        if "error" in told:
            text = f"{text}: {told['error']}"
        elif "last_failure" in told:
            text = f"{text}, after {told['last_failure']}"
        return Line(level, kind_of(event), " ".join(text.split()), told)  # one line, whatever a message holds


def _checked(levels: Levels) -> Levels:
    for kind, level in levels.items():
        if kind not in DEFAULT_LEVELS:
            names = ", ".join(it.__name__ for it in DEFAULT_LEVELS)
            raise TypeError(f"levels must be for {names}, not {kind!r}")
        if level is not None:
            checks.whole("levels", level)
    return levels


# --- repeats ---------------------------------------------------------------------------------

_Key: TypeAlias = tuple[object, ...]

#: How many different lines are kept track of: names are few, unless somebody writes ids into them.
_MOST = 1000


def _key(event: Event) -> _Key | None:
    """Return what lines have in common that are repeats of one another; None for a kind that is never left out."""
    if isinstance(event, CircuitChanged):
        return None
    return type(event), event.pipeline, event.policy, event.operation


@final
class _Interval:
    """The lines of one key since `began`: how many were written, how many left out, and the latest of those."""

    __slots__ = ("began", "latest", "left_out", "written")

    def __init__(self, began: float) -> None:
        self.began: float = began
        self.written: int = 0
        self.left_out: int = 0
        self.latest: Line | None = None


@final
class _Repeats:
    """Decides which lines are written."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._lock = threading.RLock()  # what a finalizer closes may tell an event in the middle of another
        self._intervals: dict[_Key, _Interval] = {}  # in the order in which they began

    def due(self, line: Line | None, key: _Key | None, now: float) -> list[Line]:
        """Return the lines to write now: counts of intervals that are over, then this line if it is not left out."""
        if line is None and not self._intervals:
            return []
        with self._lock:
            lines = list(self._over(now))
            if line is not None and (key is None or self._admits(line, key, now)):
                lines.append(line)
        return lines

    def all_left_out(self) -> list[Line]:
        """Return the counts that nobody has told yet, and forget them."""
        with self._lock:
            lines = [line for interval in tuple(self._intervals.values()) for line in _count(interval, None)]
            self._intervals.clear()
        return lines

    def _over(self, now: float) -> Iterator[Line]:
        while self._intervals:
            key, first = next(iter(self._intervals.items()))
            if now - first.began < self._seconds and len(self._intervals) <= _MOST:
                return
            if self._intervals.pop(key, None) is first:
                yield from _count(first, now)

    def _admits(self, line: Line, key: _Key, now: float) -> bool:
        interval = self._intervals.get(key)
        if interval is None:
            interval = self._intervals[key] = _Interval(now)
        if interval.written < self._most:
            interval.written += 1
            return True
        interval.left_out += 1
        interval.latest = line
        return False


def _count(interval: _Interval, now: float | None) -> Iterator[Line]:
    """Tell how many lines were left out, with the latest of them."""
    line, count = interval.latest, interval.left_out
    if line is None:
        return
    told: dict[str, Fact] = {**line.facts, "left_out": count}
    since = ""
    if now is not None:
        told["seconds"] = round(now - interval.began, 3)
        since = f" in {now - interval.began:.3g} s"
    more = "" if count == 1 else f" (and {count - 1} more{since})"
    yield line._replace(text=f"{line.text}{more}", facts=told)


# --- words -----------------------------------------------------------------------------------

_RAN_OUT = {
    "attempts": "no attempt is left",
    "deadline": "the deadline leaves no time for another",
    "max_elapsed": "max_elapsed leaves no time for another",
    "unrepeatable": "it must not be repeated",
}


def _who(event: Event) -> str:
    """Name the execution: its pipeline, or else its policy, and what it is for."""
    name = event.pipeline or event.policy
    return name if event.operation is None else f"{name} ({event.operation})"


def _what(event: RetryScheduled | RetryGaveUp | FallbackUsed | ExecutionFinished) -> str:
    """Name what failed by its class, without the module."""
    outcome: Any = event.outcome
    return type(outcome.error).__name__ if isinstance(outcome, Failure) else "a result that was not good enough"


def _scheduled(event: RetryScheduled) -> str:
    return f"{_who(event)}: attempt {event.attempt} failed with {_what(event)}, the next one is in {event.delay:.3g} s"


def _gave_up(event: RetryGaveUp) -> str:
    times = "1 attempt" if event.attempts == 1 else f"{event.attempts} attempts"
    return (
        f"{_who(event)}: {event.policy} gave up after {times} in {event.elapsed:.3g} s, as "
        f"{_RAN_OUT[event.reason]}; the last failure was {_what(event)}"
    )


def _timed_out(event: TimedOut) -> str:
    limits = {
        "attempt": f"an attempt took longer than the {event.timeout:.3g} s of {event.policy}",
        "total": f"the execution took longer than the {event.timeout:.3g} s of {event.policy}",
        "deadline": f"the deadline of the caller passed, {event.timeout:.3g} s after {event.policy} began",
    }
    unknown = f"a call took longer than the {event.timeout:.3g} s of {event.policy}"
    return f"{_who(event)}: {limits.get(scope_of(event), unknown)}"


def _rejected(event: CallRejected) -> str:
    waited = f" after {event.waited:.3g} s in the queue" if event.waited else ""
    later = "" if event.retry_after is None else f"; it may be worth a try in {event.retry_after:.3g} s"
    return f"{_who(event)}: {event.policy} refused a call with {event.reason}{waited}{later}"


def _changed(event: CircuitChanged) -> str:
    lasts = "" if event.retry_after is None else f" for {event.retry_after:.3g} s"
    return f"circuit {event.policy}: {event.old.value} -> {event.new.value}{lasts}"


def _fell_back(event: FallbackUsed) -> str:
    return f"{_who(event)}: {event.policy} answered instead of {_what(event)}"


def _finished(event: ExecutionFinished) -> str:
    times = "1 attempt" if event.attempts == 1 else f"{event.attempts} attempts"
    spent = f"after {times} in {event.elapsed:.3g} s"
    if event.outcome is None:
        by = {"caller": "by its caller", "closed": "as nobody waits for it", "interrupt": "by an interrupt"}
        return f"{_who(event)}: cancelled {by.get(event.cancelled_by or '', 'by a deadline')}, {spent}"
    return (
        f"{_who(event)}: failed {spent} with {_what(event)}"
        if isinstance(event.outcome, Failure)
        else (f"{_who(event)}: done {spent}")
    )


_WORDS: dict[type[Event], Callable[[Any], str]] = {
    RetryScheduled: _scheduled,
    RetryGaveUp: _gave_up,
    TimedOut: _timed_out,
    CallRejected: _rejected,
    CircuitChanged: _changed,
    FallbackUsed: _fell_back,
    ExecutionFinished: _finished,
}
