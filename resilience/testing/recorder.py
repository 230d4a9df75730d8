"""A recorder of events, with assertions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TypeVar, final

from resilience import events
from resilience.events import Event
from resilience.outcome import Failure, Success

E = TypeVar("E", bound=Event)


@final
class Recorder:
    """A listener that stores every event. Pass it to `wrap(..., listeners=[recorder])`, or use `recording()`.

    >>> from resilience import Retry
    >>> from resilience.events import AttemptFailed, RetryScheduled
    >>> from resilience.testing import recording, script
    >>> with recording() as recorder:
    ...     Retry(backoff=[0]).call(script(ConnectionError("reset"), "fine"))
    'fine'
    >>> recorder.assert_happened(RetryScheduled, times=1, attempt=1, delay=0)
    >>> print(recorder)
    +0 s  Retry  AttemptFailed attempt=1 outcome=ConnectionError('reset') ...
    """

    def __init__(self) -> None:
        #: The events, in order.
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Store an event."""
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def kinds(self) -> list[type[Event]]:
        """The kinds of the events, in order."""
        return [type(event) for event in self.events]

    def clear(self) -> None:
        """Remove all events."""
        self.events.clear()

    def assert_happened(self, kind: type[Event], *, times: int | None = None, **numbers: object) -> None:
        """Raise `AssertionError` unless there were events of a kind with these field values.

        :param times: how many; at least one by default.
        :param numbers: fields of the event, and the values that they must have.
        """
        __tracebackhide__ = True  # pytest shows the line of the test instead
        if not (isinstance(kind, type) and issubclass(kind, Event)):
            raise TypeError(f"kind must be an event class of resilience.events, not {kind!r}")
        known = {field.name for field in fields(kind)}
        if not known >= numbers.keys():
            raise TypeError(f"{kind.__name__} has no {', '.join(sorted(numbers.keys() - known))}")
        found = sum(all(getattr(it, name) == value for name, value in numbers.items()) for it in self.of(kind))
        is_as_wanted = found > 0 if times is None else found == times
        if not is_as_wanted:
            wanted = "at least once" if times is None else f"{times} times"
            raise AssertionError(f"{_text(kind, numbers)} should have happened {wanted}, not {found} times, in\n{self}")

    def assert_never(self, kind: type[Event], **numbers: object) -> None:
        """Raise `AssertionError` if there was an event of a kind with these field values."""
        __tracebackhide__ = True
        self.assert_happened(kind, times=0, **numbers)

    def assert_sequence(self, *kinds: type[Event]) -> None:
        """Raise `AssertionError` unless exactly these kinds of events happened, in this order."""
        __tracebackhide__ = True
        if self.kinds != list(kinds):
            wanted = ", ".join(kind.__name__ for kind in kinds) or "nothing"
            raise AssertionError(f"{wanted} should have happened, not\n{self}")

    def __str__(self) -> str:
        if not self.events:
            return "(no events)"
        began = self.events[0].time
        return "\n".join(f"+{event.time - began:g} s  {event.policy}  {_numbers_of(event)}" for event in self.events)


@contextmanager
def recording(*kinds: type[Event]) -> Iterator[Recorder]:
    """Record the events of all policies in this process (those of the given kinds) while the block runs."""
    recorder = Recorder()
    unsubscribe = events.subscribe(recorder, *kinds)
    try:
        yield recorder
    finally:
        unsubscribe()


def _text(kind: type[Event], numbers: dict[str, object]) -> str:
    return " ".join([kind.__name__, *(f"{name}={_short(value)}" for name, value in numbers.items())])


def _numbers_of(event: Event) -> str:
    common = {field.name for field in fields(Event)}
    own = [(it.name, getattr(event, it.name), it.default) for it in fields(event) if it.name not in common]
    return _text(type(event), {name: value for name, value, default in own if value != default})


def _short(value: object) -> str:
    if isinstance(value, Failure):
        return repr(value.error)
    if isinstance(value, Success):
        return repr(value.value)
    return f"{value:g}" if isinstance(value, float) else str(value)
