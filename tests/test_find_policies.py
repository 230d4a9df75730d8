"""A policy of a pipeline can be found by its class or name, and is returned with its type."""

from __future__ import annotations

import re
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, Fallback, Keyed, Pipeline, Retry, Timeout
from tests.custom import Passing

BREAKER = CircuitBreaker(name="payments")
TOTAL, EACH = Timeout(8, name="total"), Timeout(2, name="each")
INNER = Pipeline(BREAKER, EACH, name="inner")
PIPELINE = Pipeline(Fallback(None), TOTAL, Retry(), INNER, name="outer")


def test_a_policy_is_found_by_its_class() -> None:
    """Also in nested pipelines."""
    assert PIPELINE.find(CircuitBreaker) is BREAKER
    assert PIPELINE.find(CircuitBreaker).stats().opened == 0  # with its type
    assert INNER.find(Timeout) is EACH
    assert PIPELINE.find(Pipeline) is INNER


def test_a_policy_is_found_by_its_name() -> None:
    """Which defaults to the name of its class; nested pipelines have one, too."""
    assert PIPELINE["payments"] is BREAKER
    assert PIPELINE["each"] is EACH
    assert PIPELINE["inner"] is INNER
    assert isinstance(PIPELINE["Retry"], Retry)


def test_a_custom_policy_is_found_by_its_class_or_a_base() -> None:
    class Special(Passing):
        """A derived policy."""

    special = Special()
    assert Pipeline(special, Retry()).find(Special) is Pipeline(special, Retry()).find(Passing) is special
    assert Pipeline(special, Retry())["Special"] is special


def test_type_arguments_of_a_class_are_not_compared() -> None:
    """They are for type checkers, which would otherwise not know those of the policy."""
    fallback = PIPELINE.find(Fallback)
    assert PIPELINE.find(Fallback[Any]) is PIPELINE.find(Fallback[int]) is fallback
    with pytest.raises(LookupError, match="no Keyed in outer"):
        PIPELINE.find(Keyed[CircuitBreaker])


def test_the_error_for_a_missing_policy_lists_the_existing_ones() -> None:
    """A `KeyError` for a name, a `LookupError` for a class."""
    with pytest.raises(
        LookupError, match=r"no Bulkhead in outer, only 'Fallback', 'total', 'Retry', 'inner', 'payments'"
    ):
        PIPELINE.find(Bulkhead)
    with pytest.raises(KeyError, match=r"no policy named 'Payments' in outer, only .*'payments'"):
        PIPELINE["Payments"]


def test_an_ambiguous_class_or_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"more than one Timeout in outer: .*'total'.*'each'.*give each a name"):
        PIPELINE.find(Timeout)
    with pytest.raises(ValueError, match="more than one policy named 'Retry'"):
        Pipeline(Retry(), Retry())["Retry"]


@pytest.mark.parametrize("wrong", [0, slice(1), None, Retry])
def test_a_pipeline_cannot_be_indexed_by_position_or_iterated(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"by its name.*pipeline\.policies"):
        PIPELINE[wrong]
    with pytest.raises(TypeError):
        list(PIPELINE)  # type: ignore[call-overload]


@pytest.mark.parametrize("wrong", ["Retry", Retry(), int, list[int], Retry | Timeout, None])
def test_find_accepts_only_classes_of_policies(wrong: Any) -> None:
    """The error says how to look up a name, and what was given."""
    with pytest.raises(
        TypeError, match=rf"by its class, or by its name, pipeline\['name'\], not by {re.escape(repr(wrong))}$"
    ):
        PIPELINE.find(wrong)
