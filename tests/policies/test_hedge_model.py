"""Hedge against a model: which attempts begin and when, which attempt decides and when."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience import Bulkhead, BulkheadFull, Hedge, Timeout, TimeoutExceeded
from tests.conftest import Boom, Virtual
from tests.policies.hedges import Service

GOOD, POOR, FAILED, REFUSED, FATAL = "good", "poor", "failed", "refused", "fatal"

#: Attempt n ends 1/16, 1/32, ... s after a whole second, so that no two events are simultaneous.
ATTEMPTS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([GOOD, GOOD, POOR, FAILED, FAILED, REFUSED, FATAL])),
    min_size=4,
    max_size=4,
).map(lambda steps: [(seconds + 2.0 ** -(4 + number), end) for number, (seconds, end) in enumerate(steps)])


def expected_course(
    steps: list[tuple[float, str]], delays: list[int], hedges: int, eager: bool, limit: float
) -> tuple[list[float], int | None, float]:
    """Return when attempts begin, the number of the deciding attempt (None if the limit decides), and when that is."""
    begun, ended, due = [0.0], set[int](), float(delays[0])
    while True:
        running = {number: begun[number] + steps[number][0] for number in range(len(begun)) if number not in ended}
        next_end = min(running.values(), default=inf)
        if min(next_end, due) > limit:
            return begun, None, limit
        if due < next_end:
            begun.append(due)
            due = due + delays[min(len(begun), len(delays)) - 1] if len(begun) <= hedges else inf
            continue
        number = min(running, key=lambda it: running[it])
        ended.add(number)
        end, others_run = steps[number][1], len(running) > 1
        if end in {GOOD, FATAL}:
            return begun, number, next_end
        if end == REFUSED and not others_run:
            return begun, 0, next_end
        if eager and due < inf:
            due = next_end
        elif not others_run:
            return begun, 0, next_end


@pytest.mark.parametrize("name", ["simulation", "asyncio", "trio", "threads"])
@settings(max_examples=25, deadline=None)
@given(
    steps=ATTEMPTS,
    delays=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    more=st.integers(0, 2),
    eager=st.booleans(),
    limit=st.integers(2, 20),
)
def test_a_hedged_call_agrees_with_the_model(
    name: str, steps: list[tuple[float, str]], delays: list[int], more: int, eager: bool, limit: int
) -> None:
    """An outer limit may cut it off; then no permit is held."""
    ends: list[Any] = [
        {POOR: POOR, FAILED: Boom(number), REFUSED: BulkheadFull(str(number)), FATAL: LookupError(number)}.get(
            end, number
        )
        for number, (_, end) in enumerate(steps)
    ]
    cut_off_at = limit + 1 / 1024
    hedges = min(len(delays) + more, 3)
    begun, decider, at = expected_course(steps, delays, hedges, eager, cut_off_at)
    inside = Bulkhead(4)
    delay = delays if len(delays) > 1 else delays[0]
    hedge = Hedge(delay, hedges=hedges, on=Boom, on_result=lambda it: it == POOR, eager=eager, budget=None)
    world = Virtual(name)

    async def main() -> None:
        service = Service(world, *((seconds, end) for (seconds, _), end in zip(steps, ends, strict=True)))
        out, seconds = await service.under(Timeout(cut_off_at).wrap(hedge, inside))
        assert [when for _, when in service.begun] == pytest.approx(begun, abs=1e-5)
        assert seconds == pytest.approx(at, abs=1e-5)
        assert type(out) is TimeoutExceeded if decider is None else out is ends[decider]
        assert inside.stats().in_flight == 0
        await world.sleep(40)  # until abandoned threads have ended
        assert len(service.begun) == len(begun)

    world.run(main)
