"""Keyed: one policy for each key, such as a breaker for each host, or a bulkhead for each tenant."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import count
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Never, Protocol, cast, final

from typing_extensions import TypeVar, override

from resilience import checks, forks
from resilience.callables import name_of
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import KeyMisuse
from resilience.formats import format_number
from resilience.policies.keys import Key, key_of, refuse_unhashable
from resilience.policy import Call, Policy

T = TypeVar("T")
P_co = TypeVar("P_co", bound=Policy[Any], covariant=True, default=Policy[Any])
D_co = TypeVar("D_co", covariant=True, default=Never)

#: How often idle policies are dropped per idle time, at most: a sweep examines all policies, which takes time.
_SWEEPS: Final = 32


@final
@dataclass(frozen=True, slots=True)
class KeyedStats:
    """A snapshot of a `Keyed`.

    :param keys: how many policies it has now.
    :param made: how many it has created and kept so far.
    :param dropped: how many of these it has dropped: unused for too long, too many, or forgotten.
    """

    keys: int
    made: int
    dropped: int


class MadePolicy(Protocol[P_co, D_co]):
    """A policy of class `P` that may answer with a `D`; every `Policy[D]` is one, and type checkers infer both."""

    def _resilience_class(self) -> P_co: ...
    def _resilience_answer(self) -> D_co: ...


@final
class _Kept(Generic[P_co]):
    """The policy of a key, and when it was last used: an instant, or a sequence number if there is no idle time."""

    __slots__ = ("policy", "used_at")

    def __init__(self, policy: P_co, used_at: float) -> None:
        self.policy = policy
        self.used_at = used_at


@final
class Keyed(Policy[D_co], Generic[P_co, D_co]):
    """Run each call under the policy of its key, which is created when the key is first seen.

    `Keyed[CircuitBreaker]` makes breakers, and `Keyed[Fallback[None], None]` policies that may answer with None.

    :param make: called with the key, without holding a lock; returns the policy for it, or a pipeline. Name the policy
        after the key if errors and metrics should tell keys apart.
    :param key: called with the same arguments as the function (`key(ctx)` for `execute`); returns the key, which must
        be hashable.
    :param max_keys: how many policies are kept, 1000 by default. Beyond that, the least recently used tenth is dropped,
        with its state. Running calls finish under a dropped policy.
    :param idle: after how many seconds without use a policy is dropped, more than 0; by default never. Longer than any
        call takes, because only its beginning counts as use. Calls for its key no longer find it then; it goes when the
        policy of another key is made, at most a 32nd later.
    :param name: the name of this policy in errors; "Keyed" by default.
    :raises TypeError: from a call whose key is not hashable, or if `make` does not return a policy. No policy retries
        or answers it. What `make` and `key` raise themselves reaches the caller.

    >>> from resilience import CircuitBreaker, Keyed
    >>> breakers = Keyed(lambda host: CircuitBreaker(5, name=host), key=lambda host, path: host)
    >>> breakers.call("{0}{1}".format, "example.org", "/a")
    'example.org/a'
    >>> list(breakers.policies)
    ['example.org']
    """

    races: ClassVar[bool] = True  # the policy of a key may race
    _resilience_shares = "policies"
    _resilience_shares_results = True  # one of its policies may be a Cache

    def __init__(
        self,
        make: Callable[[Any], MadePolicy[P_co, D_co]],
        key: Key,
        *,
        max_keys: int = 1000,
        idle: Duration | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(make, Policy):  # a policy is callable, as it is a decorator
            raise TypeError(f"make must be a function that makes a policy for each key, not one policy: {make!r}")
        self._resilience_set_up(locals())
        self._make = checks.plain_function("make", make, ("key",))
        self._key = checks.plain_function("key", key)
        self._max_keys = checks.whole("max_keys", max_keys)
        self._idle = checks.optional_seconds("idle", idle)
        self._kept: dict[Hashable, _Kept[P_co]] = {}
        self._made = 0
        self._next_sweep = -inf  # the instant of the next sweep for idle policies
        self._uses = count()
        self._lock = forks.lock_of(self)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T | D_co:
        policy: Policy[D_co] = self.policy_for(key_of(ctx, self._key, self.name))
        return await policy.around(call, ctx)

    def policy_for(self, key: Hashable) -> P_co:
        """Return the policy of a key; create it if there is none."""
        try:
            kept = self._kept.get(key)
        except TypeError:
            refuse_unhashable(key, self.name)
            raise
        now = next(self._uses) if self._idle is None else clock.now()
        if kept is not None and (self._idle is None or now - kept.used_at < self._idle):
            kept.used_at = now
            return kept.policy
        if isinstance(key, Policy):  # each call would get a new one
            raise KeyMisuse(f"{self.name}: key returned a policy, {key!r}: did you mean Keyed(make, key)?")
        made = cast("P_co", self._make(key))  # user code: not under the lock
        if not isinstance(made, Policy):
            raise KeyMisuse(f"make must return a policy, not {made!r}, for the key {key!r}")
        with self._lock:
            current = self._kept.get(key)
            if current is not None and current is not kept:  # another caller has created it in the meantime
                return current.policy
            self._kept.pop(key, None)
            self._drop_locked(now)
            self._kept[key] = _Kept(made, now)
            self._made += 1
            return made

    def _drop_locked(self, now: float) -> None:
        """Drop idle policies, and a tenth of all if there is no room, to spread the cost of sorting over many calls.

        A finalizer or a signal handler may run at any point, and make or forget policies, too.
        """
        if self._idle is not None and now >= self._next_sweep:
            self._next_sweep = now + self._idle / _SWEEPS
            for key, it in self._kept.copy().items():
                if now - it.used_at >= self._idle:
                    self._kept.pop(key, None)
        if len(self._kept) >= self._max_keys:
            kept = self._kept.copy()
            by_use = sorted(kept, key=lambda key: kept[key].used_at)
            for key in by_use[: max(len(kept) - self._max_keys + 1, self._max_keys // 10)]:
                self._kept.pop(key, None)

    def forget(self, key: Hashable) -> None:
        """Drop the policy of a key. Running calls finish under it; the next call gets a new one."""
        with self._lock:
            self._kept.pop(key, None)

    @property
    def policies(self) -> Mapping[Hashable, P_co]:
        """The current policies, by key, in the order in which they were created. A snapshot."""
        with self._lock:
            return MappingProxyType({key: it.policy for key, it in self._kept.copy().items()})

    def stats(self) -> KeyedStats:
        """Return how many policies there are."""
        with self._lock:
            return KeyedStats(keys=len(self._kept), made=self._made, dropped=self._made - len(self._kept))

    @override
    def describe(self) -> str:
        policies = self.policies
        idle = "" if self._idle is None else f", dropped after {format_number(self._idle)} s unused"
        last = f"; the last: {list(policies.values())[-1].describe()}" if policies else ""
        keys = f"{len(policies)} now, at most {self._max_keys}{idle}"
        return f"{self.name}: a policy for each {name_of(self._key)}, {keys}{last}"
