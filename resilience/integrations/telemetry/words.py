"""Events as plain values: facts for log lines and spans, and types of failures for labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from math import inf
from typing import Any, NamedTuple, TypeAlias

from resilience.circuit_state import CircuitState
from resilience.events import CallFinished, Event, ExecutionFinished, Parked, TimedOut
from resilience.network_errors import grpc_status
from resilience.outcome import LONGEST_MESSAGE, Failure, Outcome, message_of

_LEFT_OUT = frozenset({"policy", "operation", "time", "properties", "pipeline", "outcome", "by_deadline", "shadow"})

#: A value of a line: what a log record can carry.
Fact: TypeAlias = str | int | float | bool


class Line(NamedTuple):
    """A line of a log.

    :param level: a level of `logging`: 10 is debug, 40 is error.
    :param kind: the kind of the event in snake case.
    :param text: a sentence that describes the event.
    :param facts: the fields of the event as plain values.
    """

    level: int
    kind: str
    text: str
    facts: Mapping[str, Fact]


def kind_of(event: Event) -> str:
    """Return the name of an event's kind in snake case: ``"retry_scheduled"``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()


def facts(event: Event, *, messages: bool = False) -> dict[str, Fact]:
    """Return the fields of an event as plain values, for a log line or a span; empty and unknown ones are left out.

    :param messages: whether to add the messages of errors, as `error` and `last_failure`, cut to 200 characters. They
        can contain anything. Arguments and results are never among the values.
    """
    found: dict[str, object] = {"pipeline": event.pipeline, "policy": event.policy, "operation": event.operation}
    found |= {it.name: getattr(event, it.name) for it in fields(event) if it.name not in _LEFT_OUT}
    if getattr(event, "shadow", False):
        found["shadow"] = True
    if isinstance(event, Parked):
        found["task"] = found.pop("name")  # in a record of `logging`, `name` is the name of the logger
    if isinstance(event, TimedOut):
        found["scope"] = scope_of(event)
    outcome: Outcome[Any] | None = event.last if isinstance(event, Parked) else getattr(event, "outcome", None)
    if isinstance(event, (CallFinished, ExecutionFinished)):
        found |= zip(ENDING, ending(event), strict=True)
    elif outcome is not None:
        found["error_type"] = error_type(outcome)
    if messages and isinstance(outcome, Failure):
        found["error"] = message_of(outcome.error)[:LONGEST_MESSAGE]
    if not messages:
        found.pop("last_failure", None)
    values = ((name, value.value if isinstance(value, CircuitState) else value) for name, value in found.items())
    known = {name: value for name, value in values if isinstance(value, (str, int, float)) and value not in ("", inf)}
    return {name: printable(value) if isinstance(value, str) else value for name, value in known.items()}


def printable(text: str) -> str:
    """Escape characters that are not printable: some control a terminal, and a line break could forge a line."""
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)


def scope_of(event: TimedOut) -> str:
    """Return what timed out: ``"attempt"``, ``"total"``, the caller's ``"deadline"``, or ``"unknown"``."""
    return "deadline" if event.by_deadline else event.scope or "unknown"


#: The labels that describe how an execution or a call ended.
ENDING = ("outcome", "error_type", "cancelled_by")


def ending(event: ExecutionFinished | CallFinished) -> tuple[str, str, str]:
    """Return the values of the labels in `ENDING`. A cancellation or an interrupt is not a failure."""
    outcome = event.outcome
    if outcome is None:
        return "cancelled", "", event.cancelled_by or ""
    if isinstance(outcome, Failure):
        return "failure", error_type(outcome), ""
    return "success", "", ""


def error_type(outcome: Outcome[Any] | BaseException) -> str:
    """Return the type of a failure: its HTTP or gRPC status, else the error's class with its module (if not builtin).

    ``"result"`` for a result that was not good enough.
    """
    error = outcome.error if isinstance(outcome, Failure) else outcome
    if not isinstance(error, BaseException):
        return "result"
    if (status := status_of(error)) is not None:
        return status
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def status_of(error: BaseException) -> str | None:
    """Return the HTTP status (``"503"``) or gRPC status (``"UNAVAILABLE"``) of an error, None if it has neither."""
    response = _attribute(error, "response")  # what `raise_for_status()` of httpx and requests raises has it there
    for status in (_attribute(error, "status"), _attribute(error, "status_code"), _attribute(response, "status_code")):
        if isinstance(status, int) and 400 <= status <= 599:
            return str(int(status))
    return grpc_status(error)


def _attribute(of: object, name: str) -> object:
    try:
        return getattr(of, name, None)
    except Exception:  # a property that raises
        return None
