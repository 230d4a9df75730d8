"""Which budgets end a storm of retries that outlives its cause: what `RetryBudget` is for."""

from __future__ import annotations

import pytest

from resilience import RetryBudget
from tests.policies.storms import PerRequest, goodput, none


@pytest.mark.slow
def test_successes_that_pay_end_a_storm_and_requests_that_pay_do_not() -> None:
    """At 93 % of the capacity: as soon as without retries, and for good; with the others it never recovers."""
    plain = goodput(none, 280, attempts=1, seconds=150)
    ours = goodput(lambda _: RetryBudget(0.1), 280, seconds=310)
    recovered = [next(n for n, it in enumerate(course) if n > 2 and it >= 0.97) for course in (plain, ours)]
    assert recovered[0] == recovered[1]
    assert ours[-1] >= 0.97
    for budget_of in (none, lambda it: PerRequest(0.1, it)):
        assert goodput(budget_of, 280, seconds=150)[-1] <= 0.05


@pytest.mark.slow
def test_where_requests_pay_a_storm_lives_if_they_pay_for_the_capacity() -> None:
    """At 250 a second: with 10 % more it recovers; 1.2 x 250 = 300 does not."""
    assert goodput(lambda it: PerRequest(0.1, it), 250, seconds=180)[-1] >= 0.97
    assert goodput(lambda it: PerRequest(0.2, it), 250, seconds=180)[-1] <= 0.05
