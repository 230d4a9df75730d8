"""Outcomes as values: `Success` and `Failure`, how they compare, unwrap, pickle, and what they say of themselves."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from resilience import Failure, Success
from resilience.outcome import StoppedIteration, describe, unwrap_stop_iteration
from tests.conftest import Boom


def test_a_success_unwraps_to_its_value() -> None:
    """Whatever the value is, also one that is false, or an exception."""
    for value in (None, 0, "", [], Boom("as a value"), Failure(Boom())):
        assert Success(value).unwrap() is value


def test_a_failure_unwraps_by_raising_its_error() -> None:
    """The very exception, with the traceback that leads to where it was first raised."""
    error = Boom("no")
    with pytest.raises(Boom) as caught:
        Failure(error).unwrap()
    assert caught.value is error


def test_outcomes_match_as_patterns() -> None:
    """`match` takes them apart by position."""
    found = []
    for outcome in (Success(5), Failure(Boom("x"))):
        match outcome:
            case Success(value):
                found.append(value)
            case Failure(error):
                found.append(str(error))
    assert found == [5, "x"]


def test_outcomes_compare_by_what_they_hold() -> None:
    """Equal values are equal outcomes; a success is never a failure."""
    error = Boom("x")
    assert Success(1) == Success(1.0)
    assert Success(1) != Success(2)
    assert Failure(error) == Failure(error)
    assert Failure(error) != Failure(Boom("x"))
    assert Success(error) != Failure(error)
    assert len({Success(1), Success(1), Failure(error), Failure(error)}) == 2


def test_outcomes_show_what_they_hold() -> None:
    """Their `repr` is the expression that makes them."""
    assert repr(Success("fine")) == "Success(value='fine')"
    assert repr(Failure(Boom("x"))) == "Failure(error=Boom('x'))"


@pytest.mark.parametrize("outcome", [Success(1), Failure(Boom("x"))], ids=["success", "failure"])
def test_outcomes_are_frozen_and_hold_nothing_else(outcome: Any) -> None:
    """They are facts: nothing can be changed or added."""
    for name in ("value", "error", "note"):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            setattr(outcome, name, 2)
    assert not hasattr(outcome, "__dict__")


@pytest.mark.parametrize("outcome", [Success([1]), Failure(Boom("x"))], ids=["success", "failure"])
def test_outcomes_pickle_and_copy(outcome: Any) -> None:
    """They travel between processes."""
    for again in (pickle.loads(pickle.dumps(outcome)), copy.deepcopy(outcome)):
        assert type(again) is type(outcome)
        assert repr(again) == repr(outcome)
    assert copy.copy(outcome) == outcome


def test_a_stop_iteration_is_taken_out_of_its_carrier() -> None:
    """Predicates and handlers see the user's own exception, also where it had to travel in another."""
    stop = StopIteration("last")
    boom = Boom()
    assert unwrap_stop_iteration(StoppedIteration(stop)) is stop
    assert unwrap_stop_iteration(boom) is boom


def test_a_failure_is_described_by_type_and_message_and_a_result_by_its_type() -> None:
    """A result may hold secrets or be large: only its type is told."""
    assert describe(Boom("x")) == ("Boom", "x")
    assert describe(Success({"password": "secret"})) == ("result", "dict")


def test_an_exception_without_a_readable_message_is_described_all_the_same() -> None:
    """A `__str__` that raises must not hide the failure that is being reported."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    kind, message = describe(Mute())
    assert kind == "Mute"
    assert "__str__" in message
