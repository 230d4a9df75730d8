"""The bars: how much of somebody else's time ours may take, cell by cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.cells import Result
from benchmarks.libraries import BY_HAND, OURS, STACK, UNIFIED


@dataclass(frozen=True)
class Bar:
    """A limit to a ratio, the median over the rounds of ours / theirs; or to our own median.

    :param cell: the name of the result that it looks at.
    :param against: "by hand", "best unified peer", "best peer" (any library, by its median), or "itself".
    :param at_most: for the ratio; where it is against itself, in the unit of the result.
    :param contestant: whose numbers are ours.
    :param at_least: for what is better when it is more.
    """

    cell: str
    against: str
    at_most: float
    contestant: str = OURS
    at_least: float | None = None


BARS = (
    Bar("sync, stack: five, deadline", "by hand", 0.75),
    Bar("sync, stack: four", "best unified peer", 0.65),
    Bar("sync, stack: five, timeout", "best peer", 0.9),
    Bar("sync, one policy: retry", "best peer", 1.0),
    Bar("sync, one policy: breaker", "best peer", 1.0),
    Bar("asyncio, stack: four", "best unified peer", 0.5),
    Bar("asyncio, stack: five, timeout", "by hand", 0.6),
    Bar("asyncio, stack: five, timeout", "best unified peer", 0.5),
    Bar("sync, failure: open circuit", "best peer", 1.0),
    Bar("asyncio, failure: open circuit", "best peer", 1.0),
)


@dataclass(frozen=True)
class Verdict:
    """How a bar was met.

    :param opponent: who it was in the end.
    :param value: the ratio, or our own median.
    """

    bar: Bar
    opponent: str
    value: float

    @property
    def met(self) -> bool:
        return self.value <= self.bar.at_most


def judge(results: Iterable[Result]) -> Iterator[Verdict]:
    """Judge the bars whose cells were measured, with somebody to compare with."""
    by_name = {result.name: result for result in results}
    for bar in BARS:
        result = by_name.get(bar.cell)
        opponent = result and _opponent(bar, result)
        if result and opponent == bar.contestant:
            yield Verdict(bar, bar.against, result.median(bar.contestant))
        elif result and opponent:
            yield Verdict(bar, opponent, result.ratio(bar.contestant, opponent))


def _opponent(bar: Bar, result: Result) -> str | None:
    match bar.against:
        case "itself":
            return bar.contestant if bar.contestant in result.samples else None
        case "by hand":
            return result.best([BY_HAND])
        case "best unified peer":
            return result.best(UNIFIED)
        case "best peer":
            return result.best(set(result.samples) - {OURS, BY_HAND, STACK})
    raise ValueError(f"against whom is {bar.against!r}?")
