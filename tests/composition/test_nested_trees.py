"""Random trees of nested calls under one breaker: the circuit counts the outermost call, and no other."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest

from resilience import CircuitBreaker, Retry, Timeout
from tests.conftest import Boom, World
from tests.policies.breakers import CLOSED, OPEN


@dataclass
class Node:
    """A call: under what it runs, which calls it makes, and whether it raises: never, always, or if one of them did."""

    under: str
    children: list[Node]
    ends: str

    @property
    def fails(self) -> bool:
        return self.ends == "fails" or (self.ends != "returns" and any(child.fails for child in self.children))


def grown(chance: random.Random, depth: int = 0) -> Node:
    under = chance.choice(
        ["call", "execute", "guard", "retry", "timeout", "worker", *(["another breaker"] if depth else [])]
    )
    children = [grown(chance, depth + 1) for _ in range(chance.choice([0, 0, 1, 1, 2]) if depth < 4 else 0)]
    return Node(under, children, chance.choice(["returns", "fails", "lets through", "translates"]))


class Calls:
    """Makes the calls of trees under one breaker, and some of them under another one."""

    def __init__(self, world: World, breaker: CircuitBreaker) -> None:
        self.world, self.breaker, self.another = world, breaker, CircuitBreaker(1000)

    async def make(self, node: Node) -> None:
        async def fn(ctx: Any = None) -> None:
            await self._run(node)

        match node.under:
            case "guard":
                with self.breaker.guard():
                    await fn()
            case "execute":
                await self.world.execute(self.breaker, fn)
            case "retry":
                await self.world.call(Retry(1).wrap(self.breaker), fn)
            case "timeout":
                await self.world.call(Timeout(60.0).wrap(self.breaker), fn)
            case "worker":
                await self.world.call(self.breaker.wrap(Timeout(60.0)), fn)
            case under:
                await self.world.call(self.breaker if under == "call" else self.another, fn)

    async def make_root(self, node: Node) -> None:
        try:
            await self.make(node)
        except (Boom, LookupError):
            assert node.fails
        else:
            assert not node.fails

    async def _run(self, node: Node) -> None:
        for child in node.children:
            try:
                await self.make(child)
            except (Boom, LookupError) as error:
                if node.ends == "lets through":
                    raise
                if node.ends == "translates":
                    raise LookupError from error
        if node.ends == "fails":
            raise Boom


@pytest.mark.parametrize("seed", range(20))
async def test_an_outermost_call_is_counted_once(world: World, seed: int) -> None:
    """The first time, the circuit has noted no call before."""
    chance = random.Random(seed)
    for _ in range(10):
        tree = grown(chance)
        calls = Calls(world, CircuitBreaker(2 if tree.fails else 1))
        for state in (CLOSED, OPEN if tree.fails else CLOSED):
            await calls.make_root(tree)
            assert calls.breaker.state is state


@pytest.mark.parametrize("seed", range(20))
async def test_an_outermost_call_is_one_probe(world: World, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(10):
        tree, breaker = grown(chance), CircuitBreaker(1, open_for=1e-6)
        breaker.capture(lambda ctx: 1 / 0)
        time.sleep(1e-5)
        await Calls(world, breaker).make_root(tree)
        stats = breaker.stats()
        assert stats.state is (OPEN if tree.fails else CLOSED)
        assert (stats.opened, stats.probes, stats.rejected) == (1 + tree.fails, 0, 0)
