"""The three worlds, and a clock that moves only when somebody waits.

A test is written once, as `async def main()`, and takes the `world` fixture, which runs it in threads,
in asyncio and in trio. In the threads world nothing in it ever suspends, so it is driven to its end
by one `send`; functions are handed to the library as the plain blocking functions that they then are.
"""

from __future__ import annotations

import gc
import inspect
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import hypothesis  # noqa: F401  # before anything is frozen: it looks for who refers to trio's random numbers
import pytest

from resilience import Context, Policy
from resilience.clock import clock as process_clock
from resilience.context import get_ambient
from resilience.runtimes import tasks
from resilience.runtimes.blocking import drive

# What a shell starts in the background ignores Ctrl-C, and so would the processes in which tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Boom(Exception):
    """The failure that the tests' dependency has."""


class World:
    """One of threads, asyncio and trio."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocking = name == "threads"
        self._released = threading.Event()

    def __repr__(self) -> str:
        return self.name

    def run(self, main: Callable[[], Awaitable[Any]]) -> Any:
        """Run `async def main()` to its end in this world."""
        if self.blocking:
            return drive(main(), "the test")  # type: ignore[arg-type]
        return anyio.run(main, backend=self.name)

    def native(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `async def fn` as a user of this world would have written it."""
        if not self.blocking or not inspect.iscoroutinefunction(fn):
            return fn
        return lambda *args, **kwargs: drive(fn(*args, **kwargs), "the test's function")

    async def execute(self, policy: Policy[Any], fn: Callable[..., Any], ctx: Context | None = None) -> Any:
        """Execute `async def fn(ctx)` under the policy."""
        if self.blocking:
            return policy.execute(self.native(fn), ctx)
        return await policy.aexecute(fn, ctx)

    async def attempt(self, policy: Policy[Any], fn: Callable[..., Any], ctx: Context | None = None) -> Any:
        """Return what came out: the value, or the exception as a value."""
        try:
            return await self.execute(policy, fn, ctx)
        except Exception as error:
            return error

    async def sleep(self, seconds: float) -> None:
        """Really wait."""
        if self.blocking:
            time.sleep(seconds)
        else:
            await anyio.sleep(seconds)

    async def hang(self) -> None:
        """Wait for much longer than any limit in the tests; a thread is let go after the test."""
        if self.blocking:
            self._released.wait(10)
        else:
            await anyio.sleep(10)

    def release(self) -> None:
        """Let go of the threads that hang."""
        self._released.set()


@pytest.fixture(autouse=True, scope="module")
def _collections_are_quick() -> None:
    """A full collection looks at what this module's tests have made, and not at every client's modules as well.

    Hundreds of tests collect, to show that nothing needs it, and that was half of the time of them all.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_stays_ambient() -> Iterator[None]:
    """Whatever a test did, the context of this thread is as it was."""
    before = get_ambient()
    yield
    assert get_ambient() is before


@pytest.fixture(params=["threads", "asyncio", "trio"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Every world in turn."""
    it = World(request.param)
    yield it
    it.release()


@pytest.fixture(params=["asyncio", "trio"])
def tasks_world(request: pytest.FixtureRequest) -> World:
    """The two worlds of tasks."""
    return World(request.param)


@pytest.fixture
def threads() -> Iterator[World]:
    """The world of threads alone."""
    it = World("threads")
    yield it
    it.release()


class FakeClock:
    """A process clock that stands still until somebody sleeps on it, or a test advances it."""

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The process clock, replaced: sleeps of policies are noted in `clock.sleeps` and take no time."""
    fake = FakeClock()

    async def sleep(runtime: object, seconds: float, ctx: Context) -> None:
        fake.sleep(seconds)
        await anyio.sleep(0)

    monkeypatch.setattr(process_clock, "now", fake.now)
    monkeypatch.setattr(process_clock, "sleep", fake.sleep)
    monkeypatch.setattr(tasks.TaskRuntime, "sleep", sleep)
    return fake


class Script:
    """An `async def fn(ctx)` that takes one step per call, the last one for ever: raises it, or returns it."""

    def __init__(self, *steps: Any) -> None:
        self._steps = steps
        self.contexts: list[Context] = []

    @property
    def calls(self) -> int:
        return len(self.contexts)

    def function(self) -> Callable[..., Awaitable[Any]]:
        async def fn(ctx: Any = None) -> Any:
            step = self._steps[min(len(self.contexts), len(self._steps) - 1)]
            self.contexts.append(ctx)
            if isinstance(step, BaseException):
                raise step
            return step

        return fn


class Heavy:
    """Something that a call holds in a local variable."""


class Watched:
    """Makes failures, and knows which of them are still alive."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def watch(self, it: Any) -> Any:
        self._refs.append(weakref.ref(it))
        return it

    def fail(self, make: Callable[[], BaseException] = Boom) -> Any:
        """Raise, from a frame that holds something (but not what it raises)."""
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
    """What goes in this block goes by itself: nothing is left to the cyclic collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def nothing_is_left_unawaited() -> Iterator[None]:
    """A coroutine that is dropped without having been awaited or closed fails the test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(it.message) for it in caught] == []


@pytest.fixture
def script() -> type[Script]:
    """`script(Boom(), "fine").function()` fails once and then answers."""
    return Script
