"""cachetools: a cache with expiry, and with the lock that its documentation demands for several threads."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import cachetools

from benchmarks.functions import KEEP_FOR
from benchmarks.libraries import Library
from benchmarks.timing import SYNC

library = Library("cachetools", packages=("cachetools",), imports=("cachetools",))


@library.enters("cache hit", SYNC)
def cache_hit(fn: Callable[..., Any]) -> Callable[..., Any]:
    return cachetools.cached(cachetools.TTLCache(1024, KEEP_FOR), lock=Lock())(fn)
