"""Events of policies as key-value events of structlog."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import pytest
import structlog

from resilience import CircuitBreaker, Context, Policy, Retry, events
from resilience.integrations.structlog import log_events
from resilience.testing import script
from tests.conftest import Boom, FakeClock


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


def test_events_are_named_after_their_kind_and_carry_its_values(clock: FakeClock, logged: list[Any]) -> None:
    """With the usual level; without sentence, result, argument or message."""
    pipeline = Policy.wrap(Retry(2, on=Boom, backoff=[1.5]), CircuitBreaker(2, open_for=30, name="db"), name="p")
    end = log_events()
    pipeline.capture(script(Boom("secret"), ...), Context(operation="get"))
    end()
    where = {"pipeline": "p", "operation": "get"}
    retry = {**where, "policy": "Retry", "error_type": "tests.conftest.Boom"}
    opened = {"retry_after": 30.0, "reason": "failures 2 of 2; the last failure was Boom", "failure_type": "Boom"}
    assert [(entry.pop("event"), entry.pop("log_level"), entry) for entry in logged] == [
        ("resilience.retry_scheduled", "info", {**retry, "attempt": 1, "delay": 1.5}),
        ("resilience.circuit_changed", "error", {**where, "policy": "db", "old": "closed", "new": "open", **opened}),
        ("resilience.retry_gave_up", "warning", {**retry, "attempts": 2, "elapsed": 1.5, "reason": "attempts"}),
        ("resilience.execution_finished", "debug", ANY),
    ]


def test_a_logger_of_the_user_filters_and_renders(clock: FakeClock) -> None:
    written = io.StringIO()
    logger = structlog.wrap_logger(
        structlog.PrintLogger(written),
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )
    end = log_events(logger, repeats=1, levels={events.CallRejected: logging.CRITICAL + 5})
    breaker = CircuitBreaker(1, name="db")
    breaker.capture(lambda ctx: 1 / 0)
    breaker.capture(lambda ctx: "never")
    Retry(on=Boom).capture(lambda ctx: "fine")
    end()
    entries = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [(entry["level"], entry["event"]) for entry in entries] == [
        ("error", "resilience.circuit_changed"),
        ("critical", "resilience.call_rejected"),
    ]


def test_the_level_is_checked_before_an_entry_is_created() -> None:
    """If the logger has `is_enabled_for`, as those of structlog 25.1 and later."""
    levels: list[int] = []
    entry = Mock(side_effect=AssertionError("no level is enabled"))
    methods = dict.fromkeys(("debug", "info", "warning", "error", "critical"), entry)
    end = log_events(SimpleNamespace(is_enabled_for=levels.append, **methods), repeats=1)
    breaker = CircuitBreaker(name="db")
    breaker.isolate()
    for _ in range(2):
        breaker.capture(lambda ctx: "never")
    end()
    assert levels == [logging.DEBUG, *[logging.WARNING] * 3]


def test_a_logger_over_the_standard_library_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    logger = structlog.wrap_logger(
        logging.getLogger("mine"),
        processors=[structlog.stdlib.render_to_log_kwargs],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    with caplog.at_level(logging.WARNING, logger="mine"):
        end = log_events(logger)
        CircuitBreaker(name="db").isolate()
        end()
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "resilience.circuit_changed")
    assert record.policy == "db"  # type: ignore[attr-defined]
