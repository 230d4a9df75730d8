"""Worker threads: the function alone runs there, is walked away from when its time is over, and is never stopped."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Never

import pytest

from resilience import (
    Bulkhead,
    Call,
    CircuitBreaker,
    CircuitState,
    Context,
    Failure,
    Fallback,
    Policy,
    Rejected,
    Retry,
    Timeout,
    TimeoutExceeded,
    WorkersExhausted,
    current_context,
    events,
)
from resilience.clock import clock as process_clock
from resilience.runtimes import workers
from tests.conftest import Boom

SHORT = 0.01
LONG = 60.0


def until(true: Callable[[], object]) -> None:
    """Wait for something that another thread is about to bring about."""
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> Iterator[None]:
    """Every test begins and ends without an abandoned call."""
    until(lambda: Timeout.abandoned() == 0)
    yield
    until(lambda: Timeout.abandoned() == 0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging functions wait for; opened after the test."""
    event = threading.Event()
    yield event
    event.set()


def abandon(gate: threading.Event, count: int = 1) -> None:
    """Walk away from so many calls."""
    for _ in range(count):
        with pytest.raises(TimeoutExceeded):
            Timeout(SHORT).call(gate.wait, 10)


# --- where things run ---


def test_the_function_runs_on_a_daemon_thread_of_ours() -> None:
    """Not in the calling thread, which has to be free to leave; and it never keeps the process alive."""
    thread = Timeout(LONG).call(threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert thread.name.startswith("resilience-worker-")


def test_without_an_enforced_limit_nothing_leaves_the_calling_thread() -> None:
    """Neither under a cooperative timeout nor under any other policy, nor where only a budget is set."""
    pipeline = Policy.wrap(Fallback(), Retry(), CircuitBreaker(), Bulkhead(1), Timeout(LONG, cooperative=True))
    here = threading.get_ident()
    assert pipeline.call(threading.get_ident) == here
    assert Retry().execute(lambda ctx: threading.get_ident(), Context(timeout=LONG)) == here


def test_all_policy_code_stays_in_the_calling_thread() -> None:
    """Predicates, listeners, handlers, backoffs, and policies on either side of the timeout."""
    seen: list[int] = []

    def here(*args: object) -> Any:
        seen.append(threading.get_ident())
        return True

    class Around(Policy[Never]):
        async def around(self, call: Call[Any], ctx: Context) -> Any:
            here()
            try:
                return await call(ctx)
            finally:
                here()

    def schedule() -> Iterator[float]:
        here()
        return iter([0.0])

    pipeline = Policy.wrap(
        Around(),
        Fallback(handler=here, on=here, on_fallback=here),
        Timeout(LONG),
        Around(),
        Retry(2, on=here, on_result=here, backoff=schedule, on_retry=here),
        CircuitBreaker(1, open_for=schedule, on=lambda error: False, on_result=lambda value: not here()),
        Timeout(SHORT, on_timeout=here),
        Around(),
        listeners=[here],
    )
    assert pipeline.execute(lambda ctx: 1 / 0) is True
    assert pipeline.execute(lambda ctx: time.sleep(3 * SHORT)) is True
    assert pipeline.execute(lambda ctx: "fine") == "fine"
    assert len(seen) > 20
    assert set(seen) == {threading.get_ident()}


def test_nested_timeouts_cost_one_hop_per_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many limits there are, the function changes threads once."""
    taken: list[str] = []
    begin = workers.Pool.begin

    def counting(self: workers.Pool, job: workers.Job, policy: str | None) -> bool:
        taken.append(threading.current_thread().name)
        return begin(self, job, policy)

    monkeypatch.setattr(workers.Pool, "begin", counting)
    pipeline = Policy.wrap(Timeout(LONG), Timeout(LONG / 2), Retry(3, on=Boom, backoff=[0]), Timeout(LONG / 4))

    def fn(ctx: Context) -> None:
        raise Boom

    with pytest.raises(Boom):
        pipeline.execute(fn)
    assert taken == [threading.current_thread().name] * 3


TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")


def test_the_function_sees_a_copy_of_the_callers_context_variables() -> None:
    """It reads what the caller has set; what it sets itself stays with it."""

    def fn() -> str:
        seen = TENANT.get()
        TENANT.set("changed")
        return seen

    token = TENANT.set("acme")
    try:
        assert Timeout(LONG).call(fn) == "acme"
        assert TENANT.get() == "acme"
    finally:
        TENANT.reset(token)
    with pytest.raises(LookupError):
        Timeout(LONG).call(TENANT.get)  # the same worker again: it has kept nothing


def test_the_ambient_context_is_there() -> None:
    """`current_context()` on the worker is what the function was handed, and inner executions inherit it."""
    seen: list[Any] = []

    def fn(ctx: Context) -> None:
        seen.append(current_context() is ctx)
        Retry().execute(lambda inner: seen.append((inner.deadline == ctx.deadline, inner.operation)))

    Timeout(LONG).execute(fn, Context(operation="fetch"))
    assert seen == [True, (True, "fetch")]
    assert current_context().operation is None


# --- reuse ---


def test_a_worker_is_reused() -> None:
    """Calls one after the other run on the same thread: starting one costs 50 us."""
    timeout = Timeout(LONG)
    assert len({timeout.call(threading.get_ident) for _ in range(20)}) == 1


def test_a_worker_is_free_before_its_caller_can_ask_for_the_next() -> None:
    """However the threads are switched: the first thing that a caller does with a result may be another call."""
    timeout, interval = Timeout(LONG), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert len({timeout.call(threading.get_ident) for _ in range(1000)}) == 1
    finally:
        sys.setswitchinterval(interval)


def test_a_worker_is_reused_after_a_failure() -> None:
    """What a function raises does not harm it, whatever it is."""
    timeout = Timeout(LONG)
    threads: list[int] = []

    def fn(error: BaseException) -> None:
        threads.append(threading.get_ident())
        raise error

    for error in (
        Boom(),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(),
        asyncio.CancelledError(),
    ):
        with pytest.raises(type(error)):
            timeout.call(fn, error)
    assert len(set(threads)) == 1


def test_a_worker_is_reused_after_it_was_walked_away_from(gate: threading.Event) -> None:
    """Once its function has come to its end."""
    threads: list[int] = []

    def fn() -> None:
        threads.append(threading.get_ident())
        gate.wait(10)

    with pytest.raises(TimeoutExceeded):
        Timeout(SHORT).call(fn)
    assert Timeout(LONG).call(threading.get_ident) != threads[0]
    gate.set()
    until(lambda: threads[0] in {worker.ident for worker in list(workers.pool.idle)})


def test_nobody_queues_for_a_worker() -> None:
    """As many calls as there are run at the same time; each has its own thread at once."""
    together = threading.Barrier(40)
    timeout = Timeout(LONG)
    with ThreadPoolExecutor(40) as callers:
        threads = list(
            callers.map(lambda _: timeout.call(lambda: (together.wait(10), threading.get_ident())[1]), range(40))
        )
    assert len(set(threads)) == 40


def test_idle_workers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that a burst has needed are not kept for ever; the next call starts a new one."""
    monkeypatch.setattr(workers, "IDLE", 0.01)
    timeout = Timeout(LONG)
    worker = timeout.call(threading.current_thread)
    worker.join(5)
    assert not worker.is_alive()
    assert worker not in workers.pool.idle
    assert timeout.call(threading.current_thread) is not worker


def test_a_worker_that_is_about_to_end_may_be_taken_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is never handed to a thread that has gone."""
    monkeypatch.setattr(workers, "IDLE", 0.0005)
    timeout = Timeout(5)
    chance = random.Random(1)

    def calls(_: int) -> list[int]:
        results = []
        for n in range(60):
            results.append(timeout.call(lambda n=n: n))
            time.sleep(chance.uniform(0, 0.001))
        return results

    with ThreadPoolExecutor(4) as callers:
        assert list(callers.map(calls, range(4))) == [list(range(60))] * 4


def test_a_worker_that_was_taken_waits_for_its_job_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller may be held up between the two; the time without work is over then, and it stays all the same."""
    taken: list[workers.Worker] = []

    class Slow(deque[workers.Worker]):
        def pop(self) -> workers.Worker:  # type: ignore[override]
            taken.append(super().pop())
            time.sleep(0.05)
            return taken[0]

    monkeypatch.setattr(workers, "IDLE", 0.01)
    monkeypatch.setattr(workers.pool, "idle", Slow())
    timeout = Timeout(LONG)
    while not taken:  # an idle worker may have ended before it could be taken
        worker = timeout.call(threading.current_thread)
    assert worker is taken[0]


def test_results_are_not_mixed_up_under_contention() -> None:
    """Many callers, few workers: each gets its own."""
    timeout = Timeout(LONG)
    with ThreadPoolExecutor(8) as callers:
        assert list(callers.map(lambda n: timeout.call(lambda: n), range(400))) == list(range(400))


# --- outcomes ---


def test_an_exception_is_handed_over_as_it_is() -> None:
    """The very object, with the frames of the function in its traceback, and nothing chained to it."""
    error = Boom("in the worker")

    def deep_down() -> None:
        raise error

    with pytest.raises(Boom) as raised:
        Timeout(LONG).call(deep_down)
    assert raised.value is error
    assert "deep_down" in "".join(traceback.format_tb(error.__traceback__))
    assert error.__context__ is None
    assert error.__cause__ is None


def test_an_exception_that_is_raised_again_and_again_does_not_grow() -> None:
    """Only as much as any exception does that somebody raises twice."""
    error = Boom()

    def fn() -> None:
        raise error.with_traceback(None)

    lengths = []
    for _ in range(5):
        with pytest.raises(Boom):
            Timeout(LONG).call(fn)
        lengths.append(len(traceback.extract_tb(error.__traceback__)))
    assert len(set(lengths)) == 1


@pytest.mark.parametrize("code", [None, 0, 3, "bye"])
def test_a_system_exit_of_the_function_belongs_to_the_caller(code: Any) -> None:
    """In a thread of its own it would end silently; here it means what it means in a plain call."""
    with pytest.raises(SystemExit) as raised:
        Timeout(LONG).call(sys.exit, code)
    assert raised.value.code == code


def test_what_an_abandoned_call_returns_is_dropped(gate: threading.Event) -> None:
    """Nobody is told of it, and nobody holds it."""
    alive: list[weakref.ref[Any]] = []
    told: list[object] = []

    class Result:
        """Something that takes memory."""

    def fn() -> Result:
        gate.wait(10)
        result = Result()
        alive.append(weakref.ref(result))
        return result

    pipeline = Policy.wrap(Fallback("instead", on_fallback=told.append), Timeout(SHORT))
    assert pipeline.call(fn) == "instead"
    gate.set()
    until(lambda: Timeout.abandoned() == 0 and alive)
    until(lambda: alive[0]() is None)
    assert len(told) == 1


def test_what_an_abandoned_call_raises_is_dropped(
    gate: threading.Event, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also a `SystemExit`; no thread dies of it, and none prints anything."""
    for error in (Boom(), SystemExit(1), KeyboardInterrupt()):
        ended = threading.Event()

        def fn(error: BaseException = error, ended: threading.Event = ended) -> None:
            gate.wait(0.03)
            ended.set()
            raise error

        with pytest.raises(TimeoutExceeded):
            Timeout(SHORT).call(fn)
        assert ended.wait(5)
        until(lambda: Timeout.abandoned() == 0)
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


def test_a_coroutine_that_an_abandoned_call_returns_is_closed(gate: threading.Event) -> None:
    """Or it would be reported as never awaited, long after anybody could do something about it."""
    made: list[Any] = []

    async def late() -> None: ...

    def fn() -> Any:
        gate.wait(10)
        made.append(late())
        return made[0]

    with pytest.raises(TimeoutExceeded):
        Timeout(SHORT).call(fn)
    gate.set()
    until(lambda: Timeout.abandoned() == 0 and made)
    until(lambda: made[0].cr_frame is None)


def test_what_cannot_even_be_closed_does_not_harm_the_worker(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged; the thread goes on to its next call."""
    threads: list[threading.Thread] = []

    class Hostile:
        send = throw = None

        def close(self) -> None:
            raise OSError("no")

    def fn() -> Hostile:
        threads.append(threading.current_thread())
        gate.wait(10)
        return Hostile()

    with pytest.raises(TimeoutExceeded):
        Timeout(SHORT).call(fn)
    gate.set()
    until(lambda: caplog.records)
    until(lambda: threads[0] in workers.pool.idle)


def test_a_call_that_was_walked_away_from_runs_to_its_own_end(gate: threading.Event) -> None:
    """Nothing is raised inside it from outside; it may be holding a lock."""
    steps: list[str] = []

    def fn() -> None:
        try:
            gate.wait(10)
            steps.append("worked on")
        finally:
            steps.append("cleaned up")

    with pytest.raises(TimeoutExceeded):
        Timeout(SHORT).call(fn)
    assert steps == []
    gate.set()
    until(lambda: Timeout.abandoned() == 0)
    assert steps == ["worked on", "cleaned up"]


def test_an_idle_worker_keeps_nobodys_things_alive() -> None:
    """Neither arguments nor result nor context variables of its last call."""

    class Thing:
        """Something that takes memory."""

    def fn(argument: Thing, variable: Any) -> Thing:
        TENANT.set(variable)
        return Thing()

    argument, variable = Thing(), Thing()
    result = Timeout(LONG).call(fn, argument, variable)
    alive = [weakref.ref(it) for it in (argument, variable, result)]
    del argument, variable, result
    gc.collect()
    until(lambda: [ref() for ref in alive] == [None] * 3)


# --- abandoned calls are counted, and capped ---


def test_abandoned_calls_are_counted_until_they_end(gate: threading.Event) -> None:
    """In the whole process, whichever policy left them behind."""
    for count in (1, 2, 3):
        abandon(gate)
        assert Timeout.abandoned() == count
    assert Timeout(LONG).call(lambda: "not counted") == "not counted"
    assert Timeout.abandoned() == 3
    gate.set()
    until(lambda: Timeout.abandoned() == 0)


def test_too_many_abandoned_calls_are_refused(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """`WorkersExhausted`: the function is not entered, and it is not counted as an attempt."""
    monkeypatch.setattr(Timeout, "max_abandoned", 2)
    entered: list[int] = []
    ctx = Context()
    abandon(gate, 2)
    with pytest.raises(WorkersExhausted) as raised:
        Timeout(LONG, name="slow").execute(lambda ctx: entered.append(1), ctx)
    assert isinstance(raised.value, Rejected)
    assert (raised.value.policy, raised.value.retry_after) == ("slow", None)
    assert "2 abandoned calls" in str(raised.value)
    assert entered == []
    assert ctx.attempts == 0
    gate.set()
    until(lambda: Timeout.abandoned() == 0)
    assert Timeout(LONG).call(lambda: "again") == "again"


def test_a_refusal_for_want_of_workers_is_a_rejection_like_others(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fallback answers it; a retry and a breaker leave it alone; permits come back."""
    monkeypatch.setattr(Timeout, "max_abandoned", 1)
    abandon(gate)
    breaker, bulkhead, told = CircuitBreaker(1), Bulkhead(1), list[Any]()
    pipeline = Policy.wrap(
        Fallback("instead"), Retry(on=Exception, on_retry=told.append), breaker, bulkhead, Timeout(LONG)
    )
    assert pipeline.call(lambda: "fine") == "instead"
    assert told == []
    assert breaker.state is CircuitState.CLOSED
    assert bulkhead.stats().in_flight == 0


def test_the_cap_is_128_unless_it_is_changed() -> None:
    """`Timeout.max_abandoned`, for the process."""
    assert Timeout.max_abandoned == 128


def test_at_the_very_moment_of_the_limit_there_is_one_outcome_and_the_count_is_right() -> None:
    """A function that ends when its time does either delivers or is walked away from."""
    chance = random.Random(3)
    timeout = Timeout(0.002)
    outcomes: list[Any] = []

    def calls(_: int) -> None:
        for n in range(60):
            outcome = timeout.capture(lambda ctx, n=n: (time.sleep(chance.uniform(0.001, 0.003)), n)[1])  # type: ignore[misc]
            outcomes.append(type(outcome.error) if isinstance(outcome, Failure) else outcome.value == n)

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(calls, range(4)))
    assert len(outcomes) == 240
    assert set(outcomes) <= {True, TimeoutExceeded}
    until(lambda: Timeout.abandoned() == 0)


def test_a_function_that_ends_before_it_is_counted_is_never_counted(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller has left it, and comes to say so when it is over: nothing would count it off any more."""
    counted: list[workers.Job] = []
    count_abandoned = workers.Pool.count_abandoned

    def late(pool: workers.Pool, job: workers.Job) -> None:
        gate.set()
        until(lambda: job.is_over)
        counted.append(job)
        count_abandoned(pool, job)

    monkeypatch.setattr(workers.Pool, "count_abandoned", late)
    with pytest.raises(TimeoutExceeded):
        Timeout(SHORT).call(gate.wait, 10)
    assert len(counted) == 1
    assert Timeout.abandoned() == 0


# --- what is held comes back at once ---


def test_permits_come_back_at_once_while_the_abandoned_function_still_runs(gate: threading.Event) -> None:
    """Whether the bulkhead is inside the timeout or around it: the next call gets in."""
    for wrap in (lambda b: Policy.wrap(Timeout(SHORT), b), lambda b: Policy.wrap(b, Timeout(SHORT))):
        bulkhead = Bulkhead(1)
        before = Timeout.abandoned()
        with pytest.raises(TimeoutExceeded):
            wrap(bulkhead).call(gate.wait, 10)
        assert bulkhead.stats().in_flight == 0
        assert bulkhead.call(lambda: "in") == "in"
        assert Timeout.abandoned() == before + 1


def test_a_probe_slot_comes_back_at_once_too(gate: threading.Event) -> None:
    """The breaker inside the timeout has not heard of a result, and admits the next probe."""
    breaker = CircuitBreaker(1, open_for=0.001)
    with pytest.raises(ZeroDivisionError):
        breaker.call(lambda: 1 / 0)
    time.sleep(0.002)
    with pytest.raises(TimeoutExceeded):
        Policy.wrap(Timeout(SHORT), breaker).call(gate.wait, 10)
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.stats().probes == 0
    assert breaker.call(lambda: "recovered") == "recovered"
    assert breaker.state is CircuitState.CLOSED


def test_what_an_abandoned_function_does_later_moves_nothing(gate: threading.Event) -> None:
    """Its result does not reach the policies that it was called through."""
    breaker = CircuitBreaker(1)
    retry = Retry(2, on=TimeoutExceeded, backoff=[0])
    ctx = Context()

    def fn(ctx: Context) -> None:
        gate.wait(10)
        raise Boom

    with pytest.raises(TimeoutExceeded):
        Policy.wrap(retry, Timeout(SHORT), breaker).execute(fn, ctx)
    elapsed = ctx.elapsed
    gate.set()
    until(lambda: Timeout.abandoned() == 0)
    assert breaker.state is CircuitState.CLOSED
    assert ctx.attempts == 2
    assert ctx.elapsed == elapsed
    assert [failed.type for failed in ctx.failures] == ["TimeoutExceeded"] * 2


# --- interrupts ---


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals are sent to a thread on POSIX only")
def test_ctrl_c_while_waiting_is_felt_at_once(gate: threading.Event) -> None:
    """The caller leaves, the call is counted as abandoned, what was held comes back."""
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    bulkhead = Bulkhead(1)
    felt: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if not felt:
            felt.append(number)
            raise KeyboardInterrupt

    def fn() -> None:
        while not felt:  # one that comes just before the lock begins to wait is noticed after it, by any Python
            signal.pthread_kill(main, signal.SIGINT)
            gate.wait(0.02)
        gate.wait(10)

    before = signal.signal(signal.SIGINT, interrupt)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            Policy.wrap(Fallback("instead", on=BaseException), bulkhead, Timeout(LONG)).call(fn)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 5
    assert Timeout.abandoned() == 1
    assert bulkhead.stats().in_flight == 0
    gate.set()
    until(lambda: Timeout.abandoned() == 0)


def test_an_interrupt_that_comes_when_the_call_is_done_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function has ended by itself: nothing is left to count as abandoned."""

    def interrupted(waitable: Any, seconds: float | None) -> bool:
        assert waitable.acquire(True, 5)  # the worker has delivered
        raise KeyboardInterrupt

    monkeypatch.setattr(process_clock, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Timeout(LONG).call(lambda: "fine")
    assert Timeout.abandoned() == 0


# --- the process ---


def run_python(code: str, timeout: float = 20) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
    )


def test_no_thread_is_started_before_one_is_needed() -> None:
    """Neither by the import, nor by building a policy, nor by asynchronous or cooperative calls."""
    done = run_python(
        """
        import asyncio, threading
        from resilience import Policy, Retry, Timeout

        timeout = Timeout(60)
        Policy.wrap(Retry(), Timeout(60, cooperative=True)).call(len, "")

        async def fn(ctx): ...

        asyncio.run(timeout.aexecute(fn))
        assert threading.active_count() == 1, threading.enumerate()
        timeout.call(len, "")
        assert threading.active_count() == 2, threading.enumerate()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)"])
def test_the_interpreter_ends_at_once_while_an_abandoned_call_hangs(ending: str) -> None:
    """Daemon threads are not joined: no minute of silence at the end of a script."""
    began = time.monotonic()
    done = run_python(
        f"""
        import time
        from resilience import Timeout

        assert str(Timeout(0.01).capture(lambda ctx: time.sleep(60)).error) == "no result within 0.01 s"
        assert Timeout.abandoned() == 1
        print("end", flush=True)
        {ending}
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    assert time.monotonic() - began < 15


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
def test_the_child_of_a_fork_starts_with_workers_of_its_own() -> None:
    """The parent's threads are not there, idle or hanging; nobody is handed a job that nobody does."""
    done = run_python(
        """
        import os, threading, time, warnings
        from resilience import Timeout

        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: forking with threads
        timeout = Timeout(10)
        timeout.call(len, "")                                 # an idle worker ...
        gate = threading.Event()
        Timeout(0.01).capture(lambda ctx: gate.wait(60))      # ... and one that hangs
        assert Timeout.abandoned() == 1
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert Timeout.abandoned() == 0, "the child has abandoned nothing"
                began = time.monotonic()
                assert timeout.call(lambda: "fine") == "fine"
                assert time.monotonic() - began < 5
                hanging = Timeout(0.01).capture(lambda ctx: threading.Event().wait(60))
                assert type(hanging.error).__name__ == "TimeoutExceeded"
                assert Timeout.abandoned() == 1
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert timeout.call(lambda: "the parent goes on") == "the parent goes on"
        assert Timeout.abandoned() == 1
        gate.set()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def no_threads_at_shutdown(self: threading.Thread) -> None:
    """What CPython says from 3.12 on, in `start`."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(workers.sys, "is_finalizing", lambda: True), (workers.Worker, "start", no_threads_at_shutdown)],
    ids=["modules are torn down", "no thread is started"],
)
def test_while_the_interpreter_shuts_down_a_function_runs_in_the_calling_thread(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A flush at the exit is made: with its deadline, and a warning that nothing can cut it off."""
    seen: list[tuple[threading.Thread, float]] = []

    def flush(ctx: Context) -> str:
        seen.append((threading.current_thread(), ctx.remaining()))
        return "flushed"

    monkeypatch.setattr(workers, "pool", workers.Pool())
    Timeout(LONG).call(len, "")  # an idle worker is there
    if owner is workers.Worker:
        workers.pool.idle.clear()
    bulkhead = Bulkhead(1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert Policy.wrap(bulkhead, Timeout(LONG, name="late")).execute(flush) == "flushed"
    ((thread, left),) = seen
    assert thread is threading.current_thread()
    assert 0 < left <= LONG
    assert bulkhead.stats().in_flight == 0
    told = [(it.name, it.levelname, it.getMessage()) for it in caplog.records]
    assert told == [("resilience", "WARNING", "the interpreter is shutting down: late cannot cut off what it limits")]


def test_a_refusal_for_want_of_a_thread_inside_a_function_is_an_error_of_that_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The function was entered: it counts as an attempt, and is reported as refused once, by the Timeout inside."""
    heard: list[Any] = []
    inner = Timeout(LONG, name="inner")

    def nested() -> int:
        with monkeypatch.context() as patch:
            patch.setattr(workers.Worker, "start", refused)
            return inner.call(len, "")

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers, "pool", workers.Pool())
    ctx = Context()
    unsubscribe = events.subscribe(heard.append, events.CallRejected)
    try:
        with pytest.raises(WorkersExhausted):
            Timeout(LONG, name="outer").execute(lambda ctx: nested(), ctx)
    finally:
        unsubscribe()
    assert ctx.attempts == len(ctx.failures) == 1
    assert [it.policy for it in heard] == ["inner"]


def test_a_limit_still_ends_what_looks_at_it_while_the_interpreter_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt begins after it, and no wait outlasts it, in whatever thread the function runs."""
    calls: list[float] = []

    def down(ctx: Context) -> None:
        calls.append(ctx.remaining())
        raise Boom

    pipeline = Policy.wrap(Timeout(0.05), Retry(None, on=Boom, backoff=[0.02]))
    with monkeypatch.context() as patch:
        patch.setattr(workers.sys, "is_finalizing", lambda: True)
        began = time.monotonic()
        with pytest.raises((Boom, TimeoutExceeded)):
            pipeline.execute(down)
    assert 1 <= len(calls) <= 3
    assert time.monotonic() - began < 5


def test_where_no_thread_can_be_started_the_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what does without, no circuit counts it, what is held comes back, and the next call finds its worker."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers, "pool", workers.Pool())
    bulkhead, breaker = Bulkhead(1), CircuitBreaker(1)
    heard: list[Any] = []
    pipeline = Policy.wrap(breaker, bulkhead, Timeout(LONG, name="slow"), listeners=[lambda it: heard.append(it)])
    ctx = Context()
    with monkeypatch.context() as patch:
        patch.setattr(workers.Worker, "start", refused)
        with pytest.raises(WorkersExhausted, match=r"can't start new thread.*cooperative=True") as caught:
            pipeline.execute(lambda ctx: 4, ctx)
    assert caught.value.policy == "slow"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (ctx.attempts, ctx.failures) == (0, ())
    rejected, ended = heard
    assert (rejected.reason, rejected.policy, ended.attempts) == ("WorkersExhausted", "slow", 0)
    assert breaker.state is CircuitState.CLOSED
    assert bulkhead.stats().in_flight == 0
    assert pipeline.call(len, "four") == 4
