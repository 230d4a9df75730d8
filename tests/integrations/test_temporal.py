"""Retry policies of Temporal, converted from a Retry and back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from temporalio.api.common.v1 import RetryPolicy as Message
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

from resilience import Retry, transient
from resilience.backoff import Constant, Decorrelated, Exponential, Linear
from resilience.integrations.temporal import from_retry_policy, to_retry_policy
from resilience.testing import script, virtual_time
from tests.conftest import Boom


def policy_of(initial: float, coefficient: float, most: float, attempts: int, errors: Any = None) -> RetryPolicy:
    return RetryPolicy(timedelta(seconds=initial), coefficient, timedelta(seconds=most), attempts, errors)


@pytest.mark.parametrize(
    ("retry", "policy"),
    [
        (Retry(5, backoff=Exponential(0.5, factor=3, cap=30, jitter="none")), policy_of(0.5, 3.0, 30, 5)),
        (Retry(None, on=Exception, backoff=Exponential(1, cap=60)), policy_of(1, 2.0, 60, 0)),
        (Retry(1, on=transient, backoff=Constant(2)), policy_of(2, 1.0, 2, 1)),
        (Retry(backoff=Exponential(9, cap=3)), policy_of(3, 2.0, 3, 3)),
        (Retry(ignore=(KeyError, Boom), backoff=Constant(2)), policy_of(2, 1.0, 2, 3, ["KeyError", "Boom"])),
        (Retry(), policy_of(0.1, 2.0, 10, 3)),
    ],
)
def test_a_retry_is_converted_to_a_retry_policy(retry: Retry, policy: RetryPolicy) -> None:
    made = to_retry_policy(retry)
    assert made == policy
    made.apply_to_proto(Message())  # which validates the values


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backoff": Exponential(1)}, "cap"),
        ({"backoff": Linear(1, cap=2)}, "Exponential or Constant"),
        ({"backoff": Decorrelated(1, cap=2)}, "Exponential or Constant"),
        ({"backoff": [1, 2]}, "Exponential or Constant"),
        ({"backoff": Constant(0)}, "more than 0"),
        ({"on": ConnectionError}, "ConnectionError"),
        ({"on": lambda error: True}, "transient or Exception"),
        ({"ignore": lambda error: True}, "ignore"),
        ({"on_result": lambda result: True}, "on_result"),
        ({"max_elapsed": 5}, "max_elapsed"),
        ({"budget": 0.1}, "budget"),
    ],
)
def test_settings_without_an_equivalent_in_temporal_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_retry_policy(Retry(**settings))


@pytest.mark.parametrize(
    "policy",
    [
        RetryPolicy(maximum_interval=timedelta(seconds=60)),
        policy_of(0.5, 1.0, 3, 7, ["KeyError"]),
        policy_of(0.5, 1.5, 3, 1),
    ],
)
def test_converting_there_and_back_changes_nothing(policy: RetryPolicy) -> None:
    """Except that missing values are the defaults of Temporal."""
    assert to_retry_policy(from_retry_policy(policy)) == policy
    assert to_retry_policy(from_retry_policy(RetryPolicy(timedelta(0)))) == policy_of(1, 2.0, 100, 0)


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (Boom(), 3),
        (KeyError(), 1),
        (ApplicationError("no", type="Gone"), 1),
        (ApplicationError("no", non_retryable=True), 1),
        (ApplicationError("later"), 3),
    ],
    ids=["other", "named", "named type", "not retryable", "retryable"],
)
def test_the_errors_that_temporal_retries_are_retried(error: Exception, attempts: int) -> None:
    fails = script(error, ...)
    retry = from_retry_policy(RetryPolicy(maximum_attempts=3, non_retryable_error_types=["KeyError", "Gone"]))
    with virtual_time(), pytest.raises(type(error)):
        retry.call(fails)
    assert len(fails.calls) == attempts


def test_repr_shows_the_errors_that_are_not_retried() -> None:
    assert "<errors named KeyError>" in repr(from_retry_policy(RetryPolicy(non_retryable_error_types=["KeyError"])))
    assert "<errors that are not retryable>" in repr(from_retry_policy(RetryPolicy()))
