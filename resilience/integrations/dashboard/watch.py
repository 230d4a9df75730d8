"""The data that the page shows: counts per second, the latest events, and the current state of the policies.

An event is reported in the thread of its call. That thread adds one count, and perhaps one row, to bounded memory that
all viewers share. Each viewer reads from it at its own pace, and continues at the change at which it stopped before.
So there is no queue for each viewer, and a slow viewer costs nothing.

Every execution emits `ExecutionFinished`. It is listened to only while there is a viewer, and for a while after. The
other events are emitted if something goes wrong, and are cheap enough to be recorded without a viewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Final, final

from resilience import events, forks
from resilience.clock import clock
from resilience.events import Event
from resilience.integrations.dashboard.log import Log
from resilience.integrations.dashboard.rates import Rates
from resilience.integrations.telemetry import Observed
from resilience.outcome import Failure

#: For how many seconds executions are counted after the last viewer has left: the page may only have been reloaded.
LINGER: Final = 30.0

#: The events that are emitted if something goes wrong, and the rates that count them.
_COUNTED: dict[type[Event], list[str]] = {
    events.RetryScheduled: ["retries"],
    events.RetryGaveUp: [],
    events.HedgeStarted: [],
    events.BudgetSpent: [],
    events.TimedOut: ["timeouts"],
    events.CallRejected: ["rejections"],
    events.CircuitChanged: [],
    events.FallbackUsed: ["fallbacks"],
    events.ChaosInjected: [],
}


@final
class Watch:
    """Listens to the events that the viewers of one dashboard need, until it is closed: a subscription keeps it alive.

    The parameters are those of `Dashboard`.
    """

    def __init__(self, observed: Observed, *, keep: int, history: bool, messages: bool) -> None:
        self._lock = forks.lock_of(self)
        self.observed: Observed = observed
        self.log: Log = Log(keep, messages=messages)
        self._rates = Rates()
        self.viewers: int = 0
        self._left_at = 0.0
        #: When the two subscriptions began: the one for the history, and the one for viewers.
        self._recorded_since = clock.now() if history else inf
        self._viewed_since = inf
        self._for_viewers: list[type[Event]] = [events.ExecutionFinished, *(() if history else _COUNTED)]
        self._end_history = events.subscribe(self.record, *_COUNTED) if history else _no_subscription
        self._end_viewing = _no_subscription

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Count a viewer during the block, and executions during the block and for `LINGER` seconds after it."""
        with self._lock:
            self.viewers += 1
            if self._viewed_since == inf:
                self._end_viewing = events.subscribe(self.record, *self._for_viewers)
                self._viewed_since = clock.now()
        try:
            yield
        finally:
            with self._lock:
                self.viewers -= 1
                self._left_at = clock.now()

    def close(self) -> None:
        """End all subscriptions."""
        with self._lock:
            self._end_history()
            self._end_viewing()

    def _ended_without_viewers(self, now: float) -> bool:
        """End the subscription for viewers if there was none for `LINGER` seconds; true if it did."""
        with self._lock:
            if self.viewers or now - self._left_at < LINGER:
                return False
            self._end_viewing()
            self._viewed_since = inf
            return True

    def record(self, event: Event) -> None:
        """Count an event, and add it to the log."""
        if isinstance(event, events.ExecutionFinished):
            if not self.viewers and self._ended_without_viewers(event.time):
                return
            failed = isinstance(event.outcome, Failure)
            names = ["executions", "failures"] if failed else ["executions"]
            is_news = failed and event.attempts == 1  # otherwise the policy that refused it or gave up has reported it
        else:
            names = [] if getattr(event, "shadow", False) else _COUNTED[type(event)]
            is_news = True
        with self._lock:
            for name in names:
                self._rates.add(name, event.pipeline, event.time)
        if is_news:
            self.log.add(event)

    def rates(self) -> dict[str, Any]:
        """Return the `rates` of the process, and those of its `pipelines`."""
        with self._lock:
            since = min(self._recorded_since, self._viewed_since)
            return self._rates.summary(clock.now(), self._viewed_since, since)


def _no_subscription() -> None:
    """End a subscription that was not begun."""
