"""Retry: what its callbacks hear, and what is closed that it throws away."""

from __future__ import annotations

import gc
import logging
from typing import Any

import anyio
import pytest

from resilience import Context, Failure, Retry, events
from resilience.backoff import Exponential
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.retries import Other, Response, RetryAfter, bad, run

# --- telling -----------------------------------------------------------------------------------


async def test_on_retry_is_called_before_each_wait_and_never_after_the_last_failure(
    world: World, clock: FakeClock
) -> None:
    """With one event that tells the delay, the attempt that failed, and what it failed with."""
    order: list[Any] = []
    errors = [Boom("a"), Boom("b"), Boom("c")]
    script = Script(*errors)
    retry = Retry(on=Boom, backoff=[1, 2], name="reader", on_retry=lambda event: order.append((event, clock.time)))
    await run(world, retry, script, Context(operation="read", properties={"tenant": 7}))
    [(one, at_one), (two, at_two)] = order
    assert (one.attempt, one.delay, one.outcome, at_one) == (1, 1, Failure(errors[0]), 1000)
    assert (two.attempt, two.delay, two.outcome, at_two) == (2, 2, Failure(errors[1]), 1001)
    assert (one.policy, one.operation, one.properties["tenant"], one.time) == ("reader", "read", 7, 1000)
    assert isinstance(one, events.RetryScheduled)


async def test_on_retry_is_not_called_for_a_wait_that_does_not_fit(world: World, clock: FakeClock) -> None:
    """There is no retry to tell of."""
    told: list[Any] = []
    await run(world, Retry(on=Boom, backoff=[9], on_retry=told.append), Script(Boom()), Context(timeout=5))
    await run(world, Retry(1, on=Boom, on_retry=told.append), Script(Boom()))
    await run(world, Retry(on=Boom, on_retry=told.append), Script(Other()))
    assert told == []


async def test_the_event_tells_the_delay_that_is_really_waited(world: World, clock: FakeClock) -> None:
    """With jitter drawn and `retry_after` taken in."""
    told: list[Any] = []
    await run(world, Retry(6, on=Boom, backoff=Exponential(1), on_retry=told.append), Script(Boom()))
    await run(world, Retry(2, on=RetryAfter, backoff=[1], on_retry=told.append), Script(RetryAfter(5)))
    assert [event.delay for event in told] == clock.sleeps
    assert clock.sleeps[-1] == 5


# --- what is thrown away is closed -------------------------------------------------------------


async def test_discarded_results_are_closed_and_the_one_that_comes_out_is_not(world: World, clock: FakeClock) -> None:
    """A connection that nobody will read goes back to its pool, once."""
    good = [Response(), Response(), Response(200)]
    await run(world, Retry(on_result=bad, backoff=[1]), Script(*good))
    assert [response.closed for response in good] == [1, 1, 0]
    last = [Response(), Response()]
    await run(world, Retry(2, on_result=bad, backoff=[1]), Script(*last))
    assert [response.closed for response in last] == [1, 0]


async def test_what_is_thrown_away_is_closed_before_the_wait(world: World, clock: FakeClock) -> None:
    """Its connection is of use to others meanwhile."""
    closed_at: list[float] = []

    class Timed(Response):
        def close(self) -> None:
            closed_at.append(clock.time)

    await run(
        world, Retry(3, on=StatusError, on_result=bad, backoff=[5]), Script(Timed(), StatusError(Timed()), Timed(200))
    )
    assert closed_at == [1000, 1005]


async def test_the_last_result_of_a_wrapped_end_is_not_closed(world: World, clock: FakeClock) -> None:
    """It is in `RetriesExhausted.last`, for whoever wants to read it."""
    responses = [Response(), Response()]
    await run(world, Retry(2, on_result=bad, backoff=[1], wrap=True), Script(*responses))
    assert [response.closed for response in responses] == [1, 0]


class StatusError(Exception):
    """An error that carries the response it is about, as httpx's and openai's do."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


@pytest.mark.parametrize("delay", [0, 1])
async def test_the_response_that_a_discarded_error_carries_is_closed(
    world: World, clock: FakeClock, delay: float
) -> None:
    """The response of the error that is raised is not."""
    responses = [Response(), Response(), Response()]
    await run(world, Retry(on=StatusError, backoff=[delay]), Script(*[StatusError(it) for it in responses]))
    assert [response.closed for response in responses] == [1, 1, 0]


async def test_an_error_that_is_not_tried_again_keeps_its_response(world: World, clock: FakeClock) -> None:
    """The caller will want to read it."""
    response = Response()
    await run(world, Retry(on=Boom), Script(StatusError(response)))
    assert response.closed == 0


class AsyncResponse:
    """A response of an asynchronous client: `aclose` has to be awaited."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def aclose(self) -> None:
        await anyio.sleep(0)
        self.closed.append("aclose")

    def close(self) -> None:
        self.closed.append("close")


async def test_aclose_is_awaited_where_there_is_one(tasks_world: World, clock: FakeClock) -> None:
    """In tasks it comes before `close`; of an error's response as well."""
    results = [AsyncResponse(), AsyncResponse(), AsyncResponse()]
    script = Script(results[0], StatusError(results[1]), results[2])
    await run(tasks_world, Retry(on=StatusError, on_result=lambda it: True, backoff=[0]), script)
    assert [it.closed for it in results] == [["aclose"], ["aclose"], []]


async def test_blocking_code_has_nobody_to_await_aclose(threads: World, clock: FakeClock) -> None:
    """There `close` is called, and `aclose` not even begun."""
    results = [AsyncResponse(), AsyncResponse()]
    await run(threads, Retry(2, on_result=lambda it: True, backoff=[0]), Script(*results))
    assert [it.closed for it in results] == [["close"], []]


class Coroutines:
    """A response whose `close` is `async def`, as aiohttp's sessions have it."""

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        await anyio.sleep(0)
        self.closed += 1


async def test_a_close_that_returns_an_awaitable_is_awaited(tasks_world: World, clock: FakeClock) -> None:
    """Clients do not agree on the name."""
    results = [Coroutines(), Coroutines()]
    await run(tasks_world, Retry(2, on_result=lambda it: True, backoff=[0]), Script(*results))
    assert [it.closed for it in results] == [1, 0]


async def test_a_close_that_returns_an_awaitable_leaves_no_warning_in_blocking_code(
    threads: World, clock: FakeClock
) -> None:
    """Nobody can await it there: it is not run, and not reported as forgotten either."""
    results = [Coroutines(), Coroutines()]
    assert await run(threads, Retry(2, on_result=lambda it: True, backoff=[0]), Script(*results)) is results[1]
    gc.collect()
    assert results[0].closed == 0


class Stubborn:
    """A response that fails to close."""

    def close(self) -> None:
        raise OSError("already gone")


async def test_a_close_that_raises_is_logged_and_changes_nothing(
    world: World, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The call goes on to its next attempt."""
    script = Script(Stubborn(), StatusError(Stubborn()), "fine")
    retry = Retry(on=StatusError, on_result=lambda it: it != "fine", backoff=[1])
    assert await run(world, retry, script) == "fine"
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert clock.sleeps == [1, 1]


def test_an_interrupt_in_a_close_is_not_swallowed(threads: World, clock: FakeClock) -> None:
    """Only an `Exception` is."""

    class Interrupted:
        def close(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Retry(on_result=lambda it: True, backoff=[0]).execute(lambda ctx: Interrupted())


@pytest.mark.parametrize("value", [0, "text", None, {"close": 1}, len], ids=repr)
async def test_what_cannot_be_closed_is_simply_dropped(world: World, clock: FakeClock, value: Any) -> None:
    """Most results are plain values."""
    assert await run(world, Retry(2, on_result=lambda it: True, backoff=[0]), Script(value)) is value


async def test_a_close_that_is_no_method_is_left_alone(world: World, clock: FakeClock) -> None:
    """A column of a table may have that name."""

    class Prices:
        close = 101.5
        aclose = None

    assert isinstance(await run(world, Retry(2, on_result=lambda it: True, backoff=[0]), Script(Prices())), Prices)
