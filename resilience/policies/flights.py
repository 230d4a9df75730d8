"""Concurrent calls of one key, across all threads, tasks and event loops: one leads, the others follow.

    lead      the first caller of a key calls. What its call ends with is handed to those that wait.
    follow    the others wait, each in its own runtime and no longer than its own deadline.
    give up   a leader that is cancelled, interrupted, cut off, or out of its own time has nothing to hand on:
              all who wait wake up, and one of them leads.

A leader that calls itself for the same key would wait for itself. It goes straight through, as does whatever
inherits its context variables: child tasks and worker threads.

No lock: `dict.setdefault` decides who leads. A follower first takes its place with the leader, then looks whether
that one has ended; the leader first says that it has, then wakes those that have a place. So none is missed.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from contextlib import suppress
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, TypeVar, final

from resilience import forks
from resilience.context import Context, is_over, waits_until
from resilience.counter import Counter
from resilience.errors import ArgumentMisuse, DeadlineExceeded, ends_with_the_deadline
from resilience.events.dispatch import report_use
from resilience.outcome import Failure, Outcome, StoppedIteration, Success
from resilience.runtimes.base import Waiter

T = TypeVar("T")


@final
class Flights:
    """The calls under way, by key.

    :param policy: what errors call the policy that owns them.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.leaders: dict[Hashable, Flight] = {}
        #: How many callers have got what another one's call brought.
        self.shared: Counter = Counter()
        forks.reset_after_fork(self, Flights._reset)

    def board(self, key: Hashable, ctx: Context) -> Flight:
        """Return the part of one caller, as a block around its call."""
        if not ctx.runtime.is_shareable:  # where another policy has handed its call on; else `streaming` has refused it
            raise ArgumentMisuse(f"{self.policy} cannot stand around a stream: items that were handed out are gone")
        flight = Flight()  # written out: an `__init__` would be 5 % of the flight
        flight._flights, flight._key, flight._ctx = self, key, ctx
        flight._followers = []
        flight.leads = flight._is_over = flight._has_landed = flight._has_result = False
        flight._result = flight._outcome = flight._token = flight._traceback = None
        return flight

    def is_current(self, key: Hashable) -> bool:
        """Whether this code runs inside the call under way for this key: false once the key was forgotten."""
        return self.leaders.get(key) in _enclosing.get()

    def forget(self, key: Hashable) -> None:
        """Let the next caller of this key call anew. Those who follow already get what they wait for."""
        self.leaders.pop(key, None)

    def forget_all(self) -> None:
        """Let the next caller of every key call anew."""
        self.leaders.clear()

    def remove(self, flight: Flight, key: Hashable) -> None:
        """Let the next caller call anew after this one, unless it does so already."""
        if self.leaders.get(key) is flight:
            removed = self.leaders.pop(key, flight)
            if removed is not flight:  # this one was forgotten between the two steps, and another caller leads
                self.leaders.setdefault(key, removed)

    def _reset(self) -> None:  # pragma: no cover (in the child of a fork, which tests look at from outside)
        """Forget the calls of other threads, which are not in the child."""
        self.leaders.clear()


@final
class Flight:
    """The part of one caller: it leads, or follows the one that does.

    flight = flights.board(key, ctx)
    try:
        with flight:
            if not flight.leads and await flight.follows():
                return flight.share()
            return flight.bring(await call(ctx))
    finally:
        flight.__exit__(None, None, None)  # again: an interrupt may have come in the place of the first end
    """

    __slots__ = (
        "_ctx",
        "_flights",
        "_followers",
        "_has_landed",
        "_has_result",
        "_is_over",
        "_key",
        "_outcome",
        "_result",
        "_token",
        "_traceback",
        "_waiter",
        "leads",
    )

    #: Whether this caller makes the call.
    leads: bool

    _flights: Flights
    _key: Hashable
    _ctx: Context
    _followers: list[Flight]
    _is_over: bool  # a follower that comes now comes too late
    _has_landed: bool
    _has_result: bool
    _result: Any
    _outcome: Outcome[Any] | None
    _token: Token[tuple[Flight, ...]] | None
    _traceback: TracebackType | None
    _waiter: Waiter

    def __enter__(self) -> None:
        outer = _enclosing.get()
        try:
            # First: a signal handler may ask for this key as soon as this caller leads, and must not wait for it.
            self._token = _enclosing.set((*_still_running(outer), self) if outer else (self,))
            self._join()
        except BaseException as error:  # an interrupt, or a key that cannot be compared: this block has no end
            _enclosing.set(outer)
            self.__exit__(None, error, None)
            raise

    def _join(self) -> Flight:
        """Lead, if no other caller does. Return who leads."""
        leader = self._flights.leaders.setdefault(self._key, self)
        self.leads = leader is self or leader in _enclosing.get()  # a call that this one is made inside of
        return leader

    # --- as a follower ---

    async def follows(self) -> bool:
        """Wait for the leader. False: it has brought nothing, and now this caller leads.

        :raises DeadlineExceeded: where the budget of the execution ends meanwhile.
        """
        while True:
            leader = self._join()
            if self.leads:
                return False
            await self._wait_for(leader)
            if self._outcome is not None:
                return True

    async def _wait_for(self, leader: Flight) -> None:
        ctx = self._ctx
        self._waiter = ctx.runtime.waiter()
        leader._followers.append(self)
        try:
            is_awake = leader._is_over or await self._waiter.wait(waits_until(ctx), ctx._timer)
        finally:
            with suppress(ValueError):  # it was woken
                leader._followers.remove(self)
        if not is_awake and self._outcome is None:
            policy = self._flights.policy
            raise DeadlineExceeded("the deadline passed while another caller made the same call", policy=policy)

    def share(self) -> Any:
        """Return what the leader's call returned, or raise a copy of its error with the traceback of the call."""
        self._flights.shared.add()
        report_use(self._flights.policy, self._ctx, "shared")
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Failure):
            outcome.error.__traceback__ = self._traceback  # an error that has no copy has grown with each who raised it
        try:
            return outcome.unwrap() if outcome is not None else None
        finally:
            del outcome  # no cycle: error -> traceback -> this frame -> error

    # --- as the leader ---

    def bring(self, result: T) -> T:
        """Return the result of the call, and hand it on at the end of the block."""
        self._result = result  # an outcome is made of it where there is another caller to hand it to: 0.2 us
        self._has_result = True
        return result

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Hand on what the call ended with, if it is anything to others."""
        if self._has_landed or self._token is None:
            return
        self._flights.remove(self, self._key)
        self._is_over = True
        if self._followers:
            self._hand_on(self._brought(error))
        try:  # last: what comes in the middle, such as a signal handler, is still inside, and must not wait for this
            _enclosing.reset(self._token)
        except (ValueError, RuntimeError):  # it ends in other variables; it was interrupted here before
            pass
        self._result = None  # a child task that outlives the call has it in its variables
        self._has_landed = True

    def _brought(self, error: BaseException | None) -> Outcome[Any] | None:
        if isinstance(error, Exception) and type(error) is not StoppedIteration:  # which is for its own caller alone
            return None if ends_with_the_deadline(error) and is_over(self._ctx) else Failure(error)
        return Success(self._result) if self._has_result else None

    def _hand_on(self, brought: Outcome[Any] | None) -> None:
        while self._followers:
            with suppress(IndexError, RuntimeError):  # the last one has left; the event loop of one has ended
                follower = self._followers.pop(0)
                if isinstance(brought, Failure):
                    follower._traceback = brought.error.__traceback__
                    follower._outcome = Failure(copy_of(brought.error))
                else:
                    follower._outcome = brought
                follower._waiter.wake()


#: The calls under way that this code runs inside of.
_enclosing: ContextVar[tuple[Flight, ...]] = ContextVar("resilience.flights", default=())


def _still_running(flights: tuple[Flight, ...]) -> list[Flight]:
    """Leave out what is over: a task may outlive the call that it was begun in, and begin others."""
    return [it for it in flights if not it._is_over]


def copy_of(error: Exception) -> Exception:
    """Return a copy of an exception with its cause, context and notes, but without its traceback.

    One that wants other arguments than it keeps has no copy: then it is returned itself.
    """
    try:
        own = copy.copy(error)
    except Exception:
        return error
    if type(own) is not type(error) or own.args != error.args:
        return error
    own.__cause__, own.__context__ = error.__cause__, error.__context__
    own.__suppress_context__ = error.__suppress_context__
    if hasattr(error, "__notes__"):
        own.__notes__ = list(error.__notes__)
    return own
