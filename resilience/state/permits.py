"""Permits: a limited number at once, granted in the order of arrival to threads and tasks alike.

Free permits are in a list, whose `pop` and `append` are atomic: while no caller waits, callers take
and release permits without a lock. The rest happens under one short lock, with the flag `busy`:

- a caller that finds no free permit queues, sets the flag, and then looks for free permits;
- a caller that releases a permit appends it to the list, and then reads the flag.

Each writes first and reads second, so at least one of them sees the other: no wake-up is lost. A new
caller that sees the flag queues too, so it overtakes no waiter. Permits are granted under the lock;
the caller of the granting method then wakes the waiters, which calls into event loops. The flag is
set until all are woken: if a caller is interrupted by a signal handler, another one wakes the rest.

The lock is reentrant, and each step leaves a consistent state: the garbage collector may finalize an
abandoned coroutine in the middle of any step, and its permit is then released in the same thread.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import deque
from typing import Any, Generic, TypeVar, final

W = TypeVar("W")

_NO_WAITERS: deque[Any] = deque()  # always empty

#: Appended to the list of free permits, without a call, to release one.
ONE_PERMIT = (None,)


class TicketState(enum.Enum):
    """The state of a ticket."""

    WAITING = "waiting"
    GRANTED = "granted"
    TAKEN = "taken"  # its holder has the permit, and must release it
    GONE = "gone"  # its holder has left the queue, or passed the permit on


WAITING, GRANTED, TAKEN, GONE = TicketState  # in CPython 3.11, the look-up of an enum member takes 100 ns


@final
class Ticket(Generic[W]):
    """A place in the queue."""

    __slots__ = ("state", "waiter")

    def __init__(self, waiter: W) -> None:
        self.waiter: W = waiter
        self.state: TicketState = WAITING


@final
class Permits(Generic[W]):
    """The state machine. After a method that can grant permits, wake the holders of the tickets in `granted`."""

    #: How many permits are created at a time, so that a large limit uses memory only as it is needed.
    BATCH = 16

    __slots__ = ("_lock", "_made", "_waiting", "busy", "free", "granted", "limit", "queue", "rejected")

    def __init__(self, limit: int, queue: int) -> None:
        self.limit: int = limit
        self.queue: int = queue
        self.rejected: int = 0
        self._made = min(limit, self.BATCH)  # permits that exist, free or taken
        self.free: list[None] = [None] * self._made
        self._waiting: deque[Ticket[W]] = _NO_WAITERS  # a deque takes 760 bytes, and most bulkheads never need one
        self.granted: list[Ticket[W]] = []  # the tickets whose holders were not woken yet, in order
        self.busy: bool = False  # there are waiters, holders to wake, or more permits than the limit
        self._lock = threading.RLock()

    # --- beside the fast path, which the policies have inline ---

    def make_room(self) -> bool:
        """Whether a permit is free now, perhaps a new one; otherwise count a refusal. For permits without a queue.

        It takes none: an interrupt on the way back to the caller would lose it.
        """
        with self._lock:
            if self.busy:
                self.settle()
            if not self.busy and (self.free or (self._made < self.limit and self._make_more_locked())):
                return True
            self.rejected += 1
            return False

    def settle(self) -> None:
        """Remove permits beyond the limit, create missing ones, and grant free ones to the waiters.

        Must be called after a permit was released while `busy` was set.
        """
        with self._lock:
            free, waiting = self.free, self._waiting
            while self._made > self.limit and free:
                try:
                    del free[-1]  # no call from here to the difference, as below
                except IndexError:  # another caller took it after the check
                    break
                self._made -= 1
            while waiting and self._made <= self.limit and (free or self._make_more_locked()):
                try:
                    ticket = waiting[0]
                    if ticket.state is WAITING:  # otherwise it is leaving
                        del free[-1]  # no call from here to the end of the loop, so no interrupt loses the permit
                        ticket.state = GRANTED
                    del waiting[0]
                except IndexError:
                    continue  # another caller took or left between these lines
                if ticket.state is GRANTED:
                    self.granted += (ticket,)
            self._update_busy_locked()

    def woken(self, ticket: Ticket[W]) -> None:
        """Record that the holder of a ticket in `granted` was woken, or cannot be."""
        try:
            self.granted.remove(ticket)
        except ValueError:  # two callers have woken it
            pass
        if not self._waiting:  # otherwise the flag stays set
            with self._lock:
                self._update_busy_locked()

    # --- the queue ---

    def first_if_full(self) -> Ticket[W] | None:
        """Return the first ticket of a full queue; None if the queue is not full, or there is none."""
        if len(self._waiting) < self.queue:
            return None
        with self._lock:
            return self._waiting[0] if self._waiting and len(self._waiting) >= self.queue else None

    def join(self, ticket: Ticket[W]) -> None:
        """Put a new ticket into the queue. It may be granted at once; it is GONE if the queue is full."""
        with self._lock:
            if self._waiting is _NO_WAITERS:
                self._waiting = deque()
            self._waiting.append(ticket)
            self.busy = True
            if self.free or self._made < self.limit:
                self.settle()
            if len(self._waiting) > self.queue and self._withdraw_locked(ticket):
                self.rejected += 1

    def leave(self, ticket: Ticket[W]) -> bool:
        """Stop waiting, and count a refusal; false if the ticket does not wait, as after a grant."""
        with self._lock:
            if not self._withdraw_locked(ticket):
                return False
            self.rejected += 1
            return True

    def drop(self, ticket: Ticket[W]) -> None:
        """Remove a waiter that will never run again from the queue. A no-op if the ticket does not wait any more."""
        with self._lock:
            self._withdraw_locked(ticket)

    def take_up(self, ticket: Ticket[W]) -> bool:
        """Take a granted permit; false if none was granted. From then on, the holder must release it.

        It needs no lock: until then, only the holder ends a grant, or `pass_on` after the holder's event loop.
        """
        if ticket.state is not GRANTED:
            return False
        ticket.state = TAKEN
        return True

    def abandon(self, ticket: Ticket[W]) -> None:
        """Stop waiting. A permit that was granted, or has just been taken up, goes to the next waiter."""
        with self._lock:
            if self._withdraw_locked(ticket) or ticket.state is GONE:
                return
            ticket.state = GONE
            self.free += ONE_PERMIT  # no call since the check
            if self.busy:
                self.settle()

    def pass_on(self, ticket: Ticket[W]) -> None:
        """Pass on the permit of a holder that cannot be woken, unless the holder has already taken it up."""
        with self._lock:
            if ticket.state is GRANTED:
                self.abandon(ticket)

    # --- control and statistics ---

    def resize(self, limit: int) -> None:
        """Change the limit. Permits in use beyond it are removed when they are released."""
        with self._lock:
            self.limit = limit
            self.settle()

    def in_flight(self) -> int:
        """Return how many permits are in use, without taking the lock."""
        return self._made - len(self.free)

    def counts(self) -> tuple[int, int, int, int]:
        """Return the limit, how many permits are in use, how many callers wait, and the number of refusals."""
        with self._lock:
            return self.limit, self._made - len(self.free), len(self._waiting), self.rejected

    # --- private ---

    def _make_more_locked(self) -> bool:
        """Create a batch of free permits; false at the limit."""
        missing = self.limit - self._made  # no call from here to the sum, so no finalizer creates permits
        if missing > self.BATCH:
            missing = self.BATCH
        if missing <= 0:
            return False
        self._made += missing
        self.free += [None] * missing
        return True

    def _withdraw_locked(self, ticket: Ticket[W]) -> bool:
        """Remove a ticket from the queue; false if it does not wait."""
        if ticket.state is not WAITING:
            return False
        ticket.state = GONE  # no call since the check, so no finalizer grants it
        with contextlib.suppress(ValueError):  # `settle` has just removed it, and sees its state
            self._waiting.remove(ticket)
        self._update_busy_locked()
        return True

    def _update_busy_locked(self) -> None:
        self.busy = bool(self._waiting or self.granted) or self._made > self.limit
