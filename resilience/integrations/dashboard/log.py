"""The last events as rows of a log. Equal ones in a row are one row with a count.

A circuit that is open refuses thousands of calls a second. So an event that is equal to one just before only counts,
which takes a microsecond, and now and then brings the words of the row up to date; and it pushes nothing else out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from resilience.events import CallRejected, CircuitChanged, Event, TimedOut
from resilience.integrations.telemetry import kind_of, scope_of
from resilience.integrations.telemetry.sentences import sentence
from resilience.outcome import Failure

#: Equal events that are no further apart than this, in seconds, are one row ...
_APART = 2.0
#: ... whose words are those of one that is no older than this ...
_WORDS_HOLD = 0.5
#: ... and which gets no longer than this: it should tell when something happened.
_LONGEST = 30.0

_Json: TypeAlias = dict[str, Any]


@final
@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the log.

    :param change: the number of the change of the log that touched it last.
    :param began: when it began, on the process clock; `ended`: when it happened last; `worded`: when the event
        happened that it has its words from.
    :param at: when it happened last, on the wall clock, in seconds since 1970.
    :param state: the state that a circuit went to, None for other kinds.
    """

    number: int
    key: object
    kind: str
    state: str | None
    text: str
    change: int
    began: float
    ended: float
    worded: float
    at: float
    count: int = 1

    def told(self) -> _Json:
        """Return what a viewer needs of it."""
        names = ("number", "change", "kind", "state", "text", "at", "count")
        return {name: getattr(self, name) for name in names}


@final
class Log:
    """The last rows.

    :param keep: how many there are at most.
    :param messages: whether the messages of errors are told.
    """

    def __init__(self, keep: int, *, messages: bool) -> None:
        self._messages = messages
        self._lock = threading.RLock()  # reentrant: a finalizer may tell an event in the middle of anything
        self._rows: deque[Row] = deque()
        self._keep = keep
        self._latest: dict[object, Row] = {}  # of each key; rows that are in `_rows` only
        self._changes = 0

    def add(self, event: Event, now: float) -> None:
        """Write a row, or count one more in the row of an equal event just now."""
        key = _key(event)
        with self._lock:
            if self._count(key, now, None):
                return
        text = sentence(
            event, messages=self._messages
        )  # may ask a user's exception for its message: not under the lock
        with self._lock:
            if not self._count(key, now, text):
                self._append(event, key, now, text)

    def since(self, change: int) -> tuple[list[_Json], int]:
        """Return the rows that are new or have changed since that change, and the number of the last one."""
        with self._lock:
            return [row.told() for row in self._rows if row.change > change], self._changes

    def _count(self, key: object, now: float, text: str | None) -> bool:
        """Count one more in the row of an equal event; say whether there is one, with words that hold still."""
        row = None if key is None else self._latest.get(key)
        if row is None or now - row.ended > _APART or now - row.began > _LONGEST:
            return False
        if text is not None:
            row.text, row.worded = text, now
        elif now - row.worded > _WORDS_HOLD:
            return False
        self._changes += 1
        row.change, row.ended, row.at = self._changes, now, time.time()
        row.count += 1
        return True

    def _append(self, event: Event, key: object, now: float, text: str) -> None:
        if len(self._rows) >= self._keep:
            oldest = self._rows.popleft()
            if self._latest.get(oldest.key) is oldest:
                del self._latest[oldest.key]
        self._changes += 1
        row = Row(
            number=self._changes,
            key=key,
            kind=kind_of(event),
            state=event.new.value if isinstance(event, CircuitChanged) else None,
            text=text,
            change=self._changes,
            began=now,
            ended=now,
            worded=now,
            at=time.time(),
        )
        self._rows.append(row)
        if key is not None:
            self._latest[key] = row


def _key(event: Event) -> object:
    """Return what equal events have in common: all but the numbers.

    None for the change of a circuit, which is a row of its own: their order is what one wants to know.
    """
    if isinstance(event, CircuitChanged):
        return None
    detail: object = None
    if isinstance(event, CallRejected):
        detail = event.reason
    elif isinstance(event, TimedOut):
        detail = scope_of(event)
    elif isinstance(outcome := getattr(event, "outcome", None), Failure):
        detail = type(outcome.error)
    return type(event), event.pipeline, event.policy, event.operation, detail
