"""Turns: waiters that come in time, late, out of order, or never."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any
from weakref import ref

import pytest

from resilience.state.rates import Quota, Spread, Window
from resilience.state.turns import Turn, Turns

COST = (1.0, 1.0)


def turns_of(rate: Spread | Window) -> Turns[str]:
    """Return turns of one rate, of which one was taken at 0."""
    turns: Turns[str] = Turns((rate,), Quota())
    assert turns.take(COST, 0.0)
    return turns


def joined(turns: Turns[str], name: str, now: float = 0.0, latest: float = 1e9) -> Turn[str]:
    turn: Turn[str] = Turn(COST, latest, name)
    turns.join(turn, now)
    return turn


def woken(result: Any) -> str | None:
    return None if result is None else str(result[1])


def test_a_turn_that_was_left_does_not_begin() -> None:
    """A coroutine may be closed at the very instant of its turn."""
    turns = turns_of(Window(1, 1.0))
    turn = joined(turns, "a")
    turns.leave(turn, 0.0)
    assert turns.go(turn, 1.0) is None
    assert turns.leave(turn, 0.0) is None
    assert not turn.has_begun


@pytest.mark.parametrize(("late", "new_caller"), [(0.0005, 3.0), (0.5, 3.5)])
def test_the_plan_is_computed_again_if_a_turn_begins_much_later_than_planned(late: float, new_caller: float) -> None:
    """Much is a hundredth of the wait of a new caller. Whether a turn may begin is always checked exactly."""
    turns = turns_of(Window(1, 1.0))
    first, second = joined(turns, "a"), joined(turns, "b")
    turns.go(first, 1.0 + late)
    assert first.has_begun
    assert turns.seconds(COST, 1.0 + late) == pytest.approx(new_caller - 1.0 - late)
    turns.go(second, 2.0)
    assert not second.has_begun
    assert second.due == pytest.approx(2.0 + late)


def test_a_turn_that_is_not_the_first_is_checked_exactly_at_its_instant() -> None:
    """Half a millisecond does not change the plan, which may be too early then."""
    turns = turns_of(Window(1, 1.0))
    first, _, third = (joined(turns, name) for name in "abc")
    turns.go(first, 1.0005)
    for now in (3.0, 3.0):  # at first it waits for the second one, which is late
        turns.go(third, now)
    assert not third.has_begun
    assert third.due == pytest.approx(3.0005)


def test_a_turn_that_is_not_the_first_comes_earlier_if_the_rate_rises() -> None:
    turns = turns_of(Spread(1, 1.0, 1))
    _, second = joined(turns, "a"), joined(turns, "b")
    turns.change(lambda: turns.rates[0].resize(4, 1.0, 0.0), 0.0)
    turns.go(second, 0.2)
    assert second.due == 0.5


def test_a_late_caller_delays_no_other_and_takes_a_turn_that_is_left() -> None:
    """Its event loop is blocked; the next caller begins at its own instant, and no turn is lost."""
    turns = turns_of(Spread(1, 1.0, 1))
    stalled, behind = joined(turns, "stalled"), joined(turns, "behind")
    assert behind.due == 2.0
    turns.go(behind, 1.0)
    assert not behind.has_begun
    turns.go(behind, 2.0)
    assert behind.has_begun
    turns.go(stalled, 2.25)
    assert stalled.has_begun
    assert turns.counts(COST, 2.25) == (0, 0.75, 0)


@pytest.mark.parametrize(
    "end",
    [
        lambda turns, first: turns.leave(first, 2.0),
        lambda turns, first: turns.change(lambda: turns.rates[1].resize(3, 5.0, 2.0), 2.0),
    ],
    ids=["leaves", "is let through"],
)
def test_turns_behind_one_that_has_held_them_up_are_not_late(end: Callable[[Any, Any], object]) -> None:
    """They do not make up for the time in which the first one waited for another rate."""
    turns: Turns[str] = Turns((Spread(10, 1.0, 1), Window(2, 5.0)), Quota())
    assert turns.take((0.0, 1.0, 1.0), 0.0)
    first, second, third = (Turn((costs, 2 - 2 * costs, 1.0), 1e9, "") for costs in (0.0, 1.0, 1.0))
    for turn in (first, second, third):
        turns.join(turn, 0.0)
    end(turns, first)
    for turn in (first, second, third):
        turns.go(turn, 2.0)
    assert (second.has_begun, third.has_begun, third.due) == (True, False, 2.1)


def test_a_bucket_alone_decides_by_one_token() -> None:
    """With two tokens, two callers could charge it at the same time. A queue or a report takes the token away."""
    turns: Turns[str] = Turns((Spread(1, 1.0, 3, 1.0),), Quota())
    for _ in range(2):
        assert turns.take(COST, 0.0)
        assert turns.fast_path == [None]
    turns.change(lambda: turns.quota.learn(9, 5.0, 0.0), 0.0)
    assert turns.fast_path == []
    assert turns.take(COST, 0.0)
    assert turns.fast_path == []
    assert turns.take(COST, 5.0)
    assert turns.fast_path == [None]
    joined(turns, "a", 5.0)
    assert turns.fast_path == []
    for rate in (Window(2, 1.0), Spread(1, 1.0, 2)):
        assert turns_of(rate).fast_path == []


def test_a_turn_lets_the_first_one_begin_before_it_and_is_then_woken() -> None:
    """Timers of the same instant fire in any order. It does not wait beyond its own limit."""
    turns = turns_of(Window(1, 1.0))
    turns.change(lambda: turns.rates[0].resize(3, 1.0, 0.0), 0.0)
    assert turns.take((2.0, 1.0), 0.0)
    first, second, third = joined(turns, "a"), joined(turns, "b"), joined(turns, "c", latest=1.0)
    turns.go(second, 1.0)
    assert (second.has_begun, second.due) == (False, 1.02)
    turns.go(third, 1.0)
    assert third.has_begun
    assert woken(turns.go(first, 1.0)) == "b"
    turns.go(second, 1.0)
    assert second.has_begun


def test_a_turn_waits_once_for_each_first_one_and_each_time_for_longer() -> None:
    """The first begins at 1 s, so the second is about to; but no turn waits beyond its own limit."""
    turns = turns_of(Window(5, 1.0))
    assert turns.take((4.0, 1.0), 0.0)
    first, _, third, fourth = (*(joined(turns, name) for name in "abc"), joined(turns, "d", latest=1.03))
    turns.go(third, 1.0)
    turns.go(first, 1.0)
    turns.go(third, 1.02)
    assert (third.has_begun, third.due) == (False, 1.06)
    turns.go(fourth, 1.02)
    assert (fourth.has_begun, fourth.due) == (False, 1.03)
    turns.go(third, 1.06)
    assert third.has_begun


def test_no_turn_waits_for_a_first_one_that_another_has_waited_for_in_vain() -> None:
    """Its event loop is blocked, and delays all turns behind it by milliseconds once, not each of them."""
    turns = turns_of(Window(3, 1.0))
    assert turns.take((2.0, 1.0), 0.0)
    _, second, third = joined(turns, "stalled"), joined(turns, "b"), joined(turns, "c")
    turns.go(second, 1.0)
    assert (second.has_begun, second.due) == (False, 1.02)
    turns.go(second, 1.02)
    turns.go(third, 1.02)
    assert second.has_begun
    assert third.has_begun


def test_a_turn_that_has_begun_keeps_no_earlier_one_alive() -> None:
    """Otherwise, in a queue that never empties, each would keep all before it."""

    class Waiter:
        pass

    turns: Turns[Waiter] = Turns((Window(3, 1.0),), Quota())
    assert turns.take((2.0, 1.0), 0.0)
    waiters = [Waiter() for _ in range(2)]
    gone = ref(waiters[0])
    first, second = (Turn(COST, inf, it) for it in waiters)
    for turn in (first, second):
        turns.join(turn, 0.0)
    turns.go(second, 1.0)
    turns.go(first, 1.0)
    turns.go(second, 1.0)
    del first, turn, waiters
    assert gone() is None


def test_leaving_wakes_the_first_caller_once_if_its_turn_is_earlier_now() -> None:
    """It does not for a change of a millisecond."""
    turns = turns_of(Spread(1, 1.0, 1))
    first, second, third = (joined(turns, name) for name in "abc")
    assert woken(turns.leave(second, 0.0)) is None
    assert woken(turns.leave(first, 0.0)) == "c"
    assert woken(turns.change(lambda: None, 0.0)) is None
    assert turns.go(third, 0.5) is None
    assert third.due == 1.0
    assert woken(turns.change(lambda: turns.rates[0].resize(1.0005, 1.0, 0.5), 0.5)) is None
    assert woken(turns.change(lambda: turns.rates[0].resize(4, 1.0, 0.5), 0.5)) == "c"


def test_a_caller_whose_turn_would_be_too_late_is_rejected() -> None:
    turns = turns_of(Spread(1, 1.0, 1))
    turn = joined(turns, "a", latest=0.5)
    assert (turn.waits, turn.instant, turns.rejected, turns.first()) == (False, 1.0, 1, None)
    assert turns.seconds((inf, 1.0), 0.0) == 1.0  # a cost above the burst begins when the bucket is full
