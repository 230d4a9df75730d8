"""Draw the picture of the dashboard, from a real run: resilience.svg, next to resilience.json.

    python docs/integrations/grafana/picture.py

It needs the program `prometheus` and takes a minute and a half. Three pipelines call functions that are well at first,
then slow, then down, then well again. A Prometheus scrapes this process each second, evaluates each query of each
panel of resilience.json, and what it answers is drawn here. It is not Grafana that draws: the queries, the titles, the
places and the numbers are the dashboard's, the look is not.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from resilience import (
    AdaptiveThrottle,
    Bulkhead,
    Chaos,
    CircuitBreaker,
    Context,
    FailureRatio,
    Fallback,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    Timeout,
    deadline,
)
from resilience.backoff import Exponential
from resilience.integrations.prometheus import instrument

HERE = Path(__file__).parent
SECONDS = 84
STEP = 1  # seconds between two scrapes, and between two points of a line

# --- the run ---------------------------------------------------------------------------------

WEATHER = Policy.wrap(
    Fallback("no forecast"),
    Timeout(0.8, name="total"),
    Retry(3, backoff=Exponential(0.1, cap=1.0)),
    CircuitBreaker(FailureRatio(0.5, window=5.0), open_for=6.0, name="weather-api"),
    Bulkhead(8, queue=8, max_wait=0.08, name="weather-api"),
    Timeout(0.25, name="attempt"),
    name="weather",
)
PAYMENTS = Policy.wrap(
    Timeout(2.0),
    Retry(3, backoff=Exponential(0.1, cap=1.0)),
    CircuitBreaker(8, open_for=9.0, name="bank"),
    name="payments",
)
FAULTS = Chaos(0.05, error=ConnectionResetError("injected"), name="faults")
SEARCH = Policy.wrap(
    RateLimiter(Rate(20, burst=5), max_wait=0.5, name="search-api"),
    AdaptiveThrottle(1.5, window=10.0, name="search-api"),
    FAULTS,
    name="search",
)


def phase(now: float) -> str:
    """What the dependencies are like: a quarter of the time each, the end the longest."""
    return next(name for until, name in [(0.25, "calm"), (0.45, "slow"), (0.7, "down"), (9, "calm")] if now < until)


def dependency(began: float, rng: random.Random) -> Callable[[Context], str]:
    """A function that takes its time, and fails, as the hour wants it."""

    def call(ctx: Context) -> str:
        hour = phase((time.monotonic() - began) / SECONDS)
        time.sleep(rng.lognormvariate(math.log(0.15 if hour == "slow" else 0.03), 0.6))
        if rng.random() < {"calm": 0.02, "slow": 0.1, "down": 0.97}[hour]:
            raise rng.choice([ConnectionResetError("reset"), ConnectionRefusedError("refused")])
        return "fine"

    return call


def client(pipeline: Policy[Any], operation: str, began: float, seed: int) -> None:
    rng = random.Random(seed)
    call = dependency(began, rng)
    while time.monotonic() - began < SECONDS:
        with deadline(rng.choice([0.5, 3.0])):
            pipeline.capture(call, Context(operation=operation))
        time.sleep(rng.expovariate(1 / 0.1))


def run_clients() -> None:
    began = time.monotonic()
    work = [(WEATHER, "forecast")] * 12 + [(PAYMENTS, "charge")] * 5 + [(SEARCH, "search")] * 5
    threads = [threading.Thread(target=client, args=(*it, began, seed)) for seed, it in enumerate(work)]
    with FAULTS.injecting(lasts=2 * SECONDS):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# --- prometheus ------------------------------------------------------------------------------


@contextmanager
def metrics() -> Iterator[int]:
    """Serve the metrics of this process on a free port."""
    registry = CollectorRegistry()
    undo = instrument(WEATHER, PAYMENTS, SEARCH, registry=registry)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        undo()


@contextmanager
def prometheus(port: int) -> Iterator[str]:
    """Run a Prometheus that scrapes that port each second; its address."""
    program = shutil.which("prometheus") or sys.exit("prometheus is not installed")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "prometheus.yml")
        config.write_text(
            f"global: {{scrape_interval: {STEP}s}}\n"
            f"scrape_configs: [{{job_name: service, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
        )
        own = port + 1 if port < 65000 else port - 1
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        command = [program, *options, f"--web.listen-address=127.0.0.1:{own}", "--log.level=warn"]
        process = subprocess.Popen(command)
        try:
            yield f"http://127.0.0.1:{own}"
        finally:
            process.terminate()
            process.wait()


Series = tuple[str, list[tuple[float, float]]]  # label, points


def ask(address: str, query: str, legend: str, began: float, ended: float) -> list[Series]:
    """Evaluate a query of the dashboard over the run, with its variables filled in."""
    query = query.replace("$__rate_interval", f"{6 * STEP}s").replace("$pipeline", ".*")
    fields = {"query": query, "start": began, "end": ended, "step": STEP}
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{urllib.parse.urlencode(fields)}") as response:
        found = json.load(response)["data"]["result"]
    return [(label(legend, it["metric"]), points(it["values"], began)) for it in found]


def label(legend: str, metric: dict[str, str]) -> str:
    for name, value in metric.items():
        legend = legend.replace(f"{{{{{name}}}}}", value)
    return legend


def points(values: list[tuple[float, str]], began: float) -> list[tuple[float, float]]:
    return [(instant - began, float(value)) for instant, value in values]


# --- drawing ---------------------------------------------------------------------------------

WIDTH, HEIGHT, GAP = 400, 246, 14
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 34, 64  # around the plot in a panel
COLOURS = ("#2a78c8", "#d9730d", "#2f9461", "#b8408f", "#8a6d1c", "#5b5fc7", "#c23a3a", "#4b8b94")
NAMED = {"green": "#2f9461", "red": "#c23a3a", "text": "#8a8f98"}
STATES = {
    0.0: ("closed", "#7cc49a"),
    1.0: ("half-open", "#e8c34a"),
    2.0: ("open", "#d9534f"),
    3.0: ("isolated", "#8e63c7"),
}


def draw(panels: list[tuple[dict[str, Any], list[Series]]], seconds: float) -> str:
    """The whole picture: the panels in the places that the dashboard gives them."""
    columns = max(panel["gridPos"]["x"] for panel, _ in panels) // 8 + 1
    rows = max(panel["gridPos"]["y"] for panel, _ in panels) // 8 + 1
    width, height = columns * (WIDTH + GAP) + GAP, rows * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
        ' font-family="system-ui, sans-serif" font-size="11" fill="#3b4048">',
        f'<rect width="{width}" height="{height}" fill="#f3f4f6"/>',
    ]
    for panel, series in panels:
        x = GAP + panel["gridPos"]["x"] // 8 * (WIDTH + GAP)
        y = GAP + panel["gridPos"]["y"] // 8 * (HEIGHT + GAP)
        parts.append(f'<g transform="translate({x} {y})">')
        parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" rx="4" fill="#fff" stroke="#d8dbe0"/>')
        parts.append(f'<text x="12" y="21" font-size="13" font-weight="600">{escape(panel["title"])}</text>')
        parts += states(series, seconds) if panel["type"] == "state-timeline" else lines(panel, series, seconds)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def across(instant: float, seconds: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(instant, seconds) / seconds


def axis(seconds: float) -> Iterator[str]:
    """The time, in seconds since the beginning of the run."""
    for instant in range(0, int(seconds) + 1, 20):
        x, y = across(instant, seconds), HEIGHT - BOTTOM + 14
        yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="#767c86">{instant} s</text>'


def lines(panel: dict[str, Any], series: list[Series], seconds: float) -> Iterator[str]:
    """A panel with a line for each series."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    top = nice(max([0.0, *(value for _, line in series for _, value in line if math.isfinite(value))]))
    bottom, tall = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    for step in range(5):
        y = bottom - tall * step / 4
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e6e8ec"/>'
        if step % 2 == 0:
            text = number(top * step / 4, unit)
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#767c86">{text}</text>'
    yield from axis(seconds)
    colours = {**dict(zip([name for name, _ in series], COLOURS, strict=False)), **chosen(panel)}
    for name, line in series:
        path, pen = [], "M"
        for instant, value in line:
            if not math.isfinite(value):
                pen = "M"
                continue
            path.append(f"{pen}{across(instant, seconds):.1f} {bottom - tall * value / top:.1f}")
            pen = "L"
        pen = f'stroke="{colours[name]}" stroke-width="1.6" stroke-linejoin="round"'
        yield f'<path d="{"".join(path)}" fill="none" {pen}/>'
    yield from legend([(name, colours[name]) for name, _ in series])


def chosen(panel: dict[str, Any]) -> dict[str, str]:
    """The colours that the dashboard gives to series by their names."""
    given = {it["matcher"]["options"]: it["properties"] for it in panel["fieldConfig"]["overrides"]}
    return {name: NAMED[it["value"]["fixedColor"]] for name, properties in given.items() for it in properties}


def states(series: list[Series], seconds: float) -> Iterator[str]:
    """The panel of the circuits: a band for each, coloured by its state."""
    tall = (HEIGHT - BOTTOM - TOP) / max(1, len(series))
    for row, (name, line) in enumerate(series):
        y = TOP + row * tall + 16
        yield f'<text x="{LEFT}" y="{y - 4:.1f}">{escape(name)}</text>'
        turns = [point for before, point in pairwise([(0.0, -1.0), *line]) if point[1] != before[1]]
        for (instant, value), (after, _) in pairwise([*turns, (seconds, 0.0)]):
            x, wide = across(instant, seconds), across(after, seconds) - across(instant, seconds)
            fill = STATES[value][1]
            yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall - 24:.1f}" fill="{fill}"/>'
    yield from axis(seconds)
    yield from legend(list(STATES.values()))


def legend(entries: list[tuple[str, str]]) -> Iterator[str]:
    """The names of the series, in as many lines as they need."""
    x, y = 12.0, HEIGHT - 36
    for name, colour in entries:
        short = name.replace("resilience.errors.", "")
        wide = 24 + 6.2 * len(short)
        if x + wide > WIDTH and x > 12:
            x, y = 12.0, y + 15
        yield f'<rect x="{x:.1f}" y="{y - 8}" width="9" height="9" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 13:.1f}" y="{y}">{escape(short)}</text>'
        x += wide


def nice(highest: float) -> float:
    """The end of an axis: a round number that is not below the highest value."""
    if highest <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(highest))
    return next(power * factor for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15) if power * factor >= highest)


def number(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s" and 0 < value < 1:
        return f"{1000 * value:g} ms"
    return f"{value:g}{' s' if unit == 's' else '/s' if unit == 'ops' else ''}"


def main() -> None:
    dashboard = json.loads((HERE / "resilience.json").read_text(encoding="utf-8"))
    with ExitStack() as stack:
        address = stack.enter_context(prometheus(stack.enter_context(metrics())))
        time.sleep(2 * STEP)
        began = time.time()
        run_clients()
        time.sleep(2 * STEP)
        ended = time.time()
        panels = []
        for panel in dashboard["panels"]:
            asked = [ask(address, it["expr"], it["legendFormat"], began, ended) for it in panel["targets"]]
            panels.append((panel, [series for found in asked for series in found]))
    empty = [panel["title"] for panel, series in panels if not any(line for _, line in series)]
    (HERE / "resilience.svg").write_text(draw(panels, ended - began), encoding="utf-8")
    print(f"{len(panels)} panels, {len(empty)} of them empty {empty or ''}")


if __name__ == "__main__":
    main()
