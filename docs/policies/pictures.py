"""Draw the pictures of these pages, each from a simulation that repeats exactly: `python docs/policies/pictures.py`.

They show what `tests/policies/simulated.py` models; the tests there hold the numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from resilience import AdaptiveLimit, AdaptiveThrottle  # noqa: E402
from tests.policies import simulated  # noqa: E402

OURS, OTHERS, BAND = "#0b6e4f", "#888888", "#eeeeee"


def adaptive_throttle(axes: Any) -> None:
    """Draw an outage of two minutes: what reaches the other side, and what that accepts."""
    axes.axvspan(120, 240, color=BAND)
    axes.text(180, 92, "outage", ha="center", color=OTHERS)
    traffic = simulated.throttled(AdaptiveThrottle(), 90.0, 400, lambda now: 0.0 if 120 <= now < 240 else 100.0)
    at = [10 * slot + 5 for slot in range(len(traffic.sent))]
    axes.axhline(90, color=OTHERS, linestyle=":", label="calls that are made")
    axes.plot(at, traffic.sent, color=OURS, label="calls that reach the other side")
    axes.plot(at, traffic.accepted, color=OURS, linestyle="--", label="calls that it accepts")
    axes.set_ylabel("calls per second")


def adaptive_limit(axes: Any) -> None:
    """Draw a server with ten workers, under twice the load that it can take, and then as much as it can."""
    limit = AdaptiveLimit(0.3)
    result = simulated.overloaded(limit, 2.0, 180, lambda now: 2.0 if 60 <= now < 120 else 1.0)
    axes.axvspan(60, 120, color=BAND)
    axes.text(90, 20, "everything takes twice as long", ha="center", color=OTHERS)
    axes.axhline(simulated.WORKERS, color=OTHERS, linestyle=":", label="calls that the other side can work on")
    axes.plot(range(len(result.limits)), result.limits, color=OURS, label="limit")
    axes.set_ylabel("calls at once")


PICTURES = {"adaptive-limit": adaptive_limit, "adaptive-throttle": adaptive_throttle}


def main() -> None:
    """Draw all of them."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "policies", "font.size": 8, "svg.fonttype": "none"})
    from matplotlib import pyplot

    for name, draw in PICTURES.items():
        figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
        draw(axes)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
