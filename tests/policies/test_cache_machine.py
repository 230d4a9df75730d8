"""A Cache compared with a simple model: sizes, ages, stale values, failures of both kinds, forgetting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from resilience import Cache
from resilience.testing import virtual_time
from tests.conftest import Boom

KEYS = st.sampled_from("abcd")


class Ignored(Exception):
    """A failure that is never answered with a stale value."""


class Kept(Exception):
    """A failure that is cached, unless there is a stale value."""


@dataclass
class Known:
    """The entry of the model for a key."""

    outcome: Any
    kept_at: float
    is_error: bool = False
    next_try: float = 0.0


class CacheAgainstModel(RuleBasedStateMachine):
    """Makes one call after another; the model predicts the result of each, and whether the function is called."""

    @initialize(ttl=st.integers(1, 5), stale=st.integers(0, 5), errors_ttl=st.integers(1, 3), size=st.integers(1, 5))
    def begin(self, ttl: int, stale: int, errors_ttl: int, size: int) -> None:
        self.time = virtual_time()
        self.clock = self.time.__enter__()
        self.ttl, self.stale, self.errors_ttl, self.size = ttl, stale, errors_ttl, size
        self.cache = Cache(
            ttl,
            key=lambda key, outcome: key,
            stale=stale,
            errors_ttl=errors_ttl,
            max_size=size,
            ignore=Ignored,
            keep_errors=Kept,
        )
        self.known: dict[str, Known] = {}
        self.calls = 0
        self.counts = {"hits": 0, "stale": 0, "misses": 0}
        self.number = 0

    def teardown(self) -> None:
        if hasattr(self, "time"):
            self.time.__exit__(None, None, None)

    def fetch(self, key: str, outcome: Any) -> Any:
        self.calls += 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        self.cache.forget(key)
        self.known.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.known.clear()

    @rule(key=KEYS, kind=st.sampled_from([None, Boom, Ignored, Kept]))
    def call(self, key: str, kind: type[Exception] | None) -> None:
        self.number += 1
        outcome: Any = self.number if kind is None else kind(self.number)
        calls = self.calls
        try:
            got: Any = self.cache.call(self.fetch, key, outcome)
        except Exception as error:
            got = error
        wanted, is_called = self.expected(key, self.known.get(key), outcome)
        assert self.calls - calls == is_called
        if isinstance(wanted, Exception):
            assert (type(got), got.args) == (type(wanted), wanted.args)
        else:
            assert got == wanted
        for dropped in self.known.keys() - self.cache._entries.keys():  # evicted; any entry but the newest may be
            assert dropped != key
            assert len(self.cache._entries) == self.size
            del self.known[dropped]

    def expected(self, key: str, held: Known | None, outcome: Any) -> tuple[Any, bool]:
        """Return the expected result, and whether the function is called; store the new entry of the model."""
        now = self.clock.now()
        fresh_for = 0.0 if held is None else self.errors_ttl if held.is_error else self.ttl
        if held is not None and now < held.kept_at + fresh_for:
            self.counts["hits"] += 1
            return held.outcome, False
        old = held if held is not None and not held.is_error and now < held.kept_at + self.ttl + self.stale else None
        if old is not None and now < old.next_try:
            self.counts["stale"] += 1
            return old.outcome, False
        self.counts["misses"] += 1
        if not isinstance(outcome, Exception):
            self.known[key] = Known(outcome, now)
        elif old is not None:
            old.next_try = now + self.errors_ttl
            if not isinstance(outcome, Ignored):
                self.counts["stale"] += 1
                self.counts["misses"] -= 1
                return old.outcome, True
        elif isinstance(outcome, Kept):
            self.known[key] = Known(outcome, now, is_error=True)
        return outcome, True

    @invariant()
    def statistics_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        stats = self.cache.stats()
        counted = {"hits": stats.hits, "stale": stats.stale, "misses": stats.misses}
        assert (counted, stats.shared) == (self.counts, 0)
        assert stats.size <= self.size


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
