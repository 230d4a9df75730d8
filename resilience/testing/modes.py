"""Modes for a whole process: no waits between attempts, no policies at all, repeatable randomness.

Each mode is a block that can be nested, or overlap with blocks of other threads and tasks. At its end, even after an
error, it no longer has an effect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from resilience import backoff
from resilience.clock import clock
from resilience.events.dispatch import subscribers
from resilience.testing.replacing import replaced


@contextmanager
def no_sleeping() -> Iterator[None]:
    """Skip the sleeps of policies: the waits of Retry, and `ctx.sleep`.

    Time stays real: attempts, events and their delays are the same, but there are no waits. Queues and timeouts are not
    affected.

    >>> from resilience import Retry
    >>> from resilience.testing import no_sleeping, script
    >>> with no_sleeping():
    ...     Retry(backoff=[3600]).call(script(ConnectionError(), "fine"))
    'fine'
    """
    with replaced(clock, sleep=lambda seconds: None, shorten=lambda seconds: 0.0):
        yield


@contextmanager
def switched_off() -> Iterator[None]:
    """Let every execution call its function directly: no policy of this process does anything.

    For tests of your code without policies. Blocks (`retry.attempts()`, `breaker.guard()`, `bulkhead.slot()`,
    `deadline(...)`) stay as they are.

    >>> from resilience import Fallback
    >>> from resilience.testing import switched_off
    >>> with switched_off():
    ...     Fallback("unknown").capture(lambda ctx: 1 / 0)
    Failure(error=ZeroDivisionError('division by zero'))
    """
    subscribers.switch_policies_off(True)
    try:
        yield
    finally:
        subscribers.switch_policies_off(False)


@contextmanager
def seeded(seed: int = 0) -> Iterator[random.Random]:
    """Let every backoff without its own `rng` draw from one generator that is seeded with `seed`.

    A breaker whose `open_for` is a backoff takes its generator when it is created, so create it inside the block.

    >>> from resilience.backoff import Exponential
    >>> from resilience.testing import seeded
    >>> def three():
    ...     with seeded(7):
    ...         delays = Exponential(1.0).delays()
    ...         return [next(delays) for _ in range(3)]
    >>> three() == three()
    True
    """
    source = random.Random(seed)
    with replaced(backoff, SHARED_RANDOMNESS=source):
        yield source
