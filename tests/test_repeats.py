"""RetryBudget and RepeatCap: their state machines, without a policy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience import RetryBudget
from resilience.repeats import Cap, as_budget, give_back_repeat, take_repeat
from tests.conftest import FakeClock

ACTIONS = st.lists(st.sampled_from(["success", "repeat", "give back"]), max_size=300)


@given(ACTIONS, st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5]), st.sampled_from([1.0, 5.0, 7.5]))
def test_repeats_never_exceed_the_budget(actions: list[str], ratio: float, saved: float) -> None:
    """repeats <= saved + ratio * successes, and the balance is that of a simple model."""
    budget = RetryBudget(ratio, saved=saved)
    balance, repeats, successes = saved, 0, 0
    for action in actions:
        if action == "success":
            budget.succeeded()
            successes, balance = successes + 1, min(saved, balance + ratio)
        elif action == "repeat":
            is_allowed = budget.withdraw()
            assert is_allowed == (balance > 1 - 1e-6)
            repeats, balance = repeats + is_allowed, balance - is_allowed
        elif repeats:
            budget.give_back()
            repeats, balance = repeats - 1, min(saved, balance + 1)
        assert budget.balance == pytest.approx(balance, abs=1e-6)
        assert repeats <= saved + ratio * successes + 1e-6


def test_ten_successes_at_a_ratio_of_a_tenth_allow_one_repeat() -> None:
    """Although ten times 0.1 adds up to a little less than 1."""
    budget = RetryBudget(0.1, saved=1)
    assert budget.withdraw()
    for _ in range(10):
        assert not budget.withdraw()
        budget.succeeded()
    assert budget.withdraw()
    assert (budget.withdraw(), budget.refused, budget.balance) == (False, 11, 0)


def test_a_budget_grows_over_time(clock: FakeClock) -> None:
    """By `per_second`, up to `saved`; a clock that is set back adds nothing."""
    budget = RetryBudget(0, saved=2, per_second=0.5)
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    clock.advance(2)
    assert [budget.withdraw() for _ in range(2)] == [True, False]
    clock.advance(-100)
    assert budget.balance == 0
    clock.advance(100)
    assert budget.balance == 2
    clock.advance(-100)
    assert budget.balance == 2


def test_many_threads_share_a_budget_exactly() -> None:
    budget = RetryBudget(0.5, saved=10_000)
    spent = sum(budget.withdraw() for _ in range(9_000))

    def client() -> int:
        taken = 0
        for turn in range(300):
            if budget.withdraw():
                taken += 1
                if turn % 10 == 0:
                    budget.give_back()
                    taken -= 1
            if turn % 3 == 0:
                budget.succeeded()
        return taken

    with ThreadPoolExecutor(8) as pool:
        taken = sum(future.result() for future in [pool.submit(client) for _ in range(8)])
    assert taken <= 1000 + 0.5 * 8 * 100
    assert spent + taken + budget.balance == 10_000 + 0.5 * 8 * 100


def test_the_repr_of_a_budget_is_the_call_that_builds_it() -> None:
    assert repr(RetryBudget()) == "RetryBudget(0.1, saved=10)"
    assert repr(RetryBudget(0.25, saved=5.5, per_second=2)) == "RetryBudget(0.25, saved=5.5, per_second=2)"


class CustomBudget:
    """A custom budget that records its calls."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []

    def succeeded(self) -> None:
        self.calls.append("succeeded")

    def withdraw(self) -> bool:
        self.calls.append("withdraw")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    def give_back(self) -> None:
        self.calls.append("give_back")


def test_a_budget_may_be_any_object_with_the_three_methods() -> None:
    own, shared = CustomBudget(), RetryBudget()
    assert as_budget("budget", own) is own
    assert as_budget("budget", shared) is shared
    assert as_budget("budget", None) is None
    assert repr(as_budget("budget", 0.2)) == "RetryBudget(0.2, saved=10)"


# --- caps --------------------------------------------------------------------------------------


def test_a_repeat_that_cap_or_budget_refuses_costs_the_other_nothing() -> None:
    """The cap comes first, and gets its repeat back, also if a custom budget raises."""
    cap, budget = Cap(1), CustomBudget(False, OSError("down"), True, True)
    assert take_repeat(cap, budget) == "budget"
    with pytest.raises(OSError, match="down"):
        take_repeat(cap, budget)
    assert take_repeat(cap, budget) is None
    assert take_repeat(cap, budget) == "cap"
    assert budget.calls == ["withdraw"] * 3
    give_back_repeat(cap, budget)
    assert take_repeat(cap, budget) is None
    assert take_repeat(None, None) is None
    give_back_repeat(None, None)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60), st.tuples(*[st.integers(0, 4)] * 3))
def test_a_cap_inside_caps_takes_from_all_or_none(steps: list[tuple[int, bool]], limits: tuple[int, int, int]) -> None:
    caps = [Cap(limits[0])]
    for limit in limits[1:]:
        caps.append(Cap(limit, caps[-1]))
    left, held = list(limits), [0, 0, 0]
    for place, takes in steps:
        outward = range(place + 1)
        if takes:
            expected = all(left[number] for number in outward)
            assert caps[place].take() == expected
            held[place] += expected
            change = -expected
        elif held[place]:
            caps[place].give_back()
            held[place] -= 1
            change = 1
        else:
            continue
        for number in outward:
            left[number] += change
