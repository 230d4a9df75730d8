"""CircuitBreaker: a function of the user's is the first probe, before any call is made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from resilience import (
    CircuitBreaker,
    CircuitOpen,
    ConsecutiveFailures,
    Context,
    Hedge,
    SlowRatio,
    Timeout,
    TimeoutExceeded,
    events,
)
from resilience.runtimes import lowering
from resilience.runtimes.lowering import lower
from resilience.state.circuit import Circuit, Closed, Probe
from tests.callers import run_all
from tests.conftest import Boom, FakeClock, Script, Virtual, World
from tests.policies.breakers import CLOSED, HALF_OPEN, ISOLATED, OPEN, Moves, fails, works


def probing(world: World, *steps: Any, **settings: Any) -> tuple[CircuitBreaker, Script]:
    """Return a breaker whose probe takes these steps, and what has become of that."""
    script = Script(*steps)
    function = script.function()

    async def ping() -> Any:
        return await function()

    settings = {"trip": 1, "open_for": 10.0, **settings}
    return CircuitBreaker(probe=world.native(ping), **settings), script


async def check(world: World, breaker: CircuitBreaker) -> Any:
    return breaker.check() if world.blocking else await breaker.acheck()


async def test_it_runs_before_the_call_that_finds_the_open_period_over(world: World, clock: FakeClock) -> None:
    moves = Moves()
    breaker, probe = probing(world, None, on_transition=moves)
    await works(world, breaker)
    await fails(world, breaker)
    assert isinstance(await works(world, breaker), CircuitOpen)
    assert probe.calls == 0
    clock.advance(10)
    assert await works(world, breaker) == "fine"
    assert (probe.calls, moves.states) == (1, [OPEN, HALF_OPEN, CLOSED])
    await works(world, breaker)
    assert probe.calls == 1


@pytest.mark.parametrize("step", [Boom("still down"), False], ids=repr)
async def test_a_probe_that_fails_opens_the_circuit_again_and_no_call_is_made(
    world: World, clock: FakeClock, step: Any
) -> None:
    """Whatever `on` says: it is no call."""
    breaker, probe = probing(world, step, None, on=(Boom, ConnectionError))
    await fails(world, breaker)
    clock.advance(10)
    call = Script("fine")
    refused = await world.attempt(breaker, call.function())
    assert (type(refused), refused.retry_after, call.calls) == (CircuitOpen, 10, 0)
    kind = "result" if step is False else type(step).__name__
    assert refused.last_failure.startswith(kind)
    assert (breaker.state, breaker.stats().opened) == (OPEN, 2)
    clock.advance(10)
    assert await world.attempt(breaker, call.function()) == "fine"
    assert probe.calls == 2


def test_a_stop_iteration_is_a_failure_like_any_other(clock: FakeClock) -> None:
    breaker = CircuitBreaker(1, open_for=10, probe=lambda: next(iter([])))
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(10)
    with pytest.raises(CircuitOpen) as refused:
        breaker.call(int)
    assert str(refused.value.last_failure).startswith("StopIteration")


async def test_it_counts_as_one_of_several_and_the_call_that_follows_is_the_second(
    world: World, clock: FakeClock
) -> None:
    breaker, probe = probing(world, None, probe_successes=2)
    await fails(world, breaker)
    clock.advance(10)
    seen = []

    async def fn(ctx: Any) -> None:
        seen.append((breaker.state, breaker.stats().probes))

    await world.execute(breaker, fn)
    assert (seen, breaker.state, probe.calls) == ([(HALF_OPEN, 1)], CLOSED, 1)
    await fails(world, breaker)
    clock.advance(10)
    await fails(world, breaker)  # the second probe fails
    assert (breaker.state, probe.calls) == (OPEN, 2)


async def test_one_that_takes_too_long_is_cut_off(anywhere: Virtual) -> None:
    """And has failed; in threads it is walked away from."""

    async def ping() -> None:
        await anywhere.sleep(100)

    breaker = CircuitBreaker(1, open_for=10, probe=anywhere.native(ping), probe_timeout=2)
    await fails(anywhere, breaker)
    await anywhere.sleep(10)
    began = anywhere.now()
    refused = await works(anywhere, breaker)
    assert type(refused) is CircuitOpen
    assert anywhere.now() - began == pytest.approx(2, abs=0.01)
    assert refused.last_failure == "TimeoutExceeded: no result within 2 s"
    assert breaker.state is OPEN
    await anywhere.sleep(100)


async def test_a_timeout_around_cuts_it_off_and_it_has_not_failed(anywhere: Virtual) -> None:
    """The slot is free again: the next call runs the probe."""
    calls = []

    async def ping() -> None:
        calls.append(anywhere.now())
        if len(calls) == 1:
            await anywhere.sleep(100)

    breaker = CircuitBreaker(1, open_for=10, probe=anywhere.native(ping), probe_timeout=5)
    await fails(anywhere, breaker)
    await anywhere.sleep(10)
    assert type(await works(anywhere, Timeout(1).wrap(breaker))) is TimeoutExceeded
    assert (breaker.state, breaker.stats().probes) == (HALF_OPEN, 0)
    assert await works(anywhere, breaker) == "fine"
    assert len(calls) == 2
    await anywhere.sleep(100)


async def test_cancelled_it_gives_its_slot_back(tasks_world: World, clock: FakeClock) -> None:
    async def ping() -> None:
        calls.append(1)
        if len(calls) == 1:
            await anyio.sleep(10)

    calls: list[int] = []
    breaker = CircuitBreaker(1, open_for=10, probe=ping)
    await fails(tasks_world, breaker)
    clock.advance(10)
    with anyio.move_on_after(0.01):
        await works(tasks_world, breaker)
    assert (breaker.state, breaker.stats().probes) == (HALF_OPEN, 0)
    assert await works(tasks_world, breaker) == "fine"
    assert len(calls) == 2


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupted_it_gives_its_slot_back(threads: World, clock: FakeClock, interrupt: type[BaseException]) -> None:
    breaker, _ = probing(threads, interrupt(), None)
    with pytest.raises(Boom):
        breaker.call(threads.native(Script(Boom()).function()))
    clock.advance(10)
    with pytest.raises(interrupt):
        breaker.call(str)
    assert breaker.stats().probes == 0
    assert breaker.call(str) == ""


def test_one_probe_at_a_time_however_many_may_be_out(threads: World) -> None:
    """Threads that come while it runs are refused, and none of their calls is made before it has succeeded."""
    go, inside, order = threading.Event(), threading.Semaphore(0), []

    def ping() -> None:
        order.append("probe")
        inside.release()
        go.wait(5)

    breaker = CircuitBreaker(1, open_for=0.001, probes=5, probe=ping)
    breaker.capture(lambda ctx: 1 / 0)
    go_on = threading.Event()
    go_on.wait(0.002)
    first = threading.Thread(target=breaker.call, args=(lambda: order.append("call"),))
    first.start()
    inside.acquire(timeout=5)
    refused: list[Any] = []

    def call() -> None:
        refused.append(breaker.capture(lambda ctx: order.append("too early")))

    run_all([threading.Thread(target=call) for _ in range(8)])
    assert [type(it.error) for it in refused] == [CircuitOpen] * 8
    go.set()
    first.join(5)
    assert order == ["probe", "call"]
    assert breaker.state is CLOSED


async def test_what_it_calls_under_the_same_breaker_goes_through(world: World, clock: FakeClock) -> None:
    async def ping() -> None:
        await works(world, breaker)

    breaker = CircuitBreaker(1, open_for=10, probe=world.native(ping))
    await fails(world, breaker)
    clock.advance(10)
    assert await works(world, breaker) == "fine"
    assert breaker.state is CLOSED


async def test_a_slow_probe_is_a_failure_where_slowness_trips(anywhere: Virtual) -> None:
    async def ping() -> None:
        await anywhere.sleep(3)

    trip = SlowRatio(1, slower_than=2, min_calls=1)
    breaker = CircuitBreaker(trip, open_for=10, probe=anywhere.native(ping))

    async def slow(ctx: Any) -> None:
        await anywhere.sleep(3)

    await anywhere.execute(breaker, slow)
    assert breaker.state is OPEN
    await anywhere.sleep(10)
    assert type(await works(anywhere, breaker)) is CircuitOpen


async def test_moved_by_a_hand_meanwhile_the_circuit_stays_as_it_was_put(world: World, clock: FakeClock) -> None:
    async def ping() -> None:
        breaker.isolate()

    breaker = CircuitBreaker(1, open_for=10, probe=world.native(ping))
    await fails(world, breaker)
    clock.advance(10)
    assert isinstance(await works(world, breaker), CircuitOpen)
    assert breaker.state is ISOLATED


async def test_one_that_only_observes_probes_and_refuses_nothing(world: World, clock: FakeClock) -> None:
    breaker, probe = probing(world, Boom(), None, observe_only=True)
    await fails(world, breaker)
    clock.advance(10)
    assert await works(world, breaker) == "fine"
    assert (breaker.state, probe.calls) == (OPEN, 1)


def test_a_coroutine_function_in_threads_is_a_misuse(clock: FakeClock) -> None:
    async def ping() -> None: ...

    breaker = CircuitBreaker(1, open_for=10, probe=ping)
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(10)
    with pytest.raises(TypeError, match="ping"):
        breaker.call(int)
    assert (breaker.state, breaker.stats().probes) == (HALF_OPEN, 0)


# --- in a loop beside the calls -----------------------------------------------------------------


async def test_check_probes_once_the_open_period_is_over(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """It is no call: nothing is refused, and what the probe raises does not come out."""
    breaker, probe = probing(world, Boom(), None)
    assert await check(world, breaker) is CLOSED
    await fails(world, breaker)
    assert await check(world, breaker) is OPEN
    assert probe.calls == 0
    clock.advance(10)
    assert await check(world, breaker) is OPEN
    assert await check(world, breaker) is OPEN
    assert probe.calls == 1
    clock.advance(10)
    assert await check(world, breaker) is CLOSED
    assert probe.calls == 2
    breaker.isolate()
    assert await check(world, breaker) is ISOLATED
    assert breaker.stats().rejected == 0
    assert not [it for it in heard if isinstance(it, events.CallRejected)]


async def test_checks_are_as_many_probes_as_it_takes(world: World, clock: FakeClock) -> None:
    breaker, probe = probing(world, None, probe_successes=2)
    await fails(world, breaker)
    clock.advance(10)
    assert await check(world, breaker) is HALF_OPEN
    assert breaker.stats().probes == 0
    assert await check(world, breaker) is CLOSED
    assert probe.calls == 2


async def test_a_check_while_another_probe_is_out_does_nothing(world: World, clock: FakeClock) -> None:
    async def ping() -> None:
        seen.append(await check(world, breaker))  # inside, it is part of it

    seen: list[Any] = []
    breaker = CircuitBreaker(1, open_for=10, probe=world.native(ping))
    await fails(world, breaker)
    clock.advance(10)
    assert await check(world, breaker) is CLOSED
    assert seen == [HALF_OPEN]


async def test_two_checks_at_once_are_one_probe(tasks_world: World, clock: FakeClock) -> None:
    async def ping() -> None:
        calls.append(1)
        await anyio.sleep(0.005)

    calls: list[int] = []
    breaker = CircuitBreaker(1, open_for=10, probe=ping)
    await fails(tasks_world, breaker)
    clock.advance(10)
    async with anyio.create_task_group() as group:
        group.start_soon(breaker.acheck)
        group.start_soon(breaker.acheck)
    assert (calls, breaker.state) == ([1], CLOSED)


async def test_without_a_probe_a_check_only_looks(world: World, clock: FakeClock) -> None:
    breaker = CircuitBreaker(1, open_for=10)
    await fails(world, breaker)
    clock.advance(10)
    assert await check(world, breaker) is OPEN


def test_a_blocking_check_in_an_event_loop_runs_it_as_blocking_code(clock: FakeClock) -> None:
    threads = []
    breaker = CircuitBreaker(1, open_for=10, probe=lambda: threads.append(threading.current_thread()))
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(10)

    async def main() -> None:
        assert breaker.check() is CLOSED

    asyncio.run(main())
    assert threads[0] is not threading.current_thread()


# --- around a block, in a stream, in a race -------------------------------------------------------


async def test_a_block_that_finds_the_open_period_over_runs_it_first(world: World, clock: FakeClock) -> None:
    breaker, probe = probing(world, Boom(), None)
    await fails(world, breaker)

    async def enter() -> str:
        if world.blocking:
            with breaker.guard():
                return "entered"
        async with breaker.guard():
            return "entered"

    clock.advance(10)
    with pytest.raises(CircuitOpen):
        await enter()
    clock.advance(10)
    assert await enter() == "entered"
    assert (probe.calls, breaker.state) == (2, CLOSED)


@pytest.mark.parametrize("limit", [None, 1.0, 50.0])
def test_in_a_stream_too(limit: float | None, clock: FakeClock) -> None:
    """Within the limit around it, or its own."""
    calls: list[int] = []

    def ping() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise TimeoutExceeded("its own")

    breaker = CircuitBreaker(1, open_for=10, probe=ping, probe_timeout=5)
    breaker.capture(lambda ctx: 1 / 0)
    policy = breaker if limit is None else Timeout(limit).wrap(breaker)
    source: Callable[[], Any] = policy.streaming()(lambda: iter([1, 2]))
    clock.advance(10)
    with pytest.raises(CircuitOpen):
        list(source())
    clock.advance(10)
    assert list(source()) == [1, 2]


def test_a_limit_around_a_stream_cuts_it_off() -> None:
    go = threading.Event()
    breaker = CircuitBreaker(1, open_for=0.001, probe=lambda: go.wait(5), probe_timeout=5)
    breaker.capture(lambda ctx: 1 / 0)
    threading.Event().wait(0.002)
    source: Callable[[], Any] = Timeout(0.02).wrap(breaker).streaming()(lambda: iter([1, 2]))
    with pytest.raises(TimeoutExceeded):
        list(source())
    go.set()
    assert (breaker.state, breaker.stats().probes) == (HALF_OPEN, 0)


async def test_in_an_attempt_of_a_race(world: World, clock: FakeClock) -> None:
    breaker, probe = probing(world, None)
    await fails(world, breaker)
    clock.advance(10)
    assert await works(world, Hedge(5.0).wrap(breaker)) == "fine"
    assert (probe.calls, breaker.state) == (1, CLOSED)


# --- what it costs, and how it is shown ------------------------------------------------------------


async def test_in_a_call_that_is_no_execution(world: World, clock: FakeClock) -> None:
    """As a test of one policy makes it: the runtime is that of the code that asks."""
    breaker, probe = probing(world, None)
    await fails(world, breaker)
    clock.advance(10)
    assert await breaker.around(Script("fine").function(), Context()) == "fine"
    assert (probe.calls, breaker.state) == (1, CLOSED)


def test_a_breaker_is_still_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "enabled", True)
    assert lower(CircuitBreaker()) is not None
    assert lower(CircuitBreaker(probe=int)) is not None


def test_how_it_is_shown() -> None:
    def ping() -> None: ...

    breaker = CircuitBreaker(probe=ping)
    assert breaker.describe().endswith("ping probes first")
    assert "probe=<function" in repr(breaker)


# --- what it stands on -------------------------------------------------------------------------------


async def test_a_function_is_cut_off_by_the_runtime_of_whatever_code_asks(world: World) -> None:
    async def hang() -> None:
        await world.hang()

    runtime = Context().runtime
    with pytest.raises(TimeoutExceeded, match=r"no result within 0\.01 s") as error:
        await runtime.run_within(0.01, world.native(hang), "ping")
    assert (error.value.policy, error.value.timeout) == ("ping", 0.01)
    assert await runtime.run_within(5, world.native(Script("fine").function()), "ping") == "fine"


def test_a_probe_that_has_lost_its_slot_does_not_get_it_back() -> None:
    circuit = Circuit(ConsecutiveFailures(1), 10.0, 1, 1, 5.0, checks_first=True)
    closed = circuit.period
    assert isinstance(closed, Closed)
    circuit.record(closed, "Boom: no", 0.0, 0.0)
    probe, _ = circuit.admit(10.0)
    assert isinstance(probe, Probe)
    circuit.release(probe)
    circuit.keep_slot(probe, 100.0)
    assert not probe.period.probes
