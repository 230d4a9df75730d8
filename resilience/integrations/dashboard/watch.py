"""What the page shows: counts per second, the last events, and what the policies hold now.

Events are reported in the thread of the call that they happen to. What that thread does for viewers is one count and
perhaps one row, in memory that is bounded and the same for all viewers. Each viewer reads from there at its own pace,
from the number on at which it stopped before. So there is no queue for each of them, a slow one costs nothing, and one
that comes back misses only what has been pushed out of the log meanwhile.

`ExecutionFinished` happens in every execution. It is listened to only while there is a viewer, and for a while after;
the other events happen where something goes wrong, and are cheap enough to be remembered before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Final, TypeAlias, final
from weakref import finalize, ref

from resilience import events, forks
from resilience.clock import clock
from resilience.events import Event, Listener
from resilience.integrations.dashboard.log import Log
from resilience.integrations.dashboard.rates import Rates
from resilience.integrations.telemetry import Observed
from resilience.outcome import Failure

#: Seconds for which executions are counted after the last viewer has gone: the page may only have been reloaded.
LINGER: Final = 30.0

#: What goes wrong, and as what it is counted.
_COUNTED: dict[type[Event], str | None] = {
    events.RetryScheduled: "retries",
    events.RetryGaveUp: None,
    events.HedgeStarted: None,
    events.BudgetSpent: None,
    events.TimedOut: "timeouts",
    events.CallRejected: "rejections",
    events.CircuitChanged: None,
    events.FallbackUsed: "fallbacks",
    events.ChaosInjected: None,
}
_Kinds: TypeAlias = tuple[type[Event], ...]
_Listening: TypeAlias = tuple[float, Callable[[], object]]  # since when, and what ends it
_NOT_LISTENING: _Listening = (inf, lambda: None)
_TROUBLE: _Kinds = tuple(_COUNTED)
_EXECUTIONS: _Kinds = (events.ExecutionFinished,)

_Json: TypeAlias = dict[str, Any]


@final
class Watch:
    """Listens to the process, as much as is needed, for all the viewers of one dashboard.

    :param keep: how many rows the log has at most.
    :param history: whether what goes wrong is remembered also before the first viewer comes.
    :param messages: whether the messages of errors are shown.
    """

    def __init__(self, observed: Observed, *, keep: int, history: bool, messages: bool) -> None:
        self._lock = forks.lock_of(self)
        self._log = Log(keep, messages=messages)
        self._rates = Rates()
        self._history = history
        self._viewers = 0
        self._left_at = 0.0
        self._listening: dict[_Kinds, _Listening] = {}
        self.observed: Observed = observed
        if history:
            self._listen_locked(_TROUBLE)

    # --- what is listened to ---

    @property
    def viewers(self) -> int:
        """How many are looking."""
        return self._viewers

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Count executions while the block lasts, and for a while after."""
        with self._lock:
            self._viewers += 1
            self._listen_locked(_EXECUTIONS)
            self._listen_locked(_TROUBLE)
        try:
            yield
        finally:
            with self._lock:
                self._viewers -= 1
                self._left_at = clock.now()

    def close(self) -> None:
        """Listen to nothing any more."""
        with self._lock:
            for kinds in tuple(self._listening):
                self._end_locked(kinds)

    def _listen_locked(self, kinds: _Kinds) -> None:
        """Subscribe, without being kept alive by it."""
        if kinds not in self._listening:
            end = finalize(self, events.subscribe(_weakly(ref(self)), *kinds))
            end.atexit = False
            self._listening[kinds] = clock.now(), end

    def _end_locked(self, kinds: _Kinds) -> None:
        _, end = self._listening.pop(kinds, _NOT_LISTENING)
        end()

    def _is_unwatched(self, now: float) -> bool:
        """Whether there was no viewer for a while; then what only viewers need is listened to no more."""
        with self._lock:
            if self._viewers or now - self._left_at < LINGER:
                return False
            self._end_locked(_EXECUTIONS)
            if not self._history:
                self._end_locked(_TROUBLE)
            return True

    def _since(self, kinds: _Kinds) -> float:
        return self._listening.get(kinds, _NOT_LISTENING)[0]

    # --- what happens ---

    def hear(self, event: Event) -> None:
        """Count an event, and write its row."""
        now = clock.now()
        if isinstance(event, events.ExecutionFinished):
            self._finished(event, now)
            return
        name = _COUNTED[type(event)]
        if name is not None and not getattr(event, "shadow", False):
            self._count(name, event, now)
        self._log.add(event, now)

    def _finished(self, event: events.ExecutionFinished, now: float) -> None:
        if not self._viewers and self._is_unwatched(now):
            return
        self._count("executions", event, now)
        if isinstance(event.outcome, Failure):
            self._count("failures", event, now)
            if event.attempts == 1:  # of no attempt, or several, the policy that refused it or gave up has a row
                self._log.add(event, now)

    def _count(self, name: str, event: Event, now: float) -> None:
        with self._lock:
            self._rates.add(name, event.pipeline, now)

    # --- what is shown ---

    def rows(self, change: int) -> tuple[list[_Json], int]:
        """Return the rows since that change of the log, and the number of its last change."""
        return self._log.since(change)

    def rates(self) -> _Json:
        """Return what was counted: `rates` of the process, and of `pipelines`."""
        with self._lock:
            return self._rates.summary(clock.now(), self._since(_EXECUTIONS), self._since(_TROUBLE))


def _weakly(held: ref[Watch]) -> Listener:
    def listen(event: Event) -> None:
        watch = held()
        if watch is not None:
            watch.hear(event)

    return listen
