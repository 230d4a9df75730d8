"""What the page shows: counts per second, the last events, and what the policies hold now.

Events are told in the thread of the call that they happen to. What that thread does for a viewer is one count and
perhaps one row, in memory that is bounded and the same for all viewers. A viewer reads from there at his own pace,
from the number on at which he stopped before. So there is no queue for each of them, a slow one costs nobody
anything, and one who comes back misses only what has been pushed out of the log meanwhile.

`ExecutionFinished` happens in every execution. It is listened to only while somebody looks, and for a while after;
the other events happen where something goes wrong, and are cheap enough to be remembered before anybody comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Final, TypeAlias, final
from weakref import finalize, ref

from resilience import events
from resilience.clock import clock
from resilience.events import (
    CallRejected,
    CircuitChanged,
    Event,
    ExecutionFinished,
    FallbackUsed,
    Listener,
    RetryGaveUp,
    RetryScheduled,
    TimedOut,
)
from resilience.integrations.dashboard.log import Log
from resilience.integrations.dashboard.rates import Rates
from resilience.integrations.telemetry import Observed
from resilience.outcome import Failure

#: Seconds for which executions are counted after the last viewer has gone: he may only have reloaded the page.
LINGER: Final = 30.0

#: What is listened to always, and as what it is counted.
_TROUBLE: dict[type[Event], str | None] = {
    RetryScheduled: "retries",
    RetryGaveUp: None,
    TimedOut: "timeouts",
    CallRejected: "rejections",
    CircuitChanged: None,
    FallbackUsed: "fallbacks",
}
_Json: TypeAlias = dict[str, Any]


@final
class Watch:
    """Listens to the process, as much as is needed, for all the viewers of one dashboard.

    :param keep: how many rows the log has at most.
    :param history: whether what goes wrong is remembered also before the first viewer comes.
    :param messages: whether the messages of errors are told.
    """

    def __init__(self, observed: Observed, *, keep: int, history: bool, messages: bool) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer may tell an event in the middle of anything
        self._log = Log(keep, messages=messages)
        self._rates = Rates()
        self._since = clock.now() if history else inf
        self._executions_since = inf
        self._viewers = 0
        self._left_at = 0.0
        self._unwatch: Callable[[], None] | None = None
        self._forget = self._subscribe(*_TROUBLE) if history else None
        self.observed: Observed = observed

    # --- who listens ---

    @property
    def viewers(self) -> int:
        """How many are looking."""
        return self._viewers

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Count executions while the block lasts, and for a while after."""
        with self._lock:
            self._viewers += 1
            self._look()
        try:
            yield
        finally:
            with self._lock:
                self._viewers -= 1
                self._left_at = clock.now()

    def close(self) -> None:
        """Listen to nothing any more."""
        with self._lock:
            for end in (self._unwatch, self._forget):
                if end is not None:
                    end()
            self._unwatch = self._forget = None

    def _look(self) -> None:
        if self._unwatch is None:
            others = _TROUBLE if self._forget is None else ()
            self._unwatch = self._subscribe(ExecutionFinished, *others)
            self._executions_since = clock.now()
            if self._forget is None:
                self._since = self._executions_since

    def _look_away(self, now: float) -> bool:
        """End the listening that only viewers need, if none has been there for a while; say whether it has ended."""
        with self._lock:
            if self._viewers or now - self._left_at < LINGER or self._unwatch is None:
                return self._unwatch is None
            self._unwatch()
            self._unwatch = None
            self._executions_since = inf
            if self._forget is None:
                self._since = inf
            return True

    def _subscribe(self, *kinds: type[Event]) -> Callable[[], None]:
        """Subscribe without being kept alive by it."""
        end = finalize(self, events.subscribe(_weakly(ref(self)), *kinds))
        end.atexit = False
        return end

    # --- what happens ---

    def hear(self, event: Event) -> None:
        """Count an event, and write its row."""
        now = clock.now()
        if isinstance(event, ExecutionFinished):
            self._finished(event, now)
            return
        name = _TROUBLE[type(event)]
        if name is not None:
            self._count(name, event, now)
        self._log.add(event, now)

    def _finished(self, event: ExecutionFinished, now: float) -> None:
        if not self._viewers and self._look_away(now):
            return
        self._count("executions", event, now)
        if isinstance(event.outcome, Failure):
            self._count("failures", event, now)
            if event.attempts == 1:  # of no attempt, or several, the policy that refused it or gave up has told
                self._log.add(event, now)

    def _count(self, name: str, event: Event, now: float) -> None:
        with self._lock:
            self._rates.add(name, event.pipeline, now)

    # --- what is told ---

    def rows(self, change: int) -> tuple[list[_Json], int]:
        """Return the rows since that change of the log, and the number of its last change."""
        return self._log.since(change)

    def rates(self) -> _Json:
        """Return what was counted: `rates` of the process, and of `pipelines`."""
        with self._lock:
            return self._rates.told(clock.now(), self._executions_since, self._since)


def _weakly(held: ref[Watch]) -> Listener:
    def listen(event: Event) -> None:
        watch = held()
        if watch is not None:
            watch.hear(event)

    return listen
