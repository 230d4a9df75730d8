"""Exceptions from a signal handler, at whatever instruction the signal finds: no permit is lost.

A real timer rings every few hundred microseconds, some hundreds of times.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, Pipeline, Policy, Rejected, Retry
from resilience.policies.live_permits import Slot
from resilience.runtimes import lowering
from tests.conftest import World
from tests.contention.beside import PATIENCE

#: Of a hundred rings two or three come where a permit could be lost.
RINGS = 400

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # a ring in a finalizer
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers"),
]


class Rang(Exception):
    """Raised by the handler."""


class Alarm:
    """Raises at each ring, but only while it is armed, and once for each time."""

    def __init__(self) -> None:
        self.armed = False
        self.rings = 0

    def ring(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            self.rings += 1
            raise Rang

    def storm(self, call: Callable[[], object]) -> None:
        """Make calls, one after the other, until it has rung so many times."""
        ends_at = time.monotonic() + PATIENCE
        while self.rings < RINGS:
            assert time.monotonic() < ends_at
            try:
                self._call_until_it_rings(call)
            except (Rang, Rejected):  # refused: what the test will find is lost
                pass

    def _call_until_it_rings(self, call: Callable[[], object]) -> None:
        """In a frame of its own: CPython 3.13 may raise at the end of a loop past the `try` that it stands in."""
        self.armed = True
        while self.armed:  # a ring in a finalizer goes nowhere
            call()


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    it = Alarm()
    before = signal.signal(signal.SIGALRM, it.ring)
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    yield it
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one that is pending is dropped: the default ends the process
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "driven"])
@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("around", [[], [Retry(2, on=KeyError)]], ids=["alone", "composed"])
def test_no_permit_is_lost(
    alarm: Alarm, monkeypatch: pytest.MonkeyPatch, around: list[Policy[Any]], limit: int, lowered: bool
) -> None:
    """Two to three of a hundred signals came between taking a permit and the `try` that gives it back."""
    monkeypatch.setattr(lowering, "enabled", lowered)
    bulkhead = Bulkhead(limit)
    pipeline: Any = Pipeline(*around, bulkhead)
    alarm.storm(lambda: pipeline.call(int))
    assert bulkhead.stats().in_flight == 0


def test_no_permit_is_lost_by_blocks(alarm: Alarm) -> None:
    """Nor where a ring comes as a block begins or ends."""
    bulkhead = Bulkhead(1)

    def hold() -> None:
        with bulkhead.slot():
            pass

    alarm.storm(hold)
    assert bulkhead.stats().in_flight == 0


def test_no_probe_is_lost(alarm: Alarm) -> None:
    """The same for the slots of a half-open circuit, which never closes here."""
    breaker = CircuitBreaker(1, open_for=1e-9, probe_successes=10**9)
    breaker.capture(lambda ctx: 1 / 0)
    alarm.storm(lambda: breaker.call(int))
    assert breaker.stats().probes == 0


async def test_the_handler_itself_raises(threads: World, alarm: Alarm) -> None:
    """What the tests above rest on: it raises in the middle of a loop, and only there."""
    alarm.storm(lambda: None)


async def test_no_permit_of_a_block_is_lost(world: World) -> None:
    """Python lets a handler raise as `__exit__` begins, before its first line."""
    bulkhead = Bulkhead(1)
    raised = 0

    def ring(frame: FrameType, event: str, argument: object) -> None:
        nonlocal raised
        if frame.f_code.co_name in {"__exit__", "__aexit__"} and isinstance(frame.f_locals.get("self"), Slot):
            sys.settrace(None)
            raised += 1
            raise Rang

    try:
        if world.blocking:
            with bulkhead.slot():
                sys.settrace(ring)
        else:
            async with bulkhead.slot():
                sys.settrace(ring)
    except Rang:
        assert bulkhead.stats().in_flight == 1
    assert (raised, bulkhead.stats().in_flight) == (1, 0)
