"""One pipeline protects three clients, in threads, asyncio and trio, against a server that keeps failing.

    python examples/quickstart.py

Look at the policies and the two functions at the top: your program needs nothing more. Then read the timeline. Each
line is one call: how many attempts it made, how long it took, how much of its budget was left, and what happened to it.
The server (`_flaky_server.py`) is real, and fails according to a script, so every run shows the same. At the end, the
promises are checked; if one is broken, the exit status is 1. You can break them:

    python examples/quickstart.py --break breaker       # or: fallback, retry, bulkhead, timeout
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import anyio
import httpx2
import requests
import trio

from _flaky_server import FlakyServer
from _timeline import Timeline, Visit
from resilience import Bulkhead, CircuitBreaker, CircuitOpen, Fallback, Policy, Retry, Timeout, events, transient
from resilience.backoff import Exponential

# --- what your program needs -----------------------------------------------------------------


def temporary(error: Exception) -> bool:
    """Whether another attempt may succeed: network errors, our own timeout, and answers with a status of 5xx."""
    return transient(error) or getattr(getattr(error, "response", None), "status_code", 0) >= 500


fallback = Fallback("yesterday's forecast")  # if everything else fails
retry = Retry(3, on=temporary, backoff=Exponential(0.1), rng=Random(42))  # waits of up to 0.1 and 0.2 s
bulkhead = Bulkhead(4, queue=16)  # four calls at once, over all threads, tasks and event loops
breaker = CircuitBreaker(5, on=temporary, open_for=1.5)  # after five failures in a row, stop calling the server
timeout = Timeout(0.5)  # for each attempt

pipeline = Policy.wrap(fallback, retry, bulkhead, breaker, timeout)  # outermost first


def fetch(url: str) -> str:
    response = requests.get(url, timeout=10)
    response.raise_for_status()
    return response.text


async def afetch(client: httpx2.AsyncClient, url: str) -> str:
    response = await client.get(url)
    response.raise_for_status()
    return response.text


#     pipeline.call(fetch, url)                           in a thread
#     await pipeline.call(afetch, client, url)            in asyncio and in trio, the same

# --- threads, asyncio and trio ---------------------------------------------------------------

# Each runtime makes its calls at the same time, through a pipeline, and records the outcomes. `ready` is called when
# the client is ready, and returns when all runtimes are.


def in_threads(through: Policy[str], visits: list[Visit], ready: Callable[[], object]) -> None:
    def call(visit: Visit) -> None:
        time.sleep(visit.delay)
        visit.end(through.capture(lambda ctx: fetch(visit.enter()), visit.begin()))

    with ThreadPoolExecutor(len(visits)) as pool:
        ready()
        for done in [pool.submit(call, visit) for visit in visits]:
            done.result()


async def _call(through: Policy[str], client: httpx2.AsyncClient, visit: Visit) -> None:
    await anyio.sleep(visit.delay)
    visit.end(await through.acapture(lambda ctx: afetch(client, visit.enter()), visit.begin()))


def in_asyncio(through: Policy[str], visits: list[Visit], ready: Callable[[], object]) -> None:
    async def main() -> None:
        async with httpx2.AsyncClient(timeout=10) as client, asyncio.TaskGroup() as tasks:
            ready()
            for visit in visits:
                tasks.create_task(_call(through, client, visit))

    asyncio.run(main())


def in_trio(through: Policy[str], visits: list[Visit], ready: Callable[[], object]) -> None:
    async def main() -> None:
        async with httpx2.AsyncClient(timeout=10) as client, trio.open_nursery() as nursery:
            ready()
            for visit in visits:
                nursery.start_soon(_call, through, client, visit)

    trio.run(main)


RUNTIMES: dict[str, Callable[[Policy[str], list[Visit], Callable[[], object]], None]] = {
    "threads": in_threads,
    "asyncio": in_asyncio,
    "trio": in_trio,
}

# --- the story -------------------------------------------------------------------------------

BUDGET = 1.5  # seconds that a call may take in all
GRACE = 0.4  # seconds by which a loaded machine may react late


class Story:
    """Seven acts, with the promises to check after each."""

    def __init__(self, server: FlakyServer, timeline: Timeline, pipelines: dict[str, Policy[str]]) -> None:
        self.server = server
        self.timeline = timeline
        self.pipelines = pipelines
        self.transitions: list[events.CircuitChanged] = []
        self.abandoned = 0

    def play(self) -> None:
        self.fair_weather()
        self.small_failures()
        self.a_hang()
        self.an_outage()
        self.recovery()
        self.rush_hour()
        self.little_time()
        self.the_whole()

    def fair_weather(self) -> None:
        self.timeline.act("Fair weather", "The server answers, and the pipeline changes nothing.")
        self.timeline.heading()
        visits = [self.one("/forecast", runtime) for runtime in RUNTIMES]
        self.timeline.promise(
            "what works is left alone",
            f"answered at attempt {_each(visit.ctx.attempts for visit in visits)}",
            all(visit.answered for visit in visits),
        )

    def small_failures(self) -> None:
        self.timeline.act("Small failures", "A 503, then a dropped connection: only the retry notices.")
        visits = [self.one("/flaky", runtime) for runtime in RUNTIMES]
        self.timeline.promise(
            "small failures were retried",
            f"answered at attempt {_each(visit.ctx.attempts for visit in visits)}",
            all(visit.answered and visit.ctx.attempts > 1 for visit in visits),
        )

    def a_hang(self) -> None:
        self.timeline.act("A hang", "The server hangs. Each attempt has half a second; the second one succeeds.")
        visits = self.all_at_once("/hangs-once")
        self.timeline.show(visits)
        self.timeline.promise(
            "the hang was cut off, and retried",
            f"in {_each(f'{visit.ctx.elapsed:.2f} s' for visit in visits)}",
            all(visit.answered and visit.count(events.TimedOut) for visit in visits),
        )

    def an_outage(self) -> None:
        self.timeline.act("Outage", "Everything is 503. Failures of threads and asyncio together open the one circuit.")
        self.server.outage = True
        fell_back = [self.one("/forecast", runtime) for runtime in RUNTIMES]
        seen = self.server.requests.total()
        refused = [self.one("/forecast", runtime) for runtime in RUNTIMES]
        self.timeline.promise(
            "the fallback answered during the outage",
            f"{sum(visit.fell_back for visit in fell_back + refused)} of {len(fell_back + refused)} calls",
            all(visit.fell_back and visit.answer is not None for visit in fell_back + refused),
        )
        last = fell_back[-1]
        self.timeline.promise(
            "one circuit for threads, asyncio and trio",
            f"attempts {_each(visit.ctx.attempts for visit in fell_back)}; "
            f"opened by {_each(self.opened_by()) or 'none'}, "
            f"{last.runtime} was {'refused' if last.count(events.CallRejected) else 'let through'}",
            self.opened_by() == ["asyncio"] and last.count(events.CallRejected) == 1,
        )
        self.timeline.promise(
            "an open circuit spared the server",
            f"{len(refused)} calls, {self.server.requests.total() - seen} requests",
            self.server.requests.total() == seen,
        )

    def recovery(self) -> None:
        open_for = breaker.stats().retry_after or 0.0
        self.timeline.act(
            "Recovery", f"The server is back. After another {open_for:.1f} s the first call is let through as a probe."
        )
        self.server.outage = False
        time.sleep(open_for + 0.02)
        visits = [self.one("/forecast", runtime) for runtime in reversed(RUNTIMES)]
        states = [change.new.name for change in self.transitions]
        self.timeline.promise(
            "the circuit opened, probed and closed",
            " > ".join(states) or "it never changed",
            states == ["OPEN", "HALF_OPEN", "CLOSED"] and all(visit.answered for visit in visits),
        )

    def rush_hour(self) -> None:
        self.timeline.act("Rush hour", "Twelve calls of 0.15 s, from the runtimes in turn; four may run at a time.")
        visits = self.all_at_once("/busy", each=4)
        self.timeline.chart(visits)
        # An attempt that was cut off may still be running at the server when the next one begins.
        allowed = 4 + sum(visit.count(events.TimedOut) for visit in visits)
        self.timeline.promise(
            "one bulkhead for threads, asyncio and trio",
            f"{self.server.most_at_once} at once of {len(visits)} calls",
            1 < self.server.most_at_once <= allowed and all(visit.answered for visit in visits),
        )

    def little_time(self) -> None:
        self.timeline.act(
            "Little time", "The server hangs, and these calls have 0.25 s in all: no attempt may take longer."
        )
        visits = self.all_at_once("/hangs", budget=0.25)
        self.abandoned = Timeout.abandoned()
        self.timeline.show(visits)
        self.timeline.promise(
            "no retry began without time for it",
            f"attempts {_each(visit.ctx.attempts for visit in visits)}",
            all(visit.ctx.attempts == 1 and not visit.count(events.RetryScheduled) for visit in visits),
        )

    def the_whole(self) -> None:
        visits = self.timeline.visits
        latest = max(visit.late for visit in visits)
        self.timeline.promise(
            "no call outlived its deadline", f"the latest of {len(visits)} by {latest * 1000:.0f} ms", latest <= GRACE
        )
        self.timeline.promise(
            "every call got an answer",
            f"{sum(visit.answer is not None for visit in visits)} of {len(visits)}",
            all(visit.answer is not None for visit in visits),
        )
        retried = sum(_retries_of_an_open_circuit(visit) for visit in visits)
        self.timeline.promise("no call retried an open circuit", f"{retried} did", retried == 0)
        stats = bulkhead.stats()
        self.timeline.promise(
            "every permit came back",
            f"{stats.in_flight} in use, {stats.queued} waiting",
            (stats.in_flight, stats.queued) == (0, 0),
        )

    def aftermath(self) -> None:
        patience = time.monotonic() + 2.0
        while Timeout.abandoned() and time.monotonic() < patience:
            time.sleep(0.01)
        self.timeline.promise(
            "no thread stayed abandoned",
            f"{self.abandoned} while the server hung, {Timeout.abandoned()} after that",
            Timeout.abandoned() == 0,
        )

    # --- how calls are made ---

    def one(self, path: str, runtime: str) -> Visit:
        visit = Visit(runtime, f"{self.server.url}{path}/{runtime}", BUDGET)
        RUNTIMES[runtime](self.pipelines[runtime], [visit], lambda: None)
        self.timeline.show([visit])
        return visit

    def all_at_once(self, path: str, each: int = 1, budget: float = BUDGET) -> list[Visit]:
        """Let each runtime make `each` calls; they begin in turn, a few milliseconds apart."""
        ready = threading.Barrier(len(RUNTIMES), timeout=5.0).wait
        arrivals = [
            Visit(runtime, f"{self.server.url}{path}/{runtime}", budget, delay=0.01 * number)
            for number, runtime in enumerate(list(RUNTIMES) * each)
        ]
        with ThreadPoolExecutor(len(RUNTIMES)) as pool:
            runs = [
                pool.submit(run, self.pipelines[runtime], [it for it in arrivals if it.runtime == runtime], ready)
                for runtime, run in RUNTIMES.items()
            ]
        for run in runs:
            run.result()
        return arrivals

    def opened_by(self) -> list[str]:
        return [it.properties["visit"].runtime for it in self.transitions if it.new.name == "OPEN"]


def _each(values: Any) -> str:
    return ", ".join(map(str, values))


def _retries_of_an_open_circuit(visit: Visit) -> int:
    return sum(
        isinstance(event, events.RetryScheduled) and isinstance(getattr(event.outcome, "error", None), CircuitOpen)
        for event in visit.events
    )


# --- breaking promises on purpose ------------------------------------------------------------


#: Each policy, and a wrong version of it that breaks a promise.
SABOTAGE: dict[str, tuple[Policy[Any], Callable[[], Policy[Any]]]] = {
    "fallback": (fallback, lambda: Fallback("nothing", on=KeyError)),  # for an error that never occurs
    "retry": (retry, lambda: Retry(3, on=(Exception, CircuitOpen), backoff=[0.05], retry_after=False)),  # also refusals
    "breaker": (breaker, lambda: CircuitBreaker(5, on=temporary, open_for=1.5)),  # one for each runtime
    "bulkhead": (bulkhead, lambda: Bulkhead(4, queue=16)),  # one for each runtime
    "timeout": (timeout, lambda: Timeout(0.5, cooperative=True)),  # cuts nothing off
}


def sabotaged(what: str) -> Policy[str]:
    """Return the pipeline with one policy replaced by its wrong version."""
    victim, culprit = SABOTAGE[what]
    return Policy.wrap(*[culprit() if policy is victim else policy for policy in pipeline.policies])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--break", dest="sabotage", choices=SABOTAGE, help="break one policy, to see which promise breaks"
    )
    sabotage = parser.parse_args().sabotage
    faulthandler.dump_traceback_later(19, exit=True)  # ends a hanging run, and shows where it hangs

    timeline = Timeline()
    pipelines = {runtime: sabotaged(sabotage) if sabotage else pipeline for runtime in RUNTIMES}
    timeline.say(pipelines["threads"].describe())
    with FlakyServer() as server:
        story = Story(server, timeline, pipelines)
        events.subscribe(timeline.hear)
        events.subscribe(story.transitions.append, events.CircuitChanged)
        story.play()
    story.aftermath()

    timeline.summary()
    sys.stdout.flush()
    for promise in timeline.broken:
        print(f"quickstart: broken promise: {promise}", file=sys.stderr)
    return 1 if timeline.broken else 0


if __name__ == "__main__":
    sys.exit(main())
