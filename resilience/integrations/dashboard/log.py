"""The last events as rows of a log. Equal ones in a row are one row with a count.

A circuit that is open refuses thousands of calls a second: that is one row, and pushes nothing else out.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from resilience import forks
from resilience.events import CallRejected, CircuitChanged, Event, TimedOut
from resilience.integrations.telemetry import kind_of, scope_of
from resilience.integrations.telemetry.sentences import sentence
from resilience.outcome import Failure

#: Equal events that are no further apart than this, in seconds, are one row ...
_APART = 2.0
#: ... which gets no longer than this: it should say when something happened.
_LONGEST = 30.0

_Json: TypeAlias = dict[str, Any]


@final
@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the log.

    :param shown: what a viewer gets of it.
    :param began: when it began, on the process clock; `ended`: when it happened last.
    """

    key: object
    shown: _Json
    began: float
    ended: float


@final
class Log:
    """The last rows.

    :param keep: how many there are at most.
    :param messages: whether the messages of errors are shown.
    """

    def __init__(self, keep: int, *, messages: bool) -> None:
        self._messages = messages
        self._lock = forks.lock_of(self)
        self._rows: deque[Row] = deque()
        self._keep = keep
        self._latest: dict[object, Row] = {}  # of each key; rows that are in `_rows` only
        self._changes = 0

    def add(self, event: Event, now: float) -> None:
        """Write a row, or count one more in the row of an equal event just now, with the words of this one."""
        key = _key(event)
        text = sentence(event, messages=self._messages)  # may ask a user's exception for its message: not locked
        with self._lock:
            self._changes += 1
            row = self._latest.get(key)
            if row is None or now - row.ended > _APART or now - row.began > _LONGEST:
                row = self._append(event, key, now)
            row.ended = now
            row.shown |= {"change": self._changes, "text": text, "at": time.time(), "count": row.shown["count"] + 1}

    def since(self, change: int) -> tuple[list[_Json], int]:
        """Return the rows that are new or have changed since that change, and the number of the last one."""
        with self._lock:
            return [row.shown.copy() for row in self._rows if row.shown["change"] > change], self._changes

    def _append(self, event: Event, key: object, now: float) -> Row:
        if len(self._rows) >= self._keep:
            oldest = self._rows.popleft()
            if self._latest.get(oldest.key) is oldest:
                del self._latest[oldest.key]
        state = event.new.value if isinstance(event, CircuitChanged) else None  # that it went to
        shown = {"number": self._changes, "kind": kind_of(event), "state": state, "count": 0}
        row = Row(key=key, shown=shown, began=now, ended=now)
        self._rows.append(row)
        if key is not None:
            self._latest[key] = row
        return row


def _key(event: Event) -> object:
    """Return what equal events have in common: all but the numbers.

    None for the change of a circuit, which is a row of its own: their order matters.
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
