"""aiolimiter: a leaky bucket for asyncio, entered as a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiolimiter import AsyncLimiter

from benchmarks.functions import RATE
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO

library = Library("aiolimiter", packages=("aiolimiter",), imports=("aiolimiter",))


@library.enters("rate", ASYNCIO)
def rate(fn: Callable[..., Any]) -> Callable[..., Any]:
    limiter = AsyncLimiter(RATE, 1.0)

    async def limited(*args: Any) -> Any:
        async with limiter:
            return await fn(*args)

    return limited
