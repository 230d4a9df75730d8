"""Retry: its events and callbacks, and the closing of discarded results and responses."""

from __future__ import annotations

import gc
import logging
from typing import Any

import anyio
import pytest

from resilience import Retry
from resilience.backoff import Exponential
from tests.conftest import Boom, FakeClock, Script, World, shown
from tests.policies.retries import Response, RetryAfter, bad, notes_of, run

# --- events ------------------------------------------------------------------------------------


async def test_the_event_carries_the_actual_delay(world: World, clock: FakeClock) -> None:
    """It includes jitter and `retry_after`."""
    scheduled: list[Any] = []
    await run(world, Retry(6, on=Boom, backoff=Exponential(1), on_retry=scheduled.append), Script(Boom()))
    await run(world, Retry(2, on=RetryAfter, backoff=[1], on_retry=scheduled.append), Script(RetryAfter(5)))
    assert [event.delay for event in scheduled] == clock.sleeps
    assert clock.sleeps[-1] == 5


async def test_no_time_is_negative_if_the_clock_is_replaced(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """As by a test that begins virtual time inside the call."""
    script = Script(Boom(), Boom(), doing=lambda ctx: clock.advance(-1000))
    error = await run(world, Retry(2, on=Boom, backoff=[1], max_elapsed=60), script)
    assert notes_of(error) == ["resilience: 2 attempts in 0 s, failed with Boom(), Boom()"]
    assert [getattr(event, "elapsed", 0) for event in heard] == [0] * len(heard)


# --- closing of discarded results --------------------------------------------------------------


async def test_discarded_results_are_closed_and_the_returned_one_is_not(world: World, clock: FakeClock) -> None:
    """Each is closed once, so that its connection returns to its pool."""
    good = [Response(), Response(), Response(200)]
    await run(world, Retry(on_result=bad, backoff=[1]), Script(*good))
    assert [response.closed for response in good] == [1, 1, 0]
    for wrap in (False, True):  # the caller may read the last one in `RetriesExhausted`, too
        last = [Response(), Response()]
        await run(world, Retry(2, on_result=bad, backoff=[1], wrap=wrap), Script(*last))
        assert [response.closed for response in last] == [1, 0]


async def test_a_discarded_result_is_closed_before_the_wait(world: World, clock: FakeClock) -> None:
    """Other calls can use its connection during the wait."""
    closed_at: list[float] = []

    class Timed(Response):
        def close(self) -> None:
            closed_at.append(clock.time)

    await run(
        world, Retry(3, on=StatusError, on_result=bad, backoff=[5]), Script(Timed(), StatusError(Timed()), Timed(200))
    )
    assert closed_at == [1000, 1005]


class StatusError(Exception):
    """An error that carries its response, like those of httpx and openai."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


@pytest.mark.parametrize("delay", [0, 1])
async def test_the_response_of_a_discarded_error_is_closed(world: World, clock: FakeClock, delay: float) -> None:
    """The response of the error that is raised is not."""
    responses = [Response(), Response(), Response()]
    await run(world, Retry(on=StatusError, backoff=[delay]), Script(*[StatusError(it) for it in responses]))
    assert [response.closed for response in responses] == [1, 1, 0]


async def test_the_response_of_an_unhandled_error_is_not_closed(world: World, clock: FakeClock) -> None:
    """The caller may read it."""
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


async def test_aclose_is_awaited_in_tasks_and_close_is_called_in_blocking_code(world: World, clock: FakeClock) -> None:
    """So it is for the response of an error."""
    results = [AsyncResponse(), AsyncResponse(), AsyncResponse()]
    script = Script(results[0], StatusError(results[1]), results[2])
    await run(world, Retry(on=StatusError, on_result=lambda it: True, backoff=[0]), script)
    way = ["close" if world.blocking else "aclose"]
    assert [it.closed for it in results] == [way, way, []]


class AsyncClose:
    """A response whose `close` is `async def`, like that of sessions of aiohttp."""

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        await anyio.sleep(0)
        self.closed += 1


async def test_a_close_that_returns_an_awaitable_is_awaited_in_tasks(world: World, clock: FakeClock) -> None:
    """Some clients name their asynchronous method `close`. In blocking code it is not run, and leaves no warning."""
    results = [AsyncClose(), AsyncClose()]
    assert await run(world, Retry(2, on_result=lambda it: True, backoff=[0]), Script(*results)) is results[1]
    gc.collect()
    assert [it.closed for it in results] == [0 if world.blocking else 1, 0]


class FailingClose:
    """A response whose `close` raises."""

    def close(self) -> None:
        raise OSError("already gone")


async def test_an_error_of_close_is_only_logged(
    world: World, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(FailingClose(), StatusError(FailingClose()), "fine")
    retry = Retry(on=StatusError, on_result=lambda it: it != "fine", backoff=[1])
    assert await run(world, retry, script) == "fine"
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert clock.sleeps == [1, 1]


def test_an_interrupt_in_close_is_raised(threads: World, clock: FakeClock) -> None:
    """Only an `Exception` is logged."""

    class Interrupted:
        def close(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Retry(on_result=lambda it: True, backoff=[0]).execute(lambda ctx: Interrupted())


class Prices:
    """A row with a column of that name."""

    close = 101.5
    aclose = None


@pytest.mark.parametrize("value", [0, "text", None, {"close": 1}, len, Prices()], ids=shown)
async def test_a_result_without_a_method_close_is_discarded(
    threads: World, clock: FakeClock, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    assert await run(threads, Retry(2, on_result=lambda it: True, backoff=[0]), Script(value)) is value
    assert caplog.records == []
