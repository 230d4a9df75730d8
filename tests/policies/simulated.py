"""Servers under load, in simulated time: what throttles and limits do to them. Repeated exactly by the seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from resilience import AdaptiveThrottle, Throttled
from resilience.testing import Simulation

# --- a backend that refuses ----------------------------------------------------------------------


class Traffic(NamedTuple):
    """What came to a backend, for each ten seconds: a mean per second."""

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
    """Clients come as a Poisson stream, `demand` a second; the backend accepts `capacity(now)`, and refuses the rest.

    It has a bucket of ten, and answers in 5 ms.
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

        async def arrivals() -> None:
            while simulation.now() < seconds:
                await simulation.sleep(simulation.rng.expovariate(demand))
                simulation.start(client())

        simulation.start(arrivals())
        simulation.run(until=seconds)
    return Traffic([it / 10 for it in sent], [it / 10 for it in accepted])
