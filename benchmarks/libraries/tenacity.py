"""tenacity: retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tenacity
from tenacity import retry_if_exception_type, stop_after_attempt, wait_none, wait_random_exponential

from benchmarks.functions import ATTEMPTS, BASE, CAP, FAILURE
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC, TRIO

library = Library("tenacity", packages=("tenacity",), imports=("tenacity",))


@library.enters("retry", SYNC, ASYNCIO, TRIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    return tenacity.retry(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=BASE, max=CAP),
        retry=retry_if_exception_type(FAILURE),
        reraise=True,
    )(fn)


@library.enters("retry at once", SYNC, ASYNCIO, TRIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return tenacity.retry(
        stop=stop_after_attempt(ATTEMPTS), wait=wait_none(), retry=retry_if_exception_type(FAILURE), reraise=True
    )(fn)
