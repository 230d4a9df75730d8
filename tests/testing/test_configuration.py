"""A pipeline as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, FailureRatio, Fallback, Policy, Retry, Timeout
from resilience.backoff import Constant
from resilience.testing import as_data
from tests.custom import Passing


class Tagging(Passing):
    """A user's policy with its own settings."""

    def settings(self) -> Mapping[str, object]:
        return {"tags": {"a": timedelta(minutes=1)}, "name": "left out"}


def is_busy(error: BaseException) -> bool:
    return False


def test_a_pipeline_is_a_list_of_its_policies() -> None:
    """Outermost first, with those of nested pipelines, and with every setting."""
    inner = Retry(5, on=(OSError, KeyError), backoff=Constant(2), name="again").wrap(Bulkhead(3))
    data = as_data(Policy.wrap(Fallback(None), Timeout(timedelta(seconds=8)), inner, name="outer"))
    assert [(it["policy"], it["name"]) for it in data] == [
        ("Fallback", "Fallback"),
        ("Timeout", "Timeout"),
        ("Retry", "again"),
        ("Bulkhead", "Bulkhead"),
    ]
    assert data[1]["settings"] == {"seconds": 8.0, "cooperative": False, "on_timeout": None}
    assert data[3]["settings"] == {"limit": 3, "queue": 0, "max_wait": None, "observe_only": False}
    retry = data[2]["settings"]
    assert (retry["attempts"], retry["on"], retry["backoff"]) == (5, ["OSError", "KeyError"], "Constant(2)")


def test_the_data_can_be_written_as_json() -> None:
    policies: list[Policy[Any]] = [
        Tagging(),
        CircuitBreaker(FailureRatio(0.5), on=is_busy),
        Retry(),
        Fallback(handler=lambda failure, ctx: None),
    ]
    data = json.loads(json.dumps(as_data(Policy.wrap(*policies))))
    assert data[0] == {"policy": "Tagging", "name": "Tagging", "settings": {"tags": {"a": 60.0}}}
    assert data[1]["settings"]["on"] == "is_busy"
    assert data[1]["settings"]["trip"].startswith("FailureRatio(0.5")
    assert data[3]["settings"]["handler"].endswith("<lambda>")


def test_a_single_policy_is_a_list_of_one() -> None:
    """So that a test need not distinguish policies from pipelines."""
    assert as_data(Timeout(2, name="limit")) == [
        {"policy": "Timeout", "name": "limit", "settings": {"seconds": 2.0, "cooperative": False, "on_timeout": None}}
    ]


def test_only_a_policy_has_data() -> None:
    with pytest.raises(TypeError, match="policy must be a policy, not 3"):
        as_data(3)  # type: ignore[arg-type]
