"""Processes that fork, are interrupted or end while policies are in use. Each test runs its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

#: The beginning of every script.
PRELUDE = """
import asyncio, atexit, faulthandler, os, signal, sys, threading, time, warnings
from resilience import *
from resilience import events

faulthandler.dump_traceback_later(20, exit=True)  # a hang shows where every thread stands
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "(?s).*fork", DeprecationWarning)  # 3.12 on: with threads
"""


def run_python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process."""
    script = PRELUDE + textwrap.dedent(code)
    root = Path(__file__).parents[2]
    command = [sys.executable, *options, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=root, check=False)


def printed_by(code: str, *options: str) -> str:
    """Run a script that must succeed without output to stderr. Return what it printed."""
    done = run_python(code, *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# --- fork ------------------------------------------------------------------------------------

#: A thread that stays inside a function or holds locks, and a child process that does not have the thread.
FORKING = """
def beside(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    assert inside.wait(20)
    return thread

def in_child(function):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            function()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

inside, let_go = threading.Event(), threading.Event()

def stay(*args):
    inside.set()
    let_go.wait(60)

def take(*locks):
    assert locks
    for lock in locks:
        lock.acquire()
    try:
        stay()
    finally:
        for lock in locks:
            lock.release()

def locks_of(owner):
    # its own, and those of its parts
    seen, todo, found = set(), [owner], []
    while todo:
        part = todo.pop()
        if id(part) in seen or isinstance(part, type):
            continue
        seen.add(id(part))
        if isinstance(part, (type(threading.Lock()), type(threading.RLock()))):
            found.append(part)
        elif type(part).__module__.startswith("resilience") or part is owner:
            todo += vars(part).values() if hasattr(part, "__dict__") else ()
            slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
            todo += (getattr(part, name) for name in slots if hasattr(part, name))
    return found
"""

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")


def forked(code: str) -> str:
    return printed_by(textwrap.dedent(FORKING) + textwrap.dedent(code))


@forks
def test_permits_and_queue_places_of_other_threads_are_free_in_the_child() -> None:
    """Those threads do not exist there. The parent keeps its own."""
    forked("""
        bulkhead = Bulkhead(1, queue=1)
        thread = beside(lambda: bulkhead.call(stay))
        waiting = threading.Thread(target=lambda: bulkhead.call(int), daemon=True)
        waiting.start()
        while not bulkhead.stats().queued:
            time.sleep(0.001)

        def child():
            assert bulkhead.stats() == type(bulkhead.stats())(1, 0, 0, 0), bulkhead.stats()
            assert bulkhead.execute(lambda ctx: "in", Context(timeout=10)) == "in"

        in_child(child)
        assert (bulkhead.stats().in_flight, bulkhead.stats().queued) == (1, 1)
        let_go.set()
        thread.join()
        waiting.join()
        assert bulkhead.stats().in_flight == 0
        """)


@forks
def test_a_fork_inside_a_bulkhead_leaves_the_permit_to_the_parent() -> None:
    """In the child the permit does not count, so releasing it there does not create one."""
    forked("""
        bulkhead = Bulkhead(1)

        def forking():
            def child():
                assert bulkhead.stats().in_flight == 0
            in_child(child)
            return os.fork()

        def call():
            return bulkhead.call(forking)

        def block():
            with bulkhead.slot():
                return forking()

        for fork in (call, block):
            child = fork()
            if child == 0:
                code = 1
                with bulkhead.slot():
                    refused = bulkhead.capture(lambda ctx: None)
                    code = 0 if isinstance(refused.error, BulkheadFull) else 2
                os._exit(code if bulkhead.stats().in_flight == 0 else 3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert bulkhead.stats().in_flight == 0
        """)


@forks
@pytest.mark.parametrize("policy", ["Bulkhead(1, queue=1)", "AdaptiveLimit(60, initial=1, queue=1)", "RateLimiter(2)"])
def test_a_task_that_is_finalized_in_the_child_while_it_waits_changes_nothing_there(policy: str) -> None:
    """It has got a permit of the parent, and a lock that another thread held at the fork is never released."""
    forked(f"""
        import gc

        policy = {policy}
        loop = asyncio.new_event_loop()

        async def wait():
            async with policy.turn() if hasattr(policy, "turn") else policy.slot():
                pass

        with policy.turn(2) if hasattr(policy, "turn") else policy.slot():
            task = loop.create_task(wait())
            loop.run_until_complete(asyncio.sleep(0.01))
        beside(lambda: take(*locks_of(policy)))

        def child():
            global task
            before = policy.stats()
            task._log_destroy_pending = False
            loop.close()
            del task
            gc.collect()
            assert policy.stats() == before, policy.stats()

        in_child(child)
    """)


@forks
def test_the_child_does_not_wait_for_a_call_of_another_thread() -> None:
    """That call would never end there. The parent goes on sharing it."""
    forked("""
        for policy in (SingleFlight(key=lambda *args: 1), Cache(60, key=lambda *args: 1)):
            inside.clear(), let_go.clear()
            thread = beside(lambda: policy.call(stay))

            def child():
                assert policy.call(lambda: "its own") == "its own"

            in_child(child)
            got = []
            waiting = threading.Thread(target=lambda: got.append(policy.call(int)), daemon=True)
            waiting.start()
            while not policy._flights.leaders[1].followers:
                time.sleep(0.001)
            let_go.set()
            thread.join()
            waiting.join()
            assert got == [None], got
        """)


@forks
def test_a_lock_that_another_thread_held_is_free_in_the_child() -> None:
    """However short it is held, some forks happen at that moment, and the child would wait for ever."""
    forked("""
        keyed = Keyed(lambda key: Retry(), lambda *args: len(args))
        uses = {
            CircuitBreaker(1): lambda policy: (policy.isolate(), policy.close(), policy.stats(), policy.call(int)),
            Bulkhead(1): lambda policy: (policy.stats(), policy.call(int), policy.resize(3)),
            RateLimiter(10): lambda policy: (
                policy.stats(), policy.call(int), policy.resize(3), policy.reset(), policy.pause(0)
            ),
            AdaptiveLimit(1, initial=1): lambda policy: (policy.stats(), policy.call(int), policy.reset()),
            AdaptiveThrottle(): lambda policy: (policy.stats(), policy.call(int), policy.reset()),
            Chaos(result=0): lambda policy: (policy.on(), policy.is_on, policy.call(int), policy.off()),
            Cache(60): lambda policy: (policy.call(int), policy.forget((int, ())), policy.clear(), policy.stats()),
            keyed: lambda policy: (policy.call(int), policy.forget(1), policy.policies, policy.stats()),
            events.dispatch.subscribers: lambda subscribers: events.subscribe(print, events.TimedOut)(),
        }
        for owner, use in uses.items():
            inside.clear(), let_go.clear()
            thread = beside(lambda: take(*locks_of(owner)))
            in_child(lambda: use(owner))
            let_go.set()
            thread.join()
            use(owner)
        """)


@forks
def test_locks_of_listeners_and_integrations_do_not_block_the_child() -> None:
    """Logs, metrics and the dashboard are often set up before a server forks its workers."""
    forked("""
        import gc, logging, sqlite3
        from contextlib import closing
        import prometheus_client
        from resilience.integrations import dashboard, opentelemetry, prometheus
        from resilience.integrations.dbapi import StatementLimits
        from resilience.integrations.logging import log_events
        from resilience.testing import virtual, virtual_time

        logging.disable()
        retry = Retry(2, on=Exception, backoff=[0], name="of this process")
        log_events()
        prometheus.instrument(retry)
        board = dashboard.Dashboard(retry, history=True)

        def is_ours(instance):
            return str(type(instance).__module__).startswith("resilience.integrations")

        def use():
            retry.capture(lambda ctx: 1 / 0)
            prometheus_client.generate_latest()
            prometheus.instrument(Bulkhead(1))()
            opentelemetry.instrument(Bulkhead(1))()
            with virtual_time():
                retry.call(int)
            board._watch.log.since(0)
            with closing(sqlite3.connect(":memory:")) as connection, deadline(60), StatementLimits(connection):
                pass

        ours = [prometheus, opentelemetry, virtual, *(instance for instance in gc.get_objects() if is_ours(instance))]
        found = {id(lock): lock for owner in ours for lock in locks_of(owner)}
        thread = beside(lambda: take(*found.values()))
        in_child(use)
        let_go.set()
        thread.join()
        use()
        """)


@forks
def test_an_algorithm_whose_reset_raises_does_not_stop_the_reset_of_other_policies() -> None:
    """A custom algorithm may raise. Its error is logged once."""
    forked("""
        import logging

        class Log(logging.Handler):
            messages = []

            def emit(self, record):
                self.messages.append(record.getMessage())

        class Own:
            is_used = False

            def update(self, limit, sample):
                return limit

            def reset(self):
                if self.is_used:
                    raise ZeroDivisionError("cannot be reset")
                self.is_used = True

        logging.getLogger("resilience").addHandler(Log())
        policies = [AdaptiveLimit(Own(), initial=1), *(Bulkhead(1) for _ in range(3)), AdaptiveLimit(Own(), initial=1)]

        def child():
            assert [policy.call(str.upper, "x") for policy in policies] == ["X"] * 5
            assert Log.messages == ["resetting AdaptiveLimit in the child of a fork raised"] * 2

        def inside_all(left):
            return stay() if not left else left[0].call(inside_all, left[1:])

        beside(lambda: inside_all(policies))
        in_child(child)
        let_go.set()
        """)


@forks
def test_a_retry_budget_is_full_in_the_child_and_its_lock_free() -> None:
    forked("""
        budget = RetryBudget(0, saved=2)
        assert [budget.withdraw() for _ in range(3)] == [True, True, False]
        beside(lambda: take(*locks_of(budget)))

        def child():
            assert (budget.balance, budget.refused) == (2, 0)

        in_child(child)
        let_go.set()
        assert (budget.balance, budget.refused) == (0, 1)
        """)


@forks
def test_a_probe_and_a_running_listener_of_another_thread_do_not_block_the_child() -> None:
    """The child makes its own probe and reports its own transitions, and not those of the parent."""
    forked("""
        states = []

        def record(event):
            states.append(event.new.value)
            if threading.current_thread() is not threading.main_thread():
                stay()

        reporting = CircuitBreaker(1, on_transition=record)
        first = beside(reporting.isolate)
        inside.clear()
        probing = CircuitBreaker(1, open_for=[0.0])
        probing.capture(lambda ctx: 1 / 0)
        second = beside(lambda: probing.call(stay))
        reporting.close()  # reported by the thread that is in the listener, once it goes on

        def child():
            states.clear()
            reporting.isolate()
            assert states == ["isolated"], states
            assert probing.stats().probes == 0
            probing.call(int)
            assert probing.state is CircuitState.CLOSED

        in_child(child)
        let_go.set()
        first.join()
        second.join()
        assert states == ["isolated", "closed"], states
        assert probing.state is CircuitState.CLOSED
        """)


@forks
def test_after_a_fork_that_python_does_not_notice_no_idle_worker_is_used() -> None:
    """Their threads are in the parent. uWSGI forks like that by default."""
    forked("""
        import ctypes

        timeout = Timeout(5)
        threads = [threading.Thread(target=timeout.call, args=(time.sleep, 0.1)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        os.fork = ctypes.PyDLL(None).fork
        in_child(lambda: [timeout.call(str.upper, "x") for _ in range(3)])
        """)


@forks
def test_event_loops_and_timers_start_afresh_in_the_child() -> None:
    """The loop of another thread is not there, nor are its calls: one running under a timer, one in the queue."""
    forked("""
        bulkhead = Bulkhead(1, queue=1)
        pipeline = Policy.wrap(Timeout(30), bulkhead, Timeout(20))

        async def wait_inside():
            inside.set()
            await asyncio.to_thread(let_go.wait, 60)

        async def both():
            await asyncio.gather(pipeline.acall(wait_inside), pipeline.acall(asyncio.sleep, 0))

        asyncio.run(pipeline.acall(asyncio.sleep, 0))
        thread = beside(lambda: asyncio.run(both()))
        while not bulkhead.stats().queued:  # the running call has its thread and its imports by then
            time.sleep(0.001)

        def child():
            assert asyncio.run(pipeline.acapture(lambda ctx: asyncio.sleep(0, "fine"))).value == "fine"
            late = asyncio.run(Timeout(0.01).acapture(lambda ctx: asyncio.sleep(60)))
            assert isinstance(late.error, TimeoutExceeded)
            assert pipeline.call(lambda: "fine") == "fine"

        in_child(child)
        let_go.set()
        thread.join()
        """)


@forks
def test_a_drain_in_which_a_signal_handler_forks_goes_on_in_the_child() -> None:
    """There, no call is in progress."""
    forked("""
        from resilience.work import Gate

        gate, children = Gate(), []
        thread = beside(lambda: gate.call(stay))
        signal.signal(signal.SIGALRM, lambda *args: children.append(os.fork()))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            drained = gate.drain(0.5)
        finally:
            if children == [0]:
                os._exit(0 if sys.exc_info()[1] is None and drained else 1)
        assert not drained
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
        let_go.set()
        thread.join()
        """)


@forks
def test_the_child_has_its_own_workers() -> None:
    """The threads of the parent do not exist there, so none of them may get a job."""
    forked("""
        timeout = Timeout(10)
        timeout.call(int)  # an idle worker, and one that hangs
        Timeout(0.01).capture(lambda ctx: let_go.wait(60))
        assert Timeout.abandoned() == 1

        def child():
            assert Timeout.abandoned() == 0, "the child has abandoned nothing"
            began = time.monotonic()
            assert timeout.call(lambda: "fine") == "fine"
            assert time.monotonic() - began < 5
            late = Timeout(0.01).capture(lambda ctx: threading.Event().wait(60))
            assert isinstance(late.error, TimeoutExceeded)
            assert Timeout.abandoned() == 1

        in_child(child)
        assert timeout.call(lambda: "the parent goes on") == "the parent goes on"
        assert Timeout.abandoned() == 1
        let_go.set()
        """)


@forks
def test_a_child_that_a_function_on_a_worker_forks_ends_with_the_function() -> None:
    """Its caller does not exist there, and no other call comes to its worker."""
    forked("""
        child = Timeout(10).call(os.fork)
        assert os.waitpid(child, 0) == (child, 0)  # at once: otherwise the dump of `PRELUDE` would end this process
        assert Timeout(10).call(lambda: "the parent goes on") == "the parent goes on"
        """)


@forks
def test_a_process_of_multiprocessing_inherits_no_deadline() -> None:
    """As with the other start methods. A pool starts its processes in the first calls, and keeps them."""
    forked("""
        import anyio, math, multiprocessing

        def child():
            assert current_context().remaining() == math.inf

        def start():
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join(20)
            return process.exitcode

        async def start_in_task():
            return start()

        async def in_task():
            async with deadline(30):
                assert start() == 0
                in_child(lambda: current_context().remaining() <= 30 or 1 / 0)
            assert await Timeout(30).acall(start_in_task) == 0

        with deadline(30):
            assert start() == 0
            in_child(lambda: current_context().remaining() <= 30 or 1 / 0)  # which continues the call
        assert Timeout(30).call(start) == 0
        for backend in ("asyncio", "trio"):
            anyio.run(in_task, backend=backend)
        """)


#: A pool of one process, which is forked by the first call that uses it.
POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from resilience.work import Gate

breaker, gate = CircuitBreaker(2), Gate()

@breaker
def fail():
    raise ConnectionError

def three_errors(pool):
    return [type(pool.submit(fail).exception()).__name__ for _ in range(3)]

def call_after_shut():
    gate.shut()
    return type(gate.capture(lambda ctx: None).error).__name__

def operation():
    return current_context().operation

def pool():
    return ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
"""


@forks
def test_a_process_of_multiprocessing_is_no_part_of_the_call_that_starts_it() -> None:
    """What it does there counts, and is refused, as in any other process."""
    forked(
        POOL
        + """
with pool() as it:
    assert breaker.call(three_errors, it) == ["ConnectionError", "ConnectionError", "CircuitOpen"]
with pool() as it, breaker.guard():
    assert three_errors(it) == ["ConnectionError", "ConnectionError", "CircuitOpen"]
with pool() as it:
    assert gate.call(lambda: it.submit(call_after_shut).result()) == "ShuttingDown"
with pool() as it:
    assert Retry(3).call(lambda: it.submit(operation).result()) is None
in_child(lambda: breaker.call(operation).endswith("operation") or 1 / 0)
"""
    )


@forks
def test_an_error_that_a_forked_circuit_has_counted_counts_here_too() -> None:
    """It says so on the error, which comes back from that process, perhaps while other calls fail here."""
    forked(
        POOL
        + """
def fetch(it):
    error = it.submit(fail).exception()
    thread = threading.Thread(target=breaker.capture, args=[lambda ctx: 1 / 0])
    thread.start()
    thread.join()
    raise error

with pool() as it:
    it.submit(int).result()  # starts the process
    try:
        breaker.call(fetch, it)
    except ConnectionError:
        pass
assert breaker.state is CircuitState.OPEN, breaker.state
"""
    )


# --- interrupts ------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent to a process on POSIX only")
@pytest.mark.parametrize(
    "run", ["asyncio.run(pipeline.acall(asyncio.sleep, 60))", "trio.run(wait)", "pipeline.call(hang)"]
)
def test_ctrl_c_ends_a_call_and_leaves_everything_as_it_was(run: str) -> None:
    """In threads, asyncio and trio, at each kind of wait: no fallback, no retry, no failure counted, no permit held."""
    printed = printed_by(f"""
        import anyio, trio
        from contextlib import nullcontext

        trio.run(anyio.sleep, 0)  # imports what it needs, so that the interrupt does not hit an import

        class Down(Policy):
            async def around(self, call, ctx):
                raise ConnectionError("down")

        async def wait():
            await pipeline.acall(trio.sleep, 60)

        def hang():
            threading.Event().wait(60)

        def interrupt(is_reached):
            while not is_reached():
                time.sleep(0.001)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        places = {{
            "in the function": lambda: bulkhead.stats().in_flight,
            "in the queue": lambda: bulkhead.stats().queued,
            "between two attempts": lambda: retries,
        }}
        for place, is_reached in places.items():
            bulkhead, retries = Bulkhead(1, queue=1), []
            breaker = CircuitBreaker(1, open_for=[0.0], on=BaseException)
            breaker.capture(lambda ctx: 1 / 0)
            everything = (Exception, KeyboardInterrupt)
            retry = Retry(2, on=everything, backoff=[60], on_retry=retries.append)
            pipeline = Policy.wrap(Fallback("instead", on=everything), retry, breaker, bulkhead, Timeout(60))
            if place == "between two attempts":
                pipeline = Policy.wrap(bulkhead, Fallback("instead", on=everything), retry, Down())
            threading.Thread(target=interrupt, args=[is_reached], daemon=True).start()
            began = time.monotonic()
            with bulkhead.slot() if place == "in the queue" else nullcontext():
                try:
                    {run}
                except KeyboardInterrupt:
                    print("interrupted", time.monotonic() - began < 15, end=" ")
            print(bulkhead.stats().in_flight, bulkhead.stats().queued, breaker.stats().probes, breaker.stats().opened)
        """)
    assert printed == "interrupted True 0 0 0 1\n" * 3


# --- threads of the process ---


def test_no_thread_is_started_before_one_is_needed() -> None:
    """Neither by the import, nor by creating a policy, nor by asynchronous or cooperative calls."""
    printed_by("""
        timeout = Timeout(60)
        Policy.wrap(Retry(), Timeout(60, cooperative=True)).call(int)
        asyncio.run(timeout.acall(asyncio.sleep, 0))
        assert threading.active_count() == 1, threading.enumerate()
        timeout.call(int)
        assert threading.active_count() == 2, threading.enumerate()
        """)


# --- subinterpreters ---


@pytest.mark.skipif(sys.version_info < (3, 13), reason="earlier versions crash or share the state of asyncio")
def test_a_subinterpreter_runs_everything_but_the_workers_of_a_timeout() -> None:
    """It cannot start a daemon thread, so those calls are refused. Tasks need none."""
    printed = printed_by("""
        import _interpreters

        number = _interpreters.create()
        _interpreters.run_string(number, '''if True:
            import asyncio
            from resilience import *

            refused = Timeout(20).capture(lambda ctx: 1).error
            print(type(refused).__name__, "cooperative=True" in str(refused))
            print(Policy.wrap(Timeout(20, cooperative=True), Retry(2), CircuitBreaker(2), Bulkhead(1)).call(int))
            print(asyncio.run(Timeout(20).acall(asyncio.sleep, 0, "awaited")), flush=True)
        ''')
        _interpreters.destroy(number)
        """)
    assert printed.splitlines() == ["WorkersExhausted True", "0", "awaited"]


# --- the end of the process ---


def test_policies_work_until_the_interpreter_exits() -> None:
    """At exit, in threads that outlive the main thread, and in finalizers."""
    done = run_python("""
        import weakref

        bulkhead = Bulkhead(1)
        pipeline = Policy.wrap(Retry(2, backoff=[0.01]), bulkhead, Timeout(30))

        class Thing: ...

        thing = Thing()
        weakref.finalize(thing, lambda: print("finalizer:", pipeline.call(lambda: "fine"), bulkhead.stats().in_flight))
        atexit.register(lambda: print("at exit:", pipeline.call(lambda: "fine")))

        def late():
            threading.main_thread().join()
            print("thread:", pipeline.call(lambda: "fine"))

        threading.Thread(target=late).start()
        """)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["at exit: fine", "finalizer: fine 0", "thread: fine"]
    # Some versions of Python cannot start a thread any more at this point, and a warning says that the timeout is off.
    assert set(done.stderr.splitlines()) <= {UNLIMITED}


#: Logged when a function runs in the calling thread because no thread can be started.
UNLIMITED = "the interpreter is shutting down: Timeout cannot cut off what it limits"


def test_a_timeout_cuts_off_at_exit_if_an_idle_worker_is_left() -> None:
    """In every version of Python; the process does not wait for the abandoned function."""
    began = time.monotonic()
    printed = printed_by("""
        Timeout(30).call(int)
        atexit.register(lambda: print("at exit:", Timeout(0.05).capture(lambda ctx: time.sleep(60)).error))
        """)
    assert printed == "at exit: Timeout: no result within 0.05 s\n"
    assert time.monotonic() - began < 40


def test_if_no_thread_can_be_started_at_exit_the_function_runs_and_a_warning_is_logged() -> None:
    """It runs in the main thread, within its deadline as far as it checks it. Otherwise the timeout works as usual."""
    done = run_python("""
        def can_start():
            try:
                threading.Thread(target=int, daemon=True).start()
            except RuntimeError:
                return False
            return True

        def flush(ctx):
            return threading.current_thread() is threading.main_thread(), 0 < ctx.remaining() <= 30

        atexit.register(lambda: print(can_start(), *Timeout(30).execute(flush)))
        """)
    assert done.returncode == 0
    assert (done.stdout, done.stderr) in {("True False True\n", ""), ("False True True\n", f"{UNLIMITED}\n")}


def test_after_the_end_of_threads_the_function_runs_without_its_timeout_and_warns() -> None:
    """As in the `__del__` of an object that is freed with its module."""
    done = run_python("""
        class Last:
            def __del__(self):
                print(Policy.wrap(Retry(), Bulkhead(1), CircuitBreaker()).call(len, "four"))
                print(Timeout(30).capture(lambda ctx: "fine"))

        sys.modules["last"] = Last()  # after the end of `__main__`
        """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\nSuccess(value='fine')\n", f"{UNLIMITED}\n")


def test_after_the_end_of_threads_a_race_runs_if_one_has_run_before() -> None:
    """What a race needs is imported by the first one: no import works any more in a `__del__` at exit."""
    printed = printed_by("""
        class Last:
            def __del__(self):
                print(Hedge(30).capture(lambda ctx: "fine"))

        Hedge(30).call(int)
        sys.modules["last"] = Last()
        """)
    assert printed == "Success(value='fine')\n"


def test_the_process_ends_at_once_whatever_daemon_threads_do() -> None:
    """They wait for a worker, or in a queue, or call all the time."""
    began = time.monotonic()
    printed = printed_by("""
        full = Bulkhead(1, queue=9)
        slot = full.slot()
        slot.__enter__()
        pipeline = Policy.wrap(Retry(), CircuitBreaker(), Bulkhead(9), Timeout(60))

        def hammer():
            while True:
                pipeline.call(int)

        for work in (lambda: Timeout(60).call(time.sleep, 60), lambda: full.call(int), *[hammer] * 4):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.1)
        print("end")
        """)
    assert printed == "end\n"
    assert time.monotonic() - began < 40


@pytest.mark.skipif(sys.version_info < (3, 14), reason="threads can inherit context variables from 3.14 on")
def test_a_worker_keeps_no_context_variable_of_the_call_that_started_it() -> None:
    """Otherwise an idle worker would keep the values alive."""
    printed_by(
        """
        import contextvars, gc, weakref

        class Heavy: ...

        heavy = Heavy()
        alive = weakref.ref(heavy)
        variable = contextvars.ContextVar("variable")
        token = variable.set(heavy)
        Timeout(30).call(int)
        variable.reset(token)
        del heavy, token
        Timeout(30).call(int)
        gc.collect()
        assert alive() is None
        """,
        "-X",
        "thread_inherit_context=1",
    )
