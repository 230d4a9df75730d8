"""An exception group is judged by all its leaves: by Retry, CircuitBreaker and Fallback, for `on` and `ignore`."""

from __future__ import annotations

from typing import Any

import pytest

from resilience import BulkheadFull, CircuitBreaker, CircuitOpen, DeadlineExceeded, Fallback, Rejected, Retry, transient
from resilience.errors import ArgumentMisuse
from tests.conftest import Boom, FakeClock, Other, Script, World
from tests.policies.breakers import CLOSED, HALF_OPEN, OPEN, fails


def group(*leaves: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("children", list(leaves))


DOWN = ConnectionError("down")
GROUPS = [
    ([DOWN], True),
    ([DOWN, ConnectionResetError()], True),
    ([group(DOWN), DOWN], True),
    ([DOWN, ValueError()], False),
    ([group(DOWN, ValueError()), DOWN], False),
    ([ValueError()], False),
]


@pytest.mark.parametrize("on", [ConnectionError, (OSError, KeyError), transient], ids=["type", "tuple", "transient"])
async def test_a_group_is_handled_if_all_its_leaves_are(world: World, on: Any) -> None:
    """A Retry repeats it, a Fallback answers it, a CircuitBreaker counts it."""
    for leaves, handled in GROUPS:
        error = group(*leaves)
        script = Script(error)
        await world.attempt(Retry(3, on=on, backoff=[0]), script.function())
        assert script.calls == (3 if handled else 1)
        assert (await world.attempt(Fallback("instead", on=on), script.function()) == "instead") is handled
        breaker = CircuitBreaker(1, on=on)
        await fails(world, breaker, error)
        assert breaker.state is (OPEN if handled else CLOSED)


@pytest.mark.parametrize("mixed", [group(DOWN, Boom()), group(Boom(), group(Boom(), DOWN))], ids=["flat", "nested"])
async def test_a_group_of_mixed_leaves_is_neutral_to_breakers(world: World, clock: FakeClock, mixed: Exception) -> None:
    """It neither opens a circuit nor closes a probed one."""
    breaker = CircuitBreaker(1, open_for=10, on=ConnectionError)
    await fails(world, breaker, mixed)
    assert breaker.state is CLOSED
    await fails(world, breaker, DOWN)
    clock.advance(10)
    await fails(world, breaker, mixed)
    assert breaker.state is HALF_OPEN
    assert breaker.stats().probes == 0


@pytest.mark.parametrize("neutral", [CircuitOpen(), BulkheadFull(), DeadlineExceeded(), group(CircuitOpen())])
async def test_rejections_deadlines_and_their_groups_are_neutral(
    world: World, clock: FakeClock, neutral: Exception
) -> None:
    """It is neither a failure nor a success to a breaker, a probe releases its slot, and it is not repeated."""
    breaker = CircuitBreaker(1, open_for=10)
    await fails(world, breaker, group(neutral))
    await fails(world, breaker, group(neutral, Boom()))
    assert breaker.state is CLOSED
    await fails(world, breaker, Boom())
    clock.advance(10)
    for error in (neutral, group(neutral)):
        await fails(world, breaker, error, times=2)
    assert breaker.state is HALF_OPEN
    assert breaker.stats().probes == 0
    script = Script(group(neutral))
    await world.attempt(Retry(3, on=Exception, backoff=[0]), script.function())
    assert script.calls == 1


async def test_a_fallback_answers_a_group_with_rejections(world: World) -> None:
    assert await world.attempt(Fallback("instead"), Script(group(CircuitOpen(), Boom())).function()) == "instead"


async def test_a_predicate_gets_the_leaves_of_a_group(world: World) -> None:
    asked: list[Exception] = []

    def worth_it(error: Exception) -> bool:
        asked.append(error)
        return True

    leaves = [Boom("a"), Other("b")]
    await world.attempt(Retry(2, on=worth_it, backoff=[0]), Script(group(*leaves)).function())
    assert asked == leaves * 2


@pytest.mark.parametrize("leaf", [CircuitOpen(), Other("ignored")])
async def test_if_on_names_groups_no_leaf_makes_a_group_neutral(world: World, leaf: Exception) -> None:
    """Otherwise one that is ignored, or a rejection, does."""
    breaker = CircuitBreaker(1, on=Exception, ignore=Other)
    await fails(world, breaker, group(Boom(), leaf))
    assert breaker.state is CLOSED
    breaker = CircuitBreaker(1, on=ExceptionGroup, ignore=Other)
    await fails(world, breaker, group(Boom(), leaf))
    assert breaker.state is OPEN


async def test_a_group_with_a_misuse_is_no_outcome(world: World) -> None:
    error = group(ArgumentMisuse("no"))
    assert await world.attempt(Fallback("instead"), Script(error).function()) is error


class Several(ExceptionGroup[Exception]):
    """A kind of groups."""


#: The settings of a Retry, and how often it calls a function that raises each of these.
REPEATED: dict[str, list[tuple[dict[str, Any], list[tuple[Exception, int]]]]] = {
    "rejections that are named": [({"on": Rejected}, [(group(CircuitOpen(), BulkheadFull()), 3)])],
    "an ignored leaf": [({"on": Exception, "ignore": Other}, [(group(Other(), Boom()), 1)])],
    "groups, if `on` names them": [
        ({"on": named}, [(group(ValueError()), 3)])
        for named in (ExceptionGroup, BaseExceptionGroup, (ExceptionGroup, KeyError))
    ],
    "groups, if `ignore` names them": [
        ({"on": ConnectionError, "ignore": named}, [(group(DOWN), 1), (DOWN, 3)])
        for named in (ExceptionGroup, (BaseExceptionGroup, Other))
    ],
    "a kind of groups": [
        ({"on": ConnectionError, "ignore": Several}, [(Several("", [DOWN]), 1), (group(DOWN), 3)]),
    ],
}


@pytest.mark.parametrize("rule", REPEATED)
async def test_a_group_is_repeated_as_on_and_ignore_say(world: World, rule: str) -> None:
    """As any other exception: `ignore` takes precedence over `on`."""
    for settings, errors in REPEATED[rule]:
        for error, calls in errors:
            script = Script(error)
            await world.attempt(Retry(3, backoff=[0], **settings), script.function())
            assert script.calls == calls, (settings, error)
