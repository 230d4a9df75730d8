"""Bulkhead: a permit that was granted and taken up is given back once, by the one who has it."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from resilience import Bulkhead, BulkheadFull
from resilience.runtimes.tasks import AsyncioWaiter, TrioWaiter
from resilience.state.permits import Permits, Ticket, TicketState
from tests.conftest import Script
from tests.contention.beside import PATIENCE
from tests.policies.bulkheads import facts, wait_until


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_has_ended_before_its_waiter_is_woken_gives_nothing_back_twice(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granted; then its `max_wait` ends, it finds the permit, runs, and its loop ends; only then `wake` is called.

    `wake` raises, and the permit was passed on though it had come back: two calls at a limit of 1, for ever.
    """
    bulkhead = Bulkhead(1, queue=1, max_wait=0.2)
    results: list[Any] = []

    def waiter() -> None:
        results.append(anyio.run(bulkhead.aexecute, Script("fine").function(), backend=backend))

    kind: Any = {"asyncio": AsyncioWaiter, "trio": TrioWaiter}[backend]
    slot, wake = bulkhead.slot(), kind.wake
    slot.__enter__()
    thread = threading.Thread(target=waiter, daemon=True)
    thread.start()
    wait_until(lambda: bulkhead.stats().queued == 1)
    raised: list[str] = []

    def late(it: Any) -> None:
        thread.join(PATIENCE)
        try:
            wake(it)
        except RuntimeError as error:
            raised.append(str(error))
            raise

    monkeypatch.setattr(kind, "wake", late)
    slot.__exit__(None, None, None)
    assert results == ["fine"]
    assert len(raised) == 1
    assert facts(bulkhead) == (1, 0, 0, 0)
    monkeypatch.undo()
    with bulkhead.slot():
        assert facts(bulkhead)[1] == 1
        assert isinstance(full(bulkhead), BulkheadFull)


def full(bulkhead: Bulkhead) -> Any:
    """Return what a call comes out with: it waits, in vain."""
    return bulkhead.capture(lambda ctx: "two at a limit of 1").error  # type: ignore[union-attr]


# --- the machine ---------------------------------------------------------------------------------


def granted() -> tuple[Permits[str], Ticket[str]]:
    """Return a machine with one permit, which a waiter was just granted."""
    permits: Permits[str] = Permits(1, 1)
    assert permits.take()
    ticket = Ticket("waiter")
    permits.join(ticket)
    assert permits.give_back() == [ticket]
    assert ticket.state is TicketState.GRANTED
    return permits, ticket


def test_who_cannot_be_woken_passes_its_permit_on() -> None:
    permits, ticket = granted()
    assert permits.pass_on(ticket) is None  # no other waiter: it lies free
    assert permits.counts()[1:3] == (0, 0)
    assert not permits.take_up(ticket)


def test_who_cannot_be_woken_and_has_taken_it_up_keeps_it() -> None:
    permits, ticket = granted()
    assert permits.take_up(ticket)
    assert permits.pass_on(ticket) is None
    assert permits.counts()[1] == 1
    permits.give_back()
    assert permits.counts()[1] == 0
    assert permits.pass_on(ticket) is None
    assert permits.counts()[1] == 0


def test_a_permit_is_passed_on_once() -> None:
    permits, ticket = granted()
    permits.pass_on(ticket)
    permits.pass_on(ticket)
    assert permits.counts()[1] == 0


def test_a_permit_is_taken_up_once() -> None:
    permits, ticket = granted()
    assert [permits.take_up(ticket), permits.take_up(ticket)] == [True, False]


def test_who_is_interrupted_as_it_takes_its_permit_up_passes_it_on() -> None:
    """It has not come back from `take_up`: nothing else will give the permit back."""
    permits, ticket = granted()
    permits.take_up(ticket)
    permits.abandon(ticket)
    permits.abandon(ticket)
    assert permits.counts()[1] == 0


def test_it_goes_to_the_next_one() -> None:
    permits: Permits[str] = Permits(1, 2)
    permits.take()
    first, second = Ticket("first"), Ticket("second")
    permits.join(first)
    permits.join(second)
    assert permits.give_back() == [first]
    assert permits.pass_on(first) == [second]
    assert permits.take_up(second)
