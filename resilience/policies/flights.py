"""Concurrent calls of one key, across all threads, tasks and event loops: one caller leads, the others follow.

    lead      the first caller of a key makes the call, and shares its outcome with the callers that wait.
    follow    the other callers wait, each in its own runtime and no longer than its own deadline.
    give up   a leader that is cancelled, interrupted, cut off, or out of its own time has no outcome to share:
              all followers wake up, one of them leads, and the others get its outcome.

A nested call for the same key would wait for the call that encloses it, so it is made at once. That includes calls
in code that inherits the leader's context variables: child tasks and worker threads.

There is no lock: `dict.setdefault` decides who leads. A follower first registers with the leader, and then checks
whether the leader has ended; the leader first marks itself as ended, and then wakes all followers. So none is missed.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar, final
from weakref import ref

from resilience import forks
from resilience.context import Context, waits_until
from resilience.counter import Counter
from resilience.errors import ArgumentMisuse, DeadlineExceeded, ends_with_the_deadline
from resilience.events.dispatch import report_use
from resilience.outcome import Failure, Outcome, StoppedIteration, Success
from resilience.policies.copies import copy_of
from resilience.runtimes.base import Waiter, has_come
from resilience.runtimes.tasks import replaces_cancellation

T = TypeVar("T")

#: An outcome, and the traceback of its error, which all copies of the error get.
Shared: TypeAlias = tuple[Outcome[Any], TracebackType | None]

#: The result of a call that has none.
_NONE: Final[Any] = object()


@final
class Lead:
    """The running call of a leader, as others see it.

    It does not keep the leader's flight alive, which refers to the followers, and so to their tasks, one of which may
    refer to the leader's task. So all of these are garbage if their event loop was closed, and the end of the leader's
    task wakes the other followers.
    """

    __slots__ = ("_flight", "is_over")

    def __init__(self, flight: Flight) -> None:
        self._flight = ref(flight)
        self.is_over: bool = False  # then, a follower that registers is too late

    @property
    def followers(self) -> list[Flight]:
        """The flights of the followers."""
        flight = self._flight()
        return [] if flight is None else flight.followers

    def has_ended(self) -> bool:
        """Whether the leader will wake no further follower: its call is over, or its task is about to be finalized."""
        return self.is_over or self._flight() is None


@final
class Flights:
    """The running calls, by key.

    :param policy: the name of the policy in errors.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.leaders: dict[Hashable, Lead] = {}
        #: How many callers have got the outcome of another caller's call.
        self.shared: Counter = Counter()
        forks.reset_after_fork(self, Flights.forget_all)  # the child has none of the threads of these calls

    def board(self, key: Hashable, ctx: Context) -> Flight:
        """Return the flight of one caller: a block around its call."""
        if not ctx.runtime.is_shareable:  # another policy has passed its call on; otherwise `streaming` refuses it
            raise ArgumentMisuse(f"{self.policy} cannot be used around a stream: delivered items are gone")
        return Flight(self, key, ctx)

    def is_current(self, key: Hashable) -> bool:
        """Whether this code runs inside the current call for this key; false once the key was forgotten."""
        return self.leaders.get(key) in _enclosing.get()

    def forget(self, key: Hashable) -> None:
        """Let the next caller of this key make a new call. Current followers still get the outcome of the old one."""
        self.leaders.pop(key, None)

    def forget_all(self) -> None:
        """Let the next caller of every key make a new call."""
        self.leaders.clear()

    def remove(self, lead: Lead, key: Hashable) -> None:
        """End a flight: let the next caller of its key make a new call, unless one already does."""
        if self.leaders.get(key) is lead:
            removed = self.leaders.pop(key, lead)
            if removed is not lead:  # `lead` was forgotten between the two steps, and another caller leads
                self.leaders.setdefault(key, removed)
                if removed.has_ended():  # meanwhile, and has not found itself
                    self.remove(removed, key)


@final
class Flight:
    """The part of one caller: it leads, or follows the caller that does.

    flight = flights.board(key, ctx)
    try:
        with flight:
            if not flight.leads and await flight.follows():
                return flight.share()
            return flight.publish(await call(ctx))
    finally:
        flight.__exit__(None, None, None)  # again: an interrupt may have prevented the first `__exit__`
    """

    __slots__ = (
        "__weakref__",
        "_ctx",
        "_flights",
        "_found",
        "_key",
        "_lead",
        "_result",
        "_token",
        "_waiter",
        "followers",
        "leads",
    )

    def __init__(self, flights: Flights, key: Hashable, ctx: Context) -> None:
        self._flights = flights
        self._key = key
        self._ctx = ctx
        #: Whether this caller makes the call.
        self.leads: bool = False
        #: The callers that wait for this one, while it leads.
        self.followers: list[Flight] = []
        self._lead = Lead(self)
        self._result = _NONE
        #: What the leader has shared: one list for all its followers. If it is empty, the one that leads next adds its
        #: outcome, also for those that have not run since.
        self._found: list[Shared] | None = None
        self._token: Token[tuple[Lead, ...]] | None = None
        self._waiter: Waiter

    def __enter__(self) -> None:
        outer = _enclosing.get()
        try:
            # Before `_join`: once this caller leads, a signal handler may call for this key, and must not wait for it.
            if outer:  # a task may outlive the call in which it was started
                self._token = _enclosing.set((*(it for it in outer if not it.is_over), self._lead))
            else:
                self._token = _enclosing.set((self._lead,))
            self._join()
        except BaseException:  # an interrupt, perhaps before the token was kept, or keys that cannot be compared
            _enclosing.set(outer)
            raise

    def _join(self) -> Lead:
        """Lead if no other caller does. Return the call that is running."""
        lead = self._flights.leaders.setdefault(self._key, self._lead)
        self.leads = lead is self._lead or lead in _enclosing.get()  # nested in the leader's call
        if lead.has_ended():  # it is about to be removed, or cannot be
            self._flights.remove(lead, self._key)
            return self._join()
        return lead

    # --- as a follower ---

    async def follows(self) -> bool:
        """Wait for the leader's outcome; false if the leader had none to share, and this caller leads now.

        :raises DeadlineExceeded: if the budget of the execution ends in the meantime.
        """
        while True:
            lead = self._join()
            if not self.leads:
                await self._wait_for(lead)
            if self._found:
                return True
            if self.leads:
                return False

    async def _wait_for(self, lead: Lead) -> None:
        ctx = self._ctx
        self._waiter = ctx.runtime.waiter()
        lead.followers.append(self)
        try:
            is_awake = lead.has_ended() or await self._waiter.wait(waits_until(ctx), ctx._timer)
        finally:
            with suppress(ValueError):  # the leader has woken all
                lead.followers.remove(self)
        if not is_awake and not self._found:
            policy = self._flights.policy
            raise DeadlineExceeded("the deadline passed while another caller made the same call", policy=policy)

    def share(self) -> Any:
        """Return what the leader's call returned, or raise a copy of its error with the traceback of the call."""
        self._flights.shared.add()
        report_use(self._flights.policy, self._ctx, "shared")
        assert self._found
        (outcome, traceback), self._found = self._found[0], None
        if isinstance(outcome, Failure):
            outcome = Failure(copy_of(outcome.error).with_traceback(traceback))
        try:
            return outcome.unwrap()
        finally:
            del outcome  # no cycle: error -> traceback -> this frame -> error

    # --- as the leader ---

    def publish(self, result: T) -> T:
        """Return the result of the call, and share it with the followers at the end of the block."""
        self._result = result  # an outcome, which costs 0.2 us, is only made if there is a follower
        return result

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Share the outcome of the call with the followers, if it concerns them, and wake them."""
        if self._token is None:
            return
        if self.leads and self._found is not None:
            self._found += self._shareable(error)  # before another caller can lead
        self._lead.is_over = True  # before it is removed: another thread may put it back, and then look at this
        try:
            self._flights.remove(self._lead, self._key)
        finally:  # also if the function has changed the key, so that it cannot be hashed: the next `_join` removes it
            if self.followers:
                self._wake_followers(self._shareable(error))
            try:  # last: a signal handler that runs before still counts as nested, and must not wait for this call
                _enclosing.reset(self._token)
            except (ValueError, RuntimeError):  # in another context, or for a second time after an interrupt
                pass
        self._found = self._token = None  # they refer to the error, and to outer calls

    def _shareable(self, error: BaseException | None) -> list[Shared]:
        """Return the outcome of the call; nothing if it does not concern the followers."""
        if isinstance(error, Exception) and concerns_all(error, self._ctx):
            return [(Failure(copy_of(error)), error.__traceback__)]  # a copy: policies around the leader add notes
        return [(Success(self._result), None)] if self._result is not _NONE else []

    def _wake_followers(self, found: list[Shared]) -> None:
        for follower in self.followers.copy():  # not removed one by one: an interrupt could lose one
            follower._found = found
            follower._waiter.wake()
        self.followers.clear()


#: The running calls that enclose this code.
_enclosing: ContextVar[tuple[Lead, ...]] = ContextVar("resilience.flights", default=())


def concerns_all(error: Exception, ctx: Context) -> bool:
    """Whether an error concerns other callers, too.

    Neither a `StopIteration` does, nor the end of the caller's own budget, nor an error instead of its cancellation.
    """
    if type(error) is StoppedIteration or (ends_with_the_deadline(error) and has_come(ctx.deadline)):
        return False
    return not replaces_cancellation(error)
