"""Which budgets end a retry storm that outlives its cause."""

from __future__ import annotations

import pytest

from resilience import RetryBudget
from tests.policies.storms import PerRequest, goodput, none


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("load", [250, 280])
def test_a_budget_filled_by_successes_ends_a_storm(load: float, seed: int) -> None:
    """At up to 93 % of the capacity, four minutes after the cause all requests succeed again."""
    assert goodput(lambda _: RetryBudget(0.1), load, seconds=330, seed=seed)[-1] >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_retries_that_successes_pay_for_prolong_a_storm_by_minutes_at_most(seed: int) -> None:
    """Without retries it ends a minute or two after its cause."""
    plain = goodput(none, 280, attempts=1, seconds=210, seed=seed)
    ours = goodput(lambda _: RetryBudget(0.1), 280, seconds=330, seed=seed)
    recovered = [next(n for n, it in enumerate(course) if n > 2 and it >= 0.97) for course in (plain, ours)]
    assert recovered[0] <= recovered[1] <= recovered[0] + 4  # half minutes


@pytest.mark.slow
def test_no_budget_and_one_filled_by_requests_sustain_a_storm() -> None:
    for budget_of in (none, lambda it: PerRequest(0.1, it)):
        assert goodput(budget_of, 280, seconds=150)[-1] <= 0.05


@pytest.mark.slow
def test_a_budget_filled_by_requests_sustains_a_storm_up_to_the_capacity() -> None:
    """At 250 requests a second the server recovers with a ratio of 0.1, but not with 0.2: 1.2 x 250 = 300."""
    assert goodput(lambda it: PerRequest(0.1, it), 250, seconds=180)[-1] >= 0.97
    assert goodput(lambda it: PerRequest(0.2, it), 250, seconds=180)[-1] <= 0.05
