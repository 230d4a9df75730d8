"""The feed of an exporter: the measurements of events and the current state of policies, for one destination."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Final, final

from resilience import checks, events, forks
from resilience.events import Event
from resilience.integrations.telemetry.instruments import MEASURED, Instrument, Measurement, readings
from resilience.integrations.telemetry.labels import Labels
from resilience.integrations.telemetry.observed import Observable, Observed, union

#: For how many seconds a feed caches recorders, and how many of them. Then `Labels` notes again which names are in use.
_CACHED_FOR: Final = 1.0
_MAX_CACHED: Final = 1000


class _Measuring(threading.local):
    """The events that wait until this thread has measured another one; None if it measures none."""

    waiting: list[Event] | None = None


@final
class Feed:
    """The metrics of the process for one destination. An event is counted once, even after several calls of `add`.

    :param recorder: called with an instrument and values for its labels; returns a function that records a value. That
        function is called in the thread of the event.
    :param labels: bounds the values of the labels.
    :param attempts: whether single calls of functions are measured too, which doubles the cost for a call.
    """

    def __init__(
        self,
        recorder: Callable[[Instrument, Mapping[str, str]], Callable[[float], object]],
        labels: Labels,
        *,
        attempts: bool = True,
    ) -> None:
        self._recorder = recorder
        self._recorders: dict[tuple[Instrument, tuple[str, ...]], Callable[[float], object]] = {}  # by label values
        self._cached_since = -inf
        self.labels: Labels = labels
        self.attempts: bool = checks.flag("attempts", attempts)
        self._lock = forks.lock_of(self)
        self._measuring = _Measuring()
        self._groups: list[Observed] = []
        self._unsubscribe: Callable[[], None] | None = None

    def add(self, *policies: Observable) -> Callable[[], None]:
        """Observe these policies. Events of the process are counted while at least one `add` is in effect.

        :returns: a function that undoes it; calling it again is a no-op.
        """
        group = Observed(*policies)
        with self._lock:
            self._groups = [*self._groups, group]
            if self._unsubscribe is None:
                kinds = (it for it in MEASURED if self.attempts or it is not events.CallFinished)
                self._unsubscribe = events.subscribe(self._measure, *kinds)

        def remove() -> None:
            with self._lock:
                self._groups = [it for it in self._groups if it is not group]
                if not self._groups and self._unsubscribe is not None:
                    self._unsubscribe()
                    self._unsubscribe = None

        return remove

    def refuse_others(self, labels: Labels, attempts: bool) -> None:
        """Refuse settings that differ: the meaning of a series must not change."""
        own = self.labels.hosts, self.labels.max_names, self.attempts
        others = labels.hosts, labels.max_names, checks.flag("attempts", attempts)
        if others != own:
            raise ValueError(f"hosts, max_names and attempts of these metrics are {own} already, not {others}")

    def gauges(self) -> Iterator[Measurement]:
        """Read the current values of the observed policies; nothing if no `add` is in effect.

        The values of policies with the same labels are added up: how many circuits are open, how many calls run. Of
        shares and times, the largest one counts.
        """
        groups = self._groups
        found: dict[tuple[Instrument, tuple[tuple[str, str], ...]], float] = {}
        for it, value, labels in union(groups).gauges() if groups else ():
            key = it, tuple(self.labels.bounded(labels).items())
            before = found.get(key, 0)
            found[key] = before + value if it.combine == "sum" else max(before, value)
        return (Measurement(it, value, dict(labels)) for (it, labels), value in found.items())

    def _measure(self, event: Event) -> None:
        """Measure an event; one of a finalizer or signal handler that runs in the middle of this, afterwards.

        The locks of a recorder are not reentrant: it would wait for itself, and then every other thread for it.
        """
        measuring = self._measuring
        if measuring.waiting is not None:
            measuring.waiting.append(event)
            return
        waiting: list[Event] = []
        try:
            measuring.waiting = waiting
            self._record(event)
        finally:  # also if the recorder raises
            measuring.waiting = None
            for each in waiting:
                self._measure(each)

    def _record(self, event: Event) -> None:
        if not 0 <= event.time - self._cached_since < _CACHED_FOR:
            self._cached_since, self._recorders = event.time, {}
        for it, value, texts in readings(event):
            record = self._recorders.get((it, texts))
            if record is None:
                record = self._cache_recorder(it, texts)
            record(value)

    def _cache_recorder(self, it: Instrument, texts: tuple[str, ...]) -> Callable[[float], object]:
        if len(self._recorders) >= _MAX_CACHED:
            self._recorders = {}
        record = self._recorder(it, self.labels.bounded(dict(zip(it.labels, texts, strict=True))))
        self._recorders[it, texts] = record
        return record
