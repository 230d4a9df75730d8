"""backoff: retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import backoff

from benchmarks.functions import ATTEMPTS, BASE, CAP, FAILURE
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC

library = Library("backoff", packages=("backoff",), imports=("backoff",))


@library.enters("retry", SYNC, ASYNCIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    return backoff.on_exception(backoff.expo, FAILURE, max_tries=ATTEMPTS, factor=BASE, max_value=CAP)(fn)


@library.enters("retry at once", SYNC, ASYNCIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return backoff.on_exception(backoff.constant, FAILURE, max_tries=ATTEMPTS, interval=0, jitter=None)(fn)
