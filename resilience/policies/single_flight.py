"""SingleFlight: make one call for all concurrent callers of the same key."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.context import Context
from resilience.policies.flights import Flights
from resilience.policies.keys import Key, key_in_words, key_of, refuse_foreign, refuse_unhashable
from resilience.policy import Call, Policy

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class SingleFlightStats:
    """A snapshot of a SingleFlight.

    :param in_flight: for how many keys a call is running.
    :param shared: how many calls have got the result of another caller's call so far.
    """

    in_flight: int
    shared: int


@final
class SingleFlight(Policy[Never]):
    """Let one call for a key run at a time, and share its outcome with all concurrent callers of that key.

    That applies to all threads, tasks and event loops that share this object. Each follower waits no longer than its
    own deadline allows. Each gets its own copy of a failure, with the traceback of the call. If the leader is
    cancelled, or runs out of its own time, no other caller fails: one of them makes the call.

    :param key: called with the same arguments as the function; returns the key of the call, which must be hashable. By
        default the function and all of its arguments. `execute` needs one: `key(ctx)`. Functions that have the same key
        share a call.
    :param name: the name of this policy in errors and events; "SingleFlight" by default.
    :raises DeadlineExceeded: if the budget of the execution ends while it waits.
    :raises TypeError: from a call whose key is missing or not hashable. No policy retries or answers it.

    Modelled on Go's `golang.org/x/sync/singleflight`. All callers get the same object: do not modify it.

    >>> from resilience import SingleFlight
    >>> SingleFlight().call(str.upper, "hello")
    'HELLO'
    """

    _resilience_streams = False
    _resilience_shares = "running calls"
    _resilience_shares_results = True

    def __init__(self, *, key: Key | None = None, name: str | None = None) -> None:
        self._resilience_set_up(locals())
        self._key = checks.optional_function("key", key)
        self._flights = Flights(self.name)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        key = key_of(ctx, self._key, self.name)
        refuse_unhashable(key, self.name)
        flight = self._flights.board(key, ctx)
        try:
            with flight:
                if not flight.leads and await flight.follows():
                    return flight.share()  # type: ignore[no-any-return]
                return flight.publish(await call(ctx))
        finally:
            flight.__exit__(None, None, None)  # again: see `Flight`

    def forget(self, key: Hashable) -> None:
        """Let the next caller of this key start a new call, beside the running one. Keys are as for `Cache.forget`."""
        refuse_foreign(key, self._key, self.name)
        self._flights.forget(key)

    def stats(self) -> SingleFlightStats:
        """Return a snapshot of the running calls."""
        return SingleFlightStats(in_flight=len(self._flights.leaders), shared=self._flights.shared.value())

    @override
    def describe(self) -> str:
        return f"{self.name}: one call at a time for each {key_in_words(self._key)}, shared by all concurrent callers"
