"""The contestants: one module per library, each used as its own documentation recommends.

An entry is a plain function that protects a function: `retry(fn)` returns `fn` under that library's retry. It is
registered under the name of the job and the worlds in which it can do it:

    library = Library("resilix")

    @library.enters("retry", SYNC, ASYNCIO)
    def retry(fn):
        return protect.when(FAILURE, retry=ATTEMPTS)(fn)

All entries use the same settings (`benchmarks.functions`). If a library offers several forms of a job, its entry is the
fastest of them.

    retry               up to three attempts, with delays
    retry at once       the same, without delays
    breaker             opens after five failures
    breaker, ratio      opens when half of the calls of the last 30 s have failed
    bulkhead            at most 64 at once, the others are refused
    queue               one at once, the others wait
    rate                so many per second that none waits, evenly spaced if the library can do that
    fallback            None instead of an error
    deadline            five seconds, which the function can read; nothing is cut off
    timeout             five seconds, after which the caller gets an error
    cache hit           a value that is in the cache
    flight              one call at a time for a key, and no other call waits
    keyed               a breaker for each key, with a single key
    stream              retry(breaker(bulkhead(fn))) around a generator
    stream, idle        the same, with a time limit for each item
    four                fallback(retry(breaker(bulkhead(fn))))
    five, deadline      fallback(retry(breaker(bulkhead(deadline(fn)))))
    five, timeout       fallback(retry(breaker(bulkhead(timeout(fn)))))
    four, unanswered    four that handle another exception than the one that is raised
    short timeout       a timeout that fires
    deadline, block     a block with a deadline; in asyncio, a block that is cut off
    guard, block        a block under a breaker
    slot, block         a block under a bulkhead
    four, listened      four, and a listener that is called with the outcome of each call
    four, call          four around a function that is passed with each call
    four, execute       the same, for a function that takes a context
    four, proxy         four around a method of an existing client
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from benchmarks.timing import TRIO, WORLDS

#: Takes a function, and returns the protected function.
Protect: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

F = TypeVar("F", bound=Protect)

#: The names in the tables.
OURS = "resilience"
HAND_WRITTEN = "hand-written"
HAND_WRITTEN_COUNTING = "hand-written, counting permits"
STACK = "tenacity + breaker + semaphore + timeout"

#: Peers that have all of a retry, a breaker, a bulkhead, a fallback and a timeout.
UNIFIED = ("resilix", "nopanic", "pyresilience", "interlock", "grelmicro", "hyx")

_MODULES = (
    "ours hand_written hand_written_tasks resilix nopanic pyresilience interlock hyx tenacity stamina backoff "
    "pybreaker circuitbreaker aiobreaker aiolimiter cachetools grelmicro stack"
).split()


class Library:
    """A contestant, with its entries.

    :param name: its name in the tables.
    :param packages: the distributions that it consists of.
    :param imports: the modules that a user of all its entries imports.
    """

    def __init__(self, name: str, *, packages: tuple[str, ...] = (), imports: tuple[str, ...] = ()) -> None:
        self.name = name
        self.packages = packages
        self.imports = imports
        self.entries: dict[tuple[str, str], Protect] = {}

    def enters(self, entry: str, *worlds: str) -> Callable[[F], F]:
        """Register a function as an entry."""

        def register(protect: F) -> F:
            self.entries.update({(entry, world): protect for world in worlds})
            return protect

        return register


def load() -> tuple[list[Library], list[str]]:
    """Return the libraries that are installed, and the names of the packages that are not."""
    libraries: dict[Library, None] = {}  # in the order of the reports; a library may have two modules
    missing: dict[str, None] = {} if TRIO in WORLDS else {TRIO: None}
    for module in _MODULES:
        try:
            names = vars(import_module(f"benchmarks.libraries.{module}")).values()
            libraries.update({it: None for it in names if isinstance(it, Library)})
        except ModuleNotFoundError as error:
            missing[str(error.name)] = None
    return list(libraries), list(missing)
