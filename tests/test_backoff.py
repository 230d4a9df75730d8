"""Backoff: the curves, jitter, the bounds at any attempt number, and what else is accepted as a backoff."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience import Retry
from resilience.backoff import Backoff, Constant, Decorrelated, Exponential, Linear, Randomness, as_backoff
from resilience.clock import FOREVER


class Fixed:
    """A source of randomness that always draws the same point of the interval: 0.0 is its start, 1.0 its end."""

    def __init__(self, at: float) -> None:
        self.at = at

    def uniform(self, a: float, b: float, /) -> float:
        return a + (b - a) * self.at


def first(backoff: Backoff, count: int, rng: Randomness | None = None) -> list[float]:
    return list(itertools.islice(backoff.delays(rng), count))


# --- the curves ---


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (Constant(1.5), [1.5] * 4),
        (Linear(2), [2, 4, 6, 8]),
        (Linear(2, cap=5), [2, 4, 5, 5]),
        (Linear(2, cap=1), [1, 1]),
        (Exponential(1, cap=10, jitter="none"), [1, 2, 4, 8, 10, 10]),
        (Exponential(1, factor=3, jitter="none"), [1, 3, 9, 27]),
        (Exponential(3, factor=1, jitter="none"), [3, 3, 3]),
        (Exponential(30, cap=4, jitter="none"), [4, 4, 4]),
        (Constant(timedelta(milliseconds=1500)), [1.5]),
        (Linear(timedelta(seconds=2), cap=timedelta(seconds=3)), [2, 3]),
        (Exponential(timedelta(seconds=2), cap=timedelta(seconds=3), jitter="none"), [2, 3]),
        (Decorrelated(timedelta(seconds=2), cap=timedelta(seconds=2)), [2, 2]),
    ],
    ids=repr,
)
def test_the_curve_of_a_backoff(backoff: Backoff, delays: list[float]) -> None:
    """Constant and linear delays have no jitter by default. Durations may be timedeltas."""
    assert first(backoff, len(delays)) == delays


def test_a_base_of_zero_means_no_delay_at_any_attempt() -> None:
    for backoff in (Constant(0), Linear(0), Exponential(0), Exponential(0, jitter="none"), Decorrelated(0)):
        assert first(backoff, 1100, Fixed(1.0)) == [0] * 1100
    assert first(Constant(0, jitter=0.5), 3) == [0] * 3


# --- jitter ---


@pytest.mark.parametrize(
    ("backoff", "drawn", "delays"),
    [
        (Exponential(4, cap=8), [(0, 4), (0, 8), (0, 8)], [1, 1, 1]),
        (Exponential(4, cap=8, jitter="full"), [(0, 4), (0, 8), (0, 8)], [1, 1, 1]),
        (Exponential(4, cap=8, jitter="equal"), [(0, 2), (0, 4), (0, 4)], [3, 5, 5]),
        (Exponential(4, cap=8, jitter=0.25), [(3, 5), (6, 10), (6, 10)], [1, 1, 1]),
    ],
    ids=repr,
)
def test_each_jitter_draws_once_for_a_delay(
    backoff: Backoff, drawn: list[tuple[float, float]], delays: list[float]
) -> None:
    """Below the envelope, in its upper half, or evenly around it. The cap limits the envelope."""
    rng = Mock(uniform=Mock(return_value=1.0))
    assert first(backoff, 3, rng) == delays
    assert rng.uniform.mock_calls == list(itertools.starmap(call, drawn))


def test_without_jitter_nothing_is_drawn() -> None:
    """So other schedules with the same source do not change."""
    rng = random.Random(3)
    state = rng.getstate()
    for backoff in (Constant(1), Linear(1), Exponential(1, jitter="none")):
        first(backoff, 5, rng)
    assert rng.getstate() == state


def test_decorrelated_draws_between_the_base_and_three_times_the_last_delay() -> None:
    """`min(cap, rng.uniform(base, 3 * prev))`, beginning with the base."""
    ours, same = random.Random(3), random.Random(3)
    expected, previous = [], 1.0
    for _ in range(40):
        previous = min(20, same.uniform(1, 3 * previous))
        expected.append(previous)
    assert first(Decorrelated(1, cap=20), 40, ours) == expected
    assert max(expected) == 20
    assert len(set(expected)) > 10


def test_jitter_draws_no_longer_delay_than_a_thread_can_sleep() -> None:
    """The envelope is cut to that length, and a ratio draws above the envelope, too."""
    assert max(first(Constant(1e300, jitter=1.0), 50, random.Random(5))) == FOREVER


# --- bounds ---

DURATIONS = st.floats(min_value=0, max_value=1.7e308, allow_nan=False, allow_infinity=False)
CAPS = st.none() | st.floats(min_value=1e-9, max_value=1e308)
JITTERS: st.SearchStrategy[Any] = st.sampled_from(["full", "equal", "none"]) | st.floats(min_value=0.01, max_value=1.0)
POINTS = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(min_value=0.0, max_value=1.0)

BACKOFFS: st.SearchStrategy[Backoff] = st.one_of(
    st.builds(Constant, DURATIONS, JITTERS),
    st.builds(Linear, DURATIONS, CAPS, JITTERS),
    st.builds(Exponential, DURATIONS, st.floats(min_value=1.0, max_value=1e308), CAPS, JITTERS),
    st.builds(lambda base, more: Decorrelated(base, cap=base + more), st.floats(1e-9, 1e300), st.floats(0, 1e300)),
    st.builds(Decorrelated, DURATIONS),
)


@given(backoff=BACKOFFS, at=POINTS)
@settings(max_examples=100, deadline=None)
def test_no_delay_is_negative_nan_or_infinite(backoff: Backoff, at: float) -> None:
    """Nor longer than a platform can wait, although two to the power of 1,100 is no float."""
    for delay in first(backoff, 1100, Fixed(at)):
        assert isinstance(delay, (int, float))
        assert 0 <= delay <= 2e10


@given(a=DURATIONS, b=DURATIONS)
@settings(max_examples=50, deadline=None)
def test_delays_of_custom_schedules_are_limited_to_what_a_platform_can_wait_for(a: float, b: float) -> None:
    for backoff in (as_backoff("backoff", [a, b]), as_backoff("backoff", lambda: iter([a, b]))):
        delays = first(backoff, 3)
        assert delays[2] == delays[1]
        assert all(0 <= delay <= 1e10 for delay in delays)


# --- schedules are independent ---

SHAPES: list[Callable[[], Backoff]] = [
    lambda: Exponential(0.1, cap=10),
    lambda: Exponential(0.1, cap=10, jitter="none"),
    lambda: Linear(1),
    lambda: Decorrelated(1, cap=100),
    lambda: as_backoff("backoff", [1, 2, 3]),
    lambda: as_backoff("backoff", lambda: iter([1, 2, 3])),
]


@pytest.mark.parametrize("make", SHAPES)
def test_every_schedule_starts_from_the_beginning(make: Callable[[], Backoff]) -> None:
    """`delays` returns a new iterator."""
    backoff = make()
    started = backoff.delays(random.Random(1))
    begun = [next(started), next(started)]
    assert first(backoff, 5, random.Random(1))[:2] == begun
    assert first(backoff, 5, random.Random(1)) == first(backoff, 5, random.Random(1))
    assert [*begun, next(started)] == first(backoff, 3, random.Random(1))


def test_without_a_source_of_randomness_the_generator_of_the_process_is_used() -> None:
    state = random.getstate()
    try:
        random.seed(9)
        assert first(Exponential(1), 5) == first(Exponential(1), 5, random.Random(9))
    finally:
        random.setstate(state)


class Truthless(Fixed):
    """A source of randomness without a truth value, as arrays are."""

    def __bool__(self) -> bool:
        raise TypeError("the truth of a source is ambiguous")


@pytest.mark.parametrize("backoff", [Exponential(8), Decorrelated(8), Constant(8, jitter="equal")], ids=repr)
def test_the_truth_value_of_a_source_of_randomness_is_not_used(backoff: Backoff) -> None:
    assert first(backoff, 2, Truthless(0.5)) == first(backoff, 2, Fixed(0.5))


# --- other kinds of backoff ---


@pytest.mark.parametrize("sequence", [[0, 1, 2], (0, 1, 2), range(3), (0, timedelta(seconds=1), timedelta(seconds=2))])
def test_a_sequence_is_a_backoff_whose_last_value_repeats(sequence: Any) -> None:
    assert first(as_backoff("backoff", sequence), 5) == [0, 1, 2, 2, 2]


class FiniteBackoff(Backoff):
    """A custom backoff with finitely many delays."""

    def delays(self, rng: Randomness | None = None) -> Iterator[float]:
        assert rng is not None
        return iter([rng.uniform(0, 10), 20.0])


def test_a_custom_backoff_draws_from_the_given_source_and_its_last_delay_repeats() -> None:
    assert first(as_backoff("backoff", FiniteBackoff()), 4, Fixed(0.5)) == [5.0, 20.0, 20.0, 20.0]


class WithoutRandomness(Backoff):
    def delays(self) -> Iterator[float]:  # type: ignore[override]  # what is refused
        return iter([1.0])


class Coroutine(Backoff):
    async def delays(self, rng: Randomness | None = None) -> Any:
        return iter([1.0])


@pytest.mark.parametrize("backoff", [WithoutRandomness(), Coroutine()], ids=lambda it: type(it).__name__)
def test_a_custom_backoff_whose_method_cannot_be_called_is_refused(backoff: Backoff) -> None:
    """When the policy is built: in a call, the error would take the place of the failure."""
    with pytest.raises(TypeError, match=r"backoff\.delays"):
        Retry(backoff=backoff)


def test_a_later_change_of_the_sequence_has_no_effect() -> None:
    delays = [1, 2]
    backoff = as_backoff("backoff", delays)
    delays[0] = 99
    assert first(backoff, 2) == [1, 2]


def test_a_callable_that_returns_an_iterable_is_a_backoff() -> None:
    """As a generator function or a lambda; the last value repeats, and it may be endless."""

    def schedule() -> Iterator[float]:
        yield 1
        yield 2

    assert first(as_backoff("backoff", schedule), 4) == [1, 2, 2, 2]
    assert first(as_backoff("backoff", lambda: [3, timedelta(seconds=1)]), 3) == [3, 1, 1]
    assert first(as_backoff("backoff", lambda: itertools.count(5)), 3) == [5, 6, 7]


def test_a_schedule_computes_only_the_delays_that_are_used() -> None:
    drawn: list[int] = []

    def schedule() -> Iterator[float]:
        for number in itertools.count():
            drawn.append(number)
            yield number

    assert first(as_backoff("backoff", schedule), 2) == [0, 1]
    assert drawn == [0, 1]


BAD_DELAYS: dict[type[Exception], list[Any]] = {
    ValueError: [-1, math.nan, math.inf, -math.inf, 10**400],
    TypeError: ["1", None, True, [1]],
}


@pytest.mark.parametrize(("bad", "error"), [(bad, error) for error, values in BAD_DELAYS.items() for bad in values])
def test_an_invalid_delay_of_a_callable_is_refused_when_it_is_drawn(bad: Any, error: type[Exception]) -> None:
    delays = as_backoff("backoff", lambda: [1, bad]).delays()
    assert next(delays) == 1
    with pytest.raises(error, match="backoff"):
        next(delays)


@pytest.mark.parametrize(("returned", "error"), [([], ValueError), (5, TypeError), (None, TypeError)])
def test_a_callable_that_returns_no_delays_is_refused_at_its_first_use(returned: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="the backoff"):
        next(as_backoff("backoff", lambda: returned).delays())


# --- broken sources of randomness ---

JITTERY = (Constant(1, jitter="full"), Linear(1, jitter="equal"), Exponential(1, jitter=0.5), Decorrelated(1, cap=9))


class Broken:
    """A source of randomness that always returns the same value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def uniform(self, a: float, b: float) -> Any:
        return self._value


@pytest.mark.parametrize("backoff", JITTERY, ids=repr)
@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (math.nan, ValueError, "must be a number, not nan"),
        (math.inf, ValueError, "must be finite, not inf"),
        (-0.5, ValueError, "must be zero or more seconds, not -0.5"),
        (None, TypeError, "not None"),
        ("1", TypeError, "not '1'"),
    ],
)
def test_a_draw_that_is_no_delay_is_refused(backoff: Backoff, bad: Any, kind: type[Exception], message: str) -> None:
    """With every jitter: `min` and `max` would let NaN pass."""
    with pytest.raises(kind, match=r"what rng\.uniform\(\) returned .*" + re.escape(message)):
        first(backoff, 1, Broken(bad))


@pytest.mark.parametrize(
    "text",
    [
        "Constant(1.5)",
        "Constant(1.5, jitter='full')",
        "Linear(1, cap=5, jitter=0.25)",
        "Exponential(0.1)",
        "Exponential(0.1, factor=3, cap=10, jitter='none')",
        "Decorrelated(0.1, cap=10)",
        *(f"{kind}(1234567.5)" for kind in ("Constant", "Linear", "Exponential", "Decorrelated")),
        "Linear(1, cap=1234567.5)",
    ],
)
def test_the_repr_of_a_backoff_is_the_call_that_makes_it(text: str) -> None:
    """Numbers are not rounded."""
    assert repr(eval(text)) == text
