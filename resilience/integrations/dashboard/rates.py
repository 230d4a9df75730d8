"""How often things happen: of the whole process second by second, and of each pipeline at present."""

from __future__ import annotations

from typing import Any, Final, TypeAlias, final

#: Seconds of which the counts of the process are kept.
SPAN: Final = 60

#: Seconds of which the present rate is the mean.
PRESENT: Final = 5

#: How many pipelines are counted separately: there may be one for each of a thousand hosts. Further ones are only
#: counted in the process.
MOST_PIPELINES: Final = 100

#: What is counted, in the order in which it is shown. Executions are counted only while there is a viewer.
FROM_EXECUTIONS: Final = ("executions", "failures")
RATES: Final = (*FROM_EXECUTIONS, "retries", "timeouts", "rejections", "fallbacks")

_Json: TypeAlias = dict[str, Any]


@final
class Seconds:
    """How often something happened in each of the last seconds."""

    __slots__ = ("_counts", "_span", "total")

    def __init__(self, span: int) -> None:
        self._span = span
        self._counts: dict[int, int] = {}  # by second, of the last ones in which there was something to count
        self.total: int = 0

    def add(self, now: float) -> None:
        """Count one more."""
        second = int(now)
        if second not in self._counts and len(self._counts) == self._span:
            del self._counts[next(iter(self._counts))]
        self._counts[second] = self._counts.get(second, 0) + 1
        self.total += 1

    def complete(self, now: float, since: float) -> list[int | None]:
        """Return the counts of the last complete seconds, the latest last; None where nothing was counted yet."""
        current = int(now)
        seconds = range(current - self._span + 1, current)
        return [self._counts.get(second, 0) if second + 1 > since else None for second in seconds]

    def present(self, now: float, since: float) -> float:
        """Return how many there were a second, in the mean of the last few complete ones; 0 where there is none yet."""
        known = [count for count in self.complete(now, since)[-PRESENT:] if count is not None]
        return round(sum(known) / len(known), 2) if known else 0.0


@final
class Rates:
    """The counts of everything in `RATES`. Their owner holds a lock around them."""

    def __init__(self) -> None:
        self._process = {name: Seconds(SPAN) for name in RATES}
        self._pipelines: dict[str, dict[str, Seconds]] = {}

    def add(self, name: str, pipeline: str | None, now: float) -> None:
        """Count one more, in the process, and in the pipeline where it is known."""
        self._process[name].add(now)
        if pipeline is None:
            return
        counts = self._pipelines.get(pipeline)
        if counts is None:
            if len(self._pipelines) >= MOST_PIPELINES:
                return
            counts = self._pipelines[pipeline] = {it: Seconds(PRESENT + 1) for it in RATES}
        counts[name].add(now)

    def summary(self, now: float, executions_since: float, since: float) -> _Json:
        """Return all of them.

        :param executions_since: since when executions are counted; `since`: since when everything else is.
        """
        begun = {name: executions_since if name in FROM_EXECUTIONS else since for name in RATES}
        return {
            "rates": {
                name: {**_numbers(it, now, begun[name]), "seconds": it.complete(now, begun[name])}
                for name, it in self._process.items()
            },
            "pipelines": [
                {"name": pipeline, "rates": {name: _numbers(it, now, begun[name]) for name, it in counts.items()}}
                for pipeline, counts in self._pipelines.items()
            ],
        }


def _numbers(seconds: Seconds, now: float, since: float) -> _Json:
    return {"total": seconds.total, "present": seconds.present(now, since)}
