"""The bars: limits on our results, mostly relative to other contestants, for single cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from benchmarks.cells import Result
from benchmarks.clients import AROUND
from benchmarks.families import calls, clients, layers, limits, queues, repeats, scale, start, telemetry, threads
from benchmarks.libraries import HAND_WRITTEN, HAND_WRITTEN_COUNTING, OURS, STACK, UNIFIED


@dataclass(frozen=True)
class Bar:
    """A limit.

    :param cell: the name of the result to check.
    :param against: a contestant, "best unified peer" or "best peer" (any library) to check the median over the rounds
        of ours / theirs; or "itself" to check the median of our own samples.
    :param limit: the largest permitted value.
    :param at_least: whether `limit` is the smallest permitted value instead.
    :param contestant: the contestant that counts as ours.
    :param unit: the unit of the limit.
    :param later: the limit from Python 3.12 on, if it is another one.
    """

    cell: str
    against: str
    limit: float
    at_least: bool = False
    contestant: str = OURS
    unit: str = ""
    later: float | None = None

    @property
    def title(self) -> str:
        return self.cell if self.contestant == OURS else f"{self.cell}, {self.contestant}"


TELEMETRY = f"{telemetry.GROUP}: {telemetry.CELL}"

BARS = (
    Bar("sync, stack: five, deadline", HAND_WRITTEN, 0.9),
    Bar("sync, stack: four", "resilix", 0.75),
    Bar("sync, stack: five, timeout", "best peer", 0.9),
    Bar("sync, one policy: retry", "resilix", 1.8),
    Bar("sync, one policy: breaker", "resilix", 1.8),
    Bar("sync, one policy: rate", "nopanic", 0.9),
    Bar("sync, one policy: retry, budget", "nopanic", 0.45),
    Bar("asyncio, one policy: retry, budget", "nopanic", 0.45),
    Bar("asyncio, one policy: hedge", "nopanic", 0.4),
    Bar("trio, one policy: hedge", "nopanic", 0.25),
    Bar(f"sync, {repeats.GROUP}: {repeats.CALL}", repeats.TIMEOUT, 1.6, contestant=repeats.HEDGE),
    Bar(f"sync, {repeats.GROUP}: {repeats.ADDED}", "itself", 1000, contestant=repeats.CAP, unit="ns"),
    Bar(f"sync, {repeats.GROUP}: {repeats.ADDED_TO_RETRY}", "itself", 35, contestant=repeats.BUDGET, unit="ns"),
    Bar("sync, by key: cache hit", "nopanic", 0.6),
    Bar("sync, by key: cache hit", "cachetools", 1.0),
    Bar("sync, by key: flight", "itself", 1500, unit="ns"),
    Bar("sync, by key: keyed", "nopanic", 0.8),
    Bar(f"asyncio, a stream of {calls.ITEMS} items: stream", "nopanic", 1.0),
    Bar(f"sync, a stream of {calls.ITEMS} items: stream", "nopanic", 2.2),
    Bar(f"asyncio, a stream of {calls.ITEMS} items: stream, idle", "itself", 2000 * calls.ITEMS, unit="ns"),
    Bar("asyncio, one policy: rate", "nopanic", 0.9),
    Bar("asyncio, one policy: rate", "aiolimiter", 0.8),
    Bar("asyncio, stack: four", "resilix", 0.45),
    Bar("asyncio, stack: five, timeout", HAND_WRITTEN, 0.65, later=0.8),
    Bar("asyncio, stack: five, timeout", "resilix", 0.5),
    Bar("sync, failure: open circuit", "best peer", 1.0),
    Bar("asyncio, failure: open circuit", "best peer", 1.0),
    Bar("sync, failure: one retry", "itself", 2000, unit="ns"),
    Bar("asyncio, failure: one retry", "itself", 3000, unit="ns"),
    Bar("sync, failure: through four", "itself", 3000, unit="ns"),
    Bar("asyncio, failure: through four", "itself", 3000, unit="ns"),
    Bar("asyncio, time out: a timeout fires", HAND_WRITTEN, 1.0),
    Bar("sync, block: deadline", "nopanic", 0.95),
    Bar("asyncio, block: deadline", HAND_WRITTEN, 1.1),
    Bar("sync, block: guard", "itself", 400, unit="ns"),
    Bar(TELEMETRY, "Prometheus, hand-written", 2.4, contestant="Prometheus"),
    Bar(TELEMETRY, "OpenTelemetry, hand-written", 1.6, contestant="OpenTelemetry"),
    Bar(TELEMETRY, "a span, hand-written", 1.3, contestant="a span"),
    Bar(TELEMETRY, "itself", 1000, contestant="logging at INFO, with nothing to say", unit="ns"),
    Bar("sync, layer: cost", "itself", 110, contestant=layers.CUSTOM, unit="ns"),
    Bar("sync, layer: largest deviation from a straight line, %", "itself", 10, contestant=layers.CUSTOM, unit="%"),
    Bar(f"sync, {limits.GROUP}: {limits.CALL}", limits.BULKHEAD, 2.2, contestant=limits.LIMITED),
    Bar(f"sync, {limits.GROUP}: {limits.ADDED}", "itself", 110, contestant=limits.THROTTLE, unit="ns"),
    Bar(f"sync, {limits.GROUP}: {limits.ADDED}", "itself", 20, contestant=limits.CHAOS_OFF, unit="ns"),
    *(Bar(f"{client}: {clients.ADDED}", AROUND, 1.5) for client in ("httpx, blocking", "httpx, asyncio", "requests")),
    Bar(f"httpx, asyncio: {clients.ADDED}", "itself", 25, unit="us"),
    Bar(f"aiohttp: {clients.ADDED}", "itself", 20, unit="us"),
    Bar(f"ASGI application: {clients.ADDED}", "itself", 7, unit="us"),
    Bar(f"SQLAlchemy, a transaction in SQLite: {clients.CALL}", HAND_WRITTEN, 1.3),
    Bar(f"{threads.GROUP}: throughput of 16 / of 1", "itself", 0.8, at_least=True),
    Bar(f"{queues.GROUP}: {queues.WAITERS}", queues.ANYIO, 1.25),
    Bar(f"{queues.GROUP}: {queues.HANDOFFS}", queues.SEMAPHORE, 1.3),
    Bar("import: from nothing", "tenacity", 1.1),
    Bar(f"{start.GROUP}: sync, four", "itself", 5_000_000, unit="ns"),
    Bar(f"{start.GROUP}: asyncio, four", "itself", 1_000_000, unit="ns"),
    Bar("made and called once: five, deadline", "nopanic", 1.0),
    Bar("bytes of a protected function: five, deadline", "itself", 6600, unit="bytes"),
    Bar(f"{scale.HOSTS}: made and called", "itself", 6000, unit="bytes"),
    Bar(f"{scale.HOSTS}: made, the 20,000th", "itself", 25_000, unit="ns"),
    Bar(f"{scale.HOSTS}: found", "itself", 1500, unit="ns"),
    Bar(f"{scale.TASKS}: bytes while it runs", "itself", 1500, unit="bytes"),
    Bar(f"{scale.CLIENTS}: {scale.CELL}", "itself", 1.0),
    Bar(f"{scale.THREADS}: after 3 s", "itself", 4, unit="threads"),
)


@dataclass(frozen=True)
class Verdict:
    """The measured value of a bar.

    :param opponent: the contestant that ours was compared with.
    :param value: the ratio, or our own median.
    """

    bar: Bar
    opponent: str
    value: float

    @property
    def met(self) -> bool:
        return self.value >= self.bar.limit if self.bar.at_least else self.value <= self.bar.limit


def judge(results: Iterable[Result], python: str) -> Iterator[Verdict]:
    """Judge the bars whose cells were measured, and whose opponents took part.

    :param python: the interpreter of the run, such as "CPython 3.13.0".
    """
    by_name = {result.name: result for result in results}
    is_later = " 3.11." not in python
    for bar in BARS:
        if bar.later is not None and is_later:
            bar = replace(bar, limit=bar.later)
        result = by_name.get(bar.cell)
        opponent = result and _opponent(bar, result)
        if result and opponent == bar.contestant:
            yield Verdict(bar, bar.against, result.median(bar.contestant))
        elif result and opponent:
            yield Verdict(bar, opponent, result.ratio(bar.contestant, opponent))


def _opponent(bar: Bar, result: Result) -> str | None:
    match bar.against:
        case "best unified peer":
            return result.best(UNIFIED)
        case "best peer":
            return result.best(set(result.samples) - {OURS, HAND_WRITTEN, HAND_WRITTEN_COUNTING, STACK})
        case "itself":
            return result.best([bar.contestant])
    return result.best([bar.against])
