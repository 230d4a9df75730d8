"""Servers under load behind throttles and limits, in simulated time. The seed repeats a run exactly."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Chaos,
    Context,
    LimitExceeded,
    Policy,
    RateLimiter,
    Retry,
    Throttled,
)
from resilience.testing import Simulation


def start_clients(
    simulation: Simulation, client: Callable[[], Coroutine[Any, Any, Any]], rate: float, seconds: float
) -> None:
    """Let clients come as a Poisson stream, `rate` a second, until this time."""

    async def arrivals() -> None:
        while simulation.now() < seconds:
            await simulation.sleep(simulation.rng.expovariate(rate))
            simulation.start(client())

    simulation.start(arrivals())


class Traffic(NamedTuple):
    """The requests of a backend: the mean per second, for each ten seconds."""

    sent: list[float]
    accepted: list[float]

    def sent_for_each_accepted(self, since: int) -> float:
        return sum(self.sent[since // 10 :]) / sum(self.accepted[since // 10 :])


def throttled(
    throttle: AdaptiveThrottle,
    demand: float,
    seconds: float,
    capacity: Callable[[float], float] = lambda now: 100.0,
    seed: int = 5,
) -> Traffic:
    """Simulate a Poisson stream of clients, `demand` per second, and a backend that accepts `capacity(now)` per second.

    It has a token bucket of ten, answers in 5 ms, and refuses the other requests.
    """
    slots = int(seconds // 10)
    sent, accepted = [0] * slots, [0] * slots
    with Simulation(seed) as simulation:
        tokens, as_of = 10.0, 0.0

        async def backend(ctx: Any) -> None:
            nonlocal tokens, as_of
            now = simulation.now()
            limit = capacity(now)
            tokens, as_of = min(10.0 if limit else 0.0, tokens + (now - as_of) * limit), now
            slot = min(slots - 1, int(now // 10))
            sent[slot] += 1
            await simulation.sleep(0.005)
            if tokens < 1:
                raise ConnectionError("refused")
            tokens -= 1
            accepted[slot] += 1

        async def client() -> None:
            try:
                await simulation.execute(throttle, backend)
            except (ConnectionError, Throttled):
                pass

        start_clients(simulation, client, demand, seconds)
        simulation.run(until=seconds)
    return Traffic([it / 10 for it in sent], [it / 10 for it in accepted])


WORKERS, SERVICE, PATIENCE = 10, 0.1, 1.0
CAPACITY = WORKERS / SERVICE


class Goodput(NamedTuple):
    """The results of the clients that arrived after the first quarter of the time.

    :param share: the requests that were answered in time, as a share of the capacity.
    :param mean: how many seconds an answer in time took.
    :param limits: the limit, second by second.
    """

    share: float
    mean: float
    limits: list[int]


def overloaded(
    policy: AdaptiveLimit | None,
    load: float,
    seconds: float,
    slower: Callable[[float], float] = lambda now: 1.0,
    seed: int = 1,
    others: Sequence[AdaptiveLimit] = (),
) -> Goodput:
    """Simulate a Poisson stream of clients, of `load` times the capacity, who give up after a second.

    The server has ten workers and an unbounded queue, and does not notice that a client has left. A request takes 0.1 s
    on average (exponential), times `slower(now)`. If other processes have limits of their own, each sends as many.
    """
    good: list[float] = []
    limits: list[int] = []
    workers = Bulkhead(WORKERS, queue=10**9)
    policies = [policy or Retry(1), *others]
    with Simulation(seed) as simulation:
        rng = simulation.rng

        async def work(ctx: Any) -> None:
            await simulation.sleep(rng.expovariate(1 / (SERVICE * slower(simulation.now()))))

        async def serve(ctx: Any) -> None:
            await simulation.execute(workers, work)

        async def client() -> None:
            began = simulation.now()
            try:
                await simulation.execute(rng.choice(policies), serve)
            except LimitExceeded:
                return
            took = simulation.now() - began
            if took <= PATIENCE and began > seconds / 4:
                good.append(took)

        async def watch() -> None:
            while policy is not None and simulation.now() < seconds:
                limits.append(policy.stats().limit)
                await simulation.sleep(1.0)

        start_clients(simulation, client, load * CAPACITY, seconds)
        simulation.start(watch())
        simulation.run(until=seconds)
    return Goodput(len(good) / (CAPACITY * seconds * 3 / 4), fmean(good) if good else inf, limits)


def begun(limiter: RateLimiter, callers: int, closed_at: float, closed_for: float) -> list[float]:
    """Return the instants at which concurrent callers begin, when the limiter is paused in between."""
    instants: list[float] = []
    with Simulation() as simulation:

        async def fn(ctx: Any) -> None:
            instants.append(simulation.now())

        async def caller() -> None:
            await simulation.execute(limiter, fn)

        async def close() -> None:
            await simulation.sleep(closed_at)
            limiter.pause(closed_for)

        for _ in range(callers):
            simulation.start(caller())
        simulation.start(close())
        simulation.run()
    return instants


def layered(policy: Policy[Any], demand: float, seconds: int, *, down: tuple[float, float], seed: int = 2) -> list[int]:
    """Return how many calls reach a service, second by second, below three layers of three attempts each.

    Clients come as a Poisson stream, and `policy` is around each of their calls. The service fails while it is down.
    """
    reached = [0] * seconds
    layer = Retry(3, backoff=[0.1])
    with Simulation(seed) as simulation:

        async def service(ctx: Context) -> None:
            now = simulation.now()
            reached[min(seconds - 1, int(now))] += 1
            if down[0] <= now < down[1]:
                raise ConnectionError("down")

        async def library(ctx: Context) -> None:
            await simulation.execute(layer, service)

        async def program(ctx: Context) -> None:
            await simulation.execute(layer, library)

        async def client() -> None:
            try:
                await simulation.execute(policy.wrap(layer), program)
            except ConnectionError:
                pass

        start_clients(simulation, client, demand, seconds)
        simulation.run(until=seconds)
    return reached


class Faults(NamedTuple):
    """The faults of a service, and the errors of its clients, second by second."""

    injected: list[int]
    errors: list[int]


def injected(
    retry: Retry, rate: float, demand: float, seconds: int, *, on_at: float, lasts: float, seed: int = 6
) -> Faults:
    """Simulate a Poisson stream of clients who retry, of a service that only a `Chaos` makes fail, for a while."""
    faults = Faults([0] * seconds, [0] * seconds)
    with Simulation(seed) as simulation:
        chaos = Chaos(error=ConnectionError)

        def note(counts: list[int]) -> None:
            counts[min(seconds - 1, int(simulation.now()))] += 1

        async def call(ctx: Context) -> None:
            await simulation.sleep(0.02)

        async def attempt(ctx: Context) -> None:
            try:
                await simulation.execute(chaos, call)
            except ConnectionError:
                note(faults.injected)
                raise

        async def client() -> None:
            try:
                await simulation.execute(retry, attempt)
            except ConnectionError:
                note(faults.errors)

        async def switch_on() -> None:
            await simulation.sleep(on_at)
            chaos.on(rate, lasts)

        simulation.start(switch_on())
        start_clients(simulation, client, demand, seconds)
        simulation.run(until=seconds)
    return faults
