"""The observed delay of a Hedge: its warm-up, what it learns from, and its effect on latencies."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from datetime import timedelta
from math import inf
from typing import Any

import pytest

from resilience import Hedge, Quantile
from tests.conftest import Boom, Virtual
from tests.policies.hedged import calls_under, lognormal, mostly_fast
from tests.policies.hedges import Service
from tests.policies.retries import Response


async def test_no_call_is_hedged_before_the_warm_up(in_simulation: Virtual) -> None:
    """The warm-up counts good results; an eager hedge waits for it, too."""
    hedge = Hedge(Quantile(0.5, warm_up=3), on=Boom, eager=True)
    for step in ("fine", Boom(), "fine"):
        assert hedge.delay() == inf
        service = Service(in_simulation, (0.2, step))
        await service.under(hedge)
        assert len(service.begun) == 1
    assert hedge.delay() == inf
    await Service(in_simulation, (0.2, "fine")).under(hedge)
    assert hedge.delay() == pytest.approx(0.2, rel=0.03)


@pytest.mark.parametrize(("share", "learned"), [(0.01, 1.0), (0.5, 1.0), (0.51, 1.2), (0.99, 1.2)])
async def test_the_delay_learns_from_good_results_of_first_attempts(
    in_simulation: Virtual, share: float, learned: float
) -> None:
    """It does not learn from failures, bad results or hedges. If a hedge wins, the first attempt counts with the time
    at which it was cut off; otherwise the slow calls would be missing.
    """
    quantile = Quantile(share, warm_up=1)
    hedge = Hedge(quantile, on_result=lambda value: isinstance(value, Response), on=Boom, budget=None)
    await Service(in_simulation, (1.0, "fine")).under(hedge)
    for step in (Boom(), Response(), ValueError()):
        await Service(in_simulation, (0.1, step)).under(hedge)
    assert hedge.delay() == pytest.approx(1.0, rel=0.03)
    await Service(in_simulation, (9.0, "first"), (0.2, "second")).under(hedge)
    await Service(in_simulation, (9.0, "first"), (0.2, ValueError())).under(hedge)
    await Service(in_simulation, (1.1, Boom()), (0.5, "second")).under(hedge)
    await in_simulation.sleep(quantile.window / 2)  # so that the delay is computed again
    assert hedge.delay() == pytest.approx(learned, rel=0.03)


async def test_the_delay_stays_within_least_and_most(in_simulation: Virtual) -> None:
    for seconds, delay in ((0.1, 0.5), (0.6, 0.6), (5.0, 0.8)):
        hedge = Hedge(Quantile(0.5, warm_up=1, least=0.5, most=0.8))
        await Service(in_simulation, (seconds, "fine")).under(hedge)
        assert hedge.delay() == pytest.approx(delay, rel=0.03)
    assert Hedge(0.3).delay() == 0.3


async def test_the_last_of_several_delays_repeats(anywhere: Virtual) -> None:
    """A list that changes later changes no policy."""
    delays = [timedelta(seconds=1), 0, 0.25]
    hedge = Hedge(delays, hedges=4, budget=None)
    delays.clear()
    assert (hedge.delay(), repr(hedge)) == (1.0, "Hedge(delay=(1.0, 0.0, 0.25), hedges=4, budget=None)")
    service = Service(anywhere, (9, "slow"))
    await service.under(hedge)
    assert sorted(service.begun) == [(0, 0.0), (1, 1.0), (2, 1.0), (3, 1.25), (4, 1.5)]


async def test_latencies_older_than_the_window_are_forgotten(in_simulation: Virtual) -> None:
    """After that the warm-up begins again."""
    hedge = Hedge(Quantile(0.5, warm_up=2, window=10))
    for _ in range(2):
        await Service(in_simulation, (0.1, "fine")).under(hedge)
    assert hedge.delay() < inf
    await in_simulation.sleep(11)
    assert hedge.delay() == inf


def test_a_quantile_is_immutable_and_checks_its_share() -> None:
    quantile = Quantile(0.9)
    with pytest.raises(AttributeError, match="cannot assign to field"):
        quantile.share = 0.5
    assert (repr(quantile), quantile.most) == ("Quantile(0.9)", inf)
    assert replace(quantile, share=0.5) == Quantile(0.5, most=inf)
    assert repr(Hedge(Quantile(0.95, most=0.5))) == "Hedge(delay=Quantile(0.95, most=0.5))"


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda quantile: pickle.loads(pickle.dumps(quantile))])
def test_a_quantile_can_be_copied_and_pickled(way: Any) -> None:
    quantile = Quantile(0.9, least=0.2, most=0.5, window=5, warm_up=3)
    assert way(quantile) == quantile
    assert repr(way(quantile)) == "Quantile(0.9, least=0.2, most=0.5, window=5, warm_up=3)"


# --- numbers (contract: Tail at Scale, and the bias of learning from winners alone) ----------------


def test_hedges_that_win_do_not_lower_the_observed_quantile() -> None:
    """With a quantile of 95 %, 5 % of the calls are hedged; learning from winners alone hedges 11 % (failsafe-go)."""
    _, load = calls_under(Hedge(Quantile(0.95), budget=None), lognormal, 6_000)
    assert load == pytest.approx(1.05, abs=0.01)


def test_two_per_cent_more_requests_cut_off_the_tail_of_latencies() -> None:
    """Dean, Barroso, "The Tail at Scale": 2 % of the calls take more than 10 ms, some much more."""
    plain, _ = calls_under(Hedge(60, budget=None), mostly_fast, 40_000)
    hedged, load = calls_under(Hedge(0.01, budget=None), mostly_fast, 40_000)
    at = int(0.999 * len(plain))
    assert load == pytest.approx(1.02, abs=0.003)
    assert plain[at] > 0.03
    assert hedged[at] < 0.021


def test_the_budget_bounds_the_hedges_of_a_delay_below_the_latency() -> None:
    """The default budget pays for ten, and a tenth of the calls; without a budget every call is hedged."""
    _, load = calls_under(Hedge(0.01), lambda rng: 0.05, 500)
    assert (load - 1) * 500 == pytest.approx(10 + 0.1 * 500, abs=1)
    _, load = calls_under(Hedge(0.01, budget=None), lambda rng: 0.05, 500)
    assert load == 2
