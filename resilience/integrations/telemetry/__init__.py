"""What everything that exports numbers or lines shares. It knows no client of any of them.

Counters and histograms come from events, of the whole process: `measurements(event)` says what an event adds to
which. Gauges are read from the policies that were handed over, when they are asked for, so a call pays nothing for
them: `Observed(*policies).gauges()`. A `Feed` is both for one place that the numbers go to. `Lines` are
events in words, for logs.

Names and units are OpenTelemetry's (dotted lower case, UCUM units). Every label has few different values: names, of
which there are at most so many (`Labels`), classes of errors, statuses of HTTP and gRPC. Arguments, results and
messages of errors are in none of them.
"""

from __future__ import annotations

from resilience.integrations.telemetry.instruments import (
    DURATION_BUCKETS,
    INSTRUMENTS,
    Instrument,
    Measurement,
    measurements,
)
from resilience.integrations.telemetry.labels import OTHER, Labels
from resilience.integrations.telemetry.lines import DEFAULT_LEVELS, Levels, Lines
from resilience.integrations.telemetry.observed import Feed, ManyPolicies, Member, Observable, Observed
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
