"""The latest events as rows of a log. Equal events in succession share a row, with a count.

An open circuit may refuse thousands of calls a second: they are one row, and do not push other rows out.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakValueDictionary

from resilience import forks
from resilience.events import CallRejected, CircuitChanged, Event, TimedOut
from resilience.integrations.telemetry import kind_of, scope_of
from resilience.integrations.telemetry.sentences import sentence
from resilience.outcome import Failure

#: Equal events share a row if there are at most this many seconds between them ...
_MAX_GAP = 2.0
#: ... and if the row began at most this many seconds ago: it should show when something happened.
_MAX_DURATION = 30.0


@final
@dataclass
class Row:
    """One row of the log.

    :param shown: the data for viewers.
    :param began: the time of its first event on the process clock; `ended`: that of its latest event.
    """

    shown: dict[str, Any]
    began: float
    ended: float


@final
class Log:
    """The latest rows. The parameters are those of `Dashboard`."""

    def __init__(self, keep: int, *, messages: bool) -> None:
        self._messages = messages
        self._lock = forks.lock_of(self)
        self._rows: deque[Row] = deque(maxlen=keep)
        self._latest: WeakValueDictionary[object, Row] = WeakValueDictionary()  # by key
        self._changes = 0

    def add(self, event: Event) -> None:
        """Add a row, or count the event in the row of a recent equal event, which then shows the text of this one."""
        key, now = _key(event), event.time
        text = sentence(event, messages=self._messages)  # not under the lock: it may call `str` of a user's exception
        with self._lock:
            self._changes += 1
            row = self._latest.get(key)
            if row is None or now - row.ended > _MAX_GAP or now - row.began > _MAX_DURATION:
                state = event.new.value if isinstance(event, CircuitChanged) else None
                row = Row({"number": self._changes, "kind": kind_of(event), "state": state, "count": 0}, now, now)
                self._rows.append(row)
                if key is not None:
                    self._latest[key] = row
            row.ended = now
            row.shown |= {"change": self._changes, "text": text, "at": time.time(), "count": row.shown["count"] + 1}

    def since(self, change: int) -> tuple[list[dict[str, Any]], int]:
        """Return the rows that were added or changed since a change, and the number of the latest change."""
        with self._lock:
            return [row.shown.copy() for row in self._rows if row.shown["change"] > change], self._changes


def _key(event: Event) -> object:
    """Return the key that equal events share: everything but their numbers.

    None for a change of a circuit, which always has a row of its own, because the order matters.
    """
    if isinstance(event, CircuitChanged):
        return None
    detail: object = None
    if isinstance(event, CallRejected):
        detail = event.reason, event.shadow
    elif isinstance(event, TimedOut):
        detail = scope_of(event)
    elif isinstance(outcome := getattr(event, "outcome", None), Failure):
        detail = type(outcome.error)
    return type(event), event.pipeline, event.policy, event.operation, detail
