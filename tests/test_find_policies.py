"""A policy of a pipeline is found by its class or its name, and comes back with its type."""

from __future__ import annotations

from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, Fallback, Pipeline, Policy, Retry, Timeout

BREAKER = CircuitBreaker(name="payments")
TOTAL, EACH = Timeout(8, name="total"), Timeout(2, name="each")
INNER = Pipeline(BREAKER, EACH, name="inner")
PIPELINE = Pipeline(Fallback(None), TOTAL, Retry(), INNER, name="outer")


def test_a_policy_is_found_by_its_class() -> None:
    """Wherever it stands, in nested pipelines too."""
    assert PIPELINE.find(CircuitBreaker) is BREAKER
    assert PIPELINE.find(CircuitBreaker).stats().opened == 0  # with its type
    assert INNER.find(Timeout) is EACH
    assert PIPELINE.find(Pipeline) is INNER


def test_a_policy_is_found_by_its_name() -> None:
    """One that was not given one has that of its class; a nested pipeline has one, too."""
    assert PIPELINE["payments"] is BREAKER
    assert PIPELINE["each"] is EACH
    assert PIPELINE["inner"] is INNER
    assert isinstance(PIPELINE["Retry"], Retry)


def test_a_policy_of_ones_own_is_found_as_well() -> None:
    """By its class, and by a class that it derives from."""

    class Own(Policy[Any]):
        async def around(self, call: Any, ctx: Any) -> Any:
            return await call(ctx)

    class Special(Own):
        """One of them."""

    special = Special()
    assert Pipeline(special, Retry()).find(Own) is special
    assert Pipeline(special, Retry())["Special"] is special


def test_what_is_not_there_is_an_error_that_says_what_is() -> None:
    """A `KeyError` for a name, and a `LookupError` for a class."""
    with pytest.raises(
        LookupError, match=r"no Bulkhead in outer, only 'Fallback', 'total', 'Retry', 'inner', 'payments'"
    ):
        PIPELINE.find(Bulkhead)
    with pytest.raises(KeyError, match=r"no policy named 'Payments' in outer, only .*'payments'"):
        PIPELINE["Payments"]


def test_what_is_there_twice_is_not_guessed() -> None:
    """Which of them was meant, a name says."""
    with pytest.raises(ValueError, match=r"more than one Timeout in outer: .*'total'.*'each'.*give each a name"):
        PIPELINE.find(Timeout)
    with pytest.raises(ValueError, match="more than one policy named 'Retry'"):
        Pipeline(Retry(), Retry())["Retry"]


@pytest.mark.parametrize("wrong", [0, slice(1), None, Retry])
def test_a_position_is_no_name(wrong: Any) -> None:
    """Nor does a pipeline look like a sequence of its policies."""
    with pytest.raises(TypeError, match=r"by its name.*pipeline\.policies"):
        PIPELINE[wrong]
    with pytest.raises(TypeError):
        list(PIPELINE)  # type: ignore[call-overload]


@pytest.mark.parametrize("wrong", ["Retry", Retry(), int, None])
def test_an_object_is_no_class_of_policies(wrong: Any) -> None:
    """`find` takes a class, and says where names go."""
    with pytest.raises(TypeError, match=r"by its class, or by its name, pipeline\['name'\]"):
        PIPELINE.find(wrong)
