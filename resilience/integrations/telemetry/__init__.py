"""The common part of all integrations that export metrics or log lines. It imports no third-party client.

Counters and histograms come from the events of the whole process: `measurements(event)` returns what an event adds to
which instruments. Gauges are read from the given policies when they are collected, so calls pay nothing for them:
`Observed(*policies).gauges()`. A `Feed` combines both for one destination. `Lines` writes events as sentences, for
logs.

Names and units follow OpenTelemetry (dotted lower case, UCUM units). Every label has few different values: names,
whose number is bounded (`Labels`), classes of errors, statuses of HTTP and gRPC. No label contains arguments, results
or messages of errors.
"""

from __future__ import annotations

from resilience.integrations.telemetry.feed import Feed
from resilience.integrations.telemetry.instruments import (
    DURATION_BUCKETS,
    INSTRUMENTS,
    Instrument,
    Measurement,
    measurements,
)
from resilience.integrations.telemetry.labels import OTHER, Labels
from resilience.integrations.telemetry.lines import DEFAULT_LEVELS, Levels, Lines
from resilience.integrations.telemetry.observed import ManyPolicies, Member, Observable, Observed
from resilience.integrations.telemetry.words import Fact, Line, error_type, facts, kind_of, scope_of

__all__ = [
    "DEFAULT_LEVELS",
    "DURATION_BUCKETS",
    "INSTRUMENTS",
    "OTHER",
    "Fact",
    "Feed",
    "Instrument",
    "Labels",
    "Levels",
    "Line",
    "Lines",
    "ManyPolicies",
    "Measurement",
    "Member",
    "Observable",
    "Observed",
    "error_type",
    "facts",
    "kind_of",
    "measurements",
    "scope_of",
]
