"""Worker threads: only the function runs on one, is abandoned after its timeout, and is never stopped."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Never

import pytest

from resilience import Bulkhead, Call, CircuitBreaker, Context, Fallback, Policy, Retry, Timeout, TimeoutExceeded
from resilience.runtimes import workers
from tests.callers import wait_until
from tests.conftest import Boom, Heavy, Watched
from tests.functions import raising
from tests.runtimes.conftest import LONG, waits_end_at_once

# --- the thread of a function ---


def test_the_function_runs_on_a_daemon_thread_of_the_pool() -> None:
    """The calling thread stays free to leave, and the worker does not keep the process alive."""
    thread = Timeout(LONG).call(threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert thread.name.startswith("resilience-worker-")


def test_without_an_enforced_timeout_everything_runs_in_the_calling_thread() -> None:
    """Under cooperative timeouts, all other policies, and contexts with a deadline."""
    pipeline = Policy.wrap(Fallback(), Retry(), CircuitBreaker(), Bulkhead(1), Timeout(LONG, cooperative=True))
    here = threading.get_ident()
    assert pipeline.call(threading.get_ident) == here
    assert Retry().execute(lambda ctx: threading.get_ident(), Context(timeout=LONG)) == here


def test_all_code_of_policies_runs_in_the_calling_thread(gate: threading.Event) -> None:
    """Predicates, listeners, handlers, backoffs, and policies outside and inside the timeout."""
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
        Timeout(0.3, on_timeout=here),
        Around(),
        listeners=[here],
    )
    assert pipeline.execute(lambda ctx: 1 / 0) is True
    assert pipeline.execute(lambda ctx: gate.wait(10)) is True
    assert pipeline.execute(lambda ctx: "fine") == "fine"
    assert len(seen) > 20
    assert set(seen) == {threading.get_ident()}


def test_nested_timeouts_take_one_worker_per_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    begin = workers.Pool.begin

    def counting(self: workers.Pool, job: workers.Job, policy: str | None) -> bool:
        taken.append(threading.current_thread().name)
        return begin(self, job, policy)

    monkeypatch.setattr(workers.Pool, "begin", counting)
    pipeline = Policy.wrap(Timeout(LONG), Timeout(LONG / 2), Retry(3, on=Boom, backoff=[0]), Timeout(LONG / 4))
    with pytest.raises(Boom):
        pipeline.execute(raising(Boom))
    assert taken == [threading.current_thread().name] * 3


TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")


# --- reuse ---


def test_a_worker_in_the_thread_of_its_caller_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """It is a greenlet. It would not run while that thread waits for another caller's function without greenlets."""
    monkeypatch.setattr(workers, "pool", workers.Pool())
    monkeypatch.setattr(workers, "_system_thread", lambda: 1)
    seen = [Timeout(LONG).call(threading.current_thread) for _ in range(3)]
    assert len(set(seen)) == 3

    def late() -> None:
        seen.append(threading.current_thread())
        gate.wait(LONG)

    with pytest.raises(TimeoutExceeded):
        Timeout(0.05).call(late)
    gate.set()
    for thread in seen:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in seen)
    assert not workers.pool.idle
    assert not workers.pool.abandoned


def test_a_worker_is_idle_before_its_caller_can_make_the_next_call() -> None:
    """However the threads are switched."""
    timeout, interval = Timeout(LONG), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert len({timeout.call(threading.get_ident) for _ in range(1000)}) == 1
    finally:
        sys.setswitchinterval(interval)


def test_a_worker_of_another_process_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork without the hooks of Python, as uWSGI makes it, copies an idle worker, but not its thread."""
    monkeypatch.setattr(workers, "pool", workers.Pool())
    copied = workers.Worker(workers.Job(int, (), {}))
    copied.process_id = -1
    workers.pool.idle.append(copied)
    assert Timeout(LONG).call(threading.current_thread).daemon
    assert copied not in workers.pool.idle


def test_a_worker_is_reused_after_a_failure() -> None:
    timeout = Timeout(LONG)
    threads: list[int] = []

    def fn(error: BaseException) -> None:
        threads.append(threading.get_ident())
        raise error

    for error in (
        *(Boom(), SystemExit(3), KeyboardInterrupt()),
        *(GeneratorExit(), StopIteration(), asyncio.CancelledError()),
    ):
        with pytest.raises(type(error)):
            timeout.call(fn, error)
    assert len(set(threads)) == 1


def test_a_worker_is_reused_after_an_abandoned_function_has_ended(gate: threading.Event) -> None:
    threads: list[int] = []

    def fn() -> None:
        threads.append(threading.get_ident())
        gate.wait(10)

    with waits_end_at_once(), pytest.raises(TimeoutExceeded):
        Timeout(LONG).call(fn)
    wait_until(lambda: threads)
    assert Timeout(LONG).call(threading.get_ident) != threads[0]
    gate.set()
    wait_until(lambda: threads[0] in {worker.ident for worker in list(workers.pool.idle)})


def test_idle_workers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call starts a new one."""
    monkeypatch.setattr(workers, "IDLE", 0.01)
    monkeypatch.setattr(workers.pool, "idle", deque())  # without the workers of other tests
    timeout = Timeout(LONG)
    worker = timeout.call(threading.current_thread)
    worker.join(5)
    assert not worker.is_alive()
    assert worker not in workers.pool.idle
    assert timeout.call(threading.current_thread) is not worker


def test_calls_do_not_queue_for_a_worker_and_only_a_few_idle_ones_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls of a burst run at the same time, each on its own thread."""
    monkeypatch.setattr(workers, "IDLE_IN_EXCESS", 0.01)
    monkeypatch.setattr(workers.pool, "idle", deque())
    together = threading.Barrier(20)
    timeout = Timeout(LONG)

    def call(_: int) -> threading.Thread:
        return timeout.call(lambda: (together.wait(10), threading.current_thread())[1])

    with ThreadPoolExecutor(20) as callers:
        threads = list(callers.map(call, range(20)))
    assert len(set(threads)) == 20
    for thread in [thread for thread in threads if thread not in list(workers.pool.idle)[: workers.FEW]]:
        thread.join(5)
    assert [thread.is_alive() for thread in threads].count(True) == workers.FEW == len(workers.pool.idle)
    assert timeout.call(threading.current_thread) in threads


def test_a_job_is_never_given_to_a_worker_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is taken while it is about to end."""
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_job_is_given_to_a_worker_that_an_exception_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a `MemoryError`, or one that a trace function raises."""
    monkeypatch.setattr(workers.pool, "idle", deque())
    timeout = Timeout(5)
    timeout.call(int)
    with monkeypatch.context() as patched:
        patched.setattr(workers.Pool, "idle_timeout", raising(MemoryError))
        worker = timeout.call(threading.current_thread)
        worker.join(5)
    assert not worker.is_alive()
    assert timeout.call(threading.current_thread) is not worker


def test_a_worker_that_was_taken_waits_for_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its caller is delayed for longer than the idle time."""
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


def test_a_worker_begins_a_job_only_once_it_is_woken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its idle time ends just then: otherwise it could drop the job, or be woken for it a second time."""
    taken: list[workers.Worker] = []

    class Taking(deque[workers.Worker]):
        def append(self, worker: workers.Worker) -> None:
            taken.append(worker)  # as soon as it is idle

    monkeypatch.setattr(workers, "IDLE", 0.001)
    monkeypatch.setattr(workers.pool, "idle", Taking())
    Timeout(LONG).call(int)
    begun = threading.Event()
    taken[0]._job = workers.Job(begun.set, (), {})
    assert not begun.wait(0.05)
    taken[0]._wake.release()
    assert begun.wait(5)


# --- outcomes ---


def test_the_traceback_of_an_exception_has_the_frames_of_the_function_and_does_not_grow() -> None:
    """If it is raised repeatedly. It has no context."""
    error = Boom()

    def deep_down() -> None:
        raise error.with_traceback(None)

    tracebacks = []
    for _ in range(5):
        with pytest.raises(Boom):
            Timeout(LONG).call(deep_down)
        tracebacks.append([frame.name for frame in traceback.extract_tb(error.__traceback__)])
    assert tracebacks == [tracebacks[0]] * 5
    assert "deep_down" in tracebacks[0]
    assert error.__context__ is None


def test_the_result_of_an_abandoned_call_is_dropped(gate: threading.Event) -> None:
    watched, used = Watched(), list[object]()

    def fn() -> Any:
        gate.wait(10)
        return watched.watch(Heavy())

    pipeline = Policy.wrap(Fallback("instead", on_fallback=used.append), Timeout(LONG))
    with waits_end_at_once():
        assert pipeline.call(fn) == "instead"
    gate.set()
    wait_until(lambda: Timeout.abandoned() == 0 and bool(watched.seen))
    wait_until(lambda: not watched.alive)
    assert len(used) == 1


def test_an_abandoned_call_drops_its_error(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Even a `SystemExit`; no thread ends of it, and nothing is printed."""
    for error in (Boom(), SystemExit(1), KeyboardInterrupt()):
        may_end, ended = threading.Event(), threading.Event()

        def fn(may_end: threading.Event, ended: threading.Event, error: BaseException = error) -> None:
            may_end.wait(10)
            ended.set()
            raise error

        with waits_end_at_once(), pytest.raises(TimeoutExceeded):
            Timeout(LONG).call(fn, may_end, ended)
        may_end.set()
        assert ended.wait(5)
        wait_until(lambda: Timeout.abandoned() == 0)
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


def test_a_coroutine_that_an_abandoned_call_returns_is_closed(gate: threading.Event) -> None:
    """Otherwise Python would warn that it was never awaited."""
    made: list[Any] = []

    async def late() -> None: ...

    def fn() -> Any:
        gate.wait(10)
        made.append(late())
        return made[0]

    with waits_end_at_once(), pytest.raises(TimeoutExceeded):
        Timeout(LONG).call(fn)
    gate.set()
    wait_until(lambda: Timeout.abandoned() == 0 and made)
    wait_until(lambda: made[0].cr_frame is None)


def test_a_late_results_error_of_close_is_only_logged(gate: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    threads: list[threading.Thread] = []

    class Hostile:
        send = throw = None

        def close(self) -> None:
            raise OSError("no")

    def fn() -> Hostile:
        threads.append(threading.current_thread())
        gate.wait(10)
        return Hostile()

    with waits_end_at_once(), pytest.raises(TimeoutExceeded):
        Timeout(LONG).call(fn)
    gate.set()
    wait_until(lambda: caplog.records)
    wait_until(lambda: threads[0] in workers.pool.idle)


def test_an_idle_worker_keeps_nothing_of_its_last_call_alive() -> None:
    """Neither arguments, result nor context variables."""

    def fn(argument: Heavy, variable: Any) -> Heavy:
        TENANT.set(variable)
        return Heavy()

    watched = Watched()
    watched.watch(Timeout(LONG).call(fn, watched.watch(Heavy()), watched.watch(Heavy())))
    gc.collect()
    wait_until(lambda: not watched.alive)
