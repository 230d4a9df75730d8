"""Exact counts under contention: `python -m tests.contention --operations 10000000`.

Sixteen threads, an asyncio loop and a trio loop call through one breaker and one bulkhead, and the interpreter switches
threads as often as it can. Prints the counts of the callers and of the policies, and exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections import Counter

from tests.contention import exact
from tests.contention.storm import LOOPS, TASKS_PER_LOOP


def machine() -> str:
    """Return the interpreter and the machine."""
    gil = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", free-threaded"
    python = f"{platform.python_implementation()} {platform.python_version()}{gil}"
    return f"{python}, {platform.system()}, {os.cpu_count()} CPUs"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contention", description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000, help="the number of calls (1,000,000)")
    parser.add_argument("--threads", type=int, default=exact.THREADS, help="the number of threads (16)")
    options = parser.parse_args(arguments)

    loops = ", ".join(f"{TASKS_PER_LOOP} {name} tasks" for name in LOOPS)
    print(f"{options.threads} threads, {loops}, one breaker, one bulkhead of {exact.LIMIT}; {machine()}", flush=True)
    storms, checks = exact.run(options.operations, options.threads)
    for name, storm in zip(("counting", "moving"), storms, strict=True):
        rate = storm.operations / storm.seconds
        print(f"{name}: {storm.operations:,} calls in {storm.seconds:,.0f} s, {rate:,.0f} per second")
    worlds = sum((storm.operations_by_world() for storm in storms), Counter())
    print("calls from " + ", ".join(f"{world}: {count:,}" for world, count in worlds.most_common()))
    print(f"\n{'':44} {'callers':>12} {'policies':>12}")
    for check in checks:
        print(f"{check.what:44} {check.callers:>12,} {check.policies:>12,} {'' if check.agrees else 'WRONG'}".rstrip())
    wrong = sum(not check.agrees for check in checks)
    print(f"\n{wrong} of {len(checks)} numbers differ" if wrong else "\nall numbers agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
