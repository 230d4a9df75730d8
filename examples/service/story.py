"""The story of the two services, and the promises that are checked after each part."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

import httpx2

from resilience import events

from .depot import Depot, Mood
from .shop import Shop

HEADER = "x-envoy-expected-rq-timeout-ms"
BUDGET = 1.5  # seconds that a customer waits
GRACE = 0.4  # seconds by which a loaded machine may react late


@dataclass(frozen=True)
class Order:
    """An order of a customer, and the answer."""

    item: str
    status: int
    fresh: bool | None  # None if there was no offer
    took: float
    late: float  # seconds after the customer's own deadline


class Story:
    """Seven parts. Each sends orders, prints the answers, and checks promises."""

    def __init__(self, shop: Shop, depot: Depot, customer: httpx2.AsyncClient) -> None:
        self.shop = shop
        self.depot = depot
        self.customer = customer
        self.orders: list[Order] = []
        self.changes: list[events.CircuitChanged] = []
        self.finished: list[events.ExecutionFinished] = []
        self.kept: list[tuple[bool, str]] = []

    async def play(self) -> None:
        for part in (self.fair, self.flaky, self.hanging, self.outage, self.recovery, self.rush, self.little_time):
            await part()
        await self.the_whole()

    # --- the parts ---

    async def fair(self) -> None:
        self.begin("Fair weather", Mood.FAIR)
        orders = await self.in_turn("tea", "salt", "rice")
        self.promise("what works is left alone", f"{self.attempts(3)} attempts for 3 orders", self.attempts(3) == 3)
        self.promise("every offer is fresh", _each(it.fresh for it in orders), all(it.fresh for it in orders))

    async def flaky(self) -> None:
        self.begin("Small failures", Mood.FLAKY)
        orders = await self.in_turn("figs", "dates")
        self.promise(
            "small failures are retried",
            f"fresh: {_each(it.fresh for it in orders)}, after {self.attempts(2)} attempts",
            all(it.fresh for it in orders) and self.attempts(2) == 6,
        )

    async def hanging(self) -> None:
        self.begin("A hang", Mood.HANGING)
        worked = len(self.depot.worked)
        orders = await self.at_once("oats", "bran")
        self.promise(
            "a hang is cut off, and retried",
            f"in {_each(f'{it.took:.2f} s' for it in orders)}",
            all(it.fresh and it.took < BUDGET for it in orders),
        )
        await asyncio.sleep(0.1)
        longest = max(self.depot.worked[worked:], default=Depot.HANG)
        self.promise(
            "the depot stops when the caller has left",
            f"after {longest:.2f} s of {Depot.HANG:g}",
            len(self.depot.worked) == worked + 4 and longest < Shop.ATTEMPT + GRACE,
        )

    async def outage(self) -> None:
        self.begin("Outage", Mood.DOWN)
        orders = await self.in_turn("milk", "eggs")
        asked = self.depot.requests
        orders += await self.in_turn("soap", "wool", "wax")
        self.promise(
            "the shop answers during the outage",
            f"{sum(it.fresh is False for it in orders)} of {len(orders)} with yesterday's stock",
            all(it.fresh is False for it in orders),
        )
        self.promise(
            "an open circuit spares the depot",
            f"3 orders, {self.depot.requests - asked} requests",
            self.depot.requests == asked,
        )

    async def recovery(self) -> None:
        self.begin("Recovery", Mood.FAIR)
        await asyncio.sleep((self.shop.breaker.stats().retry_after or 0.0) + 0.02)
        orders = await self.in_turn("milk", "eggs")
        states = [it.new.name for it in self.changes]
        self.promise(
            "the circuit opened, probed and closed",
            " > ".join(states),
            states == ["OPEN", "HALF_OPEN", "CLOSED"] and all(it.fresh for it in orders),
        )

    async def rush(self) -> None:
        self.begin("Rush hour", Mood.SLOW)
        self.depot.most_at_once = 0
        orders = await self.at_once(*(f"lamp {number}" for number in range(18)))
        most = self.depot.most_at_once
        self.promise(
            f"at most {Shop.AT_ONCE} calls at once",
            f"{most} of {len(orders)}",
            1 < most <= Shop.AT_ONCE and all(it.fresh for it in orders),
        )

    async def little_time(self) -> None:
        self.begin("Little time", Mood.HANGING)
        little = 0.25
        (hurried,) = await self.in_turn("bread", budget=little)
        given = self.depot.given[-1]
        self.promise(
            "a customer with little time gets yesterday's stock in time",
            f"in {hurried.took:.2f} s, with {self.attempts(1)} attempt",
            hurried.fresh is False and self.attempts(1) == 1,
        )
        self.promise("the depot knows how little time", f"{given:.3f} s", given <= little)
        asked = self.depot.requests
        (gone,) = await self.in_turn("bread", budget=0.0)
        self.promise(
            "for a customer without time, no work is begun",
            f"status {gone.status}, {self.depot.requests - asked} requests",
            gone.status == 504 and self.depot.requests == asked,
        )

    async def the_whole(self) -> None:
        sent = [seconds for seconds in self.depot.given if seconds <= BUDGET]
        self.promise(
            "every request says how long the depot may take",
            f"{len(sent)} of {len(self.depot.given)}",
            len(sent) == len(self.depot.given),
        )
        latest = max(it.late for it in self.orders)
        self.promise("no customer waits too long", f"the latest by {latest * 1000:.0f} ms", latest <= GRACE)
        samples = await self.metrics()
        counted = int(samples.get("resilience_rejections_total", 0))
        refused = self.shop.breaker.stats().rejected
        self.promise("the metrics show the same", f"{counted} of {refused} refusals", counted == refused > 0)
        shown = (await self.customer.get("/resilience/state")).json()["now"]["circuits"][0]
        self.promise(
            "and so does the dashboard",
            f"{shown['state']}, opened {shown['opened']} time, refused {shown['rejected']}",
            (shown["state"], shown["opened"], shown["rejected"]) == ("closed", 1, refused),
        )

    # --- customers ---

    async def in_turn(self, *items: str, budget: float = BUDGET) -> list[Order]:
        return [await self.order(item, budget) for item in items]

    async def at_once(self, *items: str) -> list[Order]:
        return list(await asyncio.gather(*(self.order(item, BUDGET) for item in items)))

    async def order(self, item: str, budget: float) -> Order:
        """Send a request with the header, as any client could: a browser, another language, a proxy."""
        began = time.monotonic()
        response = await self.customer.get(f"/offer/{item}", headers={HEADER: f"{budget * 1000:.0f}"})
        took = time.monotonic() - began
        offer = json.loads(response.text) if response.status_code == 200 else {}
        order = Order(item, response.status_code, offer.get("fresh"), took, max(0.0, took - budget))
        self.orders.append(order)
        left = offer.get("left", "no answer")
        print(f"  {took:5.2f} s of {budget:4.2f}  {response.status_code}  {item}: {left}")
        return order

    async def metrics(self) -> dict[str, float]:
        """Add up the samples of a scrape, by name."""
        found: dict[str, float] = {}
        for line in (await self.customer.get("/metrics")).text.splitlines():
            if not line.startswith("#"):
                name, value = line.partition("{")[0].split()[0], line.rpartition(" ")[2]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    # --- printing and recording ---

    def begin(self, title: str, mood: Mood) -> None:
        self.depot.mood = mood
        print(f"\n-- {title} --\nThe depot: {mood.value}.")

    def promise(self, text: str, evidence: str, held: bool) -> None:
        self.kept.append((held, f"{text}: {evidence}"))

    def hear(self, event: events.Event) -> None:
        """Listen to the pipeline of the shop."""
        if isinstance(event, events.CircuitChanged):
            self.changes.append(event)
        elif isinstance(event, events.ExecutionFinished) and event.policy == "stock":
            self.finished.append(event)

    def attempts(self, orders: int) -> int:
        """How many attempts the last `orders` orders took."""
        return sum(it.attempts for it in self.finished[-orders:])


def _each(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
