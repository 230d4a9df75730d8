"""An exception from a signal handler, raised at any instruction, loses no permit.

A real timer fires every few hundred microseconds, some hundreds of times.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, Pipeline, Policy, Retry, current_context, deadline
from resilience.errors import CircuitIsolated, Rejected
from resilience.policies.circuit_breaker import Guard
from resilience.policies.live_permits import Slot
from resilience.runtimes import lowering
from resilience.state.permits import GONE, Permits
from tests.callers import is_free
from tests.conftest import World
from tests.contention.beside import PATIENCE
from tests.state.taking import Caller

#: Two or three of a hundred signals come at a point where a permit could be lost.
RINGS = 400

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # a signal in a finalizer
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers"),
]


class Rang(Exception):
    """Raised by the signal handler."""


class Alarm:
    """Raises at a signal while it is armed, once each time."""

    def __init__(self) -> None:
        self.armed = False
        self.rings = 0

    def ring(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            self.rings += 1
            raise Rang

    def storm(self, call: Callable[[], object]) -> None:
        """Make calls, one after the other, until the given number of signals has raised."""
        ends_at = time.monotonic() + PATIENCE
        while self.rings < RINGS:
            assert time.monotonic() < ends_at
            try:
                self._call_until_it_rings(call)
            except (Rang, Rejected):  # a rejection means that a permit is lost, as the test will find
                pass

    def _call_until_it_rings(self, call: Callable[[], object]) -> None:
        """Run in its own frame: CPython 3.13 may raise at the end of a loop, outside of the `try` around it."""
        self.armed = True
        while self.armed:  # an exception in a finalizer is dropped
            call()


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    before = signal.signal(signal.SIGALRM, alarm.ring)
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    yield alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # drops a pending signal, which would end the process by default
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "driven"])
@pytest.mark.parametrize(("limit", "around"), [(1, []), (5, [Retry(2, on=KeyError)])], ids=["alone", "composed"])
def test_a_signal_during_a_call_loses_no_permit(
    alarm: Alarm, monkeypatch: pytest.MonkeyPatch, around: list[Policy[Any]], limit: int, lowered: bool
) -> None:
    """Not even between taking a permit and the `try` that releases it."""
    monkeypatch.setattr(lowering, "enabled", lowered)
    bulkhead = Bulkhead(limit)
    pipeline: Any = Pipeline(*around, bulkhead)
    pipeline.call(int)  # lowers the policies: a signal during it would have them driven from then on
    alarm.storm(lambda: pipeline.call(int))
    assert bulkhead.stats().in_flight == 0


def test_a_signal_during_a_block_loses_no_permit(alarm: Alarm) -> None:
    bulkhead = Bulkhead(1)

    def hold() -> None:
        with bulkhead.slot():
            pass

    alarm.storm(hold)
    assert bulkhead.stats().in_flight == 0


def test_a_signal_while_permits_are_granted_leaves_no_lock_held(alarm: Alarm) -> None:
    """Not even at the end of a loop: CPython before 3.13 looks for the handler of an instruction before the loop."""
    permits: Permits[Caller] = Permits(1, 1)

    def remove_all() -> None:
        permits.waiting = deque([gone] * 20_000)
        permits.grant()

    gone = Caller("gone")
    gone.place = GONE
    alarm.storm(remove_all)
    assert is_free(permits.counts)


def test_a_signal_during_a_probe_loses_no_slot(alarm: Alarm) -> None:
    """The half-open circuit never closes here."""
    breaker = CircuitBreaker(1, open_for=1e-9, probe_successes=10**9)
    breaker.capture(lambda ctx: 1 / 0)
    alarm.storm(lambda: breaker.call(int))
    assert breaker.stats().probes == 0


def test_a_signal_during_a_guarded_block_loses_no_slot_and_ends_it(alarm: Alarm) -> None:
    """Later calls are not nested in it: an open circuit refuses them."""
    breaker = CircuitBreaker(1, open_for=1e-9, probe_successes=10**9)
    breaker.capture(lambda ctx: 1 / 0)

    def probe() -> None:
        with breaker.guard():
            pass

    alarm.storm(probe)
    assert breaker.stats().probes == 0
    breaker.isolate()
    with pytest.raises(CircuitIsolated):
        breaker.call(int)


async def test_the_handler_raises_inside_the_loop_of_calls_only(threads: World, alarm: Alarm) -> None:
    """The other tests rely on it."""
    alarm.storm(lambda: None)


async def rings_before_the_exit(world: World, make: Callable[[], Any], held: Callable[[], object]) -> int:
    """Raise before the first line of a block's exit, where Python may run a signal handler. Return how often."""
    raised = 0

    def ring(frame: FrameType, event: str, argument: object) -> None:
        nonlocal raised
        if frame.f_code.co_name in {"__exit__", "__aexit__"} and isinstance(frame.f_locals.get("self"), (Slot, Guard)):
            sys.settrace(None)
            raised += 1
            raise Rang

    try:
        if world.blocking:
            with make():
                sys.settrace(ring)
        else:
            async with make():
                sys.settrace(ring)
    except Rang:
        assert held() == 1
    return raised


async def test_an_exception_before_the_first_line_of_exit_loses_no_permit(world: World) -> None:
    bulkhead = Bulkhead(1)
    assert await rings_before_the_exit(world, bulkhead.slot, lambda: bulkhead.stats().in_flight) == 1
    assert bulkhead.stats().in_flight == 0


async def test_an_exception_before_the_first_line_of_exit_ends_a_guarded_block(world: World) -> None:
    """The probe gives back its slot, and later calls do not belong to the block."""
    breaker = CircuitBreaker(1, open_for=1e-9)
    breaker.capture(lambda ctx: 1 / 0)
    assert await rings_before_the_exit(world, breaker.guard, lambda: breaker.stats().probes) == 1
    assert (breaker.state, breaker.stats().probes) == ("half_open", 0)
    breaker.isolate()
    with pytest.raises(CircuitIsolated):
        breaker.call(int)


@pytest.mark.parametrize("block", [lambda: deadline(60), lambda: next(Retry().attempts())], ids=["budget", "attempt"])
def test_a_block_leaves_no_budget_if_an_exception_comes_before_the_first_line_of_its_exit(block: Any) -> None:
    def ring(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name == "__exit__":
            sys.settrace(None)
            raise Rang

    with deadline(90) as outer:
        with suppress(Rang), block():
            sys.settrace(ring)
        assert current_context() is outer
