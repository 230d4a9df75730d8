"""CircuitBreaker: calls are refused when too many have failed, and a few probes find out when it is over.

Time stands still except where a test moves it. The machine by itself is tested in `tests/state`, the breaker
under contention in `tests/contention`; here is what its users see, in each of the worlds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import anyio
import pytest

from resilience import (
    BulkheadFull,
    CircuitBreaker,
    CircuitIsolated,
    CircuitOpen,
    CircuitState,
    ConsecutiveFailures,
    Context,
    DeadlineExceeded,
    FailureRatio,
    Policy,
    Rejected,
    SlowRatio,
    Timeout,
    TimeoutExceeded,
    WorkersExhausted,
    backoff,
    events,
)
from tests.conftest import Boom, FakeClock, Script, World, no_collector
from tests.contention.beside import beside, until

CLOSED, OPEN, HALF_OPEN, ISOLATED = CircuitState


class Other(Exception):
    """An error that a breaker under test is not told to handle."""


async def fails(world: World, breaker: Policy[Any], error: BaseException | None = None, times: int = 1) -> Any:
    """Make calls that fail; return what the last one came out with."""
    for _ in range(times):
        result = await world.attempt(breaker, Script(error or Boom("no")).function())
    return result


async def works(world: World, breaker: Policy[Any], times: int = 1) -> Any:
    """Make calls that answer; return what the last one came out with."""
    for _ in range(times):
        result = await world.attempt(breaker, Script("fine").function())
    return result


class Moves:
    """An `on_transition` callback that remembers where the circuit went."""

    def __init__(self) -> None:
        self.events: list[events.CircuitChanged] = []

    def __call__(self, event: events.CircuitChanged) -> None:
        self.events.append(event)

    @property
    def states(self) -> list[CircuitState]:
        return [event.new for event in self.events]


# --- when it opens ---------------------------------------------------------------------------


async def test_five_failures_in_a_row_open_it_by_default(world: World) -> None:
    """Four do not, the fifth does, and the sixth call is not made."""
    breaker = CircuitBreaker()
    script = Script(Boom("no"))

    for _ in range(4):
        await world.attempt(breaker, script.function())
        assert breaker.state is CLOSED
    await world.attempt(breaker, script.function())
    assert breaker.state is OPEN
    assert isinstance(await world.attempt(breaker, script.function()), CircuitOpen)
    assert script.calls == 5


async def test_a_success_ends_the_row(world: World) -> None:
    """Four failures, a success, four failures: still closed."""
    breaker = CircuitBreaker()

    for _ in range(3):
        await fails(world, breaker, times=4)
        assert await works(world, breaker) == "fine"
    assert breaker.state is CLOSED
    await fails(world, breaker, times=5)
    assert breaker.state is OPEN


@pytest.mark.parametrize("trip", [3, ConsecutiveFailures(3)])
async def test_an_int_is_so_many_failures_in_a_row(world: World, trip: Any) -> None:
    """`CircuitBreaker(3)` and `CircuitBreaker(ConsecutiveFailures(3))` are the same."""
    breaker = CircuitBreaker(trip)

    await fails(world, breaker, times=2)
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


async def test_a_failure_ratio_over_time_forgets(world: World, clock: FakeClock) -> None:
    """Half of at least four calls within ten seconds: older ones do not count."""
    breaker = CircuitBreaker(FailureRatio(0.5, min_calls=4, window=10.0))

    await fails(world, breaker, times=3)
    clock.advance(10.0)
    await fails(world, breaker)
    await works(world, breaker, times=2)
    assert breaker.state is CLOSED  # one failure of three
    await fails(world, breaker)
    assert breaker.state is OPEN  # two of four


async def test_a_failure_ratio_over_the_last_calls(world: World) -> None:
    """The last four calls, of whatever age."""
    breaker = CircuitBreaker(FailureRatio(0.75, min_calls=2, last=4))

    await works(world, breaker, times=4)
    await fails(world, breaker, times=2)
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


async def test_the_result_that_completes_min_calls_may_be_a_success(world: World) -> None:
    """Thresholds are looked at after every result; what it tells is the failure before that."""
    breaker = CircuitBreaker(FailureRatio(0.5, min_calls=3, last=4))

    await fails(world, breaker, Boom("first"))
    await fails(world, breaker, Boom("second"))
    await works(world, breaker)
    assert breaker.state is OPEN
    assert (await works(world, breaker)).last_failure == "Boom: second"


async def test_slow_calls_open_it(world: World, clock: FakeClock) -> None:
    """Half of at least two calls that took a second or more; slow failures count as slow, fast ones do not."""

    async def takes(seconds: float, error: Exception | None = None) -> None:
        async def fn(ctx: Context) -> str:
            clock.advance(seconds)
            if error is not None:
                raise error
            return "fine"

        await world.attempt(breaker, fn)

    breaker = CircuitBreaker(SlowRatio(0.5, slower_than=1.0, min_calls=2))
    await takes(0.99)
    await takes(0.5, Boom("fast"))
    await takes(0.99)
    assert breaker.state is CLOSED
    await takes(1.0)
    await takes(7.0, Boom("slow"))
    assert breaker.state is CLOSED  # two of five
    await takes(1.0)
    assert breaker.state is OPEN  # three of six


async def test_either_condition_opens_it(world: World, clock: FakeClock) -> None:
    """`a | b` trips on either."""

    async def slow(ctx: Context) -> str:
        clock.advance(2.0)
        return "fine"

    def built() -> CircuitBreaker:
        return CircuitBreaker(ConsecutiveFailures(3) | SlowRatio(1.0, slower_than=timedelta(seconds=2), min_calls=2))

    by_failures, by_slowness = built(), built()
    await fails(world, by_failures, times=3)
    assert by_failures.state is OPEN
    await world.attempt(by_slowness, slow)
    await world.attempt(by_slowness, slow)
    assert by_slowness.state is OPEN


async def test_the_time_that_counts_is_that_of_the_call_alone(world: World, clock: FakeClock) -> None:
    """What passes between two calls makes neither of them slow."""
    breaker = CircuitBreaker(SlowRatio(0.1, slower_than=1.0, min_calls=1))

    for _ in range(5):
        await works(world, breaker)
        clock.advance(5.0)
    assert breaker.state is CLOSED


# --- what counts -----------------------------------------------------------------------------


async def test_what_on_does_not_name_is_a_success(world: World) -> None:
    """The dependency has answered: a row of failures ends."""
    breaker = CircuitBreaker(2, on=Boom)
    await fails(world, breaker)
    error = Other("an answer")
    assert await fails(world, breaker, error) is error
    await fails(world, breaker)
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


@pytest.mark.parametrize("ignore", [Other, (Other, KeyError), lambda error: isinstance(error, Other)])
async def test_an_ignored_exception_is_neither_a_failure_nor_a_success(world: World, ignore: Any) -> None:
    """Nothing is recorded: it does not open, and it does not end the row."""
    breaker = CircuitBreaker(3, ignore=ignore)

    await fails(world, breaker, times=2)
    error = Other("ignored")
    assert await fails(world, breaker, error, times=9) is error
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


async def test_an_ignored_call_is_not_in_a_ratio(world: World) -> None:
    """Nothing recorded is nothing in the window, neither as a call nor as a failure."""
    breaker = CircuitBreaker(FailureRatio(1.0, min_calls=3, last=3), ignore=Other)

    await fails(world, breaker, times=2)
    await fails(world, breaker, Other("no"), times=5)
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


OWN = [
    BulkheadFull("no room"),
    CircuitOpen("another one"),
    WorkersExhausted("none left"),
    Rejected("no"),
    DeadlineExceeded("over"),
]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("on", [Exception, lambda error: True, (Boom, TimeoutError)], ids=["all", "predicate", "types"])
async def test_what_says_nothing_about_the_dependency_is_neutral(world: World, error: Exception, on: Any) -> None:
    """`Rejected` and `DeadlineExceeded` do not count unless they are named, and do not end a row either."""
    breaker = CircuitBreaker(2, on=on)

    await fails(world, breaker)
    assert await fails(world, breaker, error, times=5) is error
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


@pytest.mark.parametrize("error", [TimeoutExceeded("late"), TimeoutError("mine"), ConnectionError("lost")])
async def test_a_timeout_is_a_failure(world: World, error: Exception) -> None:
    """A limit that was exceeded says something about the dependency."""
    breaker = CircuitBreaker(1)

    await fails(world, breaker, error)
    assert breaker.state is OPEN


async def test_on_result_makes_an_answer_a_failure(world: World) -> None:
    """The answer comes out as it is, and counts as a failure; others count as successes."""
    breaker = CircuitBreaker(2, on_result=lambda status: status >= 500)

    async def answer(status: int) -> Any:
        return await world.attempt(breaker, Script(status).function())

    assert await answer(503) == 503
    assert await answer(200) == 200
    assert await answer(503) == 503
    assert breaker.state is CLOSED
    assert await answer(500) == 500
    assert breaker.state is OPEN
    refused = await answer(200)
    assert isinstance(refused, CircuitOpen)
    assert refused.last_failure == "result: int"


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError()], ids=lambda it: repr(it)
)
@pytest.mark.parametrize("on", [BaseException, lambda error: True], ids=["type", "predicate"])
def test_only_an_exception_is_an_outcome(threads: World, clock: FakeClock, raised: BaseException, on: Any) -> None:
    """An interrupt does not count, does not end a row, gives a probe's slot back, and comes out as it is."""
    breaker = CircuitBreaker(2, on=on)

    def interrupt(ctx: Context) -> None:
        raise raised

    def refuse(ctx: Context) -> None:
        raise Boom("no")

    def interrupted(times: int) -> None:
        for _ in range(times):
            with pytest.raises(type(raised)) as caught:
                breaker.execute(interrupt)
            assert caught.value is raised

    breaker.capture(refuse)
    interrupted(5)
    assert breaker.state is CLOSED
    breaker.capture(refuse)
    assert breaker.state is OPEN
    clock.advance(30.0)
    interrupted(3)  # three probes, one after another
    assert breaker.state is HALF_OPEN
    assert breaker.execute(lambda ctx: "fine") == "fine"
    assert breaker.state is CLOSED


async def test_a_cancelled_call_does_not_count(tasks_world: World) -> None:
    """However often callers lose patience, the dependency has not failed."""
    breaker = CircuitBreaker(1, on=BaseException)

    for _ in range(3):
        with anyio.move_on_after(0.001) as scope:
            await breaker.aexecute(lambda ctx: anyio.sleep(10))
        assert scope.cancelled_caught
    assert breaker.state is CLOSED


def raising(error: Exception) -> Callable[[object], bool]:
    def predicate(value: object) -> bool:
        raise error

    return predicate


@pytest.mark.parametrize("where", ["on", "ignore", "on_result"])
async def test_what_a_predicate_raises_comes_out_and_nothing_is_recorded(
    world: World, clock: FakeClock, where: str
) -> None:
    """Predicates decide. One that cannot leaves the row as it was, and gives a probe's slot back."""
    broken = ZeroDivisionError("a bug in the predicate")
    switch = [False]

    def predicate(value: object) -> bool:
        if switch[0]:
            raise broken
        return where != "ignore" and not (where == "on_result" and value == "fine")

    breaker = CircuitBreaker(2, **{where: predicate})  # type: ignore[arg-type]
    bad: Any = "not good" if where == "on_result" else Boom("no")

    async def call() -> Any:
        return await world.attempt(breaker, Script(bad).function())

    await call()
    switch[0] = True
    for _ in range(3):
        error = await call()
        assert error is broken
    assert breaker.state is CLOSED
    switch[0] = False
    await call()
    assert breaker.state is OPEN
    clock.advance(30.0)
    switch[0] = True
    for _ in range(3):
        assert await call() is broken  # a probe each: the slot is free again
    assert breaker.state is HALF_OPEN
    assert breaker.stats().probes == 0


# --- open ------------------------------------------------------------------------------------


async def test_an_open_circuit_refuses_and_says_why(world: World, clock: FakeClock) -> None:
    """`CircuitOpen` carries when to come back, the state, the failure as text, and who refused."""
    breaker = CircuitBreaker(1, open_for=12.0, name="inventory")
    script = Script("fine")

    await fails(world, breaker, Boom("connection refused"))
    clock.advance(4.5)
    error = await world.attempt(breaker, script.function())
    assert type(error) is CircuitOpen
    assert isinstance(error, Rejected)
    assert error.retry_after == pytest.approx(7.5)
    assert error.state is OPEN
    assert error.last_failure == "Boom: connection refused"
    assert error.policy == "inventory"
    assert script.calls == 0


async def test_the_first_call_after_the_open_period_is_a_probe(world: World, clock: FakeClock) -> None:
    """At the very end of the period, not a moment earlier."""
    breaker = CircuitBreaker(1, open_for=timedelta(seconds=8))

    await fails(world, breaker)
    clock.advance(7.999)
    assert isinstance(await works(world, breaker), CircuitOpen)
    clock.advance(0.001)
    assert await works(world, breaker) == "fine"


async def test_it_stays_open_for_thirty_seconds_by_default(world: World, clock: FakeClock) -> None:
    """Long enough for most restarts, short enough not to be noticed by a human."""
    breaker = CircuitBreaker(1)

    await fails(world, breaker)
    assert breaker.stats().retry_after == pytest.approx(30.0)
    clock.advance(29.9)
    assert isinstance(await works(world, breaker), CircuitOpen)
    clock.advance(0.1)
    assert await works(world, breaker) == "fine"


async def test_time_alone_does_not_change_the_state(world: World, clock: FakeClock) -> None:
    """`.state` changes when a call or a hand moves it: a reading moves nothing."""
    breaker = CircuitBreaker(1, open_for=5.0)

    await fails(world, breaker)
    clock.advance(500.0)
    assert breaker.state is OPEN
    assert breaker.stats().state is OPEN
    assert breaker.stats().retry_after == 0.0


async def test_open_periods_grow_with_a_backoff_and_start_again_after_a_close(world: World, clock: FakeClock) -> None:
    """Each re-opening takes the next delay; the last one of a list repeats; a close starts the list again."""
    breaker = CircuitBreaker(1, open_for=[5.0, 10.0, 20.0])

    async def lasts() -> float:
        await fails(world, breaker)
        seconds = breaker.stats().retry_after
        assert seconds is not None
        clock.advance(seconds)
        return seconds

    assert [await lasts() for _ in range(4)] == pytest.approx([5.0, 10.0, 20.0, 20.0])
    await works(world, breaker)
    assert breaker.state is CLOSED
    assert [await lasts() for _ in range(2)] == pytest.approx([5.0, 10.0])
    breaker.close()
    assert await lasts() == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("open_for", "periods"),
    [
        (backoff.Exponential(1.0, cap=6.0, jitter="none"), [1.0, 2.0, 4.0, 6.0, 6.0]),
        (backoff.Linear(2.0, jitter="none"), [2.0, 4.0, 6.0]),
        (backoff.Constant(7.0), [7.0, 7.0]),
        (lambda: iter([3.0, 1.0]), [3.0, 1.0, 1.0]),
        ([timedelta(seconds=2), 9], [2.0, 9.0, 9.0]),
        (4, [4.0, 4.0]),
    ],
)
def test_any_backoff_will_do(threads: World, clock: FakeClock, open_for: Any, periods: list[float]) -> None:
    """An object of `resilience.backoff`, a sequence, or a callable that returns an iterable."""
    breaker = CircuitBreaker(1, open_for=open_for)
    seen = []
    for _ in periods:
        breaker.capture(lambda ctx: 1 / 0)
        seen.append(breaker.stats().retry_after or 0.0)
        clock.advance(seen[-1])
    assert seen == pytest.approx(periods)


def test_two_breakers_do_not_share_a_schedule(threads: World, clock: FakeClock) -> None:
    """A backoff is a description: each breaker grows by itself."""
    schedule = backoff.Exponential(1.0, jitter="none")
    one, other = CircuitBreaker(1, open_for=schedule), CircuitBreaker(1, open_for=schedule)
    for _ in range(3):
        one.capture(lambda ctx: 1 / 0)
        clock.advance(100.0)
    other.capture(lambda ctx: 1 / 0)
    assert other.stats().retry_after == pytest.approx(1.0)


def test_a_users_backoff_runs_outside_the_lock() -> None:
    """While it computes a delay, other threads use the breaker."""
    free: list[bool] = []

    def periods() -> Iterator[float]:
        yield 5.0
        while True:
            thread = threading.Thread(target=lambda: breaker.stats(), daemon=True)
            thread.start()
            thread.join(5.0)
            free.append(not thread.is_alive())
            yield 5.0

    breaker = CircuitBreaker(1, open_for=periods)
    breaker.capture(lambda ctx: 1 / 0)
    assert free == [True]


def test_periods_are_drawn_in_the_order_of_the_transitions() -> None:
    """A hand closes the circuit while the next period is computed: the next opening is a first one all the same."""
    computing, go_on = threading.Event(), threading.Event()

    def periods() -> Iterator[float]:
        yield 5.0
        computing.set()
        go_on.wait(10)
        yield 10.0

    breaker = CircuitBreaker(1, open_for=periods)
    thread = threading.Thread(target=lambda: breaker.capture(lambda ctx: 1 / 0), daemon=True)
    thread.start()
    assert computing.wait(10)
    breaker.close()
    go_on.set()
    thread.join(10)
    assert breaker.state is CLOSED
    breaker.capture(lambda ctx: 1 / 0)
    assert breaker.stats().retry_after == pytest.approx(5.0, abs=0.5)


def test_a_backoff_that_raises_is_heard_and_leaves_the_breaker_whole(threads: World, clock: FakeClock) -> None:
    """What a backoff raises comes out; the circuit is open all the same, for as long as the last time."""
    moves = Moves()

    def periods() -> Iterator[float]:
        yield 5.0
        raise ZeroDivisionError("a bug in the backoff")

    breaker = CircuitBreaker(1, open_for=periods, on_transition=moves)
    with pytest.raises(ZeroDivisionError, match="in the backoff"):
        breaker.execute(lambda ctx: {}["no"])
    assert breaker.state is OPEN
    assert moves.states == [OPEN]
    clock.advance(5.0)
    breaker.capture(lambda ctx: 1 / 0)
    assert breaker.stats().retry_after == pytest.approx(5.0)
    clock.advance(5.0)
    assert breaker.execute(lambda ctx: "fine") == "fine"
    assert moves.states == [OPEN, HALF_OPEN, OPEN, HALF_OPEN, CLOSED]


def test_each_refusal_is_an_exception_of_its_own(threads: World) -> None:
    """One shared exception would grow a traceback with every refusal."""
    breaker = CircuitBreaker(1)
    breaker.capture(lambda ctx: 1 / 0)
    errors: list[CircuitOpen] = []
    for _ in range(20):
        with pytest.raises(CircuitOpen) as caught:
            breaker.execute(lambda ctx: None)
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 20
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors}) == 1


def test_an_open_circuit_keeps_no_failure_alive(threads: World) -> None:
    """The failure is kept as text: its frames, and what they hold, are free."""

    class Payload:
        pass

    kept: list[weakref.ref[Payload]] = []

    def fail(ctx: Context) -> None:
        payload = Payload()
        kept.append(weakref.ref(payload))
        raise Boom("no")

    breaker = CircuitBreaker(1)
    with no_collector():
        breaker.capture(fail)
        assert breaker.state is OPEN
        assert kept[0]() is None


def test_a_failure_without_a_message_is_told_all_the_same(threads: World, clock: FakeClock) -> None:
    """An exception whose `__str__` raises, and one with a message as long as a book."""

    class Silent(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    breaker = CircuitBreaker(1)

    def fail(error: Exception) -> str:
        breaker.capture(lambda ctx: Script(error).function()(ctx).send(None))
        assert breaker.state is OPEN
        text = breaker.stats().last_failure
        assert text is not None
        breaker.close()
        return text

    assert fail(Silent()).startswith("Silent")
    assert fail(Boom("x" * 100_000)) == "Boom: " + "x" * 200


def test_refusals_pickle(threads: World) -> None:
    """They cross process boundaries with everything they carry."""
    breaker = CircuitBreaker(1, name="inventory")
    breaker.capture(lambda ctx: 1 / 0)
    for error in (breaker.capture(lambda ctx: None).error, _isolated(breaker)):  # type: ignore[union-attr]
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert vars(again) == vars(error)
        assert str(again) == str(error)


def _isolated(breaker: CircuitBreaker) -> Exception:
    breaker.isolate()
    return breaker.capture(lambda ctx: None).error  # type: ignore[union-attr]


# --- half-open -------------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [1, 3])
async def test_so_many_probes_at_a_time(world: World, clock: FakeClock, probes: int) -> None:
    """One more is refused, and says that the circuit is half-open; a slot that comes back is given again."""
    breaker = CircuitBreaker(1, open_for=5.0, probes=probes, probe_successes=9)

    await fails(world, breaker, Boom("down"))
    clock.advance(5.0)
    async with beside(world) as group:
        calls = [await group.inside(breaker) for _ in range(probes)]
        assert breaker.stats().probes == probes
        refused = await works(world, breaker)
        assert type(refused) is CircuitOpen
        assert refused.state is HALF_OPEN
        assert refused.retry_after is None
        assert refused.last_failure == "Boom: down"
        calls[0].let_go()
        await calls[0].result()
        assert await works(world, breaker) == "fine"


@pytest.mark.parametrize(("probes", "successes"), [(1, 1), (1, 3), (3, 2), (2, 5)])
async def test_enough_successes_close_it(world: World, clock: FakeClock, probes: int, successes: int) -> None:
    """One after another or side by side, `probe_successes` of them."""
    breaker = CircuitBreaker(1, open_for=5.0, probes=probes, probe_successes=successes)

    await fails(world, breaker)
    clock.advance(5.0)
    for number in range(1, successes + 1):
        assert await works(world, breaker) == "fine"
        assert breaker.state is (CLOSED if number == successes else HALF_OPEN)


async def test_one_failure_opens_it_again(world: World, clock: FakeClock) -> None:
    """However many probes have succeeded, and whatever the ones still out will say."""
    breaker = CircuitBreaker(5, open_for=5.0, probes=2, probe_successes=3)

    await fails(world, breaker, times=5)
    clock.advance(5.0)
    await works(world, breaker, times=2)
    async with beside(world) as group:
        slow = await group.inside(breaker)
        await fails(world, breaker, Boom("again"))
        assert breaker.state is OPEN
        assert breaker.stats().last_failure == "Boom: again"
        slow.let_go()
        assert await slow.result() == "fine"
        assert breaker.state is OPEN


async def test_an_answer_that_is_no_failure_is_a_success_of_the_probe(world: World, clock: FakeClock) -> None:
    """An exception that `on` does not name says that the dependency is there."""
    breaker = CircuitBreaker(1, open_for=5.0, on=Boom)

    await fails(world, breaker)
    clock.advance(5.0)
    await fails(world, breaker, Other("404"))
    assert breaker.state is CLOSED


async def test_a_bad_answer_of_a_probe_opens_it_again(world: World, clock: FakeClock) -> None:
    """`on_result` counts for probes as for everybody."""
    breaker = CircuitBreaker(1, open_for=5.0, on_result=lambda value: value != "fine")

    await fails(world, breaker)
    clock.advance(5.0)
    assert await world.attempt(breaker, Script("worse").function()) == "worse"
    assert breaker.state is OPEN
    clock.advance(5.0)
    await works(world, breaker)
    assert breaker.state is CLOSED


@pytest.mark.parametrize("slowness_trips", [True, False])
async def test_a_slow_probe_opens_it_where_slowness_trips(world: World, clock: FakeClock, slowness_trips: bool) -> None:
    """A probe that took two seconds is a failure to who counts slow calls, and a success to who does not."""
    trip = ConsecutiveFailures(1)
    breaker = CircuitBreaker(
        trip | SlowRatio(0.5, slower_than=2.0) if slowness_trips else trip,
        open_for=5.0,
    )

    async def slow(ctx: Context) -> str:
        clock.advance(2.0)
        return "fine"

    await fails(world, breaker)
    clock.advance(5.0)
    assert await world.attempt(breaker, slow) == "fine"
    assert breaker.state is (OPEN if slowness_trips else CLOSED)


@pytest.mark.parametrize(
    ("open_for", "probe_timeout", "patience"),
    [(5.0, None, 30.0), (40.0, None, 40.0), (5.0, 2.0, 2.0), (5.0, timedelta(seconds=90), 90.0)],
)
@pytest.mark.parametrize("answer", ["fine", Boom("late")], ids=["success", "failure"])
async def test_a_probe_that_does_not_come_back_loses_its_slot(
    world: World, clock: FakeClock, open_for: float, probe_timeout: Any, patience: float, answer: Any
) -> None:
    """After `probe_timeout` somebody else may try; what the lost one says then moves nothing."""
    breaker = CircuitBreaker(1, open_for=open_for, probe_timeout=probe_timeout, probe_successes=2)

    await fails(world, breaker)
    clock.advance(open_for)
    async with beside(world) as group:
        lost = await group.inside(breaker, answer)
        clock.advance(patience - 0.01)
        assert isinstance(await works(world, breaker), CircuitOpen)
        clock.advance(0.01)
        assert await works(world, breaker) == "fine"
        assert breaker.state is HALF_OPEN
        lost.let_go()
        await lost.result()
        assert breaker.state is HALF_OPEN
        await works(world, breaker)
        assert breaker.state is CLOSED


async def test_a_lost_probe_moves_nothing_though_nobody_took_its_slot(world: World, clock: FakeClock) -> None:
    """Late is late, whether or not anybody has asked meanwhile."""
    breaker = CircuitBreaker(1, open_for=5.0, probe_timeout=2.0)

    await fails(world, breaker)
    clock.advance(5.0)
    async with beside(world) as group:
        lost = await group.inside(breaker)
        clock.advance(2.0)
        lost.let_go()
        assert await lost.result() == "fine"
        assert breaker.state is HALF_OPEN


async def test_a_lost_probe_does_not_take_the_slot_of_another(world: World, clock: FakeClock) -> None:
    """When it comes back at last, the one that has its slot keeps it: never more than one probe at a time."""
    breaker = CircuitBreaker(1, open_for=5.0, probe_timeout=2.0)

    await fails(world, breaker)
    clock.advance(5.0)
    async with beside(world) as group:
        lost = await group.inside(breaker)
        clock.advance(2.0)
        await group.inside(breaker)
        lost.let_go()
        await lost.result()
        assert breaker.stats().probes == 1
        assert isinstance(await works(world, breaker), CircuitOpen)


async def test_an_ignored_probe_gives_its_slot_back(world: World, clock: FakeClock) -> None:
    """Neutral says nothing: the circuit stays half-open, and the next call is a probe at once."""
    breaker = CircuitBreaker(1, open_for=5.0, ignore=Other)

    await fails(world, breaker)
    clock.advance(5.0)
    await fails(world, breaker, Other("ignored"), times=3)
    assert breaker.state is HALF_OPEN
    await works(world, breaker)
    assert breaker.state is CLOSED


@pytest.mark.parametrize("error", [BulkheadFull("no room"), DeadlineExceeded("over")])
async def test_a_probe_that_was_not_even_made_gives_its_slot_back(
    world: World, clock: FakeClock, error: Exception
) -> None:
    """A full bulkhead further in neither closes nor opens."""
    breaker = CircuitBreaker(1, open_for=5.0)

    await fails(world, breaker)
    clock.advance(5.0)
    await fails(world, breaker, error, times=3)
    assert breaker.state is HALF_OPEN
    await works(world, breaker)
    assert breaker.state is CLOSED


async def test_a_cancelled_probe_gives_its_slot_back(tasks_world: World, clock: FakeClock) -> None:
    """The caller lost patience; the next one may find out."""
    breaker = CircuitBreaker(1, open_for=5.0)

    await fails(tasks_world, breaker)
    clock.advance(5.0)
    async with beside(tasks_world) as group:
        for _ in range(3):
            probe = await group.inside(breaker)
            assert isinstance(await works(tasks_world, breaker), CircuitOpen)
            probe.cancel()
            await probe.result()
            assert breaker.stats().probes == 0
        assert await works(tasks_world, breaker) == "fine"
        assert breaker.state is CLOSED


def test_a_probe_that_is_thrown_away_gives_its_slot_back(clock: FakeClock) -> None:
    """A coroutine that nobody finishes is closed by the collector, and with it the probe is over."""
    breaker = CircuitBreaker(1, open_for=5.0)
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(5.0)

    class Forever:
        def __await__(self) -> Iterator[None]:
            yield

    coroutine = breaker.aexecute(lambda ctx: Forever())
    coroutine.send(None)  # type: ignore[attr-defined]
    assert breaker.stats().probes == 1
    del coroutine
    gc.collect()
    assert breaker.stats().probes == 0
    assert breaker.execute(lambda ctx: "fine") == "fine"


# --- epochs ----------------------------------------------------------------------------------


async def test_a_success_from_before_the_opening_does_not_close(world: World, clock: FakeClock) -> None:
    """It began while the circuit was closed, and comes back while it is half-open: it says nothing about now."""
    breaker = CircuitBreaker(1, open_for=5.0)

    async with beside(world) as group:
        old = await group.inside(breaker)
        await fails(world, breaker)
        clock.advance(5.0)
        probe = await group.inside(breaker)
        old.let_go()
        assert await old.result() == "fine"
        assert breaker.state is HALF_OPEN
        probe.let_go()
        await probe.result()
        assert breaker.state is CLOSED


async def test_a_success_while_it_is_open_does_not_close(world: World, clock: FakeClock) -> None:
    """Calls that were under way when it opened come back, well or not: it stays open for its time."""
    breaker = CircuitBreaker(1, open_for=5.0)

    async with beside(world) as group:
        good, bad = await group.inside(breaker), await group.inside(breaker, Boom("too"))
        await fails(world, breaker, Boom("first"))
        clock.advance(3.0)
        for call in (good, bad):
            call.let_go()
            await call.result()
        assert breaker.state is OPEN
        assert breaker.stats().retry_after == pytest.approx(2.0)
        assert breaker.stats().last_failure == "Boom: first"


async def test_a_failure_from_before_the_opening_does_not_open_again(world: World, clock: FakeClock) -> None:
    """The outage is over and the circuit closed; a failure from the outage is old news."""
    breaker = CircuitBreaker(1, open_for=5.0)

    async with beside(world) as group:
        old = [await group.inside(breaker, Boom("old")) for _ in range(2)]
        await fails(world, breaker)
        clock.advance(5.0)
        probe = await group.inside(breaker)
        old[0].let_go()
        await old[0].result()
        assert breaker.state is HALF_OPEN
        probe.let_go()
        await probe.result()
        old[1].let_go()
        await old[1].result()
        assert breaker.state is CLOSED


async def test_a_probe_of_an_earlier_half_open_period_moves_nothing(world: World, clock: FakeClock) -> None:
    """Half-open, open, half-open again: its success does not close, and it takes nobody's slot."""
    breaker = CircuitBreaker(1, open_for=5.0, probes=2, probe_successes=2)

    await fails(world, breaker)
    clock.advance(5.0)
    async with beside(world) as group:
        early = await group.inside(breaker)
        await fails(world, breaker)
        clock.advance(5.0)
        await works(world, breaker)
        early.let_go()
        await early.result()
        assert breaker.state is HALF_OPEN
        assert breaker.stats().probes == 0
        await works(world, breaker)
        assert breaker.state is CLOSED


async def test_a_close_by_hand_begins_a_new_epoch(world: World) -> None:
    """Failures of calls that were under way do not count in the fresh start."""
    breaker = CircuitBreaker(2)

    async with beside(world) as group:
        old = [await group.inside(breaker, Boom("old")) for _ in range(3)]
        breaker.close()
        for call in old:
            call.let_go()
            await call.result()
        assert breaker.state is CLOSED
        await fails(world, breaker)
        assert breaker.state is CLOSED
        await fails(world, breaker)
        assert breaker.state is OPEN


# --- by hand ---------------------------------------------------------------------------------


async def test_an_isolated_circuit_refuses_until_a_hand_closes_it(world: World, clock: FakeClock) -> None:
    """No time is long enough, and nobody can say when to come back."""
    breaker = CircuitBreaker(name="inventory")
    script = Script("fine")

    breaker.isolate()
    assert breaker.state is ISOLATED
    clock.advance(1e6)
    error = await world.attempt(breaker, script.function())
    assert breaker.state is ISOLATED
    breaker.close()
    assert await world.attempt(breaker, script.function()) == "fine"
    assert type(error) is CircuitIsolated
    assert isinstance(error, CircuitOpen)
    assert (error.retry_after, error.state, error.policy) == (None, ISOLATED, "inventory")
    assert script.calls == 1


async def test_results_of_calls_under_way_do_not_move_an_isolated_circuit(world: World, clock: FakeClock) -> None:
    """Neither a success of a probe nor a failure."""
    breaker = CircuitBreaker(1, open_for=5.0, probes=2)

    await fails(world, breaker)
    clock.advance(5.0)
    async with beside(world) as group:
        calls = [await group.inside(breaker, answer) for answer in ("fine", Boom("no"))]
        breaker.isolate()
        for call in calls:
            call.let_go()
            await call.result()
        assert breaker.state is ISOLATED


@pytest.mark.parametrize("state", CircuitState)
def test_close_closes_from_every_state(threads: World, clock: FakeClock, state: CircuitState) -> None:
    """And counting starts from zero."""
    breaker = CircuitBreaker(2, open_for=5.0, probe_successes=2)
    _bring_to(breaker, clock, state)
    breaker.close()
    assert breaker.state is CLOSED
    assert breaker.stats().last_failure is None
    breaker.capture(lambda ctx: 1 / 0)
    assert breaker.state is CLOSED
    breaker.capture(lambda ctx: 1 / 0)
    assert breaker.state is OPEN


@pytest.mark.parametrize("state", CircuitState)
def test_isolate_isolates_from_every_state(threads: World, clock: FakeClock, state: CircuitState) -> None:
    """Twice is as good as once."""
    moves = Moves()
    breaker = CircuitBreaker(2, open_for=5.0, probe_successes=2, on_transition=moves)
    _bring_to(breaker, clock, state)
    breaker.isolate()
    breaker.isolate()
    assert breaker.state is ISOLATED
    assert moves.states.count(ISOLATED) == 1


def _bring_to(breaker: CircuitBreaker, clock: FakeClock, state: CircuitState) -> None:
    if state is ISOLATED:
        breaker.isolate()
    elif state is CLOSED:
        breaker.capture(lambda ctx: 1 / 0)
    else:
        for _ in range(2):
            breaker.capture(lambda ctx: 1 / 0)
        if state is HALF_OPEN:
            clock.advance(5.0)
            breaker.execute(lambda ctx: "fine")
    assert breaker.state is state


async def test_stats_tell_what_the_breaker_knows(world: World, clock: FakeClock) -> None:
    """State, when to come back, the failure as text, probes that are out, how often it opened and refused."""
    breaker = CircuitBreaker(1, open_for=5.0)

    def facts() -> tuple[Any, ...]:
        it = breaker.stats()
        return it.state, it.retry_after, it.last_failure, it.probes, it.opened, it.rejected

    assert facts() == (CLOSED, None, None, 0, 0, 0)
    await fails(world, breaker)
    assert facts() == (OPEN, pytest.approx(5.0), "Boom: no", 0, 1, 0)
    await works(world, breaker, times=3)
    assert facts() == (OPEN, pytest.approx(5.0), "Boom: no", 0, 1, 3)
    clock.advance(5.0)
    async with beside(world) as group:
        probe = await group.inside(breaker, Boom("again"))
        assert facts() == (HALF_OPEN, None, "Boom: no", 1, 1, 3)
        await works(world, breaker)
        assert facts() == (HALF_OPEN, None, "Boom: no", 1, 1, 4)
        probe.let_go()
        await probe.result()
    assert facts() == (OPEN, pytest.approx(5.0), "Boom: again", 0, 2, 4)
    breaker.isolate()
    assert facts() == (ISOLATED, None, None, 0, 2, 4)
    breaker.close()
    assert facts() == (CLOSED, None, None, 0, 2, 4)


# --- guard: a block --------------------------------------------------------------------------


class Block:
    """`with breaker.guard():` in threads, `async with` in tasks, around something that answers or raises."""

    def __init__(self, world: World, breaker: CircuitBreaker) -> None:
        self._world = world
        self._breaker = breaker
        self.entered = 0

    async def __call__(self, answer: Any = "fine") -> Any:
        """Run the block and return what came out of it, as a value."""
        try:
            if self._world.blocking:
                with self._breaker.guard():
                    return self._inside(answer)
            async with self._breaker.guard():
                await anyio.lowlevel.checkpoint()
                return self._inside(answer)
        except Exception as error:
            return error

    def _inside(self, answer: Any) -> Any:
        self.entered += 1
        if isinstance(answer, BaseException):
            raise answer
        return answer


async def test_a_guarded_block_counts_and_really_refuses(world: World, clock: FakeClock) -> None:
    """What the block raises is recorded, and while the circuit is open the block is not entered."""
    breaker = CircuitBreaker(2, open_for=5.0)
    block = Block(world, breaker)

    error = Boom("no")
    assert await block(error) is error
    assert await block() == "fine"
    await block(error)
    assert breaker.state is CLOSED
    await block(error)
    assert breaker.state is OPEN
    assert block.entered == 4
    refused = await block()
    assert isinstance(refused, CircuitOpen)
    assert refused.retry_after == pytest.approx(5.0)
    assert block.entered == 4
    clock.advance(5.0)
    assert await block() == "fine"
    assert breaker.state is CLOSED


async def test_a_guarded_block_judges_as_a_call_does(world: World) -> None:
    """`on` and `ignore`; and `on_result` has nothing to look at."""
    seen: list[object] = []
    breaker = CircuitBreaker(2, on=Boom, ignore=KeyError, on_result=lambda value: seen.append(value) is None)
    block = Block(world, breaker)

    await block(Boom("no"))
    for _ in range(3):
        await block(KeyError("neutral"))
        await block(DeadlineExceeded("neutral"))
    await block(Other("a success"))
    await block(Boom("no"))
    assert breaker.state is CLOSED
    await block()
    await block(Boom("no"))
    assert breaker.state is CLOSED
    await block(Boom("no"))
    assert breaker.state is OPEN
    assert seen == []


async def test_a_guarded_block_counts_its_time(world: World, clock: FakeClock) -> None:
    """A slow block is a slow call, and a fast one is not."""
    breaker = CircuitBreaker(SlowRatio(1.0, slower_than=2.0, min_calls=2, last=2))

    async def block(seconds: float) -> None:
        if world.blocking:
            with breaker.guard():
                clock.advance(seconds)
        else:
            async with breaker.guard():
                clock.advance(seconds)

    await block(2.0)
    await block(1.9)
    await block(2.0)
    assert breaker.state is CLOSED
    await block(2.0)
    assert breaker.state is OPEN


def test_an_interrupted_block_counts_nothing(threads: World, clock: FakeClock) -> None:
    """And a probe's slot is free again."""
    breaker = CircuitBreaker(1, open_for=5.0)
    with pytest.raises(KeyboardInterrupt), breaker.guard():
        raise KeyboardInterrupt
    assert breaker.state is CLOSED
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(5.0)
    with pytest.raises(KeyboardInterrupt), breaker.guard():
        raise KeyboardInterrupt
    assert breaker.stats().probes == 0
    with breaker.guard():
        pass
    assert breaker.state is CLOSED


async def test_a_cancelled_block_counts_nothing(tasks_world: World, clock: FakeClock) -> None:
    """The same in a task."""
    breaker = CircuitBreaker(1, open_for=5.0)

    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(5.0)
    with anyio.move_on_after(0.001):
        async with breaker.guard():
            assert breaker.stats().probes == 1
            await anyio.sleep(10)
    assert breaker.state is HALF_OPEN
    assert breaker.stats().probes == 0


async def test_what_a_predicate_raises_at_the_end_of_a_block_comes_out(world: World) -> None:
    """As it does from a call; the error of the block is its context."""
    broken = ZeroDivisionError("a bug")
    block = Block(world, CircuitBreaker(1, on=raising(broken)))
    original = Boom("no")

    assert await block(original) is broken
    assert broken.__context__ is original


def test_a_guard_in_use_is_refused(threads: World) -> None:
    """One guard, one block at a time; it can be used again afterwards, and guards may nest."""
    breaker = CircuitBreaker(1)
    guard = breaker.guard()
    with guard, pytest.raises(RuntimeError, match="in use"):
        guard.__enter__()
    with guard, breaker.guard():
        pass
    assert breaker.state is CLOSED


def test_a_guard_that_refused_counts_nothing_when_it_is_left(threads: World) -> None:
    """`ExitStack` and hand-written code may leave what they could not enter."""
    breaker = CircuitBreaker(1)
    breaker.isolate()
    guard = breaker.guard()
    with pytest.raises(CircuitIsolated):
        guard.__enter__()
    guard.__exit__(None, None, None)
    breaker.close()
    with guard:
        pass


# --- what is told ----------------------------------------------------------------------------


async def test_each_transition_is_reported_once_and_in_order(world: World, clock: FakeClock) -> None:
    """The whole life of a circuit, with the numbers of each change."""
    moves = Moves()
    breaker = CircuitBreaker(1, open_for=[5.0, 7.0], on_transition=moves, name="inventory")

    await fails(world, breaker, Boom("one"))
    await works(world, breaker, times=3)
    clock.advance(5.0)
    await fails(world, breaker, Boom("two"))
    clock.advance(7.0)
    await works(world, breaker, times=3)
    breaker.close()
    breaker.isolate()
    breaker.isolate()
    breaker.close()
    assert [(it.old, it.new, it.retry_after, it.last_failure) for it in moves.events] == [
        (CLOSED, OPEN, 5.0, "Boom: one"),
        (OPEN, HALF_OPEN, None, "Boom: one"),
        (HALF_OPEN, OPEN, 7.0, "Boom: two"),
        (OPEN, HALF_OPEN, None, "Boom: two"),
        (HALF_OPEN, CLOSED, None, None),
        (CLOSED, ISOLATED, None, None),
        (ISOLATED, CLOSED, None, None),
    ]
    assert {it.policy for it in moves.events} == {"inventory"}
    assert [it.time for it in moves.events] == pytest.approx([1000, 1005, 1005, 1012, 1012, 1012, 1012])


async def test_an_event_tells_of_the_call_that_moved_the_circuit(world: World) -> None:
    """Operation and properties of its context; none where a hand moved it."""
    moves = Moves()
    breaker = CircuitBreaker(1, on_transition=moves)
    ctx = Context(operation="get-stock", properties={"tenant": "blue"})

    await world.attempt(breaker, Script(Boom("no")).function(), ctx)
    breaker.close()
    assert [(it.operation, dict(it.properties)) for it in moves.events] == [
        ("get-stock", {"tenant": "blue"}),
        (None, {}),
    ]


async def test_what_a_listener_raises_is_logged_and_changes_nothing(
    world: World, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Listeners observe."""

    def listener(event: events.CircuitChanged) -> None:
        raise ZeroDivisionError("a bug in the listener")

    breaker = CircuitBreaker(1, open_for=5.0, on_transition=listener)

    with caplog.at_level(logging.ERROR, logger="resilience"):
        error = Boom("no")
        assert await fails(world, breaker, error) is error
        clock.advance(5.0)
        assert await works(world, breaker) == "fine"
        assert breaker.state is CLOSED
    assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [ZeroDivisionError] * 3


def test_an_interrupted_listener_does_not_lose_a_probe(threads: World, clock: FakeClock) -> None:
    """Ctrl-C in a listener comes out; the call that it kept from being made leaves its slot free."""
    armed = [True]

    def listener(event: events.CircuitChanged) -> None:
        if event.new is HALF_OPEN and armed.pop():
            raise KeyboardInterrupt

    breaker = CircuitBreaker(1, open_for=5.0, on_transition=listener)
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(5.0)
    with pytest.raises(KeyboardInterrupt):
        breaker.execute(lambda ctx: "fine")
    assert breaker.stats().probes == 0
    assert breaker.execute(lambda ctx: "fine") == "fine"
    assert breaker.state is CLOSED


async def test_a_listener_may_call_back(world: World) -> None:
    """It closes the circuit that just opened; what it causes is told after what it was told."""
    heard: list[tuple[str, CircuitState]] = []

    def first(event: events.CircuitChanged) -> None:
        heard.append(("first", event.new))
        if event.new is OPEN:
            breaker.close()
            assert breaker.state is CLOSED
            breaker.isolate()

    breaker = CircuitBreaker(1, on_transition=first)
    unsubscribe = events.subscribe(lambda event: heard.append(("second", event.new)), events.CircuitChanged)

    try:
        await fails(world, breaker)
    finally:
        unsubscribe()
    assert heard == [(who, state) for state in (OPEN, CLOSED, ISOLATED) for who in ("first", "second")]


def test_a_listener_may_make_a_call(threads: World, clock: FakeClock) -> None:
    """Through the very breaker: it is refused or admitted as anybody else's."""
    outcomes: list[Any] = []

    def listener(event: events.CircuitChanged) -> None:
        outcomes.append(breaker.capture(lambda ctx: f"from {event.new.value}"))

    breaker = CircuitBreaker(1, open_for=5.0, on_transition=listener)
    breaker.capture(lambda ctx: 1 / 0)
    assert isinstance(outcomes[0].error, CircuitOpen)
    clock.advance(5.0)
    assert breaker.execute(lambda ctx: "fine") == "fine"
    assert isinstance(outcomes[1].error, CircuitOpen)  # half-open: the probe whose admission it hears of is out
    assert outcomes[2].value == "from closed"


def test_a_listener_runs_outside_the_lock() -> None:
    """While it takes its time, other threads use the breaker and move it."""
    done: list[bool] = []

    def listener(event: events.CircuitChanged) -> None:
        if event.new is OPEN:
            thread = threading.Thread(target=lambda: (breaker.stats(), breaker.close()), daemon=True)
            thread.start()
            thread.join(5.0)
            done.append(not thread.is_alive())

    breaker = CircuitBreaker(1, on_transition=listener)
    breaker.capture(lambda ctx: 1 / 0)
    assert done == [True]
    assert breaker.state is CLOSED


@pytest.mark.parametrize("where", ["on", "ignore", "on_result", "str"])
def test_predicates_and_messages_run_outside_the_lock(where: str) -> None:
    """A predicate that waits for another thread that uses the breaker is no deadlock."""
    free: list[bool] = []

    def look(value: object = None) -> bool:
        thread = threading.Thread(target=lambda: breaker.stats(), daemon=True)
        thread.start()
        thread.join(5.0)
        free.append(not thread.is_alive())
        return False

    class Telling(Exception):
        def __str__(self) -> str:
            look()
            return "told"

    settings: dict[str, Any] = {} if where == "str" else {where: look}
    breaker = CircuitBreaker(1, **settings)

    def call(ctx: Context) -> str:
        if where == "on_result":
            return "fine"
        raise Telling

    breaker.capture(call)
    assert free
    assert all(free)


# --- with others -----------------------------------------------------------------------------


async def test_a_timeout_around_is_neutral(world: World, clock: FakeClock) -> None:
    """The caller's patience is not the dependency's failure: not counted, and a probe's slot comes back."""
    breaker = CircuitBreaker(1, open_for=5.0)

    async def hang(ctx: Context) -> None:
        await world.hang()

    for _ in range(2):
        assert isinstance(await world.attempt(Timeout(0.02).wrap(breaker), hang), TimeoutExceeded)
    assert breaker.state is CLOSED
    await fails(world, breaker)
    clock.advance(5.0)
    assert isinstance(await world.attempt(Timeout(0.02).wrap(breaker), hang), TimeoutExceeded)
    assert breaker.state is HALF_OPEN
    assert breaker.stats().probes == 0
    world.release()


async def test_a_timeout_inside_is_a_failure(world: World) -> None:
    """A limit that belongs to the call says that the dependency was too slow."""
    breaker = CircuitBreaker(2)
    pipeline = breaker.wrap(Timeout(0.02))

    async def hang(ctx: Context) -> None:
        await world.hang()

    for _ in range(2):
        assert isinstance(await world.attempt(pipeline, hang), TimeoutExceeded)
    assert breaker.state is OPEN
    world.release()


async def test_a_deadline_that_ends_a_timeout_inside_is_neutral(world: World) -> None:
    """It was the caller who had no time left."""
    breaker = CircuitBreaker(1)
    pipeline = breaker.wrap(Timeout(60.0))

    async def hang(ctx: Context) -> None:
        await world.hang()

    error = await world.attempt(pipeline, hang, Context(timeout=0.02))
    assert isinstance(error, DeadlineExceeded)
    assert breaker.state is CLOSED
    world.release()


def test_all_worlds_share_one_circuit(clock: FakeClock) -> None:
    """Failures in a thread, in asyncio and in trio make a row; a probe in one closes it for all."""
    breaker = CircuitBreaker(3, open_for=5.0)
    worlds = [World(name) for name in ("threads", "asyncio", "trio")]
    for world in worlds:
        assert breaker.state is CLOSED
        world.run(lambda world=world: fails(world, breaker))  # type: ignore[misc]
    assert breaker.state is OPEN
    for world in worlds:
        assert isinstance(world.run(lambda world=world: works(world, breaker)), CircuitOpen)  # type: ignore[misc]
    clock.advance(5.0)
    assert worlds[2].run(lambda: works(worlds[2], breaker)) == "fine"
    assert breaker.state is CLOSED


# --- building --------------------------------------------------------------------------------


async def test_waiting_for_probes_blocks_nobody(world: World, clock: FakeClock) -> None:
    """A refusal comes at once, however long the probe takes."""
    breaker = CircuitBreaker(1, open_for=5.0)

    await fails(world, breaker)
    clock.advance(5.0)
    async with beside(world) as group:
        await group.inside(breaker)
        refused = [group.start(breaker) for _ in range(5)]
        await until(world, lambda: all(call.left.is_set() for call in refused))
        assert all(isinstance(call.outcome, CircuitOpen) for call in refused)
        assert not any(call.entered.is_set() for call in refused)
