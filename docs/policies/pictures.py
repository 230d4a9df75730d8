"""Draw the pictures of these pages, each from a simulation that repeats exactly: `python docs/policies/pictures.py`.

They show what `tests/policies/simulated.py` models; the tests there hold the numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from resilience import (  # noqa: E402
    AdaptiveLimit,
    AdaptiveThrottle,
    Cache,
    CircuitBreaker,
    FailureRatio,
    Hedge,
    Keyed,
    Rate,
    RateLimiter,
    RepeatCap,
    Retry,
    RetryBudget,
    SingleFlight,
)
from tests.policies import hedged, repeated_requests, simulated, storms  # noqa: E402
from tests.streams import broken  # noqa: E402

OURS, OTHERS, WORDS, BAND = "#0b6e4f", "#888888", "#555555", "#eeeeee"


def adaptive_throttle(axes: Any) -> None:
    """Draw an outage of two minutes: what reaches the service, and what it accepts."""
    _band(axes, 120, 240, "outage")
    traffic = simulated.throttled(AdaptiveThrottle(), 90.0, 400, lambda now: 0.0 if 120 <= now < 240 else 100.0)
    at = [10 * slot + 5 for slot in range(len(traffic.sent))]
    axes.axhline(90, color=OTHERS, linestyle=":", label="calls that are made")
    axes.plot(at, traffic.sent, color=OURS, label="calls that reach the service")
    axes.plot(at, traffic.accepted, color=OURS, linestyle="--", label="calls that it accepts")
    axes.set_ylabel("calls per second")


def adaptive_limit(axes: Any) -> None:
    """Draw a server with ten workers, under twice the load that it can take, and then as much as it can."""
    limit = AdaptiveLimit(0.3)
    result = simulated.overloaded(limit, 2.0, 180, lambda now: 2.0 if 60 <= now < 120 else 1.0)
    _band(axes, 60, 120, "everything takes twice as long")
    axes.axhline(simulated.WORKERS, color=OTHERS, linestyle=":", label="calls that the service can work on")
    axes.plot(range(len(result.limits)), result.limits, color=OURS, label="limit")
    axes.set_ylabel("calls at once")


def hedge(axes: Any) -> None:
    """Draw the share of calls that take longer than so long, with a hedge and without."""
    for policy, color, label in ((Hedge(60), OTHERS, "without"), (Hedge(0.01, budget=None), OURS, "with a hedge")):
        taken, _ = hedged.calls_under(policy, hedged.mostly_fast, 60_000)
        shares = [1 - number / len(taken) for number in range(len(taken))]
        axes.plot([1000 * it for it in taken[::20]], shares[::20], color=color, label=label)
    axes.set_yscale("log")
    axes.set_xlim(0, 60)
    axes.set_ylim(1e-4, 1)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("calls that take longer")


def retry_budget(axes: Any) -> None:
    """Draw the goodput of a service in each half minute, by what pays for retries."""
    _band(axes, 60, 70, "half of the capacity")
    for label, color, line, budget_of, attempts in (
        ("no retries", OTHERS, ":", storms.none, 1),
        ("no budget", OTHERS, "-", storms.none, 3),
        ("10 % of requests", OTHERS, "--", lambda it: storms.PerRequest(0.1, it), 3),
        ("RetryBudget(0.1)", OURS, "-", lambda it: RetryBudget(0.1), 3),
    ):
        course = storms.goodput(budget_of, 280, attempts=attempts, seconds=300)
        at = [30 * slot + 15 for slot in range(len(course))]
        axes.plot(at, [100 * it for it in course], color=color, linestyle=line, label=label)
    axes.set_ylabel("% answered in time")


def repeat_cap(axes: Any) -> None:
    """Draw an outage of a minute, below three layers that each make three attempts."""
    _band(axes, 60, 120, "outage")
    for label, color, policy in (("without", OTHERS, Retry(1)), ("under RepeatCap(2)", OURS, RepeatCap(2))):
        reached = simulated.layered(policy, 10.0, 180, down=(60, 120))
        axes.plot(_means(reached), color=color, label=label)
    axes.axhline(10, color=OTHERS, linestyle=":", label="calls that are made")
    axes.set_ylabel("calls at the bottom\nper second")


def chaos(axes: Any) -> None:
    """Draw the faults of a minute in which a fifth of the attempts fail, and the errors that clients get."""
    _band(axes, 60, 120, "on(rate=0.2, lasts=60)")
    for label, color, line, attempts in (
        ("no retries", OTHERS, "-", 1),
        ("Retry(2)", OURS, "--", 2),
        ("Retry(3)", OURS, "-", 3),
    ):
        retry = Retry(attempts, backoff=[0.05])
        faults = simulated.injected(retry, 0.2, 50.0, 180, on_at=60.0, lasts=60.0)
        axes.plot(_means(faults.errors), color=color, linestyle=line, label=label)
    axes.set_ylabel("errors that clients get\nper second")


def rate_limiter(axes: Any) -> None:
    """Draw how many of 40 callers have begun, who come at once, at ten a second."""
    _band(axes, 1.5, 3.5, "closed by the service")
    for label, color, line, rate in (
        ("Rate(10)", OTHERS, "-", Rate(10)),
        ("Rate(10, burst=5)", OURS, "--", Rate(10, burst=5)),
        ("Rate(10, burst=1)", OURS, "-", Rate(10, burst=1)),
    ):
        instants = [0.0, *simulated.begun(RateLimiter(rate), 40, 1.5, 2.0)]
        axes.step(instants, range(len(instants)), where="post", color=color, linestyle=line, label=label)
    axes.set_ylabel("calls that have begun")


def cache(axes: Any) -> None:
    """Draw an outage of a minute: the clients that get an error, and the calls that are made."""
    _band(axes, 60, 120, "outage")
    for label, color, policy in (
        ("errors with Cache(10)", OTHERS, Cache(10, key=repeated_requests.item)),
        ("errors with Cache(10, stale=120)", OURS, Cache(10, key=repeated_requests.item, stale=120)),
    ):
        load = repeated_requests.simulate(policy, 180, is_up=lambda now, _: not 60 <= now < 120)
        axes.plot(_means(load.failed), color=color, label=label)
    axes.plot(_means(load.calls), color=OURS, linestyle="--", label="calls made with stale=120")
    axes.axhline(50, color=OTHERS, linestyle=":", label="calls that are asked for")
    axes.set_ylabel("per second")


def single_flight(axes: Any) -> None:
    """Draw how many calls run at once, for five items, where each takes ten times as long for a while."""
    _band(axes, 20, 40, "calls take 2 s")
    for label, color, policy in (
        ("without", OTHERS, Retry(1)),
        ("with a SingleFlight", OURS, SingleFlight(key=repeated_requests.item)),
    ):
        load = repeated_requests.simulate(policy, 60, items=5, takes=lambda now: 2.0 if 20 <= now < 40 else 0.2)
        axes.plot(load.at_once, color=color, label=label)
    axes.set_ylabel("calls at once")


def keyed(axes: Any) -> None:
    """Draw the calls of the other four hosts that fail, where one of five is down for a minute."""
    _band(axes, 60, 120, "one of five hosts is down")

    def breaker(host: object = None) -> CircuitBreaker:
        return CircuitBreaker(FailureRatio(0.1), open_for=10)

    for label, color, policy in (
        ("one breaker for all", OTHERS, breaker()),
        ("Keyed: a breaker for each", OURS, Keyed(breaker, key=repeated_requests.item)),
    ):
        load = repeated_requests.simulate(
            policy, 180, items=5, is_up=lambda now, host: host > 0 or not 60 <= now < 120, counted=bool
        )
        axes.plot(_means(load.failed), color=color, label=label)
    axes.axhline(40, color=OTHERS, linestyle=":", label="calls of the other four")
    axes.set_ylabel("refused per second")


def streams(axes: Any) -> None:
    """Draw the items that a consumer has got, of a source that falls silent and then breaks off."""
    for label, color, line, settings in (
        ("streaming()", OTHERS, ":", {}),
        ("streaming(idle=2)", OTHERS, "-", {"idle": 2.0}),
        ("streaming(idle=2, resume=...)", OURS, "-", {"idle": 2.0, "resume": {"after": lambda number: number}}),
    ):
        instants, ended = broken.handed_out(16.0, **settings)
        until = {"waits": 16.0, "all": instants[-1], "TimeoutExceeded": instants[-1] + 2.0}[ended]
        axes.step(
            [0, *instants, until],
            [*range(len(instants) + 1), len(instants)],
            color,
            linestyle=line,
            label=label,
            where="post",
        )
        axes.annotate(ended, (until, len(instants)), ha="right", va="bottom", color=WORDS)
    axes.set_xlim(0, 16.5)
    axes.set_ylabel("items delivered")


def _band(axes: Any, begin: float, end: float, label: str) -> None:
    """Shade a time, and name it above, where no line is."""
    axes.axvspan(begin, end, color=BAND)
    top = axes.get_xaxis_transform()
    axes.text((begin + end) / 2, 1.02, label, ha="center", va="bottom", color=WORDS, transform=top)


def _means(counts: list[int]) -> list[float]:
    """Return the mean of each five seconds around."""
    around = [counts[max(0, it - 2) : it + 3] for it in range(len(counts))]
    return [sum(it) / len(it) for it in around]


PICTURES = {
    "cache": cache,
    "single-flight": single_flight,
    "keyed": keyed,
    "../streams": streams,
    "hedge": hedge,
    "rate-limiter": rate_limiter,
    "retry-budget": retry_budget,
    "repeat-cap": repeat_cap,
    "chaos": chaos,
    "adaptive-limit": adaptive_limit,
    "adaptive-throttle": adaptive_throttle,
}


def main() -> None:
    """Draw all of them."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "policies", "font.size": 8, "svg.fonttype": "none"})
    from matplotlib import pyplot

    for name, draw in PICTURES.items():
        figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
        axes.set_xlabel("seconds")
        draw(axes)
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # a line at zero is not hidden by the axis
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
