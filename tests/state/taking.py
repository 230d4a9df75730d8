"""Permits are taken and released by the policies, inline; the same steps as functions, for tests of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience.state.permits import ONE_PERMIT, WAITING, Permits, Place


class Caller:
    """A waiter that is only a name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.place: Place = WAITING


def take(permits: Permits[Any]) -> bool:
    """Take a permit if one is free and no caller waits."""
    try:
        if permits.free and not permits.waiting:
            del permits.free[-1]
            return True
    except IndexError:  # another thread was faster
        pass
    return False


def give_back(permits: Permits[Caller], wake: Callable[[Caller], object]) -> None:
    """Release a permit."""
    permits.free += ONE_PERMIT
    if permits.waiting:
        hand_on(permits, wake)


def hand_on(permits: Permits[Caller], wake: Callable[[Caller], object]) -> None:
    """Grant free permits, and wake their holders."""
    waiter = None
    while (waiter := permits.grant(waiter)) is not None:
        wake(waiter)


def queue_up(permits: Permits[Caller], caller: Caller, wake: Callable[[Caller], object]) -> None:
    """Join the queue, and leave it again if it is full."""
    if permits.join(caller):
        hand_on(permits, wake)
    if len(permits.waiting) > permits.queue and permits.first_if_full(caller) is not None:
        permits.leave(caller)
