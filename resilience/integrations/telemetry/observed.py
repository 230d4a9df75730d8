"""The current state of policies, and the feed that combines it with the measurements of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final
from weakref import ref

from resilience import checks, events, forks
from resilience.circuit_state import CircuitState
from resilience.events import Event
from resilience.integrations.telemetry.instruments import (
    ABANDONED,
    CACHE_SIZE,
    CIRCUIT_STATE,
    IN_FLIGHT,
    KEYS,
    LIMIT,
    MEASURED,
    NEXT_TURN,
    QUEUED,
    RATE_QUEUED,
    REJECTION_RATE,
    Instrument,
    Measurement,
    readings,
)
from resilience.integrations.telemetry.labels import Labels
from resilience.policies.adaptive_limit import AdaptiveLimit
from resilience.policies.adaptive_throttle import AdaptiveThrottle
from resilience.policies.bulkhead import Bulkhead
from resilience.policies.cache import Cache
from resilience.policies.circuit_breaker import CircuitBreaker
from resilience.policies.keyed import Keyed
from resilience.policies.rate_limiter import RateLimiter
from resilience.policies.timeout import Timeout
from resilience.policy import Pipeline, Policy

#: The policies with a state that can be read at any time.
Watched: TypeAlias = AdaptiveLimit | AdaptiveThrottle | Bulkhead | Cache | CircuitBreaker | Keyed | RateLimiter


class ManyPolicies(Protocol):
    """An object that is no policy, but creates policies when they are needed: one for each host, for example."""

    @property
    def policies(self) -> Mapping[str, Policy[Any]]:
        """The policies that exist now."""
        ...


#: The objects that can be observed.
Observable: TypeAlias = Policy[Any] | ManyPolicies


class Member(NamedTuple):
    """An observed policy.

    :param pipeline: the name of the executed policy that contains it.
    :param name: its own name; with a number if an earlier member of its kind in the pipeline has the same name.
    """

    pipeline: str
    name: str
    policy: Watched


@final
class Observed:
    """The circuit breakers, bulkheads and other stateful policies inside the given ones; it holds weak references.

    :param policies: policies, pipelines, and objects that create many of them (`PerHost`, `standard()` for HTTP
        clients), whose policies are looked up each time.
    :raises TypeError: for an object that is no policy, and has none.

    >>> from resilience import Bulkhead, Policy, Retry
    >>> from resilience.integrations.telemetry import Observed
    >>> pipeline = Policy.wrap(Retry(), Bulkhead(10), name="weather")
    >>> [(member.pipeline, member.name) for member in Observed(pipeline)]
    [('weather', 'Bulkhead')]
    """

    def __init__(self, *policies: Observable) -> None:
        self._given: list[tuple[str | None, ref[Observable]]] = []  # None: each policy inside has its own name
        for given in policies:
            if isinstance(given, Policy):
                # The parts are referenced, not the pipeline: it may exist for one call only, and its parts live on.
                self._given += [(given.name, ref(part)) for part in _parts(given)]
            elif not isinstance(given, type) and isinstance(getattr(given, "policies", None), Mapping):
                self._given.append((None, ref(given)))
            else:
                raise TypeError(f"only policies can be observed, not {given!r}")

    def __iter__(self) -> Iterator[Member]:
        """Iterate over the members that are alive."""
        return _members([self])

    def gauges(self) -> Iterator[Measurement]:
        """Read the current values of the members, and the number of abandoned calls in the process."""
        return _gauges(iter(self))

    def _found(self) -> Iterator[tuple[str, Watched]]:
        for pipeline, reference in self._given:
            if pipeline is not None:
                yield from ((pipeline, policy) for policy in _watched(reference()))
            else:
                yield from ((each.name, policy) for each in _inside(reference()) for policy in _watched(each))


def _parts(policy: Policy[Any]) -> tuple[Policy[Any], ...]:
    return policy.policies if isinstance(policy, Pipeline) else (policy,)


def _watched(policy: object) -> Iterator[Watched]:
    if isinstance(policy, Watched):
        yield policy
    for part in _inside(policy):
        yield from _watched(part)


def _inside(policy: object) -> tuple[Policy[Any], ...]:
    found = getattr(policy, "policies", ())
    return tuple(found.values() if isinstance(found, Mapping) else found)


def _members(groups: list[Observed]) -> Iterator[Member]:
    """Iterate over the members of all groups, each once for each pipeline that contains it."""
    seen: set[tuple[str, int]] = set()
    names: Counter[tuple[str, type, str]] = Counter()
    for pipeline, policy in (found for group in groups for found in group._found()):
        if (pipeline, id(policy)) in seen:
            continue
        seen.add((pipeline, id(policy)))
        same = pipeline, type(policy), policy.name
        names[same] += 1
        number = names[same]
        yield Member(pipeline, policy.name if number == 1 else f"{policy.name}-{number}", policy)


def _gauges(members: Iterator[Member]) -> Iterator[Measurement]:
    for pipeline, name, policy in members:
        labels = {"pipeline": pipeline, "policy": name}
        if isinstance(policy, CircuitBreaker):
            now = policy.state
            for state in CircuitState:
                yield Measurement(CIRCUIT_STATE, float(state is now), {**labels, "state": state.value})
        elif isinstance(policy, AdaptiveThrottle):
            yield Measurement(REJECTION_RATE, policy.stats().rejection_rate, labels)
        elif isinstance(policy, RateLimiter):
            turns = policy.stats()
            yield Measurement(RATE_QUEUED, turns.queued, labels)
            yield Measurement(NEXT_TURN, turns.next_turn, labels)
        elif isinstance(policy, Cache):
            yield Measurement(CACHE_SIZE, policy.stats().size, labels)
        elif isinstance(policy, Keyed):
            yield Measurement(KEYS, policy.stats().keys, labels)
        else:
            stats = policy.stats()
            yield Measurement(IN_FLIGHT, stats.in_flight, labels)
            yield Measurement(QUEUED, stats.queued, labels)
            yield Measurement(LIMIT, stats.limit, labels)
    yield Measurement(ABANDONED, Timeout.abandoned(), {})


# --- the feed --------------------------------------------------------------------------------


#: For how many seconds a feed caches the recorder for a set of labels, and how many recorders it caches.
_CACHED_FOR: Final = 1.0
_MAX_CACHED: Final = 1000


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
        #: (instrument, values of its labels) -> (when it was cached, its recorder)
        self._recorders: dict[tuple[Instrument, tuple[str, ...]], tuple[float, Callable[[float], object]]] = {}
        self.labels: Labels = labels
        self.attempts: bool = checks.flag("attempts", attempts)
        self._lock = forks.lock_of(self)
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

    def refuse_others(self, hosts: bool, max_names: int, attempts: bool) -> None:
        """Refuse settings that differ: the meaning of a series must not change."""
        self.labels.refuse_others(hosts, max_names)
        if checks.flag("attempts", attempts) != self.attempts:
            raise ValueError(f"attempts of these metrics is {self.attempts} already, not {attempts}")

    def gauges(self) -> Iterator[Measurement]:
        """Read the current values of the observed policies; nothing if no `add` is in effect.

        The values of policies with the same labels are added up: how many circuits are open, how many calls run.
        """
        groups = self._groups
        sums: dict[tuple[Instrument, frozenset[tuple[str, str]]], float] = {}
        for it, value, labels in _gauges(_members(groups)) if groups else ():
            key = it, frozenset(self.labels.bounded(labels).items())
            sums[key] = sums.get(key, 0) + value
        return (Measurement(it, value, dict(labels)) for (it, labels), value in sums.items())

    def forget_recorders(self) -> None:
        """Clear the cache of recorders."""
        self._recorders.clear()

    def _measure(self, event: Event) -> None:
        for it, value, texts in readings(event):
            since, record = self._recorders.get((it, texts), _NO_RECORDER)
            if not 0 <= event.time - since < _CACHED_FOR:  # renewed, so that `Labels` notes which names are in use
                record = self._cache_recorder(it, texts, event.time)
            record(value)

    def _cache_recorder(self, it: Instrument, texts: tuple[str, ...], now: float) -> Callable[[float], object]:
        if len(self._recorders) >= _MAX_CACHED:
            self.forget_recorders()
        record = self._recorder(it, self.labels.bounded(dict(zip(it.labels, texts, strict=True))))
        self._recorders[it, texts] = now, record
        return record


_NO_RECORDER: Final[tuple[float, Callable[[float], object]]] = (-inf, float)
