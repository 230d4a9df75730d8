"""A simple model of a circuit, which keeps every result and evaluates all of them each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import strategies as st

from resilience import CircuitState, ConsecutiveFailures, FailureCount, FailureRatio, SlowRatio, Trip

CLOSED, OPEN, HALF_OPEN, ISOLATED = CircuitState


@dataclass(frozen=True)
class Result:
    failed: bool
    took: float
    at: float


@dataclass(frozen=True)
class Condition:
    """One trip condition and its meaning. Times are whole seconds, so that windows are exact."""

    kind: str  # streak, number, failures or slow
    n: int = 1
    percent: int = 50
    min_calls: int = 1
    last: int | None = None
    window: int | None = None
    slower_than: float = float("inf")

    def trip(self) -> Trip:
        ratio = self.percent / 100
        if self.kind == "streak":
            return ConsecutiveFailures(self.n)
        if self.kind == "number":
            return FailureCount(self.n, last=self.last, window=self.window)
        if self.kind == "failures":
            return FailureRatio(ratio, min_calls=self.min_calls, last=self.last, window=self.window)
        return SlowRatio(
            ratio, slower_than=self.slower_than, min_calls=self.min_calls, last=self.last, window=self.window
        )

    def holds(self, results: list[Result]) -> bool:
        """Whether the condition holds right after the last of these results."""
        if self.kind == "streak":
            return len(results) >= self.n and all(it.failed for it in results[-self.n :])
        if self.last is not None:
            seen = results[-self.last :]
        else:
            assert self.window is not None
            seen = [it for it in results if results[-1].at - it.at < self.window]
        bad = sum(it.took >= self.slower_than if self.kind == "slow" else it.failed for it in seen)
        if self.kind == "number":
            return bad >= self.n
        enough = self.min_calls if self.last is None else min(self.min_calls, self.last)
        return len(seen) >= enough and Fraction(bad, len(seen)) >= Fraction(self.percent, 100)


@dataclass
class ModelAdmission:
    """The model's admission of a call."""

    epoch: int
    lost_at: float = float("inf")
    has_ended: bool = False


@dataclass
class Model:
    conditions: list[Condition]
    periods: list[float]
    probes: int
    successes: int
    probe_timeout: float | None
    state: CircuitState = CLOSED
    epoch: int = 0
    results: list[Result] = field(default_factory=list)
    out: list[ModelAdmission] = field(default_factory=list)  # the probes of this epoch
    good: int = 0
    openings: int = 0  # in a row
    lasts: float = 0.0
    until: float = 0.0
    moves: list[tuple[CircuitState, CircuitState]] = field(default_factory=list)

    def move(self, state: CircuitState) -> None:
        if state is not self.state:
            self.moves.append((self.state, state))
        self.state, self.epoch, self.results, self.out, self.good = state, self.epoch + 1, [], [], 0

    def next_period(self) -> float:
        return self.periods[min(self.openings, len(self.periods) - 1)]

    def open(self, now: float) -> None:
        self.lasts = self.next_period()
        self.until = now + self.lasts
        self.openings += 1
        self.move(OPEN)

    def close(self) -> None:
        self.openings = 0
        self.move(CLOSED)

    def probes_out(self, now: float) -> list[ModelAdmission]:
        return [it for it in self.out if not it.has_ended and now < it.lost_at]

    def admit(self, now: float) -> ModelAdmission | None:
        if self.state is OPEN and now >= self.until:
            self.move(HALF_OPEN)
        if self.state is CLOSED:
            return ModelAdmission(self.epoch)
        if self.state is not HALF_OPEN or len(self.probes_out(now)) >= self.probes:
            return None
        patience = max(self.lasts, 30.0) if self.probe_timeout is None else self.probe_timeout
        self.out.append(ModelAdmission(self.epoch, now + patience))
        return self.out[-1]

    def record(self, admitted: ModelAdmission, failed: bool, took: float, now: float) -> None:
        if admitted.epoch != self.epoch:
            return
        if self.state is CLOSED:
            self.results.append(Result(failed, took, now))
            if any(condition.holds(self.results) for condition in self.conditions):
                self.open(now)
            return
        lost = now >= admitted.lost_at
        admitted.has_ended = True
        if lost:
            return
        if failed or took >= min(condition.slower_than for condition in self.conditions):
            self.open(now)
            return
        self.good += 1
        if self.good >= self.successes:
            self.close()

    def release(self, admitted: ModelAdmission) -> None:
        admitted.has_ended = True


small = st.integers(1, 4)
streaks = st.builds(Condition, st.just("streak"), n=st.integers(1, 5))
percents = st.sampled_from([1, 28, 30, 50, 55, 75, 100])
windows: st.SearchStrategy[dict[str, int]] = st.one_of(
    st.builds(lambda n: {"last": n}, st.integers(1, 8)), st.builds(lambda n: {"window": n}, st.integers(2, 20))
)
numbers = st.one_of(
    st.builds(lambda n, more: Condition("number", n=n, last=n + more), small, st.integers(0, 4)),
    st.builds(lambda n, window: Condition("number", n=n, window=window), small, st.integers(2, 20)),
)
shares = st.builds(
    lambda percent, min_calls, window: Condition("failures", percent=percent, min_calls=min_calls, **window),
    percents,
    st.integers(1, 6),
    windows,
)
slow_shares = st.builds(
    lambda percent, min_calls, window, limit: Condition(
        "slow", percent=percent, min_calls=min_calls, slower_than=limit, **window
    ),
    percents,
    st.integers(1, 6),
    windows,
    st.sampled_from([1.0, 2.0]),
)
conditions = st.lists(st.one_of(streaks, numbers, shares, slow_shares), min_size=1, max_size=3)
