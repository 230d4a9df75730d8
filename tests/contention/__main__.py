"""Storms for as long as one likes: `python -m tests.contention --seconds 60`.

Each round sends some thousand calls from eight threads, an asyncio loop and a trio loop through one bulkhead
and one breaker, and checks what the tests check. The report shows that nothing grows: not the threads, not
the objects, not the memory. Exits with 1 if something does, or if a count was wrong.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from resilience import Bulkhead, CircuitBreaker, FailureRatio, Retry, Timeout, events
from tests.conftest import Boom
from tests.contention.storm import TASKS_PER_LOOP, THREADS, Gauge, Storm, through_a_bulkhead

#: Rounds that are not measured: caches fill, workers start.
WARM_UP = 3

#: What a run may grow by from its first measured round to its last: objects, and bytes of memory.
MOST_OBJECTS, MOST_BYTES = 2_000, 16 * 2**20

LIMIT = 4


class Soak:
    """One bulkhead and one breaker for the whole run, and a new storm for each round."""

    def __init__(self) -> None:
        self._bulkhead = Bulkhead(LIMIT, queue=28, max_wait=0.05)
        self._moves: list[events.CircuitChanged] = []
        self._breaker = CircuitBreaker(
            FailureRatio(0.5, min_calls=20, last=50), open_for=[0.001], probes=2, on_transition=self._moves.append
        )
        self._pipelines = [
            Retry(2, on=Boom, backoff=[0]).wrap(self._breaker, self._bulkhead),
            self._bulkhead.wrap(self._breaker),
            self._bulkhead,
        ]
        self.transitions = 0
        self.outcomes: Counter[str] = Counter()

    def round(self, operations: int, seed: int) -> None:
        """Let one storm pass, and check what is left behind."""
        gauge = Gauge()
        storm = Storm(through_a_bulkhead(self._bulkhead, self._pipelines, gauge), operations, seed)
        self.outcomes += storm.run()
        stats = self._bulkhead.stats()
        assert (stats.in_flight, stats.queued) == (0, 0), f"permits were lost or made: {stats}"
        assert gauge.most <= LIMIT, f"{gauge.most} were inside, at most {LIMIT} may be"
        chain = list(self._moves)
        assert all(one.new is other.old for one, other in itertools.pairwise(chain)), "a transition is missing"
        self.transitions += len(chain)
        del self._moves[:-1]
        assert Timeout.abandoned() == 0, "a worker was walked away from"


def resident_bytes() -> int:
    """Memory of this process, 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def measure() -> tuple[int, int, int]:
    """Threads, objects and bytes that are there now."""
    gc.collect()
    return threading.active_count(), len(gc.get_objects()), resident_bytes()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contention", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (60)")
    parser.add_argument("--operations", type=int, default=3000, help="calls in a round (3000)")
    options = parser.parse_args(arguments)

    print(f"{THREADS} threads, {TASKS_PER_LOOP} asyncio tasks, {TASKS_PER_LOOP} trio tasks, one bulkhead of {LIMIT}")
    print(f"{'round':>6} {'calls':>9} {'per s':>7} {'threads':>8} {'objects':>9} {'MiB':>7}")
    soak, began, shown, rounds = Soak(), time.monotonic(), 0.0, 0
    first = last = measure()
    while rounds <= WARM_UP or time.monotonic() - began < options.seconds:
        soak.round(options.operations, seed=rounds)
        rounds += 1
        last = measure()
        if rounds == WARM_UP:
            first = last
        elapsed = time.monotonic() - began
        if elapsed - shown >= options.seconds / 12 or elapsed >= options.seconds:
            shown = elapsed
            calls = sum(soak.outcomes.values())
            print(
                f"{rounds:>6} {calls:>9,} {calls / elapsed:>7,.0f} {last[0]:>8} {last[1]:>9,} {last[2] / 2**20:>7.1f}",
                flush=True,
            )

    print(", ".join(f"{count:,} {outcome}" for outcome, count in soak.outcomes.most_common()))
    print(f"{soak.transitions:,} transitions, every one told once and in order")
    growth = last[1] - first[1], last[2] - first[2]
    flat = growth[0] <= MOST_OBJECTS and growth[1] <= MOST_BYTES and last[0] <= first[0] + LIMIT
    verdict = "flat" if flat else "NOT FLAT"
    print(f"growth since round {WARM_UP}: {growth[0]:+,} objects, {growth[1] / 2**20:+.1f} MiB: {verdict}")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
