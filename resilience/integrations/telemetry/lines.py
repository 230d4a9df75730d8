"""What is worth a line of a log: its level, its words, and how often it is repeated."""

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

#: An opened circuit is an outage. A wait, an answer instead, a circuit that closes is what policies are for.
#: Cancellation is no error, and how an execution ended is its caller's business: both are for debugging.
DEFAULT_LEVELS: dict[type[Event], int | None] = {
    events.RetryScheduled: logging.INFO,
    events.RetryGaveUp: logging.WARNING,
    events.HedgeStarted: logging.DEBUG,  # what a Hedge does all day
    events.HedgeFinished: logging.DEBUG,
    events.BudgetSpent: logging.INFO,  # where it ends a retry, that gives up as well
    events.TimedOut: logging.WARNING,
    events.CallRejected: logging.WARNING,  # of a policy that only observes: as below
    events.CircuitChanged: logging.ERROR,  # to open; to the other states as below
    events.FallbackUsed: logging.INFO,
    events.LimitChanged: logging.DEBUG,  # about once a second
    events.ChaosInjected: logging.WARNING,  # it was on purpose, but readers of the other lines should know
    events.CacheUsed: logging.DEBUG,
    events.StreamOpened: logging.DEBUG,
    events.Parked: logging.ERROR,  # a part of the process does not work any more
    events.ExecutionFinished: logging.DEBUG,
}
#: What happens in calls that are well. To listen to it has a cost, so it is asked once whether there is a line for it.
_OFTEN = (events.CacheUsed, events.StreamOpened, events.ExecutionFinished)
_AT_MOST = {
    CircuitState.ISOLATED: logging.WARNING,  # done manually, so known
    CircuitState.HALF_OPEN: logging.INFO,
    CircuitState.CLOSED: logging.INFO,
}


@final
class Lines:
    """Makes lines of events and writes them, the repeated ones now and then.

    :param write: called with each line, in the thread in which the event happens.
    :param is_enabled: whether lines of a level are wanted; asked before anything is made, and for lines of what
        happens in calls that are well once, at the beginning.
    :param levels: levels of kinds that differ from `DEFAULT_LEVELS`; None for no line.
    :param repeats: how many lines of one kind, pipeline, policy and operation are written in an interval.
    :param interval: its length in seconds.
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
        self._follows_endings = False  # whether there is a line for each execution
        self._has_ended = False
        self._unsubscribe: Callable[[], None] | None = None

    def begin(self) -> Callable[[], None]:
        """Write lines of all policies in the process, until the function that is returned is called."""
        levels = {self._levels[it] for it in _OFTEN}
        written = {level for level in levels if level is not None and self._is_enabled(level)}
        kinds = [it for it in DEFAULT_LEVELS if it not in _OFTEN or self._levels[it] in written]
        self._follows_endings = events.ExecutionFinished in kinds
        unsubscribe = events.subscribe(self, *kinds)

        def end() -> None:
            unsubscribe()
            self._has_ended = True
            self._look_for_counts()
            for line in self._repeats.all_left_out():
                self._write(line)

        return end

    def __call__(self, event: Event) -> None:
        """Write the line of an event, and those that count what was left out before."""
        level = self._level(event)
        line = None
        if level is not None and self._is_enabled(level):
            text, values = sentence(event, messages=self._messages), facts(event, messages=self._messages)
            line = Line(level, kind_of(event), text, values)
        for each in self._repeats.due(line, key_of(event), event.time):
            self._write(each)
        if not self._follows_endings and self._repeats.has_open != (self._unsubscribe is not None):
            self._look_for_counts()

    def _look_for_counts(self) -> None:
        """Listen to the ends of executions, which every call pays for, only while they may have a count to report."""
        with self._lock:
            wanted = self._repeats.has_open and not self._has_ended
            now = events.subscribe(self, events.ExecutionFinished) if wanted else None
            before, self._unsubscribe = self._unsubscribe, now  # also where an event has interrupted the line above
            if before is not None:
                before()

    def _level(self, event: Event) -> int | None:
        level = self._levels[type(event)]
        if level is not None and isinstance(event, CircuitChanged):
            return min(level, _AT_MOST.get(event.new, level))
        if level is not None and isinstance(event, CallRejected) and event.shadow:
            return min(level, logging.INFO)  # the call was made
        return level


def _checked(levels: Levels) -> Levels:
    for kind, level in levels.items():
        if kind not in DEFAULT_LEVELS:
            names = ", ".join(it.__name__ for it in DEFAULT_LEVELS)
            raise TypeError(f"levels must be for {names}, not {kind!r}")
        if level is not None:
            checks.whole("levels", level)
    return levels
