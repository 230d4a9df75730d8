"""The command line: `python -m benchmarks.handler`."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from benchmarks import handler, report
from benchmarks.cells import Result
from benchmarks.clients.servers import Servers
from benchmarks.handler.apps import HANDLERS

GROUP = "a web handler"
P50, P99, RATE, WORK = "p50, us", "p99, us", "requests per second", "processor per request, us"

_REQUEST = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
_PACKAGES = ("httpx", "httpx-retries", "nopanic", "starlette", "uvicorn", "prometheus_client", "opentelemetry-sdk")


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.read:
        about, results = _read(options.read)
    else:
        about, results = _about(options.rounds), measure(options.rounds, options.seconds)
    print(f"{report.introduction(about)}\n\n{report.table(results)}")
    if options.json:
        cells = {
            it.cell: {name: [report.rounded(one) for one in it.samples[name]] for name in it.samples} for it in results
        }
        options.json.write_text(json.dumps({"about": about, "cells": cells}) + "\n", encoding="utf-8")
    if options.plot:
        from benchmarks.handler.plot import draw

        draw(results, options.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.handler", description=handler.__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how often each handler is measured")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each measurement takes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all samples to this file")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the picture (needs matplotlib)")
    parser.add_argument("--read", metavar="FILE", type=Path, help="show an earlier run instead")
    return parser


def _about(rounds: int) -> dict[str, Any]:
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # its handler is left out
            versions[package] = metadata.version(package)
    return report.about([], [], rounds) | {"versions": versions}


def _read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    data = json.loads(path.read_text(encoding="utf-8"))
    return data["about"], [Result(GROUP, cell, "", samples) for cell, samples in data["cells"].items()]


def measure(rounds: int, seconds: float) -> list[Result]:
    """Measure each handler once in each round, and return the results."""
    cells: dict[str, dict[str, list[float]]] = {
        cell: {name: [] for name in HANDLERS} for cell in (P50, P99, RATE, WORK)
    }
    with Servers() as servers:
        ports = {
            name: servers.start(sys.executable, "-m", "benchmarks.handler.apps", name, after=[servers.http])
            for name in HANDLERS
        }
        for port in ports.values():
            asyncio.run(_times(port, connections=4, seconds=seconds / 4))  # a warm-up, for late imports
        for _ in range(rounds):
            for name in random.sample(list(ports), len(ports)):
                worked = servers.nanoseconds(ports[name])
                alone = sorted(asyncio.run(_times(ports[name], connections=1, seconds=seconds)))
                cells[P50][name].append(statistics.median(alone))
                cells[P99][name].append(alone[int(len(alone) * 0.99)])
                cells[WORK][name].append((servers.nanoseconds(ports[name]) - worked) / len(alone) / 1000)
                many = asyncio.run(_times(ports[name], connections=16, seconds=seconds / 2))
                cells[RATE][name].append(len(many) / (seconds / 2))
    return [Result(GROUP, cell, "", samples) for cell, samples in cells.items()]


async def _times(port: int, connections: int, seconds: float) -> list[float]:
    """Send requests through several connections, one after another; return the time of each request, in us."""
    times: list[float] = []
    end = perf_counter_ns() + int(seconds * 1e9)

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (began := perf_counter_ns()) < end:
            writer.write(_REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200") or await reader.readexactly(2) != b"42":
                raise AssertionError(f"the handler answered {head!r}")
            times.append((perf_counter_ns() - began) / 1000)
        writer.close()

    await asyncio.gather(*(ask() for _ in range(connections)))
    return times


if __name__ == "__main__":
    main()
