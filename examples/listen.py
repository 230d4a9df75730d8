"""Listen to events: the events of all pipelines go to `logging`, those of one pipeline to a counter.

Look at `to_log`: a listener is a plain function of one event. The code that makes the calls does not change. Without a
listener, no event is built.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter

from resilience import CircuitBreaker, Context, Fallback, Policy, Retry, events

log = logging.getLogger("shop")
counted: Counter[str] = Counter()


def to_log(event: events.Event) -> None:
    """Log one line for each event, with the numbers of its kind."""
    match event:
        case events.RetryScheduled(attempt=attempt, delay=delay):
            log.warning("%s: attempt %d failed, next in %.2f s", event.operation, attempt, delay)
        case events.CircuitChanged(old=old, new=new, last_failure=last_failure):
            log.error("%s: circuit %s -> %s (%s)", event.policy, old.value, new.value, last_failure)
        case events.CallRejected(reason=reason, retry_after=retry_after):
            log.warning("%s: %s, retry after %.0f s", event.policy, reason, retry_after or 0.0)
        case events.FallbackUsed(outcome=outcome):
            log.warning("%s: answered instead of %s", event.policy, outcome)
        case events.ExecutionFinished(attempts=attempts):
            log.info("%s: finished after %d attempts, user %s", event.operation, attempts, event.properties["user"])


def count(event: events.Event) -> None:
    counted[type(event).__name__] += 1


pipeline = Policy.wrap(
    Fallback("out of stock", name="shelf"),
    Retry(3, backoff=[0.01]),
    CircuitBreaker(3, name="depot"),
    name="stock",
    listeners=[count],  # for this pipeline only
)


class Depot:
    """Answers the first call, and fails all others."""

    def __init__(self) -> None:
        self.asked = 0

    def stock(self, ctx: Context) -> str:
        self.asked += 1
        if self.asked > 1:
            raise ConnectionError("connection refused")
        return "7 pieces"


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)-8s %(message)s")
    depot = Depot()
    unsubscribe = events.subscribe(to_log)  # all pipelines of this process, all kinds of events
    for user in ("ada", "bob", "cyd"):
        answer = pipeline.execute(depot.stock, Context(operation="GET /stock", properties={"user": user}))
        print(f"{user} reads: {answer}")
    unsubscribe()
    pipeline.execute(depot.stock, Context(operation="GET /stock"))
    print(f"counted: {', '.join(f'{number} {kind}' for kind, number in sorted(counted.items()))}")
