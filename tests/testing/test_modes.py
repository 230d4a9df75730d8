"""Modes for a whole process: they can be nested, and are restored."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest

from resilience import Bulkhead, CircuitBreaker, CircuitState, Context, Fallback, Policy, Retry, Timeout, backoff
from resilience.backoff import Exponential
from resilience.clock import clock as process_clock
from resilience.events import RetryScheduled
from resilience.events.dispatch import subscribers
from resilience.outcome import Failure
from resilience.testing import ascript, no_sleeping, recording, script, seeded, switched_off, virtual_time
from tests.conftest import Boom, World


def everything() -> Policy[Any]:
    retry = Retry(on=Boom, backoff=[3600])
    return Policy.wrap(Fallback("unknown"), retry, CircuitBreaker(1), Bulkhead(1), Timeout(5))


async def call(world: World, policy: Policy[Any], *steps: Any) -> Any:
    return policy.call(script(*steps)) if world.blocking else await policy.acall(ascript(*steps))


# --- no sleeping -----------------------------------------------------------------------------


async def test_retries_do_not_sleep(world: World) -> None:
    """The events still have the configured delays."""
    began = time.monotonic()
    with no_sleeping(), recording(RetryScheduled) as recorder:
        retry = Retry(on=Boom, backoff=[3600, 7200])
        assert await call(world, retry, Boom(), Boom(), "fine") == "fine"
        assert process_clock.shorten(5.0) == 0
    assert [event.delay for event in recorder.of(RetryScheduled)] == [3600, 7200]
    assert time.monotonic() - began < 5


def test_sleeps_of_the_user_are_not_skipped() -> None:
    with no_sleeping():
        began = time.monotonic()
        anyio.run(anyio.sleep, 0.02)
        assert time.monotonic() - began >= 0.015


def test_virtual_time_sleeps_inside_no_sleeping() -> None:
    """The inner block holds."""
    with no_sleeping(), virtual_time() as clock:
        Retry(on=Boom, backoff=[60]).call(script(Boom(), "fine"))
    assert clock.now() == 60


# --- switched off ----------------------------------------------------------------------------


async def test_switched_off_policies_have_no_effect(world: World) -> None:
    """The function is called once, and its error is raised unchanged."""
    pipeline = everything()
    with switched_off():
        with pytest.raises(Boom):
            await call(world, pipeline, Boom())
        assert await call(world, pipeline, "fine") == "fine"
    with no_sleeping():
        assert await call(world, pipeline, Boom(), ...) == "unknown"


async def test_a_pipeline_that_was_used_before_is_switched_off(world: World) -> None:
    """Afterwards it has the state that it had."""
    breaker = CircuitBreaker(2)
    pipeline = Fallback("unknown").wrap(breaker)

    async def once() -> Any:
        return await call(world, pipeline, Boom())

    assert await once() == "unknown"
    with switched_off():
        for _ in range(5):
            with pytest.raises(Boom):
                await once()
    assert breaker.state is CircuitState.CLOSED
    assert await once() == "unknown"
    assert breaker.state is CircuitState.OPEN


def test_every_way_of_calling_a_policy_is_switched_off() -> None:
    """Execute, call, capture, decorators and proxies."""

    class Client:
        def get(self) -> str:
            raise Boom

    fallback = Fallback("unknown")
    decorated = fallback(Client().get)
    with switched_off():
        ways: list[Callable[[], object]] = [
            lambda: fallback.execute(lambda ctx: Client().get()),
            lambda: fallback.call(Client().get),
            lambda: fallback.capture(lambda ctx: Client().get()).unwrap(),
            decorated,
            fallback.proxy(Client(), "get").get,
            lambda: asyncio.run(fallback.acall(ascript(Boom()))),
        ]
        for way in ways:
            with pytest.raises(Boom):
                way()
        ctx = Context(operation="greet")
        assert fallback.execute(lambda inner: inner.operation, ctx) == "greet"
        assert ctx.attempts == 1
    assert decorated() == "unknown"


def test_listeners_do_not_switch_policies_on() -> None:
    """Neither subscribing nor unsubscribing."""
    fallback = Fallback("unknown")
    with switched_off():
        with recording():
            assert isinstance(fallback.capture(script(Boom())), Failure)
        assert isinstance(fallback.capture(script(Boom())), Failure)


# --- randomness ------------------------------------------------------------------------------


def drawn(seed: int) -> list[float]:
    with virtual_time() as clock, seeded(seed):
        Retry(6, on=Boom, backoff=Exponential(1.0)).capture(script(Boom(), ...))
    return clock.sleeps


def test_seeded_delays_repeat() -> None:
    """The same seed gives the same delays, those of `random.Random`, and another one gives others."""
    assert drawn(1) == drawn(1) != drawn(2)
    rng = random.Random(1)
    assert drawn(1) == [rng.uniform(0, 2**n) for n in range(5)]


def test_the_rng_of_a_policy_is_not_replaced() -> None:
    with seeded(1) as source:
        before = source.getstate()
        next(Exponential(1.0).delays(random.Random(2)))
        assert source.getstate() == before


# --- each mode -------------------------------------------------------------------------------

MODES = pytest.mark.parametrize("mode", [no_sleeping, switched_off, seeded, lambda: seeded(5)])


def state() -> tuple[object, ...]:
    return process_clock.sleep, process_clock.shorten, subscribers.policies_off, backoff.SHARED_RANDOMNESS


@MODES
def test_a_mode_can_be_nested_and_is_restored(mode: Callable[[], AbstractContextManager[object]]) -> None:
    """The end of the inner block does not end the outer one; an error ends both."""
    before = state()
    with pytest.raises(Boom), mode():
        outer = state()
        assert outer != before
        with pytest.raises(Boom), mode():
            raise Boom
        assert state() == outer
        raise Boom
    assert state() == before


def test_the_inner_seed_holds() -> None:
    with seeded(1) as outer, seeded(2):
        assert backoff.SHARED_RANDOMNESS is not outer


@MODES
def test_blocks_of_one_mode_may_overlap(mode: Callable[[], AbstractContextManager[object]]) -> None:
    """As those of two tasks do. The mode ends with the last block."""
    before = state()
    first, second = mode(), mode()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert state() != before
    second.__exit__(None, None, None)
    assert state() == before
