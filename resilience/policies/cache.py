"""Cache: answer a call with an earlier result for some time, and for longer if a new call fails.

    age < ttl              fresh: the value, without a call
    age < ttl + stale      one caller refreshes it, and gets the old value if that fails; all others get that at once
    otherwise              a miss: one caller makes the call, and the other callers of its key wait (`flights`)

Nothing runs in the background: a refresh belongs to the caller that makes it, whose deadline it obeys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any, Literal, Never, TypeAlias, TypeVar, final

from typing_extensions import override

from resilience import checks, forks
from resilience.ambient import get_ambient
from resilience.callables import name_of
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.counter import Counter
from resilience.errors import closable
from resilience.events.dispatch import report_use, subscribers
from resilience.formats import format_number
from resilience.innermost import raise_if_cut_off
from resilience.log import logger
from resilience.matching import Matcher, On, names_nothing
from resilience.policies.copies import without_frames
from resilience.policies.flights import Flights, concerns_all
from resilience.policies.keys import Key, key_in_words, key_of, refuse_foreign, refuse_unhashable
from resilience.policy import Call, Policy
from resilience.runtimes.base import Runtime
from resilience.runtimes.tasks import replaces_cancellation

T = TypeVar("T")

#: For how long a value is fresh: seconds, or a function of the value that returns them.
Ttl: TypeAlias = "Duration | Callable[[Any], Duration]"


@final
@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of a cache: its size, and how calls have been answered so far.

    Each call counts once, except that of a caller that gives up while it waits for another caller's call.

    :param hits: with a fresh value, or with a cached error.
    :param stale: with a stale value, including those after a failed refresh.
    :param shared: with the result of another caller's call.
    :param misses: by making the call: values that were loaded or refreshed, and failures that were raised.
    :param size: how many entries it holds now.
    """

    hits: int
    stale: int
    shared: int
    misses: int
    size: int


@final
@dataclass(eq=False, slots=True)
class Entry:
    """The entry of a key: a value, or an error. Instants are on the process clock.

    :param next_try: from when on it may be refreshed again, after a refresh that failed.
    :param is_used: whether it was used since it was last considered for eviction.
    """

    fresh_until: float
    stale_until: float
    value: Any = None
    error: Exception | None = None
    next_try: float = -inf
    is_used: bool = False


@final
class Cache(Policy[Never]):
    """Answer a call with the result of an earlier one for the same key.

    All threads, tasks and event loops that share this object share one cache. If a value is missing, one caller makes
    the call, and the others wait for it, as under `SingleFlight`. Place it outside Retry.

    :param ttl: how many seconds a value is fresh, more than 0; or a function of the value that returns them. If it
        returns 0 or less, the value is not kept.
    :param key: called with the same arguments as the function; returns the key of the call, which must be hashable. By
        default the function and all of its arguments. `execute` needs one: `key(ctx)`. Functions that have the same key
        share a value.
    :param max_size: how many entries are kept, 1024 by default. Beyond it, the oldest entry that was not used since it
        was last considered is dropped.
    :param stale: for how many seconds more than `ttl` a value is the answer while a refresh runs, or if it fails; 0 by
        default.
    :param on: which failures of a refresh are answered with the stale value; every `Exception` by default.
    :param ignore: which failures are never answered, even if `on` matches.
    :param keep_errors: which failures are cached and raised again, each time as a copy without the frames of the call;
        none by default.
    :param errors_ttl: for how many seconds, 1 by default; also the minimum time between a failed refresh and the next
        one.
    :param store: a mapping for the entries, such as one of `cachetools`, instead of the cache's own. It is used under a
        lock, replaces `max_size`, and the format of its entries is private.
    :param name: the name of this policy in errors and events; "Cache" by default.
    :raises DeadlineExceeded: if the budget of the execution ends while it waits for another caller.
    :raises TypeError: from a call whose key is missing or not hashable. No policy retries or answers it.

    All callers get the same object: do not modify it. `stale` is RFC 5861's `stale-if-error`, with
    `stale-while-revalidate` for all callers except the one that refreshes.

    >>> from resilience import Cache
    >>> cache = Cache(ttl=60.0)
    >>> cache.call(str.upper, "hello"), cache.call(str.upper, "hello")
    ('HELLO', 'HELLO')
    >>> cache.stats().hits
    1
    """

    _resilience_streams = False
    _resilience_shares = "values"
    _resilience_shares_results = True
    _resilience_answers = True  # with an old value

    def __init__(
        self,
        ttl: Ttl,
        *,
        key: Key | None = None,
        max_size: int = 1024,
        stale: Duration = 0.0,
        on: On = Exception,
        ignore: On = (),
        keep_errors: On = (),
        errors_ttl: Duration = 1.0,
        store: MutableMapping[Any, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self._resilience_set_up(locals())
        self._ttl = checks.plain_function("ttl", ttl, ("value",)) if callable(ttl) else checks.seconds("ttl", ttl)
        self._key = checks.optional_function("key", key)
        self._max_size = checks.whole("max_size", max_size)
        self._stale = checks.seconds("stale", stale, zero=True)
        self._answered = Matcher(on, ignore, own=True)
        self._kept = None if names_nothing(keep_errors) else Matcher(keep_errors, (), own=True, name="keep_errors")
        self._errors_ttl = checks.seconds("errors_ttl", errors_ttl)
        if store is not None:
            checks.instance("store", store, MutableMapping, "a mutable mapping")
        self._flights = Flights(self.name)
        own: OrderedDict[Hashable, Entry] = OrderedDict()
        self._own = own if store is None else None
        self._entries: MutableMapping[Any, Any] = own if store is None else store
        self._find: Callable[[Hashable], Entry | None] = self._entries.get if store is None else self._ask_store
        self._lock = forks.lock_of(self)
        self._hits, self._stale_hits, self._misses = Counter(), Counter(), Counter()

    @override
    async def around(self, call: Call[T], ctx: Context) -> Any:
        key = key_of(ctx, self._key, self.name)
        try:
            entry = self._find(key)
        except TypeError:
            refuse_unhashable(key, self.name)
            raise
        now = clock.now()
        if entry is not None and now < entry.fresh_until:
            if entry.error is not None or subscribers.caches or ctx._info.listeners:
                return self._answer(entry, ctx, "fresh")
            entry.is_used = True  # as `_answer` does, but without two calls: a tenth of the time
            self._hits.add()
            return entry.value
        old = entry if entry is not None and now < entry.stale_until else None
        if old is not None and now < old.next_try:
            return self._answer(old, ctx, "stale")
        flight = self._flights.board(key, ctx)
        try:
            with flight:
                if not flight.leads and old is not None:
                    return self._answer(old, ctx, "stale")
                if not flight.leads and await flight.follows():
                    return flight.share()
                entry = self._find(key)  # another caller may have refreshed it in the meantime, or failed to
                if entry is not None and clock.now() < entry.fresh_until:
                    return flight.publish(self._answer(entry, ctx, "fresh"))
                if old is not None and clock.now() < old.next_try:
                    return self._answer(old, ctx, "stale")
                try:
                    result = await call(ctx)
                except BaseException as error:
                    if (old := self._stale_after(error, key, old, ctx)) is None:
                        raise
                    await ctx.runtime.close(closable(error))
                    return self._answer(old, ctx, "stale")
                self._misses.add()
                await self._keep_value(key, result, ctx.runtime)
                return flight.publish(result)
        finally:
            flight.__exit__(None, None, None)  # again: see `Flight`

    def _answer(self, entry: Entry, ctx: Context, how: Literal["fresh", "stale"]) -> Any:
        entry.is_used = True
        (self._hits if how == "fresh" else self._stale_hits).add()
        report_use(self.name, ctx, how)
        if entry.error is not None:
            raise without_frames(entry.error)
        return entry.value

    def _stale_after(self, error: BaseException, key: Hashable, old: Entry | None, ctx: Context) -> Entry | None:
        """Return the old entry if its stale value is the answer after a failed call.

        If not, count a miss, and cache the error if it is one that is kept.
        """
        is_answered = False
        try:
            if isinstance(error, Exception) and not replaces_cancellation(error):
                raise_if_cut_off(ctx._timer, get_ambient(), error)  # as in a Fallback
                now = clock.now()
                until = now + self._errors_ttl
                if old is not None and now < old.stale_until:
                    old.next_try = until
                    is_answered = self._answered.judge(error) is True
                elif self._kept is not None and concerns_all(error, ctx) and self._kept.judge(error):
                    self._keep(key, Entry(until, until, error=without_frames(error)))
        finally:  # an error of a predicate is raised, and counts as a miss
            if not is_answered:
                self._misses.add()
        return old if is_answered else None

    # --- entries ---

    def _ask_store(self, key: Hashable) -> Entry | None:
        """Return the entry of a key in the store. A store that raises, or returns another object, holds none."""
        try:
            with self._lock:
                entry = self._entries.get(key)
            if entry is None or isinstance(entry, Entry):
                return entry
            logger.warning("the store of %s holds an unknown %s; the call is made", self.name, type(entry).__name__)
        except Exception:
            refuse_unhashable(key, self.name)
            logger.exception("the store of %s raised; the call is made", self.name)
        return None

    async def _keep_value(self, key: Hashable, value: object, runtime: Runtime) -> None:
        try:
            ttl = _seconds(self._ttl(value)) if callable(self._ttl) else self._ttl
            if ttl > 0:
                fresh_until = clock.now() + ttl
                self._keep(key, Entry(fresh_until, fresh_until + self._stale, value=value))
        except BaseException:  # no caller will see the value
            await runtime.close(value)
            raise

    def _keep(self, key: Hashable, entry: Entry) -> None:
        """Keep an entry, unless its key was forgotten since the call began."""
        try:
            with self._lock:
                if self._flights.is_current(key):
                    if self._own is not None:
                        _make_room(self._own, key, self._max_size)
                    self._entries[key] = entry
        except Exception:
            logger.exception("the store of %s raised; the result is not kept", self.name)

    def forget(self, key: Hashable) -> None:
        """Drop the entry of a key. The result of a running call for it is not kept either.

        :param key: what the `key` function returned; without one, `(function, arguments)`: a tuple of the undecorated
            function, the tuple of its arguments, and for each keyword argument, sorted, a `(name, value)`.
        :raises TypeError: for a key that no call can have, such as an argument alone if there is no `key` function.
        """
        refuse_foreign(key, self._key, self.name)
        with self._lock:
            self._flights.forget(key)
            self._entries.pop(key, None)

    def clear(self) -> None:
        """Drop all entries. The results of running calls are not kept either."""
        with self._lock:
            self._flights.forget_all()
            self._entries.clear()

    def stats(self) -> CacheStats:
        """Return a snapshot: the size of the cache, and how calls were answered."""
        with self._lock:
            size = len(self._entries)
        return CacheStats(
            hits=self._hits.value(),
            stale=self._stale_hits.value(),
            shared=self._flights.shared.value(),
            misses=self._misses.value(),
            size=size,
        )

    @override
    def _resilience_hint(self) -> str:
        if not callable(self._ttl):
            return ""
        return f"; the ttl of this Cache is {name_of(self._ttl)}: did you mean @Cache(60.0)?"

    @override
    def describe(self) -> str:
        fresh = f"what {name_of(self._ttl)} says" if callable(self._ttl) else f"{format_number(self._ttl)} s"
        stale = f", {format_number(self._stale)} s more if a refresh fails" if self._stale else ""
        room = f"at most {self._max_size}" if self._own is not None else f"in a {type(self._entries).__name__}"
        again = f"; tries again {format_number(self._errors_ttl)} s after a failure" if self._errors_ttl != 1 else ""
        return f"{self.name}: keeps values for {fresh}{stale}, by {key_in_words(self._key)}, {room}{again}"


def _seconds(ttl: object) -> float:
    """Return the seconds that `ttl(value)` has returned; a value with 0 or less is not kept."""
    return ttl.total_seconds() if isinstance(ttl, timedelta) else checks.number("ttl(value)", ttl)


def _make_room(entries: OrderedDict[Hashable, Entry], key: Hashable, max_size: int) -> None:
    """Let the entry of this key become the newest one; drop the oldest that are not used, if there are too many."""
    entries.pop(key, None)
    while len(entries) >= max_size:
        oldest, kept = next(iter(entries.items()))
        if kept.is_used:  # a second chance, so that hits need no lock
            kept.is_used = False
            entries.move_to_end(oldest)  # never removed, so that readers always find it
        else:
            del entries[oldest]
