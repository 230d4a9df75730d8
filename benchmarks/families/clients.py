"""Calls over the network, to a server in another process on this machine: the cost of protecting them.

This measures the processor time of all threads of this process. The wait for the server shows nothing about the client,
and on a busy machine takes longer than everything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from time import process_time_ns
from typing import Any

from benchmarks import clients, timing
from benchmarks.cells import Result, Wanted, check
from benchmarks.clients import ALONE, AROUND, Client
from benchmarks.clients.servers import Servers
from benchmarks.libraries import HAND_WRITTEN, Library
from benchmarks.timing import Effort

CALL = "a call"
ADDED = "more than alone, us"

#: Other libraries, to put around a call of the plain client: the entry of each that is closest to a client's pipeline.
_AROUND = {"tenacity": "retry", "stamina": "retry", "nopanic": "five, timeout"}

#: Batches take this many times as long as usual, because a call takes about a hundred times as long as a function.
_LONGER = 5


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    longer = dataclasses.replace(effort, batch=_LONGER * effort.batch, clock=process_time_ns)
    with Servers() as servers:
        for client in clients.load():
            if wanted(client.name):
                yield from _measure(client, servers, libraries, longer)


def _measure(client: Client, servers: Servers, libraries: list[Library], effort: Effort) -> Iterator[Result]:
    async def main() -> dict[str, list[float]]:
        async with client.setting(servers) as own:
            functions = {**own, **_around(client, own, libraries)} if own else {}
            for name, function in functions.items():
                await check(f"{client.name}: {name}", client.world, function)
            return await timing.interleaved(client.world, functions, effort)

    samples = timing.run(client.world, main)
    if not samples:  # the server is not installed
        return
    yield Result(client.name, CALL, "ns", samples)
    alone = samples[ALONE if ALONE in samples else HAND_WRITTEN]
    added = {name: [(mine - its) / 1000 for mine, its in zip(it, alone, strict=True)] for name, it in samples.items()}
    yield Result(client.name, ADDED, "us", {name: it for name, it in added.items() if any(it)})


def _around(client: Client, own: clients.Functions, libraries: list[Library]) -> dict[str, Callable[[], Any]]:
    if client.policy is None:
        return {}
    alone = own[ALONE]
    others = {
        f"{it.name} around the call": it.entries[_AROUND[it.name], client.world](alone)
        for it in libraries
        if it.name in _AROUND
    }
    return {AROUND: client.policy()(alone), **others}
