"""The checks that constructors are made of: what they take, in which form they keep it, what they refuse."""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience import checks

NAN = float("nan")
INF = float("inf")

NO_NUMBERS = [True, False, "1", b"1", None, [1], 1j, object, fractions.Fraction(1, 2)]
NO_WHOLE_NUMBERS = [*NO_NUMBERS, 1.0, 0.5, NAN]


def refused(error: type[Exception], check: Callable[[], object], *texts: str) -> None:
    """The check raises exactly this kind, and the message names all of this."""
    with pytest.raises(error) as caught:
        check()
    assert type(caught.value) is error
    for text in texts:
        assert text.lower() in str(caught.value).lower()


@pytest.mark.parametrize("value", [0, 1, -3, 0.5, INF, -INF, 2**70])
def test_a_number_is_kept_as_a_float(value: float) -> None:
    """An int and a float are numbers, also infinite ones."""
    kept = checks.number("factor", value)
    assert type(kept) is float
    assert kept == value


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused(value: object) -> None:
    """Booleans and texts are no numbers."""
    refused(TypeError, lambda: checks.number("factor", value), "factor", repr(value))


def test_nan_and_numbers_beyond_floats_are_refused() -> None:
    """Neither can be compared or waited for."""
    refused(ValueError, lambda: checks.number("factor", NAN), "factor", "nan")
    refused(ValueError, lambda: checks.number("factor", 10**400), "factor", str(10**400))


@pytest.mark.parametrize(
    ("value", "kept"), [(1, 1.0), (0.25, 0.25), (timedelta(minutes=1), 60.0), (timedelta(milliseconds=5), 0.005)]
)
def test_a_duration_is_kept_in_seconds(value: Any, kept: float) -> None:
    """Seconds as a number, or a `timedelta`."""
    seconds = checks.seconds("timeout", value)
    assert type(seconds) is float
    assert seconds == kept


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_duration_is_refused(value: object) -> None:
    """The message says what would have been one."""
    refused(TypeError, lambda: checks.seconds("timeout", value), "timeout", repr(value), "seconds", "timedelta")


@pytest.mark.parametrize(
    ("value", "told"), [(-1, "-1"), (-0.001, "-0.001"), (timedelta(seconds=-1), "-1"), (-INF, "-inf")]
)
@pytest.mark.parametrize("zero", [False, True])
def test_a_negative_duration_is_refused(value: Any, told: str, zero: bool) -> None:
    """Whatever else is allowed. A `timedelta` is told in seconds: its own `repr` of -1 s is -1 day and 86,399 s."""
    refused(ValueError, lambda: checks.seconds("timeout", value, zero=zero, infinite=True), "timeout", told)


@pytest.mark.parametrize("value", [0, 0.0, timedelta(0)], ids=repr)
def test_zero_is_a_duration_only_where_it_means_something(value: Any) -> None:
    """`zero=True` lets it pass."""
    refused(ValueError, lambda: checks.seconds("timeout", value), "timeout", "more than zero", "not 0")
    assert checks.seconds("timeout", value, zero=True) == 0.0


def test_infinity_is_a_duration_only_where_it_means_something() -> None:
    """`infinite=True` lets it pass; NaN never."""
    refused(ValueError, lambda: checks.seconds("timeout", INF), "timeout", "inf")
    assert checks.seconds("timeout", INF, infinite=True) == INF
    refused(ValueError, lambda: checks.seconds("timeout", NAN, infinite=True), "timeout", "nan")


def test_an_optional_duration_may_be_none() -> None:
    """None is none; everything else is held to the rule for durations."""
    assert checks.optional_seconds("max_wait", None) is None
    assert checks.optional_seconds("max_wait", timedelta(seconds=2)) == 2.0
    assert checks.optional_seconds("max_wait", 0, zero=True) == 0.0
    refused(ValueError, lambda: checks.optional_seconds("max_wait", 0), "max_wait", "0")
    refused(TypeError, lambda: checks.optional_seconds("max_wait", False), "max_wait", "False")


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_every_finite_positive_float_is_a_duration(value: float) -> None:
    """Denormals and the largest included."""
    assert checks.seconds("timeout", value) == value


@given(st.one_of(st.floats(), st.integers(), st.timedeltas(), st.booleans(), st.text(), st.none()))
def test_a_duration_is_finite_and_positive_or_refused(value: Any) -> None:
    """There is no third way out, whatever goes in."""
    try:
        kept = checks.seconds("timeout", value)
    except (TypeError, ValueError):
        return
    assert math.isfinite(kept)
    assert kept > 0


def test_a_whole_number_has_a_lower_bound() -> None:
    """1 unless it is told otherwise."""
    assert checks.whole("limit", 1) == 1
    assert checks.whole("queue", 0, least=0) == 0
    for value in (0, -5):
        refused(ValueError, lambda value=value: checks.whole("limit", value), "limit", repr(value), "at least 1")
    refused(ValueError, lambda: checks.whole("queue", -1, least=0), "queue", "-1", "at least 0")


@pytest.mark.parametrize("value", NO_WHOLE_NUMBERS, ids=repr)
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    """A float is none, also where it has no fraction."""
    refused(TypeError, lambda: checks.whole("limit", value), "limit", repr(value))


def test_a_ratio_is_more_than_zero_and_at_most_one() -> None:
    """1 is one: all of them."""
    assert checks.ratio("ratio", 1) == 1.0
    assert checks.ratio("ratio", 1e-9) == 1e-9
    for value in (0, -0.5, 1.0000001, INF):
        refused(ValueError, lambda value=value: checks.ratio("ratio", value), "ratio", repr(value))
    refused(ValueError, lambda: checks.ratio("ratio", NAN), "ratio", "nan")
    refused(TypeError, lambda: checks.ratio("ratio", True), "ratio", "True")


def test_a_flag_is_a_real_boolean() -> None:
    """A truthy something is more likely an argument in the wrong place."""
    assert checks.flag("wrap", True) is True
    assert checks.flag("wrap", False) is False
    for value in (1, 0, None, "yes", ValueError):
        refused(TypeError, lambda value=value: checks.flag("wrap", value), "wrap", repr(value))


def test_a_callable_is_kept_as_it_is() -> None:
    """Functions, classes and objects with `__call__` are callables; None is none."""
    for value in (print, dict, lambda: None, None):
        assert checks.optional_callable("on_result", value) is value
    refused(TypeError, lambda: checks.optional_callable("on_result", 5), "on_result", "5")  # type: ignore[type-var]


def test_a_name_is_a_text_that_is_not_empty() -> None:
    """An empty name would make an error that names nobody."""
    assert checks.optional_name("db") == "db"
    assert checks.optional_name(None) is None
    refused(TypeError, lambda: checks.optional_name(5), "name", "5")
    refused(TypeError, lambda: checks.optional_name(b"db"), "name", "b'db'")
    refused(ValueError, lambda: checks.optional_name(""), "name", "empty")
