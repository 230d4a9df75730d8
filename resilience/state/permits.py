"""Permits: at most so many at once, granted in the order of arrival to threads and tasks alike.

Free permits lie in a list, whose `pop` and `append` are atomic: while all is quiet a caller takes
one, and gives it back, without a lock. The rest happens under one short lock, behind the flag `busy`:

- a caller that finds none free queues, raises the flag, and then looks for free permits;
- a caller that gives a permit back appends it, and then looks at the flag.

Each writes first and looks second, so at least one of the two sees the other: no wake-up is lost. A
newcomer that sees the flag queues as well, so no waiter is overtaken. Granting is decided under the
lock; waking, which calls into event loops, is left to the caller of the method that granted.

The lock is reentrant, and each step below leaves things in order: a coroutine that is thrown away
may be finalized in the middle of any of them, by the same thread, and give its permit back.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar, final

W = TypeVar("W")

_NO_WAITERS: deque[Any] = deque()  # stays empty


class Place(enum.Enum):
    """Where the holder of a ticket stands."""

    WAITING = "waiting"
    GRANTED = "granted"
    TAKEN = "taken"  # the holder has its permit, and gives it back itself
    GONE = "gone"


WAITING, GRANTED, TAKEN, GONE = Place  # CPython 3.11 looks a member up in Python, 100 ns each time


@final
class Ticket(Generic[W]):
    """A place in the queue."""

    __slots__ = ("place", "waiter")

    def __init__(self, waiter: W) -> None:
        self.waiter: W = waiter
        self.place: Place = WAITING


class Counts(NamedTuple):
    """The state of the permits at one instant."""

    limit: int
    in_flight: int
    queued: int
    rejected: int


@final
class Permits(Generic[W]):
    """The machine. Methods that can grant permits return the tickets whose holders are to be woken, in order."""

    #: How many permits are made at a time: a limit of a million costs memory only as it is used.
    BATCH = 16

    __slots__ = ("_lock", "_made", "_rejected", "_waiting", "busy", "free", "limit", "queue")

    def __init__(self, limit: int, queue: int) -> None:
        self.limit: int = limit
        self.queue: int = queue
        self._rejected = 0
        self._made = min(limit, self.BATCH)  # permits in existence, free or taken
        self.free: list[None] = [None] * self._made
        self._waiting: deque[Ticket[W]] = _NO_WAITERS  # 760 bytes, which most bulkheads never need
        self.busy: bool = False  # there are waiters, or more permits than there should be
        self._lock = threading.RLock()

    # --- the happy path ---

    def take(self) -> bool:
        """Take a permit if one is free and there is no waiter."""
        if self.busy:
            return False
        try:
            self.free.pop()
        except IndexError:
            return False
        return True

    def take_or_refuse(self) -> bool:
        """Take a permit where there is no queue: look again under the lock, and count a refusal."""
        with self._lock:
            if self.busy:
                self.settle()
            if self._made <= self.limit and (self._take_free() or self._make_one_locked()):
                return True
            self._rejected += 1
            return False

    def give_back(self) -> list[Ticket[W]] | None:
        """Give a permit back."""
        self.free.append(None)
        return self.settle() if self.busy else None

    def settle(self) -> list[Ticket[W]]:
        """Withdraw permits beyond the limit, make missing ones, hand free ones to the waiters.

        To be called where a permit was given back while there was something to settle.
        """
        granted: list[Ticket[W]] = []
        with self._lock:
            free, waiting = self.free, self._waiting
            while self._made > self.limit and self._take_free():
                self._made -= 1
            while waiting and self._made <= self.limit and (free or self._made < self.limit):
                try:
                    if free or not self._make_one_locked():
                        free.pop()
                except IndexError:
                    continue  # taken between these lines
                try:
                    ticket = waiting.popleft()
                except IndexError:
                    free.append(None)
                    break
                if ticket.place is WAITING:
                    ticket.place = GRANTED
                    granted.append(ticket)
                else:  # thrown away between these lines
                    free.append(None)
            self.busy = bool(waiting) or self._made > self.limit
        return granted

    # --- the queue ---

    def first_if_full(self) -> Ticket[W] | None:
        """Return the first in a queue that has no place left; None where there is room, or no queue at all."""
        if len(self._waiting) < self.queue:
            return None
        with self._lock:
            return self._waiting[0] if self._waiting and len(self._waiting) >= self.queue else None

    def join(self, ticket: Ticket[W]) -> list[Ticket[W]] | None:
        """Join the queue with a new ticket. It may be granted at once, and is gone if the queue is full."""
        with self._lock:
            if self._waiting is _NO_WAITERS:
                self._waiting = deque()
            self._waiting.append(ticket)
            self.busy = True
            granted = self.settle() if self.free or self._made < self.limit else None
            if len(self._waiting) > self.queue and self._withdraw_locked(ticket):
                self._rejected += 1
        return granted

    def leave(self, ticket: Ticket[W]) -> bool:
        """Stop waiting; false if the permit had been granted already, which the holder then has."""
        with self._lock:
            if not self._withdraw_locked(ticket):
                return False
            self._rejected += 1
            return True

    def drop(self, ticket: Ticket[W]) -> None:
        """Take a waiter that will never come back out of the queue; nothing, if the ticket does not wait (any more)."""
        with self._lock:
            self._withdraw_locked(ticket)

    def take_up(self, ticket: Ticket[W]) -> bool:
        """Take a permit that was granted; false if there is none. From here on the holder gives it back itself."""
        with self._lock:
            if ticket.place is not GRANTED:
                return False
            ticket.place = TAKEN
            return True

    def abandon(self, ticket: Ticket[W]) -> list[Ticket[W]] | None:
        """Stop waiting without wanting the permit any more: one that was granted, or just taken up, is passed on."""
        with self._lock:
            if self._withdraw_locked(ticket) or ticket.place is GONE:
                return None
            ticket.place = GONE
            return self.give_back()

    def pass_on(self, ticket: Ticket[W]) -> list[Ticket[W]] | None:
        """Give the permit of a holder that can't be woken to another one, unless it has taken it up already."""
        with self._lock:
            return self.abandon(ticket) if ticket.place is GRANTED else None

    # --- from outside ---

    def resize(self, limit: int) -> list[Ticket[W]]:
        """Change the limit. Permits that are out come back in their own time."""
        with self._lock:
            self.limit = limit
            return self.settle()

    def in_flight(self) -> int:
        """Return how many permits are out, without the lock."""
        return self._made - len(self.free)

    def counts(self) -> Counts:
        """Return the state of the permits."""
        with self._lock:
            return Counts(self.limit, self._made - len(self.free), len(self._waiting), self._rejected)

    # --- inside ---

    def _take_free(self) -> bool:
        if not self.free:  # most often, and `pop` would take 200 ns to say so
            return False
        try:
            self.free.pop()
        except IndexError:
            return False
        return True

    def _make_one_locked(self) -> bool:
        """Make more permits, one for the asker and the rest of a batch to lie free."""
        missing = self.limit - self._made  # nothing is called from here to the sum: none are made meanwhile
        if missing > self.BATCH:
            missing = self.BATCH
        if missing <= 0:
            return False
        self._made += missing
        self.free.extend([None] * (missing - 1))
        return True

    def _withdraw_locked(self, ticket: Ticket[W]) -> bool:
        """Take a ticket out of the queue; false if it does not wait."""
        if ticket.place is not WAITING:
            return False
        ticket.place = GONE  # nothing is called in between: it is not granted meanwhile
        with contextlib.suppress(ValueError):  # it is just being granted: the code that does that will see
            self._waiting.remove(ticket)
        self.busy = bool(self._waiting) or self._made > self.limit
        return True
