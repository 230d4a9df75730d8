"""The three worlds, and a clock that moves only when something waits.

A test is written once, as `async def test_x(world)`, and runs in threads, in asyncio and in trio. In the threads world,
nothing in it ever suspends, so one `send` drives it to its end; its functions are passed to the library as plain
blocking functions.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import IO, Any

import anyio
import hypothesis  # before anything is frozen: it looks for referrers of trio's random numbers
import pytest

from resilience import Context, Policy, Timeout, current_context, events
from resilience.clock import Waitable
from resilience.clock import clock as process_clock
from resilience.events.dispatch import subscribers
from resilience.events.kinds import CallFinished, ExecutionFinished
from resilience.runtimes.workers import Worker
from resilience.testing import Simulation, virtual_time

try:
    import fcntl
except ImportError:  # Windows, where tests marked `serial` may run beside others
    fcntl = None  # type: ignore[assignment]

# A process that a shell starts in the background ignores Ctrl-C, and so would the processes to which tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine, the time that one example takes says nothing.
hypothesis.settings.register_profile(
    "unhurried", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


class Boom(Exception):
    """The failure of the tests' dependency."""


class Other(Exception):
    """A failure that the policy under test does not handle."""


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception that refuses attributes, even its cause and its traceback."""

    code: int


class Incomparable:
    """A key that can be hashed, but not compared."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise TypeError("it cannot be compared")


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends to its end, in this thread."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("in the threads world, a test may not wait for anything but `world`")


def shown(value: object) -> str:
    """Return the `repr` of a value for the id of a test, without addresses, which differ from run to run."""
    return re.sub(r" (at 0x[0-9a-f]+|id='\d+')", "", repr(value))


class World:
    """One of threads, asyncio and trio."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocking = name == "threads"
        self._released = threading.Event()

    def __repr__(self) -> str:
        return self.name

    def run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run `async def main()` to its end in this world, for tests with several runs: an `async def` test is one."""
        if self.blocking:
            return drive(main())
        return anyio.run(main, backend=self.name)

    def native(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `async def fn` as a user of this world would have written it."""
        if not self.blocking or not inspect.iscoroutinefunction(fn):
            return fn

        def function(*args: Any, **kwargs: Any) -> Any:
            return drive(fn(*args, **kwargs))

        function.__qualname__ = getattr(fn, "__qualname__", "function")
        return function

    async def execute(self, policy: Policy[Any], fn: Callable[..., Any], ctx: Context | None = None) -> Any:
        """Execute `async def fn(ctx)` under the policy."""
        if self.blocking:
            return policy.execute(self.native(fn), ctx)
        return await policy.aexecute(fn, ctx)

    async def call(self, policy: Policy[Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `async def fn(*args, **kwargs)` under the policy."""
        if self.blocking:
            return policy.call(self.native(fn), *args, **kwargs)
        return await policy.acall(fn, *args, **kwargs)

    async def result(self, result: Any) -> Any:
        """Return the result of a decorated function or method, awaited in tasks."""
        return result if self.blocking else await result

    async def attempt(self, policy: Policy[Any], fn: Callable[..., Any], ctx: Context | None = None) -> Any:
        """Execute `async def fn(ctx)` under the policy; return the value, or the exception as a value."""
        try:
            return await self.execute(policy, fn, ctx)
        except Exception as error:
            return error

    async def sleep(self, seconds: float) -> None:
        """Wait in real time."""
        if self.blocking:
            time.sleep(seconds)
        else:
            await anyio.sleep(seconds)

    async def hang(self, ctx: object = None) -> None:
        """Wait for much longer than any limit in the tests; a thread is released after the test."""
        if self.blocking:
            self._released.wait(10)
        else:
            await anyio.sleep(10)

    def release(self) -> None:
        """Release the threads that hang."""
        self._released.set()


class Virtual(World):
    """Threads, asyncio or trio in virtual time, or a simulation; time passes when all code waits."""

    simulation: Simulation

    def run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if self.name != "simulation":
            # Threads of other tests may poll (an idle server does), and would hold up the clock. Those in trio's cache
            # may work for this test.
            here = threading.current_thread()
            others = [it for it in threading.enumerate() if it is not here and not isinstance(it, Worker)]
            with virtual_time(ignore=[it for it in others if not it.name.startswith("Trio thread")]):
                return super().run(main)
        results = []

        async def client() -> None:
            results.append(await main())

        with Simulation(1) as self.simulation:
            self.simulation.start(client())
            self.simulation.run()
        return results[0]

    async def execute(self, policy: Policy[Any], fn: Callable[..., Any], ctx: Context | None = None) -> Any:
        if self.name == "simulation":
            return await self.simulation.execute(policy, fn, ctx)
        return await super().execute(policy, fn, ctx)

    async def sleep(self, seconds: float) -> None:
        if self.blocking:
            process_clock.sleep(seconds)
        elif self.name == "simulation":
            await self.simulation.sleep(seconds)
        else:
            await anyio.sleep(seconds)

    def now(self) -> float:
        return process_clock.now()


def _lock(file: IO[bytes], *, alone: bool) -> None:
    fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)


@contextmanager
def _turn(*, alone: bool) -> Iterator[None]:
    """Run beside the tests of the other xdist workers, or alone.

    The lock on `room` is shared or exclusive. Each test passes the lock on `door` first, which a test that waits for an
    exclusive `room` holds, so that no other test enters before it. Both are locks on files that exist anyway, and the
    system releases them if a worker dies.
    """
    if fcntl is None or "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with open(__file__, "rb") as room:
        with open(Path(__file__).with_name("__init__.py"), "rb") as door:
            _lock(door, alone=True)
            _lock(room, alone=alone)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Switch the garbage collector off during the imports, which leave nothing that it could collect."""
    gc.disable()
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
        _import_together(session, worker)
    result = yield
    gc.enable()
    return result


def _import_together(session: pytest.Session, worker: str) -> None:
    """Import the tests in the workers of xdist, so that each file is compiled by one worker only.

    Every worker has to import every file. Each begins at another file, and writes its bytecode, even if that is
    switched off. If an import fails, pytest repeats and reports it.
    """
    sys.dont_write_bytecode = False
    asked = [Path(it.partition("::")[0]).absolute() for it in session.config.args]
    files = [file for it in asked for file in (sorted(it.rglob("test_*.py")) if it.is_dir() else [it])]
    first = int(worker.removeprefix("gw")) * len(files) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test that is marked `serial` while no other test runs."""
    with _turn(alone=item.get_closest_marker("serial") is not None):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in its world."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    world = next((it for it in arguments.values() if isinstance(it, World)), None)
    if world is None:
        pytest.fail("an `async def` test takes a world to run in, such as the fixture `world`", pytrace=False)
    world.run(partial(test, **arguments))
    return True


@pytest.fixture(autouse=True, scope="module")
def _collections_are_quick() -> None:
    """Freeze all existing objects, so that a full collection scans only the objects that this module's tests create.

    Hundreds of tests run a collection, to show that none was needed, and that took half of the time of the whole suite.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Check after each test that no context is ambient in this thread, and that none of its listeners is left."""
    before = _listeners()
    yield
    assert current_context() is not current_context(), "the context of an execution is still ambient"
    assert _listeners() == before, "a subscription has not been ended, or the policies are off"


@pytest.fixture(autouse=True)
def _no_call_is_left_behind() -> Iterator[None]:
    """Wait until all functions that a test abandoned have ended, before the next test begins."""
    yield
    end = time.monotonic() + 20
    while Timeout.abandoned() and time.monotonic() < end:
        time.sleep(0.001)
    assert Timeout.abandoned() == 0, "a function that was abandoned still runs"


def _listeners() -> Any:
    return subscribers.by_kind[ExecutionFinished], subscribers.by_kind[CallFinished], subscribers.policies_off


@pytest.fixture(params=["threads", "asyncio", "trio"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each world in turn."""
    it = World(request.param)
    yield it
    it.release()


@pytest.fixture(params=["asyncio", "trio"])
def tasks_world(request: pytest.FixtureRequest) -> World:
    """The two worlds of tasks."""
    return World(request.param)


@pytest.fixture
def threads() -> Iterator[World]:
    """Only the world of threads."""
    it = World("threads")
    yield it
    it.release()


@pytest.fixture
def in_asyncio() -> World:
    """Only the world of asyncio, for its own features, such as `Task.cancel`."""
    return World("asyncio")


@pytest.fixture
def in_trio() -> World:
    """Only the world of trio."""
    return World("trio")


@pytest.fixture(params=["threads", "asyncio", "trio", "simulation"])
def anywhere(request: pytest.FixtureRequest) -> Virtual:
    """Each runtime in turn, in virtual or simulated time."""
    return Virtual(request.param)


@pytest.fixture(params=["asyncio", "trio"])
def virtual_tasks(request: pytest.FixtureRequest) -> Virtual:
    """The two worlds of tasks, in virtual time."""
    return Virtual(request.param)


@pytest.fixture
def in_virtual_asyncio() -> Virtual:
    """Only the world of asyncio, in virtual time."""
    return Virtual("asyncio")


@pytest.fixture
def in_simulation() -> Virtual:
    """Only a simulation."""
    return Virtual("simulation")


class FakeClock:
    """A process clock that stands still until a policy sleeps, or a test advances it.

    A thread that waits for another one, as under an enforced `Timeout`, wakes when that is done, or when the clock has
    advanced far enough. So a test decides at which line a timeout fires. Event loops keep their own clocks.
    """

    def __init__(self) -> None:
        self.time = 1000.0
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time += seconds

    def shorten(self, seconds: float) -> float:
        """Record the sleep of a task, which then takes no time."""
        self.sleep(seconds)
        return 0.0

    def wait(self, waitable: Waitable, seconds: float | None) -> bool:
        end, patience = inf if seconds is None else self.time + seconds, time.monotonic() + 20
        while not waitable.acquire(True, 0.001):
            if self.time >= end:
                return False
            assert time.monotonic() < patience, "a thread waits, and nothing advances the clock"
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace the process clock: sleeps of policies are recorded in `clock.sleeps`, and take no time."""
    fake = FakeClock()
    monkeypatch.setattr(process_clock, "now", fake.now)
    monkeypatch.setattr(process_clock, "sleep", fake.sleep)
    monkeypatch.setattr(process_clock, "shorten", fake.shorten)
    monkeypatch.setattr(process_clock, "wait", fake.wait)
    return fake


class Script:
    """An `async def fn(ctx)` that raises or returns one step per call; the last one repeats.

    :param doing: is called with the context before each step.
    """

    def __init__(self, *steps: Any, doing: Callable[[Any], object] | None = None) -> None:
        self._steps = steps
        self._doing = doing
        self.contexts: list[Context] = []

    @property
    def calls(self) -> int:
        return len(self.contexts)

    def function(self) -> Callable[..., Awaitable[Any]]:
        async def fn(ctx: Any = None) -> Any:
            step = self._steps[min(len(self.contexts), len(self._steps) - 1)]
            self.contexts.append(ctx)
            if self._doing is not None:
                self._doing(ctx)
            if isinstance(step, BaseException):
                raise step
            return step

        return fn


class Heavy:
    """An object that a call holds in a local variable."""


class Watched:
    """Makes failures, and tracks which of them are still alive."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def watch(self, it: Any) -> Any:
        self._refs.append(weakref.ref(it))
        return it

    def fail(self, make: Callable[[], BaseException] = Boom) -> Any:
        """Raise from a frame that holds an object, but not the error."""
        heavy = self.watch(Heavy())
        raise self.watch(make())
        return heavy

    async def fn(self, ctx: Any = None) -> Any:
        self.fail()

    @property
    def seen(self) -> int:
        return len(self._refs)

    @property
    def alive(self) -> list[str]:
        return [type(ref()).__name__ for ref in self._refs if ref() is not None]


@contextmanager
def no_collector() -> Iterator[None]:
    """Switch the cyclic garbage collector off in this block, so that objects in reference cycles stay alive."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def nothing_is_left_unawaited() -> Iterator[None]:
    """Fail the test if a coroutine is dropped without being awaited or closed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(it.message) for it in caught] == []


@pytest.fixture
def script() -> type[Script]:
    """The class `Script`: `script(Boom(), "fine").function()` fails once, and then succeeds."""
    return Script


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """Every event of the process while the test runs."""
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append)
    yield seen
    unsubscribe()
