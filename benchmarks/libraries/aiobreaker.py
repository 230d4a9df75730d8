"""aiobreaker: pybreaker's descendant, with asyncio and without the lock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from aiobreaker import CircuitBreaker

from benchmarks.functions import FAILURES, OPEN_FOR
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC

library = Library("aiobreaker", packages=("aiobreaker",), imports=("aiobreaker",))


@library.enters("breaker", SYNC, ASYNCIO)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    return CircuitBreaker(fail_max=FAILURES, timeout_duration=timedelta(seconds=OPEN_FOR))(fn)
