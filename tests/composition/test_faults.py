"""Nothing is lost if user code, clocks, signals or event loops misbehave."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    BulkheadFull,
    Cache,
    CircuitBreaker,
    CircuitState,
    Context,
    DeadlineExceeded,
    FailureRatio,
    Fallback,
    Hedge,
    Policy,
    Rate,
    RateLimiter,
    Rejected,
    Retry,
    Timeout,
    TimeoutExceeded,
    deadline,
    events,
)
from resilience.clock import clock as process_clock
from resilience.policy import Call
from resilience.work import Once
from tests.conftest import Boom, Virtual, World
from tests.custom import Driven, Passing

SHORT, LONG = 0.02, 60.0


class Broken(Exception):
    """Raised by the misbehaving part."""


def broken(*args: object, **kwargs: object) -> Any:
    raise Broken("user code")


def probing(**settings: Any) -> CircuitBreaker:
    """Return a breaker whose next call is a probe."""
    breaker = CircuitBreaker(1, open_for=[0.0], **settings)
    breaker.isolate()
    breaker.close()
    with pytest.raises(ZeroDivisionError), breaker.guard():
        1 / 0  # noqa: B018
    return breaker


def held(*policies: Policy[Any]) -> list[Any]:
    """Return the statistics of those policies that still hold permits or probes."""
    bulkheads = [policy.stats() for policy in policies if isinstance(policy, Bulkhead)]
    breakers = [policy.stats() for policy in policies if isinstance(policy, CircuitBreaker)]
    holding: list[Any] = [stats for stats in bulkheads if stats.in_flight or stats.queued]
    return holding + [stats for stats in breakers if stats.probes]


async def failing(ctx: Context | None = None) -> None:
    raise Boom("no")


async def fine(ctx: Context | None = None) -> str:
    return "fine"


# --- user code -------------------------------------------------------------------------------

RAISING: dict[str, Callable[[], Policy[Any]]] = {
    "on of a retry": lambda: Retry(on=broken),
    "ignore of a retry": lambda: Retry(on=Boom, ignore=broken),
    "backoff of a retry": lambda: Retry(on=Boom, backoff=broken),
    "delay of a retry": lambda: Retry(on=Boom, backoff=lambda: (broken() for _ in range(3))),
    "rng of a retry": lambda: Retry(on=Boom, rng=type("Dice", (), {"uniform": broken})()),
    "on of a breaker": lambda: CircuitBreaker(on=broken),
    "open_for of a breaker": lambda: CircuitBreaker(1, open_for=lambda: (delay or broken() for delay in (1.0, 0))),
    "on of a fallback": lambda: Fallback(on=broken),
    "handler of a fallback": lambda: Fallback(handler=broken),
    "a policy before its call": lambda: Before(),
    "a policy after its call": lambda: After(),
}


class Before(Policy[Any]):
    async def around(self, call: Call[Any], ctx: Context) -> Any:
        broken()


class After(Policy[Any]):
    async def around(self, call: Call[Any], ctx: Context) -> Any:
        try:
            return await call(ctx)
        finally:
            broken()


@pytest.mark.parametrize("what", RAISING)
async def test_an_exception_of_user_code_comes_out_and_nothing_is_held(world: World, what: str) -> None:
    """At any place of a pipeline: permits and probes outside and inside are released."""
    around, inside, outer = Bulkhead(1), Bulkhead(1), probing(ignore=Broken)
    pipeline = Policy.wrap(outer, around, RAISING[what](), inside, Timeout(LONG))
    error = await world.attempt(pipeline, failing)
    assert type(error) is Broken
    assert held(outer, around, inside) == []
    assert outer.state is CircuitState.HALF_OPEN


RAISING_AFTER_A_RESULT: dict[str, Callable[[], Policy[Any]]] = {
    "retry": lambda: Retry(on_result=broken),
    "backoff of a retry": lambda: Retry(on_result=bool, backoff=lambda: (broken() for _ in range(3))),
    "fallback": lambda: Fallback(on_result=broken),
    "breaker": lambda: CircuitBreaker(on_result=broken),
    "breaker, a probe": lambda: probing(on_result=broken),
    "throttle": lambda: AdaptiveThrottle(on_result=broken),
    "hedge, alone": lambda: Hedge(on_result=broken),
    "update of a limiter": lambda: RateLimiter(10, told=broken),
    "units of a limiter": lambda: RateLimiter(Rate(10, actual=broken)),
    "an algorithm": lambda: AdaptiveLimit(type("Own", (), {"update": broken, "reset": print})(), min_samples=1),
    "a cache": lambda: Cache(broken, key=lambda ctx: 1),
    "serializer": lambda: Once({}, key=lambda ctx: 1),
    "hedge": lambda: Hedge(0.1, on_result=broken),
}


@pytest.mark.parametrize("what", RAISING_AFTER_A_RESULT)
async def test_the_result_is_closed_if_user_code_raises_afterwards(anywhere: Virtual, what: str) -> None:
    """The caller gets the exception instead, and the connection returns to its pool."""
    closed = []

    async def fetch(ctx: Context) -> object:
        return type("Response", (), {"close": lambda self: closed.append(self)})()

    error = await anywhere.attempt(RAISING_AFTER_A_RESULT[what](), fetch)
    assert (type(error), len(closed)) == (TypeError if what == "serializer" else Broken, 1)


async def test_a_blocked_listener_does_not_block_calls_or_transitions(world: World) -> None:
    """Transitions in the meantime are reported in order when it returns."""
    inside, release = threading.Event(), threading.Event()
    states: list[CircuitState] = []

    def block(event: events.CircuitChanged) -> None:
        states.append(event.new)
        inside.set()
        assert release.wait(20)

    breaker = CircuitBreaker(1, on_transition=block)
    blocked = threading.Thread(target=breaker.isolate, daemon=True)
    blocked.start()
    assert inside.wait(20)
    breaker.close()
    assert await world.execute(breaker, fine) == "fine"
    breaker.isolate()
    assert states == [CircuitState.ISOLATED]
    release.set()
    blocked.join(20)
    assert states == [CircuitState.ISOLATED, CircuitState.CLOSED, CircuitState.ISOLATED]


# --- clocks ----------------------------------------------------------------------------------


@pytest.fixture
def replace_clock() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Return a function that replaces `now` of the process clock."""

    def replace(now: Callable[[], Any]) -> None:
        process_clock.now = now

    yield replace
    process_clock.restore()


def raising_at(nth: int) -> Callable[[], float]:
    """Return the `now` of a clock whose nth reading raises."""
    readings = itertools.count(1)

    def now() -> float:
        if next(readings) == nth:
            raise Broken("the clock")
        return time.monotonic()

    return now


@pytest.mark.parametrize("nth", range(1, 14))
async def test_a_clock_that_raises_once_loses_nothing(world: World, replace_clock: Any, nth: int) -> None:
    """Whichever reading raises: the error comes out, permits and probes are released, the next call works."""
    bulkhead, breaker = Bulkhead(1, queue=1, max_wait=1.0), probing()
    pipeline = Policy.wrap(Timeout(LONG), Retry(2, on=Boom, backoff=[0]), breaker, bulkhead, Timeout(LONG / 2))

    async def main() -> tuple[Any, Any]:
        replace_clock(raising_at(nth))
        first = await world.attempt(pipeline, failing)
        process_clock.restore()
        breaker.close()
        return first, await world.attempt(pipeline, fine)

    first, second = await main()
    assert type(first) in (Broken, Boom)
    assert second == "fine"
    assert held(bulkhead, breaker) == []


@pytest.mark.parametrize("nth", [1, 2])
async def test_a_clock_that_raises_in_a_queue_leaves_no_place_in_it(world: World, replace_clock: Any, nth: int) -> None:
    """An abandoned place would take the next permit with it."""
    bulkhead = Bulkhead(1, queue=1, max_wait=1.0)
    with bulkhead.slot():
        replace_clock(raising_at(nth))
        error = await world.attempt(bulkhead, fine)
        process_clock.restore()
    assert type(error) is Broken
    assert held(bulkhead) == []
    assert await world.execute(bulkhead, fine) == "fine"


async def hanging(ctx: Context) -> None:
    await asyncio.sleep(LONG)


async def test_a_clock_that_raises_when_an_alarm_rings_loses_no_timer(in_asyncio: World, replace_clock: Any) -> None:
    """Neither the due one nor later ones; the error goes to the exception handler of the loop."""
    limited = Timeout(SHORT)
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))
    calls = [asyncio.create_task(limited.acapture(hanging))]
    await asyncio.sleep(SHORT / 2)
    calls.append(asyncio.create_task(limited.acapture(hanging)))
    await asyncio.sleep(0)
    replace_clock(raising_at(1))
    await asyncio.wait(calls, timeout=10.0)
    assert [type(call.result().error) for call in calls if call.done()] == [TimeoutExceeded, TimeoutExceeded]
    assert [type(error) for error in errors] == [Broken]


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_clock_that_raises_leaves_no_timer_behind(in_asyncio: World, replace_clock: Any, nth: int) -> None:
    """The call has ended, so nothing later in its task is cut off, although other calls have the same timeout."""
    limited = Timeout(SHORT)
    replace_clock(raising_at(nth))
    await limited.acapture(fine)
    process_clock.restore()
    other = asyncio.create_task(limited.acapture(hanging))
    await asyncio.sleep(3 * SHORT)
    assert type((await other).error) is TimeoutExceeded


ODD_CLOCKS: dict[str, Callable[[], Callable[[], float]]] = {
    "goes backwards": lambda: (1e6 - n for n in itertools.count()).__next__,
    "jumps by days": lambda: (86_400.0 * n for n in itertools.count()).__next__,
    "is no number": lambda: lambda: math.nan,
}


@pytest.mark.filterwarnings("ignore:.*it ignores its deadline:RuntimeWarning")
@pytest.mark.parametrize("how", ODD_CLOCKS)
async def test_a_misbehaving_clock_makes_no_call_hang(world: World, replace_clock: Any, how: str) -> None:
    """Nothing is left behind; the outcome is the failure or an error of this library."""
    breaker = CircuitBreaker(FailureRatio(0.5, min_calls=2, window=1.0), open_for=0.1)
    bulkhead = Bulkhead(1, queue=1, max_wait=0.01)
    pipelines: list[Policy[Any]] = [
        Retry(3, on=Boom, backoff=[0.001], max_elapsed=1.0),
        Timeout(0.5, cooperative=True),
        breaker,
        bulkhead,
    ]
    replace_clock(ODD_CLOCKS[how]())
    errors = [await world.attempt(policy, failing, Context(timeout=5)) for policy in pipelines for _ in range(4)]
    process_clock.restore()
    assert {type(error) for error in errors} <= {Boom, *_OURS}
    assert held(breaker, bulkhead) == []


_OURS = {DeadlineExceeded, TimeoutExceeded, BulkheadFull} | set(Rejected.__subclasses__())


# --- depth -----------------------------------------------------------------------------------


KINDS: list[Callable[[], Policy[Any]]] = [
    lambda: Retry(2, on=KeyError, backoff=[0]),
    lambda: Bulkhead(1),
    lambda: CircuitBreaker(3),
    lambda: Fallback(on=KeyError),
    lambda: Timeout(LONG),
    Passing,
    Driven,
]


async def test_two_hundred_nested_policies_work(world: World) -> None:
    """All kinds in turn around one call, which succeeds and fails as if there were none."""
    policies = [KINDS[number % len(KINDS)]() for number in range(200)]
    pipeline = Policy.wrap(*policies)
    assert await world.execute(pipeline, fine) == "fine"
    assert type(await world.attempt(pipeline, failing)) is Boom
    assert held(*policies) == []


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_too_deep_a_pipeline_raises_recursion_error(world: World) -> None:
    """The permits that were taken are released."""
    policies: list[Policy[Any]] = [Bulkhead(1) if number % 2 else Passing() for number in range(5000)]
    error = await world.attempt(Policy.wrap(*policies), fine)
    assert type(error) is RecursionError
    assert held(*policies) == []


# --- signals and loops -----------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no such timers on this platform")
def test_a_signal_handler_may_use_the_policies_it_interrupts() -> None:
    """Between any two instructions of the same thread, even while that thread holds the lock of the same policy."""
    bulkhead, breaker, timeout = Bulkhead(2, queue=2, max_wait=0.001), CircuitBreaker(2, open_for=[0.0]), Timeout(LONG)
    interrupted = 0

    def use() -> None:
        for act in (
            lambda: bulkhead.call(int),
            lambda: bulkhead.resize(2),
            lambda: breaker.call(broken),
            breaker.isolate,
            breaker.close,
            lambda: timeout.call(int),
            events.subscribe([].append, events.TimedOut),
            lambda: Policy.wrap(breaker, bulkhead, timeout).call(int),
        ):
            try:
                act()
            except (Broken, Rejected):
                pass

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        use()
        interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0.001)  # the next one: not inside this one, however slow the machine is

    before = signal.signal(signal.SIGALRM, interrupt)
    # CPython 3.11 collects garbage inside of `ContextVar.set`. If Python code runs then (hypothesis has a callback in
    # each collection), the handler may run, set the variable, and leave freed memory to the interrupted call.
    gc.disable()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        end = time.monotonic() + 10
        while interrupted < 200 and time.monotonic() < end:
            use()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # the handler would set the timer again
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert interrupted > 0
    assert held(bulkhead, breaker) == []


def all_waits(bulkhead: Bulkhead) -> list[Callable[[], Awaitable[Any]]]:
    """Return coroutine functions that wait for a delay, a timer, a place in a queue, and a deadline."""
    calls = itertools.count(1)

    async def second_try() -> str:
        if next(calls) == 1:
            raise Boom
        return "fine"

    async def until_cut_off() -> None:
        async with deadline(0.02):
            await asyncio.sleep(LONG)

    async def queue() -> Any:
        slot = bulkhead.slot()
        slot.__enter__()
        thread = threading.Timer(0.02, slot.__exit__, (None, None, None))
        thread.start()
        try:
            return await Timeout(LONG).wrap(bulkhead).acall(fine)
        finally:
            thread.join()

    return [
        lambda: Retry(on=Boom, backoff=[0.01]).acall(second_try),
        lambda: Timeout(0.02).acall(asyncio.sleep, LONG),
        until_cut_off,
        queue,
    ]


@pytest.mark.parametrize("kind", ["debug", "uvloop", "uvloop, debug"])
def test_other_event_loops_give_the_same_results(kind: str) -> None:
    """asyncio's debug mode, which checks the calling thread, and uvloop, which is written in C."""
    factory = pytest.importorskip("uvloop").new_event_loop if "uvloop" in kind else None
    bulkhead = Bulkhead(1, queue=1)

    async def main() -> list[Any]:
        return await asyncio.gather(*(wait() for wait in all_waits(bulkhead)), return_exceptions=True)

    with asyncio.Runner(debug="debug" in kind, loop_factory=factory) as runner:
        outcomes = runner.run(main())
    assert [outcomes[0], outcomes[3]] == ["fine", "fine"]
    assert [type(outcomes[1]), type(outcomes[2])] == [TimeoutExceeded, DeadlineExceeded]
    assert held(bulkhead) == []
