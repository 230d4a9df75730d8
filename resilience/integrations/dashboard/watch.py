"""The data that the page shows: counts per second, the latest events, and the current state of the policies.

An event is reported in the thread of its call. That thread adds one count, and perhaps one row, to bounded memory that
all viewers share. Each viewer reads from it at its own pace, and continues at the change at which it stopped before.
So there is no queue for each viewer, and a slow viewer costs nothing.

Every execution emits `ExecutionFinished`. It is listened to only while there is a viewer, and for a while after. The
other events are emitted if something goes wrong, and are cheap enough to be recorded without a viewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Final, TypeAlias, final

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
_Subscription: TypeAlias = tuple[float, Callable[[], object]]  # when it began, and the function that ends it
_NO_SUBSCRIPTION: _Subscription = (inf, lambda: None)
_TROUBLE: _Kinds = tuple(_COUNTED)
_EXECUTIONS: _Kinds = (events.ExecutionFinished,)


@final
class Watch:
    """Listens to the events that the viewers of one dashboard need, until it is closed: a subscription keeps it alive.

    The parameters are those of `Dashboard`.
    """

    def __init__(self, observed: Observed, *, keep: int, history: bool, messages: bool) -> None:
        self._lock = forks.lock_of(self)
        self.log: Log = Log(keep, messages=messages)
        self._rates = Rates()
        self._history = history
        self.viewers: int = 0
        self._left_at = 0.0
        self._subscriptions: dict[_Kinds, _Subscription] = {}
        self.observed: Observed = observed
        if history:
            self._subscribe_locked(_TROUBLE)

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Count a viewer during the block, and executions during the block and for `LINGER` seconds after it."""
        with self._lock:
            self.viewers += 1
            self._subscribe_locked(_EXECUTIONS)
            self._subscribe_locked(_TROUBLE)
        try:
            yield
        finally:
            with self._lock:
                self.viewers -= 1
                self._left_at = clock.now()

    def close(self) -> None:
        """End all subscriptions."""
        with self._lock:
            for kinds in tuple(self._subscriptions):
                self._unsubscribe_locked(kinds)

    def _subscribe_locked(self, kinds: _Kinds) -> None:
        if kinds not in self._subscriptions:
            self._subscriptions[kinds] = clock.now(), events.subscribe(self.record, *kinds)

    def _unsubscribe_locked(self, kinds: _Kinds) -> None:
        _, end = self._subscriptions.pop(kinds, _NO_SUBSCRIPTION)
        end()

    def _ended_without_viewers(self, now: float) -> bool:
        """End the subscriptions that only viewers need if there was none for `LINGER` seconds; true if it did."""
        with self._lock:
            if self.viewers or now - self._left_at < LINGER:
                return False
            self._unsubscribe_locked(_EXECUTIONS)
            if not self._history:
                self._unsubscribe_locked(_TROUBLE)
            return True

    def _since(self, kinds: _Kinds) -> float:
        return self._subscriptions.get(kinds, _NO_SUBSCRIPTION)[0]

    def record(self, event: Event) -> None:
        """Count an event, and add it to the log."""
        now = clock.now()
        if isinstance(event, events.ExecutionFinished):
            self._finished(event, now)
            return
        name = _COUNTED[type(event)]
        if name is not None and not getattr(event, "shadow", False):
            self._count(name, event, now)
        self.log.add(event, now)

    def _finished(self, event: events.ExecutionFinished, now: float) -> None:
        if not self.viewers and self._ended_without_viewers(now):
            return
        self._count("executions", event, now)
        if isinstance(event.outcome, Failure):
            self._count("failures", event, now)
            if event.attempts == 1:  # otherwise the log has the event of the policy that refused it or gave up
                self.log.add(event, now)

    def _count(self, name: str, event: Event, now: float) -> None:
        with self._lock:
            self._rates.add(name, event.pipeline, now)

    def rates(self) -> dict[str, Any]:
        """Return the `rates` of the process, and those of its `pipelines`."""
        with self._lock:
            return self._rates.summary(clock.now(), self._since(_EXECUTIONS), self._since(_TROUBLE))
