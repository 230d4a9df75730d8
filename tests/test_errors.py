"""The error tree: its classes, their attributes, and that they survive pickling and copying."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import resilience
from resilience import CircuitState, Failure, Success, errors
from resilience.errors import (
    AwaitableMisuse,
    BulkheadFull,
    CircuitIsolated,
    CircuitOpen,
    DeadlineExceeded,
    LimitExceeded,
    Misuse,
    RateLimited,
    Rejected,
    ResilienceError,
    RetriesExhausted,
    SuspensionMisuse,
    Throttled,
    TimeoutExceeded,
    WorkersExhausted,
)

#: One error of each class, with no attribute at its default.
FULL: dict[str, tuple[ResilienceError, dict[str, Any]]] = {
    "ResilienceError": (ResilienceError("no", policy="p"), {"policy": "p"}),
    "Rejected": (Rejected("no", policy="p", retry_after=1.5), {"policy": "p", "retry_after": 1.5}),
    "CircuitOpen": (
        CircuitOpen("no", policy="p", retry_after=1.5, state=CircuitState.OPEN, last_failure="Boom: x"),
        {"policy": "p", "retry_after": 1.5, "state": CircuitState.OPEN, "last_failure": "Boom: x"},
    ),
    "CircuitIsolated": (
        CircuitIsolated("no", policy="p", state=CircuitState.ISOLATED, last_failure="Boom: x"),
        {"policy": "p", "retry_after": None, "state": CircuitState.ISOLATED, "last_failure": "Boom: x"},
    ),
    "LimitExceeded": (
        LimitExceeded("no", policy="p", retry_after=1.5, limit=3),
        {"policy": "p", "retry_after": 1.5, "limit": 3},
    ),
    "Throttled": (
        Throttled("no", policy="p", retry_after=1.5, rejection_rate=0.25),
        {"policy": "p", "retry_after": 1.5, "rejection_rate": 0.25},
    ),
    "BulkheadFull": (
        BulkheadFull("no", policy="p", retry_after=1.5, limit=3, queue=7),
        {"policy": "p", "retry_after": 1.5, "limit": 3, "queue": 7},
    ),
    "RateLimited": (RateLimited("no", policy="p", retry_after=1.5), {"policy": "p", "retry_after": 1.5}),
    "WorkersExhausted": (WorkersExhausted("no", policy="p", retry_after=1.5), {"policy": "p", "retry_after": 1.5}),
    "TimeoutExceeded": (TimeoutExceeded("no", policy="p", timeout=2.5), {"policy": "p", "timeout": 2.5}),
    "DeadlineExceeded": (DeadlineExceeded("no", policy="p", timeout=2.5), {"policy": "p", "timeout": 2.5}),
    "RetriesExhausted": (
        RetriesExhausted("no", policy="p", attempts=4, last=Success([1, 2])),
        {"policy": "p", "attempts": 4, "last": Success([1, 2])},
    ),
}

Again = Callable[[Any], Any]
WAYS: dict[str, Again] = {
    **{
        f"pickle-{protocol}": lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def test_every_error_has_an_example_here_and_is_exported_by_the_front_door() -> None:
    assert set(FULL) == set(errors.__all__)
    assert all(getattr(resilience, name) is getattr(errors, name) for name in errors.__all__)


def carried(error: BaseException) -> dict[str, object]:
    """Return the attributes of an error, slotted or not."""
    slots = [name for kind in type(error).__mro__ for name in vars(kind).get("__slots__", ())]
    return {name: getattr(error, name) for name in slots} | vars(error)


@pytest.mark.parametrize("name", FULL)
def test_each_error_has_its_numbers_as_attributes_and_one_sentence_as_text(name: str) -> None:
    """The text begins with the name of the policy: a log or an error tracker often keeps nothing else."""
    error, numbers = FULL[name]
    assert carried(error) == numbers
    assert error.args == ("no",)
    assert str(error) == "p: no"
    assert repr(error) == f"{name}('no')"


@pytest.mark.parametrize("name", FULL)
def test_each_error_can_be_created_without_arguments(name: str) -> None:
    """As in tests and mocks. The numbers are then None (attempts: 0), and the text has no prefix."""
    kind = getattr(errors, name)
    numbers = carried(kind())
    assert numbers.pop("attempts", 0) == 0
    assert set(numbers.values()) == {None}
    assert (str(kind("no")), str(kind(policy="p")), str(kind())) == ("no", "", "")


@pytest.mark.parametrize("name", FULL)
def test_each_error_survives_pickling_and_copying(name: str) -> None:
    """With its type, text, numbers and notes, as process pools, task queues and test tools need it."""
    for way in WAYS.values():
        error, numbers = copy.copy(FULL[name][0]), FULL[name][1]
        for notes in ([], ["while fetching user 4711", "for the second time"]):
            for note in notes:
                error.add_note(note)
            again = way(error)
            assert again is not error
            assert type(again) is type(error)
            assert str(again) == "p: no"
            assert again.args == ("no",)
            assert carried(again) == numbers | ({"__notes__": notes} if notes else {})


@pytest.mark.parametrize("way", WAYS)
def test_a_custom_error_survives_pickling_and_copying_with_its_attributes(way: str) -> None:
    """It need not call the `__init__` of its base."""
    error = _Busy("no")
    error.since = 4.0
    again = WAYS[way](error)
    assert (type(again), again.args, again.since, again.retry_after) == (_Busy, ("no",), 4.0, 2.0)
    assert str(again) == "no"
    assert not hasattr(again, "policy")


class _Busy(Rejected):
    """The rejection of a custom policy."""

    since: float

    def __init__(self, message: str) -> None:
        self.retry_after = 2.0


@pytest.mark.parametrize("way", WAYS)
def test_a_custom_error_may_take_other_arguments(way: str) -> None:
    """It keeps the message that it passes to its base, and is not recreated from it, as Python would do."""
    error = _Slow("example.org", port=80)
    for it in (error, WAYS[way](error)):
        assert (type(it), it.args) == (_Slow, ("example.org is slow",))
        assert carried(it) == {"policy": "mine", "timeout": 2.0, "port": 80}


class _Slow(TimeoutExceeded):
    """The timeout of a custom policy."""

    def __init__(self, host: str, *, port: int) -> None:
        super().__init__(f"{host} is slow", policy="mine", timeout=2.0)
        self.port = port


@pytest.mark.parametrize("way", [way for way in WAYS if way != "copy"])
def test_the_last_failure_of_a_retry_survives_pickling_with_its_error(way: str) -> None:
    error = RetriesExhausted("no", policy="p", attempts=4, last=Failure(ConnectionResetError(104, "reset")))
    last = WAYS[way](error).last
    assert isinstance(last, Failure)
    assert type(last.error) is ConnectionResetError
    assert last.error.args == (104, "reset")


@pytest.mark.parametrize("name", ["TimeoutExceeded", "DeadlineExceeded"])
def test_a_timeout_is_a_builtin_timeout_error_without_an_errno(name: str) -> None:
    error, _ = FULL[name]
    assert isinstance(error, TimeoutError)
    assert (error.errno, error.strerror, error.filename) == (None, None, None)
    assert repr(error) == f"{name}('no')"


def test_misuse_is_outside_of_the_tree() -> None:
    """It is no error of a call, and has the type that Python would raise."""
    assert issubclass(AwaitableMisuse, TypeError)
    assert issubclass(SuspensionMisuse, RuntimeError)
    for kind in (Misuse, AwaitableMisuse, SuspensionMisuse):
        assert not issubclass(kind, ResilienceError)
        assert kind.__name__ not in errors.__all__
