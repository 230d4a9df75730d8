"""Shared by the tests of bulkheads."""

from __future__ import annotations

import threading
from typing import Any

from resilience import Bulkhead, Context
from tests.conftest import Script, World

SHORT = 0.02

LONG = 60.0


def counts(bulkhead: Bulkhead) -> tuple[int, int, int, int]:
    stats = bulkhead.stats()
    return stats.limit, stats.in_flight, stats.queued, stats.rejected


async def works(world: World, policy: Any, ctx: Context | None = None) -> Any:
    return await world.attempt(policy, Script("fine").function(), ctx)


def calling(bulkhead: Bulkhead, served: list[str], name: str) -> threading.Thread:
    """Begin a call in another thread, which appends its name to `served`."""
    thread = threading.Thread(target=lambda: bulkhead.execute(lambda ctx: served.append(name)), daemon=True)
    thread.start()
    return thread
