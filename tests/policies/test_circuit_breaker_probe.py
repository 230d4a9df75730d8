"""CircuitBreaker: a probe function, which runs before the first call after the open period."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from resilience import CircuitBreaker, CircuitOpen, Context, Hedge, Policy, SlowRatio, Timeout, TimeoutExceeded, events
from resilience.runtimes import lowering
from resilience.runtimes.lowering import lower
from tests.callers import in_threads
from tests.conftest import Boom, FakeClock, Script, Virtual, World
from tests.custom import Doing
from tests.functions import raising
from tests.policies.blocks import entered
from tests.policies.breakers import CLOSED, HALF_OPEN, ISOLATED, OPEN, Moves, fails, works
from tests.streams.sources import Source, streamed


def probing(world: World, *steps: Any, doing: Any = None, **settings: Any) -> tuple[CircuitBreaker, Script]:
    """Return a breaker whose probe function takes these steps, and the script of those steps."""
    script = Script(*steps, doing=doing)
    function = script.function()

    async def ping() -> Any:
        return await function()

    settings = {"trip": 1, "open_for": 10.0, **settings}
    return CircuitBreaker(probe=world.native(ping), **settings), script


async def about_to_probe(world: World, breaker: CircuitBreaker, clock: FakeClock) -> None:
    """Let the circuit open, and the open period pass."""
    await fails(world, breaker)
    clock.advance(10)


async def about_to_hang(anywhere: Virtual) -> CircuitBreaker:
    """Return a breaker whose next call runs the probe, which hangs for longer than its 2 s."""

    async def ping() -> None:
        await anywhere.sleep(100)

    breaker = CircuitBreaker(1, open_for=10, probe=anywhere.native(ping), probe_timeout=2)
    await fails(anywhere, breaker)
    await anywhere.sleep(10)
    return breaker


async def check(world: World, breaker: CircuitBreaker) -> Any:
    return breaker.check() if world.blocking else await breaker.acheck()


async def test_the_probe_runs_before_the_first_call_after_the_open_period(world: World, clock: FakeClock) -> None:
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


@pytest.mark.parametrize("step", [Boom("still down"), KeyError("other"), False], ids=repr)
async def test_a_probe_that_fails_opens_the_circuit_without_a_call(threads: World, clock: FakeClock, step: Any) -> None:
    """A result of False and an error that is not in `on` are failures, too: `on` holds for calls only."""
    breaker, probe = probing(threads, step, None, on=(Boom, ConnectionError))
    await about_to_probe(threads, breaker, clock)
    call = Script("fine")
    refused = await threads.attempt(breaker, call.function())
    assert (type(refused), refused.retry_after, call.calls) == (CircuitOpen, 10, 0)
    kind = "result" if step is False else type(step).__name__
    assert refused.last_failure.startswith(kind)
    assert (breaker.state, breaker.stats().opened) == (OPEN, 2)
    clock.advance(10)
    assert await threads.attempt(breaker, call.function()) == "fine"
    assert probe.calls == 2


async def test_a_probe_that_fails_refuses_its_call_even_without_an_open_period(world: World, clock: FakeClock) -> None:
    """Otherwise a call would probe for ever."""
    breaker, probe = probing(world, Boom("still down"), Boom("still down"), None, open_for=[0.0])
    await about_to_probe(world, breaker, clock)
    for calls in (1, 2):
        refused = await world.attempt(breaker, Script("fine").function())
        assert (type(refused), refused.retry_after, probe.calls) == (CircuitOpen, 0, calls)
    assert await world.attempt(breaker, Script("fine").function()) == "fine"


def test_a_stop_iteration_of_the_probe_is_a_failure(clock: FakeClock) -> None:
    breaker = CircuitBreaker(1, open_for=10, probe=lambda: next(iter([])))
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(10)
    with pytest.raises(CircuitOpen) as refused:
        breaker.call(int)
    assert str(refused.value.last_failure).startswith("StopIteration")


async def test_the_probe_function_counts_as_one_of_several_successful_probes(world: World, clock: FakeClock) -> None:
    breaker, probe = probing(world, None, probe_successes=2)
    await about_to_probe(world, breaker, clock)
    seen = []
    fn = Script(None, doing=lambda ctx: seen.append((breaker.state, breaker.stats().probes))).function()
    await world.execute(breaker, fn)
    assert (seen, breaker.state, probe.calls) == ([(HALF_OPEN, 1)], CLOSED, 1)
    await about_to_probe(world, breaker, clock)
    await fails(world, breaker)  # the second probe fails
    assert (breaker.state, probe.calls) == (OPEN, 2)


async def test_a_probe_that_comes_too_late_to_count_refuses_its_call(world: World, clock: FakeClock) -> None:
    """It has lost its slot. If it always took so long, as in a busy process, a call would otherwise run it for ever."""
    breaker, probe = probing(world, None, doing=lambda _: clock.advance(3 if probe.calls < 5 else 0), probe_timeout=1)
    await about_to_probe(world, breaker, clock)
    assert type(await works(world, breaker)) is CircuitOpen
    assert (probe.calls, breaker.state, breaker.stats().probes) == (1, HALF_OPEN, 0)


@pytest.mark.parametrize("outer", [[], [Hedge(5)], [Timeout(60)]], ids=str)
async def test_a_probe_is_cut_off_after_probe_timeout_and_has_failed(anywhere: Virtual, outer: list[Any]) -> None:
    """In threads it is abandoned."""
    breaker = await about_to_hang(anywhere)
    began = anywhere.now()
    refused = await works(anywhere, Policy.wrap(*outer, breaker))
    assert type(refused) is CircuitOpen
    assert anywhere.now() - began == pytest.approx(2, abs=0.01)
    assert refused.last_failure == "TimeoutExceeded: CircuitBreaker: no result within 2 s"
    assert breaker.state is OPEN
    await anywhere.sleep(100)


@pytest.mark.parametrize("outer", [[], [Hedge(5)]], ids=str)
def test_a_probe_for_which_there_is_no_worker_has_failed_and_is_not_entered(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, outer: list[Hedge]
) -> None:
    pings: list[int] = []
    breaker = CircuitBreaker(1, open_for=10, probe=lambda: pings.append(1))
    with pytest.raises(Boom):
        breaker.call(raising(Boom))
    clock.advance(10)
    monkeypatch.setattr(Timeout, "max_abandoned", 0)
    with pytest.raises(CircuitOpen) as refused:
        Policy.wrap(*outer, breaker).call(int)
    assert refused.value.last_failure is not None
    assert refused.value.last_failure.startswith("WorkersExhausted: CircuitBreaker: 0 abandoned calls")
    assert pings == []


@pytest.mark.parametrize(
    ("outer", "probe_timeout"),
    [
        ([Timeout(1)], 5),
        ([Timeout(1)], 1),
        ([Timeout(1), Hedge(5)], 5),
        ([Hedge(5), Timeout(1)], 5),
        ([Timeout(1), Hedge(5)], 1),
        ([Hedge(5), Timeout(1)], 1),
    ],
    ids=str,
)
async def test_a_probe_cut_off_by_an_outer_timeout_is_neutral(
    anywhere: Virtual, outer: list[Timeout | Hedge], probe_timeout: float
) -> None:
    """It releases its slot, and the next call runs the probe again."""
    calls = []

    async def ping() -> None:
        calls.append(anywhere.now())
        if len(calls) == 1:
            await anywhere.sleep(100)

    breaker = CircuitBreaker(1, open_for=10, probe=anywhere.native(ping), probe_timeout=probe_timeout)
    await fails(anywhere, breaker)
    await anywhere.sleep(10)
    began = anywhere.now()
    assert type(await works(anywhere, Policy.wrap(*outer, breaker))) is TimeoutExceeded
    assert anywhere.now() - began == pytest.approx(1, abs=0.01)
    assert (breaker.state, breaker.stats().probes) == (HALF_OPEN, 0)
    assert await works(anywhere, breaker) == "fine"
    assert len(calls) == 2
    await anywhere.sleep(100)


async def test_a_probe_does_not_begin_after_the_limit_of_an_outer_timeout(threads: World, clock: FakeClock) -> None:
    breaker, probe = probing(threads, None)
    await about_to_probe(threads, breaker, clock)
    assert (
        type(await works(threads, Policy.wrap(Timeout(1), Doing(lambda ctx: clock.advance(2)), breaker)))
        is TimeoutExceeded
    )
    assert (probe.calls, breaker.stats().probes) == (0, 0)


def test_one_probe_function_runs_at_a_time_although_several_probes_are_allowed(threads: World) -> None:
    """Threads that call meanwhile are refused, and no call is made before it has succeeded."""
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

    in_threads(*[call] * 8)
    assert [type(it.error) for it in refused] == [CircuitOpen] * 8
    go.set()
    first.join(5)
    assert order == ["probe", "call"]
    assert breaker.state is CLOSED


async def test_calls_of_the_probe_under_the_same_breaker_are_admitted(world: World, clock: FakeClock) -> None:
    async def ping() -> None:
        assert await works(world, breaker) == "fine"

    breaker = CircuitBreaker(1, open_for=10, probe=world.native(ping))
    await about_to_probe(world, breaker, clock)
    assert await works(world, breaker) == "fine"
    assert breaker.state is CLOSED


async def test_a_slow_probe_fails_if_slowness_trips_the_circuit(anywhere: Virtual) -> None:
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


async def test_a_manual_change_during_the_probe_is_kept(world: World, clock: FakeClock) -> None:
    breaker, _ = probing(world, None, doing=lambda _: breaker.isolate())
    await about_to_probe(world, breaker, clock)
    assert isinstance(await works(world, breaker), CircuitOpen)
    assert breaker.state is ISOLATED


async def test_a_breaker_that_only_observes_runs_the_probe_and_refuses_no_call(world: World, clock: FakeClock) -> None:
    breaker, probe = probing(world, Boom(), None, observe_only=True)
    await about_to_probe(world, breaker, clock)
    assert await works(world, breaker) == "fine"
    assert (breaker.state, probe.calls) == (OPEN, 1)


def test_a_coroutine_function_as_probe_of_a_blocking_call_is_misuse(clock: FakeClock) -> None:
    async def ping() -> None: ...

    breaker = CircuitBreaker(1, open_for=10, probe=ping)
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(10)
    with pytest.raises(TypeError, match="ping"):
        breaker.call(int)
    assert (breaker.state, breaker.stats().probes) == (HALF_OPEN, 0)


# --- check --------------------------------------------------------------------------------------


async def test_check_runs_the_probe_after_the_open_period(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """It neither counts as a refused call nor raises the error of the probe."""
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


async def test_each_check_runs_one_of_several_required_probes(world: World, clock: FakeClock) -> None:
    breaker, probe = probing(world, None, probe_successes=2)
    await about_to_probe(world, breaker, clock)
    assert await check(world, breaker) is HALF_OPEN
    assert breaker.stats().probes == 0
    assert await check(world, breaker) is CLOSED
    assert probe.calls == 2


async def test_a_check_inside_the_probe_runs_no_second_probe(world: World, clock: FakeClock) -> None:
    async def ping() -> None:
        seen.append(await check(world, breaker))

    seen: list[Any] = []
    breaker = CircuitBreaker(1, open_for=10, probe=world.native(ping))
    await about_to_probe(world, breaker, clock)
    assert await check(world, breaker) is CLOSED
    assert seen == [HALF_OPEN]


async def test_a_check_inside_a_call_runs_no_probe(world: World, clock: FakeClock) -> None:
    """Also if another probe may run beside that call."""
    breaker, probe = probing(world, None, probes=2, probe_successes=3)
    await about_to_probe(world, breaker, clock)

    async def checks(ctx: Any) -> Any:
        return await check(world, breaker)

    assert await world.execute(breaker, checks) is HALF_OPEN
    assert probe.calls == 1


async def test_two_concurrent_checks_run_one_probe(tasks_world: World, clock: FakeClock) -> None:
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


async def test_a_check_without_a_probe_function_only_returns_the_state(world: World, clock: FakeClock) -> None:
    breaker = CircuitBreaker(1, open_for=10)
    await about_to_probe(world, breaker, clock)
    assert await check(world, breaker) is OPEN


def test_a_blocking_check_in_an_event_loop_runs_the_probe_in_a_worker_thread(clock: FakeClock) -> None:
    threads = []
    breaker = CircuitBreaker(1, open_for=10, probe=lambda: threads.append(threading.current_thread()))
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(10)

    async def main() -> None:
        assert breaker.check() is CLOSED

    asyncio.run(main())
    assert threads[0] is not threading.current_thread()


# --- blocks, streams and races --------------------------------------------------------------------


async def in_a_block(world: World, breaker: CircuitBreaker) -> str:
    async with entered(world, breaker.guard()):
        return "fine"


async def in_a_stream(world: World, policy: Policy[Any]) -> str:
    return "".join(await streamed(world, policy, Source(world, ["fi", "ne"])).all())


async def directly(world: World, breaker: CircuitBreaker) -> Any:
    """As tests of a single policy do; the runtime is that of the calling code."""
    return await breaker.around(Script("fine").function(), Context())


FORMS: dict[str, Callable[[World, CircuitBreaker], Awaitable[Any]]] = {
    "block": in_a_block,
    "stream": in_a_stream,
    "limited stream": lambda world, breaker: in_a_stream(world, Timeout(1.0).wrap(breaker)),
    "stream with a long limit": lambda world, breaker: in_a_stream(world, Timeout(50.0).wrap(breaker)),
    "race": lambda world, breaker: world.execute(Hedge(5.0).wrap(breaker), Script("fine").function()),
    "direct": directly,
}


@pytest.mark.parametrize("form", FORMS)
async def test_the_probe_runs_before_the_first_call_in_any_form(world: World, clock: FakeClock, form: str) -> None:
    breaker, probe = probing(world, TimeoutExceeded("its own"), None, probe_timeout=5)
    await about_to_probe(world, breaker, clock)
    with pytest.raises(CircuitOpen):
        await FORMS[form](world, breaker)
    clock.advance(10)
    assert await FORMS[form](world, breaker) == "fine"
    assert (probe.calls, breaker.state) == (2, CLOSED)


@pytest.mark.parametrize(
    ("outer", "seconds", "expected", "state"),
    [([], 2, CircuitOpen, OPEN), ([Timeout(60)], 2, CircuitOpen, OPEN), ([Timeout(1)], 1, TimeoutExceeded, HALF_OPEN)],
    ids=str,
)
@pytest.mark.parametrize("anywhere", ["threads", "asyncio", "trio"], indirect=True)  # a simulation has no streams
async def test_a_probe_of_a_stream_is_cut_off(
    anywhere: Virtual, outer: list[Timeout], seconds: int, expected: type[Exception], state: object
) -> None:
    """By its own limit, or by an outer timeout, which it says nothing about."""
    breaker = await about_to_hang(anywhere)
    began = anywhere.now()
    with pytest.raises(expected):
        await in_a_stream(anywhere, Policy.wrap(*outer, breaker))
    assert anywhere.now() - began == pytest.approx(seconds, abs=0.01)
    assert (breaker.state, breaker.stats().probes) == (state, 0)
    await anywhere.sleep(100)


# --- descriptions ----------------------------------------------------------------------------------


def test_a_breaker_with_a_probe_can_be_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "enabled", True)
    assert lower(CircuitBreaker()) is not None
    assert lower(CircuitBreaker(probe=int)) is not None


def test_repr_and_description_name_the_probe() -> None:
    def ping() -> None: ...

    breaker = CircuitBreaker(probe=ping)
    assert breaker.describe().endswith("ping probes first")
    assert "probe=<function" in repr(breaker)
