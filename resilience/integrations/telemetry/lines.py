"""Events as lines of a log: which kinds have a line, at which level, and how repeated lines are limited."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias, final

from resilience import checks, events, forks
from resilience.checks import Duration
from resilience.circuit_state import CircuitState
from resilience.events import CallRejected, CircuitChanged, Event
from resilience.integrations.telemetry.repeats import Repeats, key_of
from resilience.integrations.telemetry.sentences import sentence
from resilience.integrations.telemetry.words import Line, facts, kind_of

#: Kind of event -> level, or None for no line at all.
Levels: TypeAlias = Mapping[type[Event], int | None]

#: An opened circuit is an outage. Retries, fallbacks and circuits that close are the normal work of policies. How an
#: execution ended concerns its caller, and a cancellation is no error: both are for debugging.
DEFAULT_LEVELS: dict[type[Event], int | None] = {
    events.RetryScheduled: logging.INFO,
    events.RetryGaveUp: logging.WARNING,
    events.HedgeStarted: logging.DEBUG,  # routine
    events.HedgeFinished: logging.DEBUG,
    events.BudgetSpent: logging.INFO,  # if it ends a Retry, RetryGaveUp follows
    events.TimedOut: logging.WARNING,
    events.CallRejected: logging.WARNING,  # at most INFO if the policy only observes: see `_level`
    events.CircuitChanged: logging.ERROR,  # if it opened; for other states see `_MAX_LEVELS`
    events.FallbackUsed: logging.INFO,
    events.LimitChanged: logging.DEBUG,  # about once a second
    events.ChaosInjected: logging.WARNING,  # intended, but it explains other lines
    events.CacheUsed: logging.DEBUG,
    events.StreamOpened: logging.DEBUG,
    events.Parked: logging.ERROR,  # a part of the process has stopped working
    events.ExecutionFinished: logging.DEBUG,
}
#: Kinds that successful calls emit. Listening has a cost, so whether they have a line is decided once, in `begin`.
_FREQUENT = (events.CacheUsed, events.StreamOpened, events.ExecutionFinished)
_MAX_LEVELS = {
    CircuitState.ISOLATED: logging.WARNING,  # done manually
    CircuitState.HALF_OPEN: logging.INFO,
    CircuitState.CLOSED: logging.INFO,
}


@final
class Lines:
    """Writes events as lines, and limits how often a line is repeated.

    :param write: called with each line, in the thread of the event.
    :param is_enabled: whether lines of a level are written. It is called before each line is built, and by `begin`,
        which listens to the kinds that successful calls emit only if they are written.
    :param levels: the levels of kinds, instead of those in `DEFAULT_LEVELS`; None for no line.
    :param repeats: how many lines of one kind, pipeline, policy and operation are written in an interval.
    :param interval: the length of the interval in seconds.
    :param messages: whether the messages of errors are written.
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
        self._repeats = Repeats(checks.whole("repeats", repeats), checks.seconds("interval", interval))
        self._messages = checks.flag("messages", messages)
        self._lock = forks.lock_of(self)
        self._follows_endings = False  # whether each execution has a line
        self._has_ended = False
        self._unsubscribe: Callable[[], None] | None = None

    def begin(self) -> Callable[[], None]:
        """Write the events of all policies in the process, until the returned function is called."""
        levels = {self._levels[it] for it in _FREQUENT}
        written = {level for level in levels if level is not None and self._is_enabled(level)}
        kinds = [it for it in DEFAULT_LEVELS if it not in _FREQUENT or self._levels[it] in written]
        self._follows_endings = events.ExecutionFinished in kinds
        unsubscribe = events.subscribe(self, *kinds)

        def end() -> None:
            unsubscribe()
            self._has_ended = True
            self._update_subscription()
            for line in self._repeats.all_left_out():
                self._write(line)

        return end

    def __call__(self, event: Event) -> None:
        """Write the line of an event, after the counts of left-out lines that are due."""
        level = self._level(event)
        line = None
        if level is not None and self._is_enabled(level):
            text, values = sentence(event, messages=self._messages), facts(event, messages=self._messages)
            line = Line(level, kind_of(event), text, values)
        for each in self._repeats.due(line, key_of(event), event.time):
            self._write(each)
        if not self._follows_endings and self._repeats.has_open != (self._unsubscribe is not None):
            self._update_subscription()

    def _update_subscription(self) -> None:
        """Listen to the ends of executions, which costs every call, only while a count may have to be reported."""
        with self._lock:
            wanted = self._repeats.has_open and not self._has_ended
            now = events.subscribe(self, events.ExecutionFinished) if wanted else None
            before, self._unsubscribe = self._unsubscribe, now  # an event may have re-entered during `subscribe`
            if before is not None:
                before()

    def _level(self, event: Event) -> int | None:
        level = self._levels[type(event)]
        if level is not None and isinstance(event, CircuitChanged):
            return min(level, _MAX_LEVELS.get(event.new, level))
        if level is not None and isinstance(event, CallRejected) and event.shadow:
            return min(level, logging.INFO)  # the call was made nevertheless
        return level


def _checked(levels: Levels) -> Levels:
    checks.instance("levels", levels, Mapping, "a mapping of kinds of events to levels")
    for kind, level in levels.items():
        if kind not in DEFAULT_LEVELS:
            names = ", ".join(it.__name__ for it in DEFAULT_LEVELS)
            raise TypeError(f"levels must be for {names}, not {kind!r}")
        if level is not None:
            checks.whole("levels, such as logging.INFO,", level)
    return levels
