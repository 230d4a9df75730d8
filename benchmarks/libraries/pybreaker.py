"""pybreaker: a circuit breaker for threads. (Its asynchronous calls are for Tornado.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pybreaker

from benchmarks.functions import FAILURES, OPEN_FOR
from benchmarks.libraries import Library
from benchmarks.timing import SYNC

library = Library("pybreaker", packages=("pybreaker",), imports=("pybreaker",))


@library.enters("breaker", SYNC)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    return pybreaker.CircuitBreaker(fail_max=FAILURES, reset_timeout=OPEN_FOR)(fn)
