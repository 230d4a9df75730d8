"""The cells: a cell is one job in one world, with all contestants that can do it."""

from __future__ import annotations

import statistics
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from operator import truediv
from typing import Any, TypeAlias

import anyio

from benchmarks import timing
from benchmarks.functions import ANSWER, FAILURE, FAILURES, answering, failing
from benchmarks.libraries import OURS, Library, Protect
from benchmarks.timing import SYNC, Effort, outcome

#: Sets up a contestant in a world, and yields the function that is timed.
Setting: TypeAlias = Callable[[Protect, str], AbstractAsyncContextManager[Callable[[], Any]]]

#: Whether a cell of this name is to be measured.
Wanted: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True)
class Result:
    """The result of a cell.

    :param group: the table of the cell.
    :param cell: its column in the table.
    :param unit: the unit of the samples.
    :param samples: one number per round, by contestant.
    """

    group: str
    cell: str
    unit: str
    samples: dict[str, list[float]]

    @property
    def name(self) -> str:
        return name_of(self.group, self.cell)

    def median(self, contestant: str) -> float:
        return statistics.median(self.samples[contestant])

    def ratio(self, ours: str, theirs: str) -> float:
        """Return the median over the rounds of ours / theirs."""
        return statistics.median(map(truediv, self.samples[ours], self.samples[theirs]))

    def best(self, contestants: Iterable[str]) -> str | None:
        """Return the contestant with the smallest median; None if none of them took part."""
        return min((it for it in contestants if it in self.samples), key=self.median, default=None)


def name_of(group: str, cell: str) -> str:
    return f"{group}: {cell}"


@dataclass(frozen=True)
class Cell:
    """One job in one world.

    :param group: the table of the cell.
    :param name: its column in the table.
    :param world: the world in which it runs.
    :param entry: the entry of the libraries that does the job.
    :param setting: makes the timed function of an entry.
    :param expected: what each call must return; otherwise the cell raises an error.
    """

    group: str
    name: str
    world: str
    entry: str
    setting: Setting
    expected: object = field(default=ANSWER)

    def contestants(self, libraries: Iterable[Library]) -> dict[str, Protect]:
        """Return the contestants, by name."""
        key = self.entry, self.world
        return {library.name: library.entries[key] for library in libraries if key in library.entries}

    def measure(self, libraries: Iterable[Library], effort: Effort) -> Result:
        """Time all contestants that can do the job."""
        contestants = self.contestants(libraries)

        async def main() -> dict[str, list[float]]:
            functions = {}
            async with AsyncExitStack() as settings:
                for name, protect in contestants.items():
                    function = functions[name] = await settings.enter_async_context(self.setting(protect, self.world))
                    await check(f"{self.group}, {self.name}: {name}", self.world, function, self.expected)
                samples = await timing.interleaved(self.world, functions, effort)
                for name, function in functions.items():
                    await check(f"{self.group}, {self.name}: {name}", self.world, function, self.expected)
            return samples

        return Result(self.group, self.name, "ns", timing.run(self.world, main))


async def check(name: str, world: str, function: Callable[[], Any], expected: object = ANSWER) -> None:
    """Raise an error unless a function returns the expected value."""
    for _ in range(3):
        result = await outcome(world, function)
        if result != expected:
            raise AssertionError(f"{name} returned {result!r}, not {expected!r}")


def measure_each(
    cells: Iterable[Cell], libraries: Iterable[Library], effort: Effort, wanted: Wanted
) -> Iterator[Result]:
    """Measure the cells that are wanted, if our library takes part in them."""
    for cell in cells:
        if wanted(name_of(cell.group, cell.name)) and OURS in cell.contestants(libraries):
            yield cell.measure(libraries, effort)


# --- settings ---


@asynccontextmanager
async def fine(protect: Protect, world: str) -> AsyncIterator[Callable[[], Any]]:
    """Protect a function that succeeds."""
    yield protect(answering(world))


def with_function(function: Callable[[str], Callable[..., Any]]) -> Setting:
    """Protect another function, made for the world."""

    @asynccontextmanager
    async def setting(protect: Protect, world: str) -> AsyncIterator[Callable[[], Any]]:
        yield protect(function(world))

    return setting


@asynccontextmanager
async def opened(protect: Protect, world: str) -> AsyncIterator[Callable[[], Any]]:
    """Open a circuit with failures, so that it refuses each call; the caller catches the error."""
    protected = protect(failing(world))
    for _ in range(FAILURES):
        await _error_of(world, protected)
    error = await _error_of(world, protected)
    assert not isinstance(error, FAILURE), "the circuit is not open"
    yield _catching(world, protected, type(error))


def raising(function: Callable[[str], Callable[..., Any]], kind: type[Exception]) -> Setting:
    """Protect a function whose exception reaches the caller, who catches it."""

    @asynccontextmanager
    async def setting(protect: Protect, world: str) -> AsyncIterator[Callable[[], Any]]:
        yield _catching(world, protect(function(world)), kind)

    return setting


@asynccontextmanager
async def full(protect: Protect, world: str) -> AsyncIterator[Callable[[], Any]]:
    """Take the only permit of a bulkhead, so that it refuses each call; the caller catches the error."""
    async with _held(protect, world) as protected:
        error = await _error_of(world, protected)
        yield _catching(world, protected, type(error))


@asynccontextmanager
async def _held(protect: Protect, world: str) -> AsyncIterator[Callable[[], Any]]:
    if world == SYNC:
        entered, left = threading.Event(), threading.Event()

        def hold(ctx: object = None) -> int:
            entered.set()
            left.wait()
            return ANSWER

        protected = protect(hold)
        holder = threading.Thread(target=protected)
        holder.start()
        entered.wait()
        try:
            yield protected
        finally:
            left.set()
            holder.join()
        return

    inside, done = anyio.Event(), anyio.Event()

    async def hold_on(ctx: object = None) -> int:
        inside.set()
        await done.wait()
        return ANSWER

    protected = protect(hold_on)
    async with anyio.create_task_group() as holders:
        holders.start_soon(protected)
        await inside.wait()
        try:
            yield protected
        finally:
            done.set()


async def _error_of(world: str, protected: Callable[..., Any]) -> Exception:
    try:
        await outcome(world, protected)
    except Exception as error:
        return error
    raise AssertionError("the call was let through")


def _catching(world: str, protected: Callable[..., Any], kind: type[Exception]) -> Callable[[], Any]:
    """Return a function that makes the call, and catches the expected exception."""

    def refused() -> int:
        try:
            protected()
        except kind:
            return ANSWER
        return 0

    async def refused_later() -> int:
        try:
            await protected()
        except kind:
            return ANSWER
        return 0

    return refused if world == SYNC else refused_later
