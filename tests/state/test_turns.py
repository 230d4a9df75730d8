"""Turns: who wait for their instants, come late, come out of order, or never."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from resilience.state.rates import Quota, Spread, Window
from resilience.state.turns import Turn, Turns

COST = (1.0, 1.0)


def turns_of(rate: Spread | Window) -> Turns[str]:
    """One turn has been taken at 0."""
    turns: Turns[str] = Turns((rate,), Quota())
    assert turns.take(COST, 0.0)
    return turns


def joined(turns: Turns[str], name: str, now: float = 0.0, latest: float = 1e9) -> Turn[str]:
    turn: Turn[str] = Turn(COST, latest, name)
    turns.join(turn, now)
    return turn


def woken(result: Any) -> str | None:
    return None if result is None else str(result[1])


def test_who_has_left_does_not_begin() -> None:
    """A coroutine may be thrown away just as its instant comes."""
    turns = turns_of(Window(1, 1.0))
    turn = joined(turns, "a")
    turns.leave(turn)
    assert turns.go(turn, 1.0) is None
    assert turns.leave(turn) is None
    assert not turn.has_begun


@pytest.mark.parametrize(("late", "newcomer"), [(0.0005, 3.0), (0.5, 3.5)])
def test_the_plan_is_made_anew_where_a_window_is_charged_much_later(late: float, newcomer: float) -> None:
    """By more than a hundredth of what a newcomer waits. Whether one may begin is always looked at exactly."""
    turns = turns_of(Window(1, 1.0))
    first, second = joined(turns, "a"), joined(turns, "b")
    turns.go(first, 1.0 + late)
    assert first.has_begun
    assert turns.seconds(COST, 1.0 + late) == pytest.approx(newcomer - 1.0 - late)
    turns.go(second, 2.0)
    assert not second.has_begun
    assert second.due == pytest.approx(2.0 + late)


def test_who_is_not_the_first_is_timed_exactly_at_its_instant_too() -> None:
    """The plan stands after half a millisecond; by then it may be too early."""
    turns = turns_of(Window(1, 1.0))
    first, _, third = (joined(turns, name) for name in "abc")
    turns.go(first, 1.0005)
    turns.go(third, 3.0)
    assert not third.has_begun
    assert third.due == pytest.approx(3.0005)


def test_who_is_not_the_first_comes_earlier_too_where_the_rate_rises() -> None:
    turns = turns_of(Spread(1, 1.0, 1))
    _, second = joined(turns, "a"), joined(turns, "b")
    turns.change(lambda: turns.rates[0].resize(4, 1.0, 0.0))
    turns.go(second, 0.25)
    assert second.due == 0.5


def test_who_is_late_holds_up_no_other_and_gets_the_turn_that_is_left() -> None:
    """Its loop stands still: the one behind begins at its own instant, and no turn is lost."""
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


def test_who_leaves_wakes_the_first_if_that_sleeps_too_long_and_once() -> None:
    """Not for a millisecond, and not twice."""
    turns = turns_of(Spread(1, 1.0, 1))
    first, second, third = (joined(turns, name) for name in "abc")
    assert woken(turns.leave(second)) is None
    assert woken(turns.leave(first)) == "c"
    assert woken(turns.change(lambda: None)) is None
    assert turns.go(third, 0.5) is None
    assert third.due == 1.0
    assert woken(turns.change(lambda: turns.rates[0].resize(1.0005, 1.0, 0.5))) is None
    assert woken(turns.change(lambda: turns.rates[0].resize(4, 1.0, 0.5))) == "c"


def test_who_would_come_too_late_is_not_let_into_the_queue() -> None:
    turns = turns_of(Spread(1, 1.0, 1))
    turn = joined(turns, "a", latest=0.5)
    assert (turn.waits, turn.instant, turns.rejected, turns.first()) == (False, 1.0, 1, None)
    assert turns.seconds((inf, 1.0), 0.0) == 1.0  # more than the burst begins when all of that is there
