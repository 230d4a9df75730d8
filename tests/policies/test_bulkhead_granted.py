"""Bulkhead: a granted permit is released exactly once, by its holder."""

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
from tests.policies.bulkheads import counts, wait_until


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_waiter_whose_event_loop_ends_before_its_wake_up_releases_its_permit_once(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the grant `max_wait` ends, the call takes the permit and runs, and its event loop ends. Then `wake` raises.

    If the permit were passed on now, two calls could run at a limit of 1.
    """
    bulkhead = Bulkhead(1, queue=1, max_wait=0.3)
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

    def late(target: Any) -> None:
        thread.join(PATIENCE)
        try:
            wake(target)
        except RuntimeError as error:
            raised.append(str(error))
            raise

    monkeypatch.setattr(kind, "wake", late)
    slot.__exit__(None, None, None)
    assert results == ["fine"]
    assert len(raised) == 1
    assert counts(bulkhead) == (1, 0, 0, 0)
    monkeypatch.undo()
    with bulkhead.slot():
        assert counts(bulkhead)[1] == 1
        with pytest.raises(BulkheadFull):
            bulkhead.call(str, "two at a limit of 1")


# --- the state machine ---------------------------------------------------------------------------


def granted() -> tuple[Permits[str], Ticket[str]]:
    """Return permits with a limit of 1, and the ticket of a waiter that was just granted it."""
    permits: Permits[str] = Permits(1, 1)
    assert permits.take()
    ticket = Ticket("waiter")
    permits.join(ticket)
    assert permits.give_back() == [ticket]
    assert ticket.state is TicketState.GRANTED
    return permits, ticket


def test_a_granted_permit_is_passed_on_once_or_taken_up_once() -> None:
    permits, ticket = granted()
    for _ in range(2):
        assert permits.pass_on(ticket) is None  # no other waiter: it is free
        assert permits.counts()[1:3] == (0, 0)
    assert not permits.take_up(ticket)
    permits, ticket = granted()
    assert [permits.take_up(ticket), permits.take_up(ticket)] == [True, False]
    assert permits.pass_on(ticket) is None
    assert permits.counts()[1] == 1
    permits.give_back()
    assert permits.pass_on(ticket) is None
    assert permits.counts()[1] == 0
