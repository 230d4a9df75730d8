"""AdaptiveThrottle: the rejection rate, what it counts, and the load of a backend that it protects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resilience import AdaptiveThrottle, Context, Failure, Success, events
from resilience.clock import clock as process_clock
from resilience.errors import BulkheadFull, CircuitOpen, DeadlineExceeded, Rejected, Throttled
from resilience.policies.adaptive_throttle import ThrottleStats
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.simulated import throttled


class Draws:
    """A source of randomness that always draws the same number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def uniform(self, a: float, b: float) -> float:
        assert (a, b) == (0, 1)
        return self.number


ADMIT, REJECT = Draws(1.0), Draws(0.0)


def counts(throttle: AdaptiveThrottle) -> tuple[int, int, int]:
    stats = throttle.stats()
    return stats.requests, stats.accepts, stats.rejected


async def run_calls(world: World, throttle: AdaptiveThrottle, ending: Any, times: int = 1) -> Any:
    outcome = None
    for _ in range(times):
        outcome = await world.attempt(throttle, Script(ending).function())
    return outcome


# --- the rate ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "accepts", "k", "most", "rate"),
    [
        (1, 0, 1.0, 1.0, 0.5),
        (120, 90, 1 / 0.9, 1.0, 20 / 121),
        (100, 95, 1 / 0.9, 1.0, 0.0),
        (1000, 10, 1 / 0.9, 0.8, 0.8),
        (30, 10, 2.0, 0.9, 10 / 31),
        (20, 10, 2.0, 0.9, 0.0),
    ],
)
async def test_the_rejection_rate_is_that_of_the_sre_book(
    threads: World, clock: FakeClock, requests: int, accepts: int, k: float, most: float, rate: float
) -> None:
    """The first four cases are those of failsafe-go's adaptivethrottler_test.go."""
    throttle = AdaptiveThrottle(k, most=most, min_calls=1, on=Boom, rng=ADMIT)
    await run_calls(threads, throttle, "fine", accepts)
    await run_calls(threads, throttle, Boom(), requests - accepts)
    assert throttle.stats() == ThrottleStats(pytest.approx(rate), requests, accepts, 0)


async def test_a_draw_below_the_rate_rejects_the_call(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """It counts as a request that was not accepted; the error carries the rate, and an event is sent."""
    source = Draws(0.5)
    throttle = AdaptiveThrottle(1.0, min_calls=1, on=Boom, rng=source, name="search")
    assert isinstance(await run_calls(world, throttle, Boom()), Boom)
    assert throttle.stats().rejection_rate == 0.5
    assert await run_calls(world, throttle, "fine") == "fine"  # 0.5 is not below 0.5
    assert throttle.stats().rejection_rate == pytest.approx(1 / 3)
    source.number = 0.3
    script = Script("fine")
    error = await world.attempt(throttle, script.function())
    assert (type(error), error.policy, error.retry_after, script.calls) == (Throttled, "search", None, 0)
    assert error.rejection_rate == pytest.approx(1 / 3)
    assert "33 %" in str(error)
    assert counts(throttle) == (3, 1, 1)
    assert throttle.stats().rejection_rate == 0.5
    [event] = [it for it in heard if isinstance(it, events.CallRejected)]
    assert (event.policy, event.reason, event.retry_after, event.shadow) == ("search", "Throttled", None, False)


async def test_no_call_is_rejected_below_min_calls(threads: World, clock: FakeClock) -> None:
    """Ten by default, in the window."""
    throttle = AdaptiveThrottle(1.0, on=Boom, rng=REJECT)
    await run_calls(threads, throttle, Boom(), 9)
    assert throttle.stats().rejection_rate == 0
    await run_calls(threads, throttle, Boom())
    assert throttle.stats().rejection_rate == pytest.approx(0.9)  # the default of `most`
    with pytest.raises(Throttled, match="90 % of the calls are held back"):
        await threads.execute(throttle, Script("fine").function())
    clock.advance(30)
    assert throttle.stats() == ThrottleStats(0.0, 0, 0, 1)
    assert await run_calls(threads, throttle, "fine") == "fine"


# --- what counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "counted"),
    [
        ("fine", (1, 1)),
        ("bad", (1, 0)),
        (Boom(), (1, 0)),
        (KeyError(), (1, 1)),
        (LookupError(), (0, 0)),
        (CircuitOpen(), (0, 0)),
        (BulkheadFull(), (0, 0)),
        (DeadlineExceeded(), (0, 0)),
        (ExceptionGroup("", [Boom(), Boom()]), (1, 0)),
    ],
    ids=repr,
)
async def test_each_outcome_counts_as_refused_accepted_or_neutral(
    threads: World, clock: FakeClock, ending: Any, counted: tuple[int, int]
) -> None:
    """An error that is not in `on` is a response of the service, so it counts as accepted."""
    throttle = AdaptiveThrottle(
        on=Boom, on_result=lambda it: it == "bad", ignore=lambda error: type(error) is LookupError
    )
    assert await run_calls(threads, throttle, ending) is ending
    assert counts(throttle)[:2] == counted


def test_an_ignored_stop_iteration_is_not_counted() -> None:
    """In blocking code, where a carrier takes it through the policies."""
    throttle = AdaptiveThrottle(ignore=StopIteration)
    throttle.capture(lambda ctx: next(iter(())))
    assert counts(throttle) == (0, 0, 0)


async def test_a_rejection_that_is_in_on_counts_as_refused(threads: World) -> None:
    throttle = AdaptiveThrottle(on=(Boom, Rejected))
    await run_calls(threads, throttle, CircuitOpen())
    assert counts(throttle) == (1, 0, 0)


async def test_by_default_only_transient_errors_count_as_refused(threads: World) -> None:
    throttle = AdaptiveThrottle()
    await run_calls(threads, throttle, ConnectionError())
    await run_calls(threads, throttle, Boom())
    assert counts(throttle) == (2, 1, 0)


async def test_running_calls_are_not_counted(threads: World) -> None:
    """Otherwise a client that has just started would reject half of its concurrent calls."""
    throttle = AdaptiveThrottle(1.0, min_calls=1)
    seen: list[ThrottleStats] = []
    await threads.execute(throttle, Script(None, doing=lambda ctx: seen.append(throttle.stats())).function())
    assert seen == [ThrottleStats(0.0, 0, 0, 0)]


async def test_an_accepted_call_is_in_the_window_from_its_end(threads: World, clock: FakeClock) -> None:
    """Also while calls are rejected, and if nothing looks at the throttle for long."""
    throttle = AdaptiveThrottle(1.0, min_calls=1, on=Boom, rng=ADMIT)
    await run_calls(threads, throttle, "fine", 5)
    clock.advance(25)
    await run_calls(threads, throttle, "fine", 3)
    clock.advance(10)
    assert counts(throttle) == (3, 3, 0)
    await run_calls(threads, throttle, Boom(), 4)
    assert throttle.stats().rejection_rate > 0
    await threads.execute(throttle, Script(None, doing=lambda ctx: clock.advance(25)).function())
    clock.advance(10)
    assert counts(throttle) == (1, 1, 0)


async def test_an_error_of_a_predicate_is_raised_and_the_call_is_not_counted(threads: World) -> None:
    for throttle in (AdaptiveThrottle(on=lambda error: 1 / 0 > 0), AdaptiveThrottle(on_result=lambda it: 1 / 0)):
        ending = Boom() if throttle.settings()["on_result"] is None else "fine"
        assert isinstance(await run_calls(threads, throttle, ending), ZeroDivisionError)
        assert counts(throttle) == (0, 0, 0)


# --- observe_only, events and description --------------------------------------------------------


async def test_observe_only_rejects_no_call(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """It counts the calls that it would have rejected as rejected, and ignores their outcomes."""
    throttle = AdaptiveThrottle(1.0, min_calls=1, on=Boom, rng=REJECT, observe_only=True)
    await run_calls(world, throttle, Boom())
    error = Boom()
    assert await run_calls(world, throttle, "fine") == "fine"
    assert await run_calls(world, throttle, error) is error
    assert counts(throttle) == (3, 0, 2)
    assert [(it.reason, it.shadow) for it in heard if isinstance(it, events.CallRejected)] == [("Throttled", True)] * 2
    assert throttle.describe().endswith("; only observes")


# --- a model -------------------------------------------------------------------------------------


class ThrottleAgainstModel(RuleBasedStateMachine):
    """A throttle against a list of all results and their instants."""

    WINDOW = 32.0

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(process_clock, "now", lambda: self.now)
        self.source = Draws(1.0)
        self.throttle = AdaptiveThrottle(1.5, window=self.WINDOW, min_calls=3, on=Boom, rng=self.source)
        self.results: list[tuple[float, bool]] = []
        self.rejected = 0

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 7.0, 33.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(ending=st.sampled_from(["fine", "fine", "failed", "other", "ignored"]), draw=st.sampled_from([0.0, 0.4, 1.0]))
    def call(self, ending: str, draw: float) -> None:
        self.source.number = draw
        rate = self.throttle.stats().rejection_rate
        errors = {"failed": Boom(), "other": KeyError(), "ignored": CircuitOpen()}

        def fn(ctx: Context) -> None:
            if ending in errors:
                raise errors[ending]

        outcome = self.throttle.capture(fn)
        if draw < rate:
            assert isinstance(outcome, Failure)
            assert isinstance(outcome.error, Throttled)
            assert outcome.error.rejection_rate == rate
            self.rejected += 1
            self.results.append((self.now, True))
            return
        assert outcome == (Failure(errors[ending]) if ending in errors else Success(None))
        if ending != "ignored":
            self.results.append((self.now, ending == "failed"))

    @rule()
    def reset(self) -> None:
        self.throttle.reset()
        self.results.clear()

    @invariant()
    def statistics_agree(self) -> None:
        stats = self.throttle.stats()
        at_least = [bad for at, bad in self.results if self.now - at < self.WINDOW * 30 / 32]
        at_most = [bad for at, bad in self.results if self.now - at < self.WINDOW]
        assert len(at_least) <= stats.requests <= len(at_most)
        assert at_least.count(False) <= stats.accepts <= at_most.count(False)
        assert stats.rejected == self.rejected
        share = (stats.requests - 1.5 * stats.accepts) / (stats.requests + 1)
        assert stats.rejection_rate == (min(0.9, max(0.0, share)) if stats.requests >= 3 else 0.0)

    def teardown(self) -> None:
        self.patch.undo()


TestThrottleAgainstModel = ThrottleAgainstModel.TestCase
TestThrottleAgainstModel.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


# --- the load of a backend -----------------------------------------------------------------------


def test_about_k_requests_are_sent_for_each_accepted_one() -> None:
    """SRE book, "Handling Overload": with k = 2 one request is refused for each accepted one."""
    traffic = throttled(AdaptiveThrottle(2.0, most=1.0, window=10), 300.0, seconds=60)
    assert traffic.sent_for_each_accepted(since=20) == pytest.approx(2.0, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "demand"), [(1.1, 400.0), (1.5, 200.0), (2.0, 1000.0)])
def test_the_ratio_of_sent_requests_is_within_three_per_cent_of_k_in_the_long_run(k: float, demand: float) -> None:
    """The demand here is 2 to 10 times the capacity."""
    traffic = throttled(AdaptiveThrottle(k, most=1.0), demand, seconds=400)
    assert traffic.sent_for_each_accepted(since=250) == pytest.approx(min(k, demand / 100), rel=0.03)


@pytest.mark.slow
def test_the_throttle_recovers_after_an_outage() -> None:
    """At 90 % of the capacity, after two minutes: it sends at most a sixth in the outage, and recovers in a minute."""
    traffic = throttled(AdaptiveThrottle(), 90.0, 400, lambda now: 0.0 if 120 <= now < 240 else 100.0)
    assert traffic.sent[23] < 15
    assert next(at for at in range(24, 40) if traffic.accepted[at] >= 81) <= 30
