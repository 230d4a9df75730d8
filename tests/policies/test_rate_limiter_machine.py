"""RateLimiter compared with a model that stores all uses, and checks all of them each time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from resilience import Context, Rate, RateLimited, RateLimiter
from tests.policies.machines import TasksInVirtualTime

#: All numbers are multiples of a power of two, so that no sum is rounded.
CASES = (
    (Rate(2),),
    (Rate(2, burst=1),),
    (Rate(4, burst=3),),
    (Rate(4, burst=2), Rate(6, per=4)),
    (Rate(4, per=2), Rate(2, burst=1)),
)


@dataclass
class Waiting:
    name: int
    joined: float
    cost: float
    latest: float


class Use(NamedTuple):
    """Units that were charged, or given back (negative)."""

    when: float
    units: float
    leaves: float  # the units leave a window one period after this instant
    calls: int = 1  # 0 if only the units of an earlier call are corrected


def use(when: float, units: float) -> Use:
    return Use(when, units, leaves=when)


@dataclass
class Model:
    """Computes from all uses when each waiter begins."""

    rates: tuple[Rate, ...]
    uses: list[Use] = field(default_factory=list)
    changed_at: float = -inf  # when something last let waiters begin earlier: none of them begins before
    closed_until: float = 0.0
    quotas: list[tuple[float, float, float]] = field(default_factory=list)  # (since, remaining, until)
    queue: list[Waiting] = field(default_factory=list)

    def instant(self, uses: list[Use], cost: float, floor: float) -> float:
        """Return the first instant that all limits allow."""
        candidates = {floor, self.closed_until, *(until for _, _, until in self.quotas)}
        for rate in self.rates:
            if rate.burst is None:
                candidates |= {it.leaves + rate.per for it in uses}
            else:
                candidates.add(self.full(rate, uses) + (min(cost, rate.burst) - rate.burst) * rate.per / rate.limit)
        fits = [it for it in candidates if it >= floor and self.allows(uses, cost, it)]
        return min(fits, default=inf)

    def full(self, rate: Rate, uses: list[Use]) -> float:
        full_at = busy_since = -inf
        for it in uses:
            if it.units < 0 and (it.leaves < busy_since or full_at <= it.when):
                continue  # refilled since
            if it.when >= full_at:
                full_at = busy_since = it.when
            full_at = max(full_at + it.units * rate.per / rate.limit, it.when)
        return full_at

    def allows(self, uses: list[Use], cost: float, at: float) -> bool:
        if at < self.closed_until:
            return False
        for since, remaining, until in self.quotas:
            if at < until and sum(it.calls for it in uses if since <= it.when) + 1 > remaining:
                return False
        for rate in self.rates:
            if rate.burst is None:
                if sum(it.units for it in uses if it.leaves > at - rate.per) + cost > rate.limit:
                    return False
            elif self.full(rate, uses) + (min(cost, rate.burst) - rate.burst) * rate.per / rate.limit > at:
                return False
        return True

    def plan(self) -> tuple[dict[int, float], list[Use], float]:
        """Return the instant at which each waiter begins, all uses after that, and the last of these instants."""
        uses, at, instants = list(self.uses), self.changed_at, {}
        for it in self.queue:
            instants[it.name] = instant = self.instant(uses, it.cost, max(at, it.joined))
            if instant <= it.latest:
                at = instant
                uses.append(use(at, it.cost))
        return instants, uses, at

    def next_instant(self, cost: float, now: float) -> float:
        _, uses, at = self.plan()
        return self.instant(uses, cost, max(now, at))

    def forget(self, name: int) -> None:
        self.queue = [it for it in self.queue if it.name != name]

    def correct(self, more: float, began: float, now: float) -> None:
        self.uses.append(Use(now, more, leaves=now if more > 0 else began, calls=0))
        self.changed_at = now


class LimiterAgainstModel(TasksInVirtualTime):
    """Tasks of one loop in virtual time. They begin exactly at the instants of the model, or are refused."""

    @initialize(rates=st.sampled_from(CASES), max_wait=st.none() | st.sampled_from([0.0, 1.0, 3.0]))
    def build(self, rates: tuple[Rate, ...], max_wait: float | None) -> None:
        self.open()
        costed = [
            Rate(it.limit, it.per, burst=it.burst, cost=lambda ctx: ctx.properties["cost"], actual=lambda used: used)
            for it in rates
        ]
        self.limiter = RateLimiter(*costed, max_wait=max_wait)
        self.max_wait = inf if max_wait is None else max_wait
        self.model = Model(rates)
        self.began: dict[int, float] = {}
        self.expected: dict[int, float] = {}
        self.answers: dict[int, asyncio.Future[float]] = {}
        self.costs: dict[int, float] = {}
        self.rejected = 0

    def settle(self, seconds: float = 0.0) -> None:
        """Let `seconds` pass for the tasks and for the model, until all tasks wait."""
        end = self.clock.now() + seconds
        self.turn(seconds)
        while True:
            instants, _, _ = self.model.plan()
            ready = [it for it in self.model.queue if instants[it.name] <= min(end, it.latest)]
            if not ready:
                break
            first = ready[0]
            self.begin(first.name, instants[first.name], first.cost)
            self.model.forget(first.name)
        for it in list(self.model.queue):
            is_doomed = instants[it.name] > it.latest
            if self.tasks[it.name].done():
                assert is_doomed
                assert isinstance(self.tasks[it.name].exception(), RateLimited)
                self.model.forget(it.name)
                self.rejected += 1
            else:
                assert not is_doomed or it.latest > end

    def begin(self, name: int, at: float, cost: float) -> None:
        self.expected[name] = at
        self.model.uses.append(use(at, cost))

    @rule(cost=st.sampled_from([1.0, 1.0, 2.0, 0.5]), budget=st.none() | st.sampled_from([0.75, 2.0]))
    def arrive(self, cost: float, budget: float | None) -> None:
        name, now = len(self.tasks), self.clock.now()

        async def fn(ctx: Context) -> float:
            self.began[name] = self.clock.now()
            return await self.answers[name]

        before = self.limiter.stats()
        self.answers[name], self.costs[name] = self.loop.create_future(), cost
        ctx = Context(timeout=budget, properties={"cost": cost})
        self.tasks[name] = self.loop.create_task(self.limiter.aexecute(fn, ctx))
        at = self.model.next_instant(cost, now)
        deadline = now + (budget or inf)
        assert before.queued == len(self.model.queue)
        if at > now + self.max_wait or at >= deadline:
            self.settle()
            refusal = self.tasks[name].exception()
            assert isinstance(refusal, RateLimited)
            assert refusal.retry_after == (None if at == inf else at - now)
            self.rejected += 1
            return
        self.model.queue.append(Waiting(name, now, cost, min(now + self.max_wait, deadline - 1e-6)))
        self.settle()

    @precondition(lambda self: self.model.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([it.name for it in self.model.queue]))
        self.tasks[name].cancel()
        self.model.forget(name)
        self.model.changed_at = self.clock.now()
        self.settle()
        assert self.tasks[name].cancelled()

    @precondition(lambda self: self.running())
    @rule(data=st.data(), used=st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 4.0]))
    def answer(self, data: st.DataObject, used: float) -> None:
        self.end(data.draw(st.sampled_from(self.running())), used)
        self.settle()

    def running(self) -> list[int]:
        return [name for name, answer in self.answers.items() if name in self.began and not answer.done()]

    def end(self, name: int, used: float) -> None:
        self.answers[name].set_result(used)
        if used != self.costs[name]:
            self.model.correct(used - self.costs[name], self.began[name], self.clock.now())

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 2.5]))
    def wait(self, seconds: float) -> None:
        self.settle(seconds)

    @rule(seconds=st.sampled_from([0.25, 1.25, 4.0]))
    def pause(self, seconds: float) -> None:
        self.limiter.pause(seconds)
        self.model.closed_until = max(self.model.closed_until, self.clock.now() + seconds)
        self.settle()

    @rule(remaining=st.integers(1, 3), seconds=st.sampled_from([2.5, 5.0]))
    def learn(self, remaining: int, seconds: float) -> None:
        now = self.clock.now()
        if all(abs(now + seconds - until) > 1 for _, _, until in self.model.quotas):  # separate windows
            self.limiter.learn(remaining, seconds)
            self.model.quotas.append((now, remaining, now + seconds))
            self.counted_from(now)
        self.settle()

    def counted_from(self, now: float) -> None:
        """Let the model count only uses after `now`: an answer includes the calls that began at its own instant."""
        since, remaining, until = self.model.quotas.pop()
        self.model.quotas.append((since, remaining + sum(it.calls for it in self.model.uses if it.when == now), until))

    @rule()
    def reset(self) -> None:
        for name in self.running():
            self.end(name, self.costs[name])  # so that no use is corrected that is discarded here
        self.settle()
        self.limiter.reset()
        self.model.uses, self.model.quotas, self.model.closed_until = [], [], self.clock.now()
        self.settle()

    @invariant()
    def limiter_and_model_agree(self) -> None:
        if not self.is_open:
            return
        assert self.began == self.expected
        stats = self.limiter.stats()
        assert (stats.queued, stats.rejected) == (len(self.model.queue), self.rejected)
        now = self.clock.now()
        assert stats.next_turn == self.model.next_instant(1.0, now) - now

    def teardown(self) -> None:
        super().teardown()
        assert not self.is_open or self.limiter.stats().queued == 0


TestLimiterAgainstModel = LimiterAgainstModel.TestCase
TestLimiterAgainstModel.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
