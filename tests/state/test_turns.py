"""Turns: waiters that come in time, late, out of order, or never."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any
from weakref import ref

import pytest

from resilience.state.rates import EPSILON, Quota, SlidingLog, Spread
from resilience.state.turns import Turn, Turns

COST = (1.0, 1.0)


def turns_of(rate: Spread | SlidingLog) -> Turns[str]:
    """Return turns of one rate, of which one was taken at 0."""
    turns: Turns[str] = Turns((rate,), Quota())
    assert turns.take(COST, 0.0)
    return turns


def joined(turns: Turns[str], name: str, now: float = 0.0, latest: float = 1e9) -> Turn[str]:
    turn: Turn[str] = Turn(COST, latest, name)
    turns.join(turn, now)
    return turn


def begins(turns: Turns[str], turn: Turn[str], now: float) -> bool:
    """Let a turn come at this instant. Return whether it begins."""
    turns.go(turn, now)
    return turn.has_begun


def woken(result: list[tuple[Turn[str], str]]) -> str:
    """Return the names of the turns to wake."""
    return " ".join(name for _, name in result)


def test_a_turn_that_was_left_does_not_begin() -> None:
    """A coroutine may be closed at the very instant of its turn."""
    turns = turns_of(SlidingLog(1, 1.0))
    turn, other = joined(turns, "a"), joined(turns, "b")
    assert turns.first() is turn
    turns.leave(turn, 0.0)
    assert turns.first() is other
    assert woken(turns.go(turn, 1.0)) == ""
    assert woken(turns.leave(turn, 0.0)) == ""
    turns.leave(other, 1.0)
    assert woken(turns.go(turn, 1.0)) == ""
    assert not turn.has_begun


@pytest.mark.parametrize(("late", "new_caller"), [(0.0005, 3.0), (0.5, 3.5)])
def test_the_plan_is_computed_again_if_a_turn_begins_much_later_than_planned(late: float, new_caller: float) -> None:
    """Much is a hundredth of the wait of a new caller. Whether a turn may begin is always checked exactly."""
    turns = turns_of(SlidingLog(1, 1.0))
    first, second = joined(turns, "a"), joined(turns, "b")
    assert begins(turns, first, 1.0 + late)
    assert turns.seconds(COST, 1.0 + late) == pytest.approx(new_caller - 1.0 - late)
    assert not begins(turns, second, 2.0)
    assert second.due == pytest.approx(2.0 + late)


def test_a_turn_that_is_not_the_first_is_checked_exactly_at_its_instant() -> None:
    """Half a millisecond does not change the plan, which may be too early then."""
    turns: Turns[str] = Turns((SlidingLog(2, 1.0),), Quota())
    assert turns.take((2.0, 1.0), 0.0)
    first = Turn((2.0, 1.0), 1e9, "a")
    turns.join(first, 0.0)
    second, third = joined(turns, "b"), joined(turns, "c")
    turns.go(first, 1.0005)
    for turn in (third, second):
        assert not begins(turns, turn, 2.0)
    assert second.due == pytest.approx(2.0005)
    assert woken(turns.go(second, second.due)) == "c"


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
    turns: Turns[str] = Turns((Spread(10, 1.0, 1), SlidingLog(2, 5.0)), Quota())
    assert turns.take((0.0, 1.0, 1.0), 0.0)
    first, second, third = (Turn((costs, 2 - 2 * costs, 1.0), 1e9, "") for costs in (0.0, 1.0, 1.0))
    for turn in (first, second, third):
        turns.join(turn, 0.0)
    end(turns, first)
    assert turns.seconds((1.0, 0.0, 1.0), 2.0) == pytest.approx(0.2)
    for turn in (first, second, third):
        turns.go(turn, 2.0)
    assert (second.has_begun, third.has_begun, third.due) == (True, False, 2.1)


def test_turns_that_wait_during_a_reset_make_up_for_nothing_before_it() -> None:
    turns = turns_of(Spread(10, 5.0, 1))
    first, second = joined(turns, "a"), joined(turns, "b")
    turns.change(lambda: turns.replace((Spread(10, 1.0, 1),), Quota(), 0.4), 0.4)
    for turn in (first, second):
        turns.go(turn, 0.4)
    assert (first.has_begun, second.has_begun, second.due) == (True, False, 0.5)


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
    for rate in (SlidingLog(2, 1.0), Spread(1, 1.0, 2)):
        assert turns_of(rate).fast_path == []


def test_a_turn_lets_the_first_one_begin_before_it_and_is_then_woken() -> None:
    """Timers of the same instant fire in any order. It does not wait beyond its own limit."""
    turns = turns_of(SlidingLog(1, 1.0))
    turns.change(lambda: turns.rates[0].resize(3, 1.0, 0.0), 0.0)
    assert turns.take((2.0, 1.0), 0.0)
    first, second, third = joined(turns, "a"), joined(turns, "b"), joined(turns, "c", latest=1.0)
    turns.go(second, 1.0)
    assert (second.has_begun, second.due) == (False, 1.02)
    assert begins(turns, third, 1.0)
    assert woken(turns.go(first, 1.0)) == "b"
    assert begins(turns, second, 1.0)


def test_a_turn_waits_longer_for_a_first_one_that_was_woken_meanwhile() -> None:
    """The second is about to begin; but no turn waits beyond its own limit."""
    turns = turns_of(SlidingLog(4, 1.0))
    assert turns.take((3.0, 1.0), 0.0)
    first, second, third, fourth = (*(joined(turns, name) for name in "abc"), joined(turns, "d", latest=1.03))
    for turn in (third, second):
        turns.go(turn, 1.0)
        assert turn.due == 1.02
    assert woken(turns.go(first, 1.01)) == "b"
    turns.go(third, 1.02)
    assert (third.has_begun, third.due) == (False, 1.06)
    turns.go(fourth, 1.02)
    assert (fourth.has_begun, fourth.due) == (False, 1.03)
    assert begins(turns, third, 1.06)


def begin(turns: Turns[str], *live: Turn[str], until: float = 9.0) -> list[float]:
    """Let these turns come when they are due, the last of the queue first, and no others. Return when each begins."""
    now, began = 0.0, {}
    while waiting := [it for it in reversed(live) if it.waits and it.due <= until]:
        turn = min(waiting, key=lambda it: it.due)
        now = max(now, turn.due)
        turns.go(turn, now)
        if turn.has_begun:
            began[turn.waiter] = now
    return [began[it.waiter] for it in live if it.has_begun]


@pytest.mark.parametrize(
    ("rate", "instants"),
    [
        (SlidingLog(10, 1.0), [2.02] * 10 + [3.02] * 10),
        (Spread(10, 1.0, 1), [1.62] * 3 + [1.67, 1.77, 1.87]),  # three in the quarter of a second that is made up for
    ],
    ids=["window", "spread"],
)
def test_stalled_turns_cost_those_behind_them_milliseconds(rate: Spread | SlidingLog, instants: list[float]) -> None:
    """A blocked event loop has 15 turns; those behind them begin at their instants, and then as if alone."""
    turns = turns_of(rate)
    while turns.take(COST, 0.0):
        pass
    for number in range(15):
        joined(turns, f"stalled {number}")
    live = [joined(turns, str(number)) for number in range(len(instants))]
    assert begin(turns, *live) == pytest.approx(instants)


def test_stalled_turns_hold_up_no_newcomer_and_begin_first_once_they_come() -> None:
    """Also if they do not come in their order: then those of the same event loop are about to come."""
    turns = turns_of(Spread(2, 1.0, 1, 1.0))
    first, second, third = (joined(turns, name) for name in "abc")
    assert begin(turns, third, until=1.52) == [1.52]
    assert turns.take(COST, 1.52)
    assert turns.counts(COST, 1.52) == (2, 0.5, 0)
    assert turns.fast_path == []
    fourth = joined(turns, "d", 1.52)
    assert fourth.due == 2.02
    turns.go(second, 2.02)
    assert (second.has_begun, second.due) == (False, 2.04)
    assert woken(turns.go(first, 2.02)) == ""
    assert first.has_begun
    turns.go(fourth, 2.02)
    assert fourth.due == 3.02


def test_the_instants_of_newcomers_are_exact_although_a_stalled_turn_waits() -> None:
    """A plan does not count it; and no plan outlives its turns, because it does not count uses without the queue."""
    turns = turns_of(Spread(1, 1.0, 2))
    assert turns.take(COST, 0.0)
    stalled, second, third = (joined(turns, name) for name in "abc")
    assert begin(turns, second, until=2.02) == [2.02]
    fourth = joined(turns, "d", 2.02)
    assert fourth.due == 3.0
    assert begin(turns, third, fourth) == [2.02, 3.0]
    assert turns.take(COST, 4.0)
    assert [joined(turns, name, 4.5).due for name in "ef"] == [5.0, 6.0]
    turns.go(stalled, 4.5)
    assert stalled.due == 5.0
    assert joined(turns, "g", 4.5).due == 8.0


def paused_until_the_last_instant_of_the_second() -> tuple[Turns[str], Turn[str], Turn[str]]:
    """Return the turns after a pause, with the first two of them, of which both may now begin, but not both at once."""
    turns = turns_of(SlidingLog(1, 1.0))
    first, second = joined(turns, "a"), joined(turns, "b", latest=2.0)
    turns.change(lambda: turns.quota.learn(0, 2.0, 0.5), 0.5)
    return turns, first, second


def test_a_turn_at_its_last_instant_does_not_overtake_one_that_is_about_to_come() -> None:
    """It is refused, as the other turn has the only unit. The timers of both fire at this instant."""
    turns, first, second = paused_until_the_last_instant_of_the_second()
    turns.go(first, 1.0)
    assert first.due == 2.0
    turns.go(second, 2.0)
    assert (second.waits, second.has_begun, turns.rejected) == (False, False, 1)
    assert begins(turns, first, 2.0)


def test_a_turn_at_its_last_instant_does_not_wait_for_a_stalled_one() -> None:
    """It cannot give way any more, and the first one should have come a second ago."""
    turns, first, second = paused_until_the_last_instant_of_the_second()
    turns.go(second, 2.0)
    assert (first.waits, second.has_begun) == (True, True)


def test_a_turn_at_its_last_instant_begins_if_there_are_units_for_all_before_it() -> None:
    turns = turns_of(SlidingLog(2, 1.0))
    assert turns.take(COST, 0.0)
    first, second = joined(turns, "a"), joined(turns, "b", latest=1.0)
    for turn in (second, first):
        assert begins(turns, turn, 1.0)


def test_a_turn_that_gives_way_to_one_before_it_is_not_due_for_that_reason() -> None:
    """It has come too early. Later it wakes none of those before it, and sleeps until its own instant."""
    turns = turns_of(Spread(1, 1.0, 1))
    first, *_, last = (joined(turns, name) for name in "abcd")
    turns.go(last, 1.0)
    assert last.due == 1.02
    assert begins(turns, first, 1.0)
    assert woken(turns.go(last, 1.02)) == ""
    assert last.due == 4.0


@pytest.mark.parametrize(("order", "names"), [("dc", "c"), ("cd", "c d")], ids=["comes soon", "sleeps longer"])
def test_turns_that_give_way_and_are_woken_together_begin_in_order(order: str, names: str) -> None:
    """None takes another one for late, to which it gave way at the instant at which that one was woken."""
    turns = turns_of(SlidingLog(8, 1.0))
    assert turns.take((7.0, 1.0), 0.0)
    _, first, _, second, _, third, fourth, last = (
        joined(turns, name) for name in ("stalled", "a", "stalled", "b", "stalled", "c", "d", "e")
    )
    for turn in (last, fourth, third, second, first):
        turns.go(turn, 1.0)
    turns.go(first, 1.02)
    for turn in (third, fourth) if order == "cd" else (fourth, third):
        turns.go(turn, 1.02)
    turns.go(second, 1.02)
    assert (first.has_begun, second.has_begun) == (True, True)
    assert woken(turns.go(last, 1.02)) == names
    for turn in (fourth, third):
        if turn.due == 1.02:
            turns.go(turn, 1.02)
    assert (third.has_begun, fourth.has_begun) == (True, False)


@pytest.mark.parametrize("until", [0.0, 1.0], ids=["may begin", "is closed"])
def test_the_first_turn_behind_a_stalled_one_is_woken_if_its_turn_is_earlier_now(until: float) -> None:
    """A change of the rates has woken only the stalled one."""
    turns = turns_of(Spread(1, 1.0, 1))
    for name in ("stalled", "second"):
        joined(turns, name)
    assert woken(turns.change(lambda: turns.rates[0].resize(100, 1.0, 0.0), 0.0)) == "stalled"
    newcomer = joined(turns, "newcomer", 0.5)
    assert woken(turns.go(newcomer, 0.5)) == ""
    assert woken(turns.change(lambda: turns.quota.learn(0, until, 0.51), 0.51)) == ""
    assert woken(turns.go(newcomer, 0.52)) == "second"
    assert newcomer.waits


@pytest.mark.parametrize(("stalled", "wait"), [(1, 0.02), (3, 0.04), (200, 0.04)])
def test_stalled_turns_whose_turns_are_earlier_now_cost_as_much_as_two(stalled: int, wait: float) -> None:
    """The limit was raised, which has woken only the first one; the one that waits for the second wakes all others."""
    turns = turns_of(Spread(1, 1.0, 1))
    for number in range(stalled):
        joined(turns, f"stalled {number}")
    turns.change(lambda: turns.rates[0].resize(1000, 1.0, 0.0), 0.0)
    assert begin(turns, joined(turns, "newcomer", 0.5)) == pytest.approx([0.5 + wait], abs=0.001)


@pytest.mark.parametrize(("late", "begins"), [(0.1, 2.1), (0.9, 2.9)])
def test_a_turn_whose_timers_are_always_late_is_overtaken_only_once(late: float, begins: float) -> None:
    """Although those of another event loop use up each unit, and are never late."""
    turns = turns_of(SlidingLog(2, 1.0))
    assert turns.take(COST, 0.0)
    slow, live = joined(turns, "slow"), [joined(turns, str(number)) for number in range(9)]
    now = 0.0
    while slow.waits:
        turn = min((it for it in (slow, *live) if it.waits), key=lambda it: it.due + late * (it is slow))
        now = max(now, turn.due + late * (turn is slow))
        turns.go(turn, now)
    assert now == pytest.approx(begins, abs=0.03)


def behind_a_slow_one(turns: Turns[str], came_at: float) -> tuple[Turn[str], list[Turn[str]]]:
    """Let the first turn of a window of three come after all units were used, at 1.02, and return those behind it."""
    assert turns.take((2.0, 1.0), 0.0)
    slow, *live = (joined(turns, name) for name in ("slow", *"abcdef"))
    assert begin(turns, *live, until=1.1) == [1.02] * 3
    turns.go(slow, came_at)
    assert slow.due == 2.02
    return slow, live[3:]


def test_newcomers_leave_a_turn_that_was_late_its_unit_as_well() -> None:
    turns = turns_of(SlidingLog(3, 1.0))
    slow, live = behind_a_slow_one(turns, 1.5)
    turns.go(live[0], 2.02)
    for turn in live[1:]:
        turns.leave(turn, 2.03)
    begin(turns, live[0], until=2.1)
    assert turns.seconds((2.0, 1.0), 2.1) == pytest.approx(0.94)
    assert [turns.take(COST, 2.1), turns.take(COST, 2.1)] == [True, False]
    assert begins(turns, slow, 2.9)


def test_the_unit_of_a_turn_that_was_late_is_kept_for_twice_that_time() -> None:
    """It came 0.12 s late, so the last one begins 0.24 s after the next instant of that turn."""
    turns = turns_of(SlidingLog(3, 1.0))
    slow, live = behind_a_slow_one(turns, 1.12)
    assert begin(turns, *live, until=2.1) == pytest.approx([2.04, 2.04])
    assert turns.seconds((2.0, 1.0), 2.1) == pytest.approx(1.0)
    newcomer = joined(turns, "newcomer", 2.1)
    assert begin(turns, live[-1], until=2.5) == pytest.approx([2.26])
    assert turns.seconds((2.0, 1.0), 2.27) == pytest.approx(0.99)
    turns.go(slow, 2.3)
    assert (slow.has_begun, slow.due) == (False, pytest.approx(3.04))
    assert newcomer.waits


def test_newcomers_do_not_wait_for_a_unit_that_is_kept_no_longer() -> None:
    turns = turns_of(SlidingLog(3, 1.0))
    _, live = behind_a_slow_one(turns, 1.12)
    assert begin(turns, *live, until=2.1) == pytest.approx([2.04, 2.04])
    turns.leave(live[-1], 2.1)
    turns.join(Turn((2.0, 1.0), inf, "first"), 2.1)
    assert turns.seconds(COST, 2.2) == pytest.approx(1.0)
    assert turns.seconds(COST, 2.3) == pytest.approx(0.74)


def test_a_newcomer_looks_again_when_a_unit_is_kept_no_longer() -> None:
    """It is the only one in the queue that is not late, so no other turn would wake it."""
    turns = turns_of(SlidingLog(3, 1.0))
    _, live = behind_a_slow_one(turns, 1.12)
    assert begin(turns, *live, until=2.1) == pytest.approx([2.04, 2.04])
    turns.leave(live[-1], 2.1)
    assert begin(turns, joined(turns, "newcomer", 2.1)) == pytest.approx([2.26])


def test_several_turns_that_were_late_are_left_their_units() -> None:
    """One of each stalled event loop; the rest of the window is for the others."""
    turns = turns_of(SlidingLog(3, 1.0))
    assert turns.take((2.0, 1.0), 0.0)
    first, second, *live = (joined(turns, name) for name in ("first", "second", *"abcdef"))
    assert begin(turns, *live, until=1.1) == [1.02] * 3
    for turn, at in ((first, 1.5), (second, 1.6)):
        turn.is_late = True
        turns.go(turn, at)
        assert turn.due == pytest.approx(2.02)
    assert begin(turns, *live[3:], until=2.5) == pytest.approx([2.04])
    for turn in (second, first):
        turns.go(turn, 2.9)
    assert (first.has_begun, second.has_begun) == (True, False)


def test_units_are_kept_for_at_most_a_second() -> None:
    turns = turns_of(SlidingLog(1, 1.0))
    slow, second, third = (joined(turns, name) for name in ("slow", "b", "c"))
    assert begin(turns, second, until=2.1) == [2.02]
    turns.go(slow, 2.9)
    assert slow.due == 3.02
    assert begin(turns, third) == pytest.approx([4.04])


def test_a_slow_event_loop_costs_others_little_and_gets_its_turns() -> None:
    """It is blocked for 0.4 s at a time, four windows of 20. All others together make 200 calls a second at most."""
    turns: Turns[str] = Turns((SlidingLog(20, 0.1),), Quota())
    began: list[tuple[float, str]] = []
    callers: dict[str, Turn[str]] = {}
    now = 0.0

    def call(name: str) -> None:
        while turns.take(COST, now):
            began.append((now, name))
        callers[name] = joined(turns, name, now)

    def comes_at(name: str) -> float:
        due = callers[name].due
        return max(now, due if name != "slow" else -(-due // 0.4) * 0.4)

    for number in range(41):
        call(str(number) if number else "slow")
    while now < 10:
        name = min(callers, key=comes_at)
        now = comes_at(name)
        turns.go(callers[name], now)
        if callers[name].has_begun:
            began.append((now, name))
            call(name)
    instants = [instant for instant, _ in began]
    assert all(later - earlier > 0.1 - EPSILON for earlier, later in zip(instants, instants[20:], strict=False))
    assert sum(name == "slow" for _, name in began) >= 10
    assert len(began) > 10 * 200 * 0.9


def test_those_behind_stalled_turns_make_up_for_nothing_before_these_were_due() -> None:
    """The stalled one waited for another rate until 2 s; until then it held up the others."""
    turns: Turns[str] = Turns((Spread(10, 1.0, 1), SlidingLog(1, 2.0)), Quota())
    assert turns.take((0.0, 1.0, 1.0), 0.0)
    stalled, *live = (Turn((1 - cost, cost, 1.0), 1e9, str(cost)) for cost in (1.0, 0.0, 0.0))
    for number, turn in enumerate((stalled, *live)):
        turn.waiter = str(number)
        turns.join(turn, 0.0)
    assert begin(turns, *live) == pytest.approx([2.02, 2.1])


def test_a_turn_that_is_due_at_its_last_instant_keeps_its_place() -> None:
    turns = turns_of(Spread(1, 1.0, 1))
    turn = joined(turns, "a", latest=1.0)
    assert turns.seconds(COST, 0.5) == 1.5
    assert not turns.take(COST, 1.0)
    assert begins(turns, turn, 1.0)


def test_a_turn_that_will_be_refused_does_not_change_the_order_of_those_behind_it() -> None:
    """The first cannot begin before its limit, so the second one is woken before a newcomer comes."""
    turns = turns_of(SlidingLog(3, 1.0))
    assert turns.take((2.0, 1.0), 0.0)
    refused = Turn((3.0, 1.0), 5.0, "a")
    turns.join(refused, 0.0)
    second, third = joined(turns, "b"), joined(turns, "c")
    assert (second.due, third.due) == (2.0, 2.0)
    assert woken(turns.change(lambda: turns.rates[0].resize(2, 1.0, 0.5), 0.5)) == "b"
    newcomer = joined(turns, "d", 0.5)
    assert begin(turns, second, third, newcomer) == [1.0, 1.0, 2.0]
    turns.go(refused, 2.0)
    assert (refused.waits, refused.has_begun, turns.rejected) == (False, False, 1)


def test_a_turn_that_has_begun_keeps_no_earlier_one_alive() -> None:
    """Otherwise, in a queue that never empties, each would keep all before it."""

    class Waiter:
        pass

    turns: Turns[Waiter] = Turns((SlidingLog(3, 1.0),), Quota())
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
    assert woken(turns.leave(second, 0.0)) == ""
    assert woken(turns.leave(first, 0.0)) == "c"
    assert woken(turns.change(lambda: None, 0.0)) == ""
    assert woken(turns.go(third, 0.5)) == ""
    assert third.due == 1.0
    assert woken(turns.change(lambda: turns.rates[0].resize(1.0005, 1.0, 0.5), 0.5)) == ""
    assert woken(turns.change(lambda: turns.rates[0].resize(4, 1.0, 0.5), 0.5)) == "c"
    turns = turns_of(Spread(1, 1.0, 1))
    first, _ = (joined(turns, name) for name in "ab")
    assert woken(turns.leave(first, 1.5)) == "b"
    assert woken(turns.change(lambda: None, 1.6)) == ""
