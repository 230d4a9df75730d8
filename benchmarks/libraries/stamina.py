"""stamina: retries, on top of tenacity. Its default logging of each retry is off, as in the other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import stamina
import stamina.instrumentation

from benchmarks.functions import ATTEMPTS, BASE, CAP, FAILURE
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC, TRIO

library = Library("stamina", packages=("stamina",), imports=("stamina",))

stamina.instrumentation.set_on_retry_hooks([])


@library.enters("retry", SYNC, ASYNCIO, TRIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    return stamina.retry(on=FAILURE, attempts=ATTEMPTS, timeout=None, wait_initial=BASE, wait_max=CAP)(fn)


@library.enters("retry at once", SYNC, ASYNCIO, TRIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return stamina.retry(on=FAILURE, attempts=ATTEMPTS, timeout=None, wait_initial=0, wait_max=0, wait_jitter=0)(fn)
