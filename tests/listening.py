"""Shared by the tests of events."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

from resilience import (
    AdaptiveLimit,
    Bulkhead,
    Cache,
    Chaos,
    CircuitBreaker,
    Fallback,
    Hedge,
    Policy,
    Retry,
    RetryBudget,
    Timeout,
    deadline,
    events,
)
from resilience.work import Supervisor
from tests.callers import in_threads
from tests.conftest import Boom

#: Reported only to listeners that subscribe to it by name.
ASKED_FOR = events.CallFinished

#: The events of policies, except for that: a `Parked` is one of a Supervisor.
KINDS = tuple(
    kind
    for kind in (getattr(events, name) for name in events.__all__)
    if isinstance(kind, type)
    and issubclass(kind, events.Event)
    and kind not in (events.Event, events.Parked, ASKED_FOR)
)


def facts(event: events.Event) -> dict[str, Any]:
    """Return the fields of an event."""
    return {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}


def kinds(seen: list[Any]) -> list[type]:
    return [type(event) for event in seen]


def every_kind() -> Iterator[Policy[Any]]:
    """Yield policies under which a call that fails causes an event of each kind, except for that of streams."""
    yield Fallback("x").wrap(Retry(2, on=Boom, backoff=[0]))
    yield retry_without_budget()
    yield Hedge(5, on=Boom, eager=True)
    with deadline(0):
        yield Timeout(5.0)
    yield CircuitBreaker(1)
    yield AdaptiveLimit(60, initial=20, min_samples=1, on=Boom)
    chaos = Chaos(result=None)
    with chaos.injecting(rate=1.0):
        yield chaos
    cache = Cache(60, keep_errors=Boom, key=lambda *_: "same")
    yield cache
    yield cache
    full = Bulkhead(1)
    with full.slot():
        yield full


def everything() -> None:
    """Make an event of each kind."""
    for policy in every_kind():
        policy.capture(fails)
    list(Retry().streaming().call(iter, [1]))


def retry_without_budget() -> Retry:
    """Return a retry whose budget is spent."""
    budget = RetryBudget(0, saved=1)
    budget.withdraw()
    return Retry(2, on=Boom, budget=budget)


def park_a_task(name: str = "feed") -> None:
    """Let a supervisor give up a task, in its own event loop."""

    async def task() -> None:
        raise Boom("secret")

    async def main() -> None:
        async with Supervisor(max_restarts=0, name="feeds") as supervisor:
            supervisor.start_soon(task, name=name)

    in_threads(lambda: asyncio.run(main()))


def fails(*args: Any) -> None:
    raise Boom
