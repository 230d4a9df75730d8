"""Two services, a dependency that fails, and a pipeline between them.

    python -m examples.service              runs for a few seconds, and checks its promises
    python -m examples.service --serve      keeps running, so that you can look at the dashboard

The customers call the shop, the shop calls the depot, and the depot fails in all the usual ways (`depot.py`). Look at
`shop.py`: your service needs only the first lines of its constructor. Indented lines are the telemetry, as it would
appear in your log. If a promise is broken, the exit status is 1. You can break them:

    python -m examples.service --break wire         # or: bulkhead, breaker
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import random
import sys
import time
from typing import Any

import httpx2

from resilience import events
from resilience.integrations.logging import log_events

from .depot import Depot, Mood
from .serving import serving
from .shop import Shop
from .story import BUDGET, HEADER, Story

#: Wrong arguments for the shop, each of which breaks a promise.
SABOTAGE: dict[str, dict[str, Any]] = {
    "wire": {"propagate": False},
    "bulkhead": {"at_once": 100},
    "breaker": {"opens_after": 1000},
}


async def tell_story(shop: Shop, depot: Depot, url: str) -> Story:
    async with httpx2.AsyncClient(base_url=url, timeout=10, trust_env=False) as customer:
        story = Story(shop, depot, customer)
        unsubscribe = events.subscribe(story.hear)
        try:
            await story.play()
        finally:
            unsubscribe()
        print("\n-- Metrics --\nSums of a scrape of /metrics.")
        for name, value in sorted((await story.metrics()).items()):
            if name.endswith(("_total", "_duration_seconds_count")):
                print(f"  {name:<48}{value:6g}")
    return story


async def keep_busy(depot: Depot, url: str) -> None:
    """Simulate customers for ever, while the mood of the depot changes."""

    async def order() -> None:
        while True:
            await customer.get(f"/offer/{random.randrange(10**6)}", headers={HEADER: f"{BUDGET * 1000:.0f}"})
            await asyncio.sleep(random.expovariate(4))

    async with httpx2.AsyncClient(base_url=url, timeout=10, trust_env=False) as customer, asyncio.TaskGroup() as tasks:
        for _ in range(12):
            tasks.create_task(order())
        while True:
            for mood, seconds in ((Mood.FAIR, 12), (Mood.FLAKY, 8), (Mood.SLOW, 10), (Mood.HANGING, 6), (Mood.DOWN, 8)):
                depot.mood = mood
                await asyncio.sleep(seconds)


def show_telemetry() -> None:
    """Print the events of the policies, as a log would."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("      %(levelname)s %(message)s"))
    logger = logging.getLogger("resilience.events")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    log_events(logger, repeats=20)


def main() -> int:
    parser = argparse.ArgumentParser(prog="examples.service", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="keep running, with customers, until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="where the shop listens; any free port by default")
    parser.add_argument(
        "--break", dest="sabotage", choices=SABOTAGE, help="break one thing, to see which promise breaks"
    )
    options = parser.parse_args()

    depot = Depot()
    with serving(depot.app) as depot_url:
        shop = Shop(depot_url, open_for=4.0 if options.serve else 1.0, **SABOTAGE.get(options.sabotage, {}))
        with serving(shop.app, options.port) as url, contextlib.closing(shop.dashboard):
            if options.serve:
                print(
                    f"The shop is at {url}/offer/tea, its dashboard at {url}/resilience/. Ctrl-C ends it.", flush=True
                )
                try:
                    asyncio.run(keep_busy(depot, url))
                except KeyboardInterrupt:
                    return 0
            faulthandler.dump_traceback_later(25, exit=True)  # ends a hanging run, and shows where it hangs
            show_telemetry()
            began = time.monotonic()
            print(shop.pipeline.describe())
            story = asyncio.run(tell_story(shop, depot, url))
    print(f"\n-- Promises --\n{len(story.orders)} orders in {time.monotonic() - began:.1f} s.")
    broken = [text for held, text in story.kept if not held]
    for held, text in story.kept:
        print(f"{'kept  ' if held else 'BROKEN'} {text}")
    sys.stdout.flush()
    for text in broken:
        print(f"service: broken promise: {text}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
