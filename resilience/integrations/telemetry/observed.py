"""The current state of policies, read when it is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, final
from weakref import ref

from resilience.circuit_state import CircuitState
from resilience.integrations.telemetry.instruments import ABANDONED, CIRCUIT_STATE, STATISTICS, Measurement, Watched
from resilience.policies.circuit_breaker import CircuitBreaker
from resilience.policies.timeout import Timeout
from resilience.policy import Pipeline, Policy


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
    :param name: its own name; with a number if an earlier member of its kind in the pipeline has the same name. Those
        that a `Keyed` or a `PerHost` has made for different keys have the same name: a number would soon be another's.
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
        self._given: list[tuple[str | None, list[ref[Observable]]]] = []  # None: each policy inside has its own name
        for given in policies:
            if isinstance(given, Policy):
                # The parts are referenced, not the pipeline: it may exist for one call only, and its parts live on.
                parts = given.policies if isinstance(given, Pipeline) else (given,)
                self._given.append((given.name, [ref(part) for part in parts]))
            elif isinstance(getattr(given, "policies", None), Mapping):
                self._given.append((None, [ref(given)]))
            else:
                hint = ": unpack them, with *policies" if isinstance(given, (list, tuple)) else ""
                raise TypeError(f"only policies can be observed, not {given!r}{hint}")

    def __iter__(self) -> Iterator[Member]:
        """Iterate over the members that are alive, each once for each pipeline that contains it."""
        found: dict[tuple[str, int], Member] = {}
        for it in self._found():
            found.setdefault((it.pipeline, id(it.policy)), it)
        return iter(found.values())

    def gauges(self) -> Iterator[Measurement]:
        """Read the current values of the members, and the number of abandoned calls in the process.

        Members with the same names have the same labels; a `Feed` combines their values.
        """
        for pipeline, name, policy in self:
            labels = {"pipeline": pipeline, "policy": name}
            if isinstance(policy, CircuitBreaker):
                now = policy.state
                for state in CircuitState:
                    yield Measurement(CIRCUIT_STATE, float(state is now), {**labels, "state": state.value})
            else:
                stats = policy.stats()
                yield from (Measurement(it, getattr(stats, of), labels) for of, it in STATISTICS[type(policy)].items())
        yield Measurement(ABANDONED, Timeout.abandoned(), {})

    def _found(self) -> Iterator[Member]:
        for pipeline, references in self._given:
            names = _Names(list)
            for policy in [reference() for reference in references]:
                if pipeline is not None:
                    yield from _members(pipeline, policy, names)
                else:
                    for each in _inside(policy):
                        yield from _members(each.name, each, _Names(list))


def union(groups: Iterable[Observed]) -> Observed:
    """Return all members of several groups as one."""
    members = Observed()
    members._given = [given for group in groups for given in group._given]
    return members


#: The members of one pipeline by kind and name; the place in the list is the number of a member.
_Names: TypeAlias = defaultdict[tuple[type, str], list[Watched]]


def _members(pipeline: str, policy: object, names: _Names) -> Iterator[Member]:
    if isinstance(policy, Watched):
        same = names[type(policy), policy.name]
        if policy not in same:
            same.append(policy)
        number = same.index(policy) + 1
        yield Member(pipeline, policy.name if number == 1 else f"{policy.name}-{number}", policy)
    by_key = isinstance(getattr(policy, "policies", None), Mapping)
    for part in _inside(policy):
        yield from _members(pipeline, part, _Names(list) if by_key else names)


def _inside(policy: object) -> tuple[Policy[Any], ...]:
    found = getattr(policy, "policies", ())
    return tuple(found.values() if isinstance(found, Mapping) else found)
