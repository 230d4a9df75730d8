"""Rates of events: of the whole process for each of the last seconds, and of each pipeline at present."""

from __future__ import annotations

from typing import Any, Final, final

#: For how many seconds the counts of the process are kept.
SPAN: Final = 60

#: The number of seconds whose mean is the present rate.
PRESENT: Final = 5

#: How many pipelines are counted separately: there may be one for each of a thousand hosts. Further ones are counted
#: only as part of the process.
MOST_PIPELINES: Final = 100

#: What is counted, in the order in which it is shown. Executions are counted only while there is a viewer.
FROM_EXECUTIONS: Final = ("executions", "failures")
RATES: Final = (*FROM_EXECUTIONS, "retries", "timeouts", "rejections", "fallbacks")


@final
class Seconds:
    """The counts of the last seconds."""

    __slots__ = ("_counts", "_span", "_total")

    def __init__(self, span: int) -> None:
        self._span = span
        self._counts: dict[int, int] = {}  # second -> count; only seconds with a count, the latest of them
        self._total = 0

    def add(self, now: float) -> None:
        """Count one more."""
        second = int(now)
        if second not in self._counts and len(self._counts) == self._span:
            del self._counts[next(iter(self._counts))]
        self._counts[second] = self._counts.get(second, 0) + 1
        self._total += 1

    def complete(self, now: float, since: float) -> list[int | None]:
        """Return the counts of the last complete seconds, oldest first; None for seconds before counting began."""
        current = int(now)
        seconds = range(current - self._span + 1, current)
        return [self._counts.get(second, 0) if second + 1 > since else None for second in seconds]

    def numbers(self, now: float, since: float) -> dict[str, Any]:
        """Return the total, and the mean per second over the last `PRESENT` complete seconds: 0 if there is none."""
        known = [count for count in self.complete(now, since)[-PRESENT:] if count is not None]
        return {"total": self._total, "present": round(sum(known) / len(known), 2) if known else 0.0}


@final
class Rates:
    """The counts of everything in `RATES`. Not thread-safe: the owner holds a lock."""

    def __init__(self) -> None:
        self._process = {name: Seconds(SPAN) for name in RATES}
        self._pipelines: dict[str, dict[str, Seconds]] = {}

    def add(self, name: str, pipeline: str | None, now: float) -> None:
        """Count one more for the process, and for the pipeline if it is known."""
        self._process[name].add(now)
        counted = self._pipelines
        if pipeline is not None and pipeline not in counted and len(counted) < MOST_PIPELINES:
            counted[pipeline] = {it: Seconds(PRESENT + 1) for it in RATES}
        if pipeline in counted:
            counted[pipeline][name].add(now)

    def summary(self, now: float, executions_since: float, since: float) -> dict[str, Any]:
        """Return all rates.

        :param executions_since: when the counting of executions began; `since`: when that of everything else began.
        """
        begun = {name: executions_since if name in FROM_EXECUTIONS else since for name in RATES}
        return {
            "rates": {
                name: {**it.numbers(now, begun[name]), "seconds": it.complete(now, begun[name])}
                for name, it in self._process.items()
            },
            "pipelines": [
                {"name": pipeline, "rates": {name: it.numbers(now, begun[name]) for name, it in counts.items()}}
                for pipeline, counts in self._pipelines.items()
            ],
        }
