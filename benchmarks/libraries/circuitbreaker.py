"""circuitbreaker: a circuit breaker, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from circuitbreaker import circuit

from benchmarks.functions import FAILURES, OPEN_FOR
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC, TRIO

library = Library("circuitbreaker", packages=("circuitbreaker",), imports=("circuitbreaker",))


@library.enters("breaker", SYNC, ASYNCIO, TRIO)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    return circuit(failure_threshold=FAILURES, recovery_timeout=OPEN_FOR)(fn)
