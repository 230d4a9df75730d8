"""The contestants: one module per library, each used as its own documentation recommends.

An entry is a plain function that protects a function: `retry(fn)` returns `fn` under that library's
retry. It names what it enters and the worlds in which it does:

    library = Library("resilix")

    @library.enters("retry", SYNC, ASYNCIO)
    def retry(fn):
        return protect.when(FAILURE, retry=ATTEMPTS)(fn)

All are set to the same numbers (`benchmarks.functions`). Where libraries differ in what they can do,
an entry takes the form that is fastest for its library.

    retry               up to three attempts, waiting in between
    retry at once       the same without waiting
    breaker             opens after five failures
    breaker, ratio      opens when half of the calls of the last 30 s have failed
    bulkhead            at most 64 at once, the others turned away
    queue               one at once, the others wait
    rate                so many in a second that none waits, spread where a library can do that
    fallback            None instead of an error
    deadline            five seconds that the function can ask for; nothing is cut off
    timeout             five seconds, then the caller is let go
    cache hit           a value that is kept already
    flight              one call at a time for a key, and none waits
    keyed               a breaker for each key, of which there is one
    stream              retry(breaker(bulkhead(fn))) around a generator
    stream, idle        the same, where each item has a limit of its own
    four                fallback(retry(breaker(bulkhead(fn))))
    five, deadline      fallback(retry(breaker(bulkhead(deadline(fn)))))
    five, timeout       fallback(retry(breaker(bulkhead(timeout(fn)))))
    four, unanswered    four that handle another exception than the one that is raised
    short timeout       a timeout that fires
    deadline, block     a block with a deadline; in asyncio one that is cut off
    guard, block        a block under a breaker
    slot, block         a block under a bulkhead
    four, listened      four, and a listener that hears how each call went
    four, call          four around a function that is handed over with each call
    four, execute       ... that takes a context
    four, proxy         four around a method of an existing client
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from benchmarks.timing import TRIO, WORLDS

#: Takes a function, returns it protected.
Protect: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

F = TypeVar("F", bound=Protect)

#: The name under which our own library runs.
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
    """A contestant, with what it enters.

    :param name: what the tables call it.
    :param packages: the distributions that it consists of.
    :param imports: the modules that a user of all that it enters imports.
    """

    def __init__(self, name: str, *, packages: tuple[str, ...] = (), imports: tuple[str, ...] = ()) -> None:
        self.name = name
        self.packages = packages
        self.imports = imports
        self.entries: dict[tuple[str, str], Protect] = {}

    def enters(self, entry: str, *worlds: str) -> Callable[[F], F]:
        """Enter a function."""

        def register(protect: F) -> F:
            self.entries.update({(entry, world): protect for world in worlds})
            return protect

        return register


def load() -> tuple[list[Library], list[str]]:
    """Return the libraries that are installed, and the names of the packages that are not."""
    libraries: dict[Library, None] = {}  # a library may have two modules; and the order is that of the reports
    missing: dict[str, None] = {} if TRIO in WORLDS else {TRIO: None}
    for module in _MODULES:
        try:
            names = vars(import_module(f"benchmarks.libraries.{module}")).values()
            libraries.update({it: None for it in names if isinstance(it, Library)})
        except ModuleNotFoundError as error:
            missing[str(error.name)] = None
    return list(libraries), list(missing)
