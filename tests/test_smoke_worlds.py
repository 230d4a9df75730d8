"""The thinnest path through everything: five policies around one call, in every world."""

from __future__ import annotations

from resilience import Bulkhead, CircuitBreaker, Fallback, Policy, Retry, Timeout
from tests.conftest import Boom, FakeClock, Script, World


async def test_five_policies_protect_one_call_in_every_world(world: World, clock: FakeClock) -> None:
    """A call that fails once is made again after its backoff, and its result comes out."""
    pipeline = Policy.wrap(
        Fallback("unknown"), Retry(on=Boom, backoff=[2.5]), CircuitBreaker(), Bulkhead(4), Timeout(5.0)
    )
    script = Script(Boom("once"), "fine")

    assert await world.execute(pipeline, script.function()) == "fine"
    assert clock.sleeps == [2.5]
    assert script.calls == 2
