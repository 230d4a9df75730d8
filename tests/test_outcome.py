"""Outcomes as values: how `Success` and `Failure` compare, unwrap, pickle and describe themselves."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from resilience import Failure, Success
from resilience.outcome import StoppedIteration, type_and_message, unwrap_stop_iteration
from tests.conftest import Boom


def test_a_success_unwraps_to_its_value() -> None:
    for value in (None, 0, "", [], Boom("as a value"), Failure(Boom())):
        assert Success(value).unwrap() is value


def test_a_failure_unwraps_by_raising_its_error() -> None:
    error = Boom("no")
    with pytest.raises(Boom) as caught:
        Failure(error).unwrap()
    assert caught.value is error


def test_a_success_has_no_error() -> None:
    """A listener may read `event.outcome.error` of every event, and need not know that the outcome is a failure."""
    error = Boom("x")
    assert [outcome.error for outcome in (Success(error), Failure(error))] == [None, error]


def test_outcomes_match_positional_patterns() -> None:
    found = []
    for outcome in (Success(5), Failure(Boom("x"))):
        match outcome:
            case Success(value):
                found.append(value)
            case Failure(error):
                found.append(str(error))
    assert found == [5, "x"]


def test_outcomes_compare_by_their_values() -> None:
    """A success never equals a failure."""
    error = Boom("x")
    assert Success(1) == Success(1.0)
    assert Success(1) != Success(2)
    assert Failure(error) == Failure(error)
    assert Failure(error) != Failure(Boom("x"))
    assert Success(error) != Failure(error)
    assert len({Success(1), Success(1), Failure(error), Failure(error)}) == 2


def test_the_repr_of_an_outcome_is_the_expression_that_makes_it() -> None:
    assert repr(Success("fine")) == "Success(value='fine')"
    assert repr(Failure(Boom("x"))) == "Failure(error=Boom('x'))"


@pytest.mark.parametrize("outcome", [Success(1), Failure(Boom("x"))], ids=["success", "failure"])
def test_outcomes_are_frozen_and_slotted(outcome: Any) -> None:
    for name in ("value", "error", "note"):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            setattr(outcome, name, 2)
    assert not hasattr(outcome, "__dict__")


@pytest.mark.parametrize("outcome", [Success([1]), Failure(Boom("x"))], ids=["success", "failure"])
def test_outcomes_can_be_pickled_and_copied(outcome: Any) -> None:
    for duplicate in (pickle.loads(pickle.dumps(outcome)), copy.deepcopy(outcome)):
        assert type(duplicate) is type(outcome)
        assert repr(duplicate) == repr(outcome)
    assert copy.copy(outcome) == outcome


def test_a_stop_iteration_is_unwrapped_from_its_carrier() -> None:
    """Predicates and handlers get the user's own exception."""
    stop = StopIteration("last")
    boom = Boom()
    assert unwrap_stop_iteration(StoppedIteration(stop)) is stop
    assert unwrap_stop_iteration(boom) is boom


def test_a_failure_is_described_by_type_and_message_and_a_result_by_its_type_only() -> None:
    """A result may be secret or large."""
    assert type_and_message(Boom("x")) == ("Boom", "x")
    assert type_and_message(Success({"password": "secret"})) == ("result", "dict")


def test_an_exception_whose_str_raises_is_still_described() -> None:
    """The original failure must not be hidden."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no message")

    kind, message = type_and_message(Mute())
    assert kind == "Mute"
    assert "__str__" in message
