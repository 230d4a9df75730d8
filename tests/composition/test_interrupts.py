"""Ctrl-C wherever the interpreter checks for it: at the beginning of a function of the library, and at the return of
a function written in C.

A signal handler runs between two instructions of the main thread, and `KeyboardInterrupt` is raised there. So each
scene runs once to count those places, and is then interrupted at each of them. One is left out, where nothing can be
done: before the first line of an `__exit__`. Python 3.14 has a second: after `with lock` has acquired the lock, and
before its block. In Python 3.15 an interrupt no longer occurs there, but a profile function can raise there, so it is
left out, too.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import resilience
from resilience import (
    AdaptiveLimit,
    Bulkhead,
    BulkheadFull,
    Cache,
    CircuitBreaker,
    CircuitIsolated,
    CircuitState,
    Fallback,
    Hedge,
    Outcome,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    SingleFlight,
    Timeout,
    TimeoutExceeded,
    current_context,
    deadline,
    detached,
)
from resilience.ambient import get_ambient, innermost_open
from resilience.clock import clock as process_clock
from resilience.runtimes import workers
from resilience.runtimes.base import close_each
from resilience.runtimes.blocking import BLOCKING
from resilience.state.rates import Quota, SlidingLog, Spread
from resilience.state.turns import Turn, Turns
from resilience.state.windows import CountWindow, TimeWindow, Window
from resilience.streams import driver
from resilience.work import Gate, Once, each
from tests.callers import calls_around, followers, leaders, outcome_of, wait_until
from tests.conftest import Boom, drive
from tests.custom import HandingOn
from tests.functions import raising
from tests.policies.retries import Response
from tests.state.stepping import TRACING_CRASHES, Interruption

OURS = str(Path(resilience.__file__).parent)

#: The functions whose return is left out.
LEFT_OUT = {"lock.__enter__", "RLock.__enter__"} if sys.version_info >= (3, 14) else set()


#: A coroutine may be interrupted before its first await.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
    pytest.mark.filterwarnings("ignore:.*was never awaited:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Disable garbage collection during a scene: an interrupt in it could break the import of a warning."""
    gc.disable()
    yield
    gc.enable()


class Interruptions:
    """Counts the places in the library where an interrupt may occur, and interrupts at one of them.

    Also as a function begins that the library calls, such as one of the standard library.
    """

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.count = 0

    def __enter__(self) -> Interruptions:
        self._before = sys.getprofile()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._before)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        # An exception in a finalizer, also of an unfinished generator, is only reported and reaches no caller.
        begins = event == "call" and frame.f_code.co_name not in {"__exit__", "__del__", "<genexpr>"}
        has_called = event == "c_return" and getattr(argument, "__qualname__", "") not in LEFT_OUT
        if (begins and is_ours(frame.f_back)) or ((begins or has_called) and is_ours(frame)):
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt


def is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


def at_each_place(least: int, *, exact: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test without an interrupt, to count its places, and then once for each, interrupted there.

    :param least: there are more places than this.
    :param exact: whether there are as many each time; threads may change their number.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def at_all(**arguments: Any) -> None:
            def play(at: int) -> int:
                interruptions = Interruptions(at)
                try:
                    test(interruptions=interruptions, **arguments)
                except BaseException as error:
                    error.add_note(f"after an interrupt at place {at}")
                    raise
                return interruptions.count

            play(0)  # the first execution of a policy has more places than later ones
            number = play(0)
            assert number > least
            played = [play(at) for at in range(1, number + 1)]
            assert not exact or played == [*range(1, number + 1)]
            gc.collect()  # frees the coroutines while their warnings are ignored

        parameters = [it for it in inspect.signature(test).parameters.values() if it.name != "interruptions"]
        vars(at_all)["__signature__"] = inspect.Signature(parameters)
        return at_all

    return decorate


def failing() -> None:
    raise Boom("no")


async def failing_in_task() -> None:
    failing()


def enter(block: Any) -> None:
    with block:
        pass


def fail_in(block: Any) -> None:
    with block:
        raise Boom("no")


def retry_block() -> None:
    with deadline(60):
        for attempt in Retry(2, on=Boom, backoff=[0]).attempts():
            with attempt:
                failing()


def race(breaker: CircuitBreaker, bulkhead: Bulkhead) -> None:
    """A race whose caller always waits, and always finds an idle worker: as many places each time."""
    waits, wait_for = threading.Event(), process_clock.wait

    def wait(waitable: Any, seconds: float | None) -> bool:
        waits.set()
        return wait_for(waitable, seconds)

    def fails() -> None:
        waits.wait(10)
        failing()

    process_clock.wait = wait
    try:
        Policy.wrap(bulkhead, Hedge(60), breaker).call(fails)
    finally:
        process_clock.wait = wait_for
        waits.set()
        wait_until(lambda: bool(workers.pool.idle) and Timeout.abandoned() == 0)


SCENES: dict[str, Callable[[CircuitBreaker, Bulkhead], Any]] = {
    "a probe that succeeds": lambda breaker, bulkhead: breaker.call(int),
    "a probe that fails": lambda breaker, bulkhead: breaker.call(failing),
    "a call after a check": lambda breaker, bulkhead: breaker.call(int),
    "a guarded block after a check": lambda breaker, bulkhead: enter(breaker.guard()),
    "a check": lambda breaker, bulkhead: breaker.check(),
    "a guarded block": lambda breaker, bulkhead: enter(breaker.guard()),
    "a guarded block that fails": lambda breaker, bulkhead: fail_in(breaker.guard()),
    "a call in a bulkhead": lambda breaker, bulkhead: bulkhead.call(int),
    "a call in a bulkhead that fails": lambda breaker, bulkhead: bulkhead.call(failing),
    "a slot": lambda breaker, bulkhead: enter(bulkhead.slot()),
    "a slot whose block fails": lambda breaker, bulkhead: fail_in(bulkhead.slot()),
    "a budget": lambda breaker, bulkhead: enter(deadline(60)),
    "a budget that fails": lambda breaker, bulkhead: fail_in(detached(60)),
    "a retried block": lambda breaker, bulkhead: retry_block(),
    "a call that is retried at once": lambda breaker, bulkhead: (
        Retry(3, on=Boom, backoff=[0]).wrap(bulkhead).call(failing)
    ),
    "a call in a task that is retried at once": lambda breaker, bulkhead: copy_context().run(  # a task has its own
        drive, Retry(2, on=Boom, backoff=[0]).wrap(bulkhead).acall(failing_in_task)
    ),
    "a fallback's handler": lambda breaker, bulkhead: Policy.wrap(
        Timeout(60, cooperative=True), Fallback(handler=lambda failure, ctx: "instead")
    ).call(failing),
    "a race": race,
    "a driven chain": lambda breaker, bulkhead: HandingOn(Policy.wrap(bulkhead, breaker)).call(int),
    "a driven chain that fails": lambda breaker, bulkhead: HandingOn(Policy.wrap(bulkhead, breaker)).call(failing),
    "a pipeline": lambda breaker, bulkhead: Policy.wrap(
        Fallback("instead", on=BaseException), Timeout(60, cooperative=True), breaker, bulkhead, Retry(1)
    ).call(failing),
}


@pytest.mark.parametrize("scene", SCENES)
@at_each_place(3)
def test_an_interrupt_anywhere_leaves_nothing_held(interruptions: Interruptions, scene: str) -> None:
    """All permits and probes are released, no budget applies, and the caller gets the interrupt."""
    probe = int if "check" in scene else None
    changes: list[Any] = []
    breaker = CircuitBreaker(1, open_for=[0.0], probe_successes=2, probe=probe, on_transition=changes.append)
    bulkhead = Bulkhead(1)
    breaker.capture(lambda ctx: 1 / 0)
    raised: list[type] = []
    with interruptions:
        try:
            SCENES[scene](breaker, bulkhead)
        except (Boom, KeyboardInterrupt) as error:
            raised.append(type(error))
    assert current_context().deadline == inf, "a budget is left"
    assert (bulkhead.stats().in_flight, breaker.stats().probes) == (0, 0)
    if interruptions.at:
        assert raised == [KeyboardInterrupt]
        assert breaker.state in CircuitState
    breaker.isolate()
    assert changes[-1].new is CircuitState.ISOLATED, "it reports no change"
    with pytest.raises(CircuitIsolated):  # it is no nested call of the interrupted one
        breaker.call(int)


BLOCKS = [lambda: deadline(60), lambda: detached(60), lambda: next(Retry().attempts())]


@pytest.mark.parametrize("make", BLOCKS)
def test_a_handler_that_uses_a_block_leaves_the_one_that_begins_open(make: Callable[[], Any]) -> None:
    """A signal handler that raises nothing, or a finalizer, may run at any place."""
    block, before = make(), sys.getprofile()

    def handle(frame: FrameType, event: str, argument: Any) -> None:
        if is_ours(frame) and event in {"call", "c_return"}:
            with deadline(1):
                pass

    sys.setprofile(handle)
    block.__enter__()
    sys.setprofile(before)
    try:
        assert current_context() is current_context(), "no block is open"
        assert current_context().remaining() > 1, "that of the handler is"
    finally:
        block.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore:Retry. an attempt was not entered")  # an interrupt may come just before it is
@pytest.mark.parametrize("make", BLOCKS)
@at_each_place(3)
def test_an_interrupt_as_a_block_begins_leaves_no_context_behind(
    interruptions: Interruptions, make: Callable[[], Any]
) -> None:
    """Even if the block is kept: by a variable, or by the traceback of the interrupt."""
    block = make()
    with ExitStack() as stack:
        with interruptions, suppress(KeyboardInterrupt):
            block.__enter__()
            stack.push(block)
        assert (innermost_open(get_ambient()) is None) == bool(interruptions.at)


@at_each_place(0, exact=False)
def test_an_interrupt_anywhere_ends_a_race_with_an_attempt_beside_the_first(interruptions: Interruptions) -> None:
    """The number of places depends on which thread is faster."""
    bulkhead = Bulkhead(1)
    with interruptions, suppress(KeyboardInterrupt):
        Policy.wrap(bulkhead, Hedge(0.0), CircuitBreaker(1)).call(int)
    assert bulkhead.stats().in_flight == 0


@at_each_place(6)
def test_an_interrupt_anywhere_while_resources_are_closed_leaves_only_one_open(interruptions: Interruptions) -> None:
    """The one that was just taken. All stay in the list if none was taken."""
    closed: list[int] = []
    left = [SimpleNamespace(close=partial(closed.append, it)) for it in range(5)]
    with interruptions, suppress(KeyboardInterrupt):
        drive(close_each(BLOCKING.close, left))
    assert not (closed and left)
    assert len(closed) + len(left) >= 5 - bool(interruptions.at)


class Counting:
    """An algorithm that lowers the limit, and counts how often it was asked."""

    def __init__(self) -> None:
        self.updates = 0

    def update(self, limit: float, sample: Any) -> float:
        self.updates += 1
        return limit - 1

    def reset(self) -> None: ...


@at_each_place(10)
def test_an_interrupt_anywhere_does_not_end_the_adaptation_of_a_limit(interruptions: Interruptions) -> None:
    algorithm = Counting()
    limit = AdaptiveLimit(algorithm, initial=2, window=1e-9, min_samples=1)
    with interruptions, suppress(KeyboardInterrupt):
        limit.call(int)
    before = algorithm.updates
    wait_until(lambda: limit.call(int) or algorithm.updates > before)  # it is evaluated again
    assert limit.stats().in_flight == 0


@pytest.mark.parametrize("make", [SingleFlight, lambda: Cache(60)], ids=["single flight", "cache"])
@at_each_place(20)
def test_an_interrupt_anywhere_ends_the_flight(interruptions: Interruptions, make: Callable[[], Any]) -> None:
    """Otherwise later calls with the same key would wait for ever."""
    policy, before = make(), calls_around()
    with interruptions, suppress(KeyboardInterrupt):
        policy.call(int)
    assert not leaders(policy), "a call is under way"
    assert calls_around() == before, "the next call is inside it"


@pytest.mark.parametrize("pulls", [1, 3])
@at_each_place(30)
def test_an_interrupt_anywhere_in_a_stream_leaves_nothing_held_once_it_is_closed(
    interruptions: Interruptions, pulls: int
) -> None:
    """Also in the call that closes it."""
    breaker, bulkhead = CircuitBreaker(1, open_for=[0.0]), Bulkhead(1)
    breaker.capture(lambda ctx: 1 / 0)
    pipeline = Policy.wrap(Fallback([], on=BaseException), bulkhead, breaker, Retry(1))
    stream = pipeline.streaming().call(iter, "ab")
    with interruptions, suppress(KeyboardInterrupt):
        for _ in range(pulls):
            next(stream, None)
        stream.close()
    stream.close()
    assert next(stream, None) is None, "it goes on"
    assert (bulkhead.stats().in_flight, breaker.stats().probes) == (0, 0)


@at_each_place(30)
def test_an_interrupt_anywhere_in_a_stream_leaves_nothing_held_once_it_has_ended(interruptions: Interruptions) -> None:
    """Its consumer may go on after an interrupt, and need not close it."""
    bulkhead = Bulkhead(1)
    stream = bulkhead.streaming().call(iter, "abc")
    with interruptions, suppress(KeyboardInterrupt):
        for _ in range(4):
            next(stream, None)
    while next(stream, None) is not None:
        pass
    assert bulkhead.stats().in_flight == 0


@pytest.mark.skipif(TRACING_CRASHES, reason="CPython 3.12 crashes where several threads trace opcodes")
def test_a_stream_goes_on_or_is_over_after_an_interrupt_where_no_call_is_made() -> None:
    """It may be over, and that is not noted yet."""
    for place in itertools.count():
        stream = Bulkhead(1).streaming().call(iter, "a")
        interruption = Interruption([driver], place, raising(KeyboardInterrupt))
        with suppress(KeyboardInterrupt):
            interruption.around(lambda stream=stream: list(stream))
        assert list(stream) in (["a"], [])
        assert list(stream) == []
        if not interruption.happened:
            break
    assert place > 10


@pytest.mark.parametrize("end", [int, failing], ids=["returns", "fails"])
@pytest.mark.parametrize("make", [SingleFlight, lambda: Cache(60)], ids=["single flight", "cache"])
@at_each_place(10)
def test_an_interrupt_anywhere_in_a_leader_leaves_no_follower_waiting(
    interruptions: Interruptions, make: Callable[[], SingleFlight | Cache], end: Callable[[], Any]
) -> None:
    """At a place after the call that another thread follows."""
    policy = make()
    threads = [threading.Thread(target=lambda: outcome_of(lambda: policy.call(leads))) for _ in range(2)]

    def leads() -> Any:
        if threading.current_thread() in threads:
            return None
        for thread in threads:
            thread.start()
        wait_until(lambda: followers(policy) == 2)
        interruptions.__enter__()
        return end()

    with suppress(KeyboardInterrupt, Boom):
        policy.call(leads)
    interruptions.__exit__()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "a follower waits for ever"


QUEUEING: dict[str, tuple[float | None, Callable[[Bulkhead], Any]]] = {
    "a call that waits in vain": (0.001, lambda bulkhead: bulkhead.call(int)),
    "a call that is cut off": (60, lambda bulkhead: Policy.wrap(Timeout(0.001), bulkhead).call(int)),
    "a call that is granted a permit": (None, lambda bulkhead: bulkhead.call(int)),
    "a slot that waits in vain": (0.001, lambda bulkhead: enter(bulkhead.slot())),
    "a slot that is granted a permit": (None, lambda bulkhead: enter(bulkhead.slot())),
}


@pytest.mark.parametrize("scene", QUEUEING)
@at_each_place(10)
def test_an_interrupt_anywhere_in_a_queue_leaves_the_queue_empty(interruptions: Interruptions, scene: str) -> None:
    """Neither a place in the queue nor a granted permit is lost; another thread holds it, and may release it."""
    max_wait, play = QUEUEING[scene]
    bulkhead = Bulkhead(1, queue=1, max_wait=max_wait)
    with held_by_another_thread(bulkhead, until_queued=max_wait is None), interruptions:
        try:
            play(bulkhead)
        except (BulkheadFull, TimeoutExceeded, KeyboardInterrupt):
            pass
    assert (bulkhead.stats().in_flight, bulkhead.stats().queued) == (0, 0)


RELEASES: dict[str, tuple[Callable[[], Any], Callable[[Any, Callable[[], None]], Any]]] = {
    "call": (partial(Bulkhead, 1, queue=1), lambda limit, work: limit.call(work)),
    "slot": (partial(Bulkhead, 1, queue=1), lambda limit, work: work_in(limit.slot(), work)),
    "adaptive call": (partial(AdaptiveLimit, 60, initial=1, queue=1), lambda limit, work: limit.call(work)),
    "adaptive slot": (partial(AdaptiveLimit, 60, initial=1, queue=1), lambda limit, work: work_in(limit.slot(), work)),
}


def work_in(block: Any, work: Callable[[], None]) -> None:
    with block:
        work()


@pytest.mark.parametrize("form", RELEASES)
@at_each_place(10)
def test_an_interrupt_anywhere_in_a_release_leaves_no_waiter_asleep(interruptions: Interruptions, form: str) -> None:
    """The permit of an interrupted caller goes to the thread that waits for it."""
    make, play = RELEASES[form]
    limit = make()
    waiter = threading.Thread(target=limit.call, args=[int], daemon=True)

    def let_another_wait() -> None:
        waiter.start()
        wait_until(lambda: bool(limit._permits.machine.waiting))  # no call of ours, which would be a place

    with pytest.raises(KeyboardInterrupt) if interruptions.at else nullcontext(), interruptions:
        play(limit, let_another_wait)
    if waiter.ident is not None:
        waiter.join(5)
        assert not waiter.is_alive(), "a waiter sleeps for ever"
    wait_until(lambda: limit.stats().in_flight == limit.stats().queued == 0)


@at_each_place(3)
def test_after_an_interrupt_anywhere_in_a_call_of_a_gate_no_later_call_is_inside_it(
    interruptions: Interruptions,
) -> None:
    """So no number of interrupts makes later calls slower."""
    gate = Gate()
    before = gate.call(calls_around)
    with interruptions, suppress(KeyboardInterrupt):
        gate.call(int)
    assert gate.call(calls_around) == before


@at_each_place(10)
def test_an_interrupt_anywhere_in_the_last_call_of_a_gate_ends_the_drain(interruptions: Interruptions) -> None:
    gate = Gate()
    drained: list[bool] = []
    drain = threading.Thread(target=lambda: drained.append(gate.drain(30)), daemon=True)

    def let_it_drain() -> None:
        drain.start()
        wait_until(lambda: bool(gate._drains))  # no call of ours, which would be a place

    with pytest.raises(KeyboardInterrupt) if interruptions.at else nullcontext(), interruptions:
        gate.call(let_it_drain)
    assert gate.stats().inside == 0, "a call is counted for ever"
    if drain.ident is not None:
        drain.join(5)
        assert drained == [True], "a drain waits for nothing"


@at_each_place(5)
def test_an_interrupt_anywhere_in_a_drain_leaves_no_waiter_behind(interruptions: Interruptions) -> None:
    """Otherwise each later call would wake it."""
    gate = Gate()

    def drain_in_vain() -> None:
        with interruptions, suppress(KeyboardInterrupt):
            gate.drain(0.001)

    gate.call(drain_in_vain)
    assert gate._drains == set()


@at_each_place(50)
def test_an_interrupt_anywhere_in_once_leaves_no_connection_open(interruptions: Interruptions, tmp_path: Path) -> None:
    """And no transaction, which would refuse later calls."""
    opened: list[sqlite3.Connection] = []

    def connect() -> sqlite3.Connection:
        opened.append(sqlite3.connect(tmp_path / "once.db", timeout=0))
        return opened[-1]

    once = Once(connect, key=lambda key: key)
    with interruptions, suppress(KeyboardInterrupt):
        once.call(str, f"interrupted at {interruptions.at}")
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.cursor()
    assert once.call(str, f"after {interruptions.at}")


@pytest.mark.parametrize("goes_on", [False, True], ids=["leaves", "goes on"])
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@at_each_place(25, exact=False)
def test_an_interrupt_anywhere_in_a_loop_over_each_loses_no_outcome(
    interruptions: Interruptions, ordered: bool, goes_on: bool
) -> None:
    """A result is delivered or closed, whether the consumer then leaves the block or goes on."""
    made: list[Response] = []
    delivered: list[Outcome[Response]] = []

    def fetch(number: int) -> Response:
        made.append(Response())
        return made[-1]

    with each(Retry(1), fetch, range(4), limit=2, ordered=ordered) as outcomes:
        with interruptions, suppress(KeyboardInterrupt):
            for _, outcome in outcomes:
                delivered.append(outcome)
        if goes_on:
            delivered += [outcome for _, outcome in outcomes]
            assert len(delivered) >= 4 - bool(interruptions.at)  # without the one that was being read
    results = {it.unwrap() for it in delivered}
    assert [it.closed for it in made] == [it not in results for it in made]


@pytest.mark.parametrize("make", [partial(Bulkhead, 20), partial(Bulkhead, 20, queue=1), partial(AdaptiveLimit, 1)])
@pytest.mark.parametrize("play", [lambda policy: policy.call(int), lambda policy: enter(policy.slot())])
@at_each_place(10)
def test_an_interrupt_anywhere_loses_no_permit_of_a_second_batch(
    interruptions: Interruptions, make: Callable[[], Any], play: Any
) -> None:
    """Permits are created 16 at a time."""
    policy = make()
    with ExitStack() as held:
        for _ in range(16):
            held.enter_context(policy.slot())
        with interruptions, suppress(KeyboardInterrupt):
            play(policy)
        assert policy.stats().in_flight == 16


@pytest.mark.parametrize("form", ["call", "block"])
@at_each_place(10, exact=False)
def test_an_interrupt_anywhere_leaves_the_queue_of_a_rate_limiter_empty(
    interruptions: Interruptions, form: str
) -> None:
    """And the next call begins at its turn. There are fewer places if a turn comes before its caller waits."""
    limiter = RateLimiter(Rate(1000, burst=1))
    limiter.call(int)
    with interruptions, suppress(KeyboardInterrupt):
        if form == "call":
            limiter.call(int)
        else:
            enter(limiter.turn())
    assert limiter.stats().queued == 0
    limiter.call(int)


#: What lets a waiting call begin, after something has been done.
EARLIER: dict[str, Callable[[RateLimiter, Callable[[], object]], Any]] = {
    "reset": lambda limiter, before: (before(), limiter.reset()),
    "resize": lambda limiter, before: (before(), limiter.resize(6e6)),
    "refund": lambda limiter, before: limiter.call(before),
}


@pytest.mark.parametrize("how", EARLIER)
@at_each_place(10)
def test_an_interrupt_anywhere_in_a_change_of_a_rate_leaves_no_caller_asleep(
    interruptions: Interruptions, how: str
) -> None:
    """If the change has taken place, so that the turn of a waiting call has come."""
    limiter = RateLimiter(Rate(60, per=60, burst=60, cost=60, actual=lambda result: 0))
    waiter = threading.Thread(target=limiter.call, args=[int], daemon=True)
    if how != "refund":
        limiter.try_take()

    def let_another_wait() -> None:
        waiter.start()
        wait_until(lambda: limiter.stats().queued == 1)
        interruptions.__enter__()

    with suppress(KeyboardInterrupt):
        EARLIER[how](limiter, let_another_wait)
    interruptions.__exit__()
    wait_until(lambda: limiter.stats().queued == 0 or limiter.stats().next_turn > 110)
    limiter.reset()
    waiter.join(5)
    assert not waiter.is_alive(), "it sleeps although a later change has woken it"


@at_each_place(4)
def test_an_interrupt_anywhere_in_uses_of_a_window_loses_and_adds_no_unit(interruptions: Interruptions) -> None:
    """A window that is always in use never forgets what it has counted wrongly."""
    log = SlidingLog(10, 1.0)
    log.take(1, 0.0, 0.0)
    log.take(1, 0.5, 0.5)
    with interruptions, suppress(KeyboardInterrupt):
        log.take(1, 1.2, 1.2)  # the first use leaves
        log.take(1, 1.2003, 1.2003)  # joins that entry
    log.take(1, 1.4, 1.4)
    log.take(1, 2.3, 2.3)
    assert log.ready(8, 2.3) == -inf
    assert log.ready(9, 2.3) == 1.4 + 1.0


@pytest.mark.parametrize("make", [partial(CountWindow, 2), partial(TimeWindow, 32.0)])
@at_each_place(1)
def test_an_interrupt_anywhere_in_a_window_of_results_keeps_its_counts_right(
    interruptions: Interruptions, make: Callable[[], Window]
) -> None:
    window = make()
    window.add(True, 0.0)
    window.add(False, 5.0)
    with interruptions, suppress(KeyboardInterrupt):
        window.add(True, 33.0)  # the first result leaves
    window.add(False, 34.0)
    window.add(True, 65.5)  # all those before leave, except that of 34.0
    assert (window.bad, window.total) == (1, 2)


@at_each_place(1)
def test_an_interrupt_anywhere_in_a_resize_changes_all_or_nothing(interruptions: Interruptions) -> None:
    """So that the limit can be set again."""
    bucket = Spread(10, 1.0, 1, 1.0)
    bucket.take(5, 0.0, 0.0)
    with interruptions, suppress(KeyboardInterrupt):
        bucket.resize(20, 1.0, 0.0)
    bucket.resize(20, 1.0, 0.0)
    assert (bucket.full_at, bucket.interval, bucket.increment) == (0.25, 0.05, 0.05)


@at_each_place(25)
def test_an_interrupt_anywhere_loses_no_turn_behind_a_stalled_one(interruptions: Interruptions) -> None:
    """Also not that of the stalled one, which comes later."""
    turns: Turns[str] = Turns((Spread(1, 1.0, 1, 1.0),), Quota())
    turns.take((1.0, 1.0), 0.0)
    stalled, second = (Turn((1.0, 1.0), 9.0, name) for name in ("stalled", "second"))
    for turn in (stalled, second):
        turns.join(turn, 0.0)
    turns.go(second, 2.0)
    with interruptions, suppress(KeyboardInterrupt):
        turns.go(second, 2.02)
    turns.leave(second, 2.02)
    turns.go(stalled, 4.0)
    assert stalled.has_begun
    assert turns.take((1.0, 1.0), 6.0), "no turn is left"
    assert turns.fast_path == [None]


@contextmanager
def held_by_another_thread(bulkhead: Bulkhead, until_queued: bool) -> Iterator[None]:
    """Hold a permit in another thread until the block ends, or until a call is queued."""
    is_held, is_left = threading.Event(), threading.Event()

    def hold() -> None:
        with bulkhead.slot():
            is_held.set()
            while not is_left.wait(0.0001):
                if until_queued and bulkhead.stats().queued:
                    return

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        yield
    finally:
        is_left.set()
        thread.join()


@pytest.mark.parametrize("is_idle", [True, False], ids=["an idle worker", "a new worker"])
@pytest.mark.parametrize(("seconds", "takes"), [(60, 0), (0.002, 0.01)], ids=["in time", "too late"])
@at_each_place(10, exact=False)
def test_an_interrupt_anywhere_loses_no_worker_and_no_count(
    interruptions: Interruptions, seconds: float, takes: float, is_idle: bool
) -> None:
    """A worker that was taken has its job, and each abandoned call that is counted also ends."""
    busy, idle = busy_workers(), workers.pool.idle
    set_aside = [] if is_idle else [idle.pop() for _ in range(len(idle))]
    with interruptions:
        try:
            Timeout(seconds).call(time.sleep, takes)
        except (TimeoutExceeded, KeyboardInterrupt):
            pass
    end = time.monotonic() + 20
    while ((lost := busy_workers() - {*set_aside, *busy}) or Timeout.abandoned()) and time.monotonic() < end:
        time.sleep(0.001)
    idle.extend(set_aside)
    assert not lost, "a worker is lost"
    assert Timeout.abandoned() == 0


def busy_workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, workers.Worker)} - {*workers.pool.idle}
