"""Permits: a limited number at once, granted in the order of arrival to threads and tasks alike.

Free permits are in a list, and waiters in a queue, whose operations are atomic: while no caller waits,
callers take and release permits without a lock.

- A caller that finds no free permit, or an occupied queue, joins the queue, and then looks for free permits.
- A caller that releases a permit appends it to the list, and then looks at the queue.

Each writes first and reads second, so at least one of them sees the other: no wake-up is lost. A new
caller that sees the queue joins it, so it overtakes no waiter. Permits are granted under a short lock,
always to the first waiter; the caller of `grant` then wakes it, which calls into its event loop. Until
then, that waiter stays the first: if a caller is interrupted by a signal handler, another one wakes it.
So a waiter may be woken twice, but none sleeps for ever with a permit.

After the limit was lowered, permits may exist beyond it. A mark in the queue takes them before all
waiters, as they are released.

The lock is reentrant, and each step leaves a consistent state: the garbage collector may finalize an
abandoned coroutine in the middle of any step, and its permit is then released in the same thread.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import Any, Final, Generic, Protocol, TypeVar, final

_NO_WAITERS: deque[Any] = deque()  # always empty

#: Appended to the list of free permits, without a call, to release one.
ONE_PERMIT = (None,)


class Place(enum.Enum):
    """The place of a waiter."""

    WAITING = "waiting"
    GRANTED = "granted"  # it has a permit, and may still be asleep
    TAKEN = "taken"  # it knows of its permit, and must release it
    GONE = "gone"  # it has left the queue, or passed the permit on


WAITING, GRANTED, TAKEN, GONE = Place  # in CPython 3.11, the look-up of an enum member takes 100 ns


class Queued(Protocol):
    """A waiter. Here, it is only a place, which its caller has set to WAITING."""

    place: Place


W = TypeVar("W", bound=Queued)


class _Excess:
    """The mark in the queue while there are more permits than the limit."""

    place: Place = GONE


_EXCESS: Final[Any] = _Excess()


@final
class Permits(Generic[W]):
    """The state machine.

    A waiter that was granted a permit sets its place to TAKEN. That needs no lock: until then, only its own caller ends
    the grant, or `drop` after its event loop.
    """

    #: How many permits are created at a time, so that a large limit uses memory only as it is needed.
    BATCH = 16

    __slots__ = ("_lock", "_made", "free", "limit", "queue", "rejected", "waiting")

    def __init__(self, limit: int, queue: int) -> None:
        self.limit: int = limit
        self.queue: int = queue
        self.rejected: int = 0
        self._made = min(limit, self.BATCH)  # permits that exist, free or taken
        self.free: list[None] = [None] * self._made
        self.waiting: deque[W] = _NO_WAITERS  # a deque takes 760 bytes, and most bulkheads never need one
        self._lock = threading.RLock()

    # --- beside the fast path, which the policies have inline ---

    def make_room(self) -> bool:
        """Whether a permit is free now, perhaps a new one; otherwise count a refusal. For permits without a queue.

        It takes none: an interrupt on the way back to the caller would lose it.
        """
        with self._lock:
            if self.waiting:
                self.grant()
            if not self.waiting and (self.free or self._make_more_locked()):
                return True
            self.rejected += 1
            return False

    def grant(self, woken: W | None = None) -> W | None:
        """Grant a permit to the first waiter, and return it, to be woken; None if there is no permit, or no waiter.

        Must be called after a permit was released while the queue was not empty, and then until it returns None.

        :param woken: what it returned before, if that was woken or cannot be.
        """
        with self._lock:
            return self._grant_locked(woken)  # no loop in this block: see there

    # --- the queue ---

    def join(self, waiter: W) -> bool:
        """Put a waiter into the queue; true if it or another one may have to be woken: `grant` must be called."""
        if self.waiting is _NO_WAITERS:
            self._open()
        self.waiting.append(waiter)
        try:
            return bool(self.free) or self._made < self.limit or self.waiting[0].place is GRANTED
        except IndexError:  # another caller has granted it a permit, and has woken it
            return False

    def first_if_full(self, waiter: W) -> W | None:
        """Return the first waiter if the queue was full before this one joined; None if this one may stay."""
        with self._lock:
            ahead = self._ahead_locked()
            try:
                self.waiting.index(waiter, ahead + self.queue)
                return self.waiting[ahead]
            except (ValueError, IndexError):  # it has a place; the second, if a finalizer removed waiters meanwhile
                return None

    def leave(self, waiter: W) -> None:
        """Stop waiting, and count a refusal. A no-op after a grant."""
        with self._lock:
            self.rejected += self._withdraw_locked(waiter)

    def abandon(self, waiter: W) -> None:
        """Stop waiting. A permit that was granted, or has just been taken up, is free again."""
        with self._lock:
            if not self._withdraw_locked(waiter) and waiter.place is not GONE:
                waiter.place = GONE
                self.free += ONE_PERMIT  # no call since the check

    def drop(self, waiter: W) -> None:
        """Abandon the wait of a waiter that will never run again. A no-op after it has taken up its permit."""
        with self._lock:
            if waiter.place is not TAKEN:
                self.abandon(waiter)

    # --- control and statistics ---

    def resize(self, limit: int) -> None:
        """Change the limit. Permits in use beyond it are removed when they are released."""
        with self._lock:
            self.limit = limit
            if self._made > limit and _EXCESS not in self.waiting:
                self._open()
                self.waiting.insert(self._ahead_locked(), _EXCESS)

    def in_flight(self) -> int:
        """Return how many permits are in use, without taking the lock."""
        return self._made - len(self.free)

    def counts(self) -> tuple[int, int, int, int]:
        """Return the limit, how many permits are in use, how many callers wait, and the number of refusals."""
        with self._lock:
            queued = min(len(self.waiting) - self._ahead_locked(), self.queue)  # the others are about to leave
            return self.limit, self._made - len(self.free), queued, self.rejected

    # --- private ---

    def _open(self) -> None:
        with self._lock:
            if self.waiting is _NO_WAITERS:
                self.waiting = deque()

    def _grant_locked(self, woken: W | None) -> W | None:
        # CPython before 3.13 looks in the wrong place for what handles an interrupt at the end of a loop, and might
        # leave a lock acquired (python/cpython#108214).
        free, waiting = self.free, self.waiting
        if woken is not None:
            if waiting and waiting[0] is woken:  # otherwise another caller has woken it, too
                del waiting[0]
            if not free and self._made >= self.limit:
                return None
        while waiting:
            has_permit = True if free else self._make_more_locked()  # looks once
            try:
                first = waiting[0]  # no call from here to the end of the loop, so no interrupt loses a permit
                if first.place is WAITING or (first is _EXCESS and self._made > self.limit):
                    if not has_permit:
                        break
                    del free[-1]
                    if first is _EXCESS:
                        self._made -= 1
                        continue
                    first.place = GRANTED
                elif first.place is not GRANTED:
                    del waiting[0]
                    continue
            except IndexError:  # another caller took that permit, or the last waiter left, between these lines
                continue
            return first
        return None

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

    def _ahead_locked(self) -> int:
        """Return how many in the queue are before those that wait: one that was granted a permit, and the mark."""
        ahead, waiting = 0, self.waiting
        try:
            while waiting[ahead].place is not WAITING:
                ahead += 1
        except IndexError:
            pass
        return ahead

    def _withdraw_locked(self, waiter: W) -> bool:
        """Remove a waiter from the queue; false if it does not wait."""
        if waiter.place is not WAITING:
            return False
        waiter.place = GONE  # no call since the check, so no finalizer grants it a permit
        try:
            self.waiting.remove(waiter)
        except ValueError:  # `grant` has just removed it
            pass
        return True
