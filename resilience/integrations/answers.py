"""The answers of a web service if a policy has refused a call, or if the time is up.

If an application raises, the server answers 500. Flask and Django answer an error themselves, before a middleware
around them sees it. They send a signal then, which this module receives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from math import ceil, isfinite
from typing import Any, NamedTuple, TypeAlias, final

from resilience.errors import DeadlineExceeded, RateLimited, Rejected, TimeoutExceeded

__all__ = ["Answer", "answer_to"]


class Answer(NamedTuple):
    """A complete response, in plain text.

    :param retry_after: the seconds for `Retry-After`; None to leave the header out.
    """

    status: int
    reason: str
    text: str
    retry_after: int | None = None

    @property
    def body(self) -> bytes:
        """The body of the response."""
        return self.text.encode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The headers of the response."""
        headers = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(self.body)))]
        return headers if self.retry_after is None else [*headers, ("retry-after", str(self.retry_after))]


#: Returns the answer to an error; None if the application has to handle it.
Answering: TypeAlias = Callable[[Exception], "Answer | None"]

TOO_LATE = Answer(504, "Gateway Timeout", "the deadline of the request has passed\n")
_TOO_SLOW = Answer(504, "Gateway Timeout", "there was no answer in time\n")
_TOO_MANY = Answer(429, "Too Many Requests", "there are too many requests\n")
_REFUSED = Answer(503, "Service Unavailable", "the service is not available now\n")


def answer_to(error: BaseException) -> Answer | None:
    """Return 429 for a call over a rate, 503 for another refusal, 504 if the time is up; None for any other error.

    A group is answered if each error in it is: a refusal precedes a timeout, and the longest `Retry-After` applies.
    The body contains no details of an error, which may concern the request of another caller.
    """
    if isinstance(error, ExceptionGroup):
        answers = [answer_to(each) for each in error.exceptions]
        known = [each for each in answers if each is not None]
        longest = max(known, key=lambda it: (it.status != 504, it.retry_after or 0), default=None)
        return longest if len(known) == len(answers) else None
    if isinstance(error, Rejected):
        wait = getattr(error, "retry_after", None)  # a user's subclass may not have called `super().__init__`
        answer = _TOO_MANY if isinstance(error, RateLimited) else _REFUSED
        return answer if wait is None or not isfinite(wait) else answer._replace(retry_after=max(1, ceil(wait)))
    if isinstance(error, TimeoutExceeded):
        return TOO_LATE if isinstance(error, DeadlineExceeded) else _TOO_SLOW
    return None


# --- frameworks ------------------------------------------------------------------------------

_FRAMEWORKS = frozenset({"flask.signals", "django.core.signals"})
_connected: set[str] = set()  # the frameworks whose signal is connected; a framework may be imported late
_current: ContextVar[FrameworkErrors | None] = ContextVar("resilience.framework_errors", default=None)


@final
class FrameworkErrors:
    """A block that notes the answer to an error that a framework answers itself.

    It does not keep the error, which refers to frames, which refer to the request.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._answer: Answer | None = None
        self._outer: FrameworkErrors | None = None

    def __enter__(self) -> None:
        for name in _FRAMEWORKS:
            if name not in _connected and name in sys.modules:
                sys.modules[name].got_request_exception.connect(_receive, weak=False)  # connecting twice is harmless
                _connected.add(name)
        self._outer = _current.get()
        _current.set(self)

    def __exit__(self, *_: object) -> None:
        _current.set(self._outer)

    def answer_in_place_of(self, status: int) -> Answer | None:
        """Return the answer that replaces a framework's response with this status; None to keep the response."""
        return self._answer if status == 500 else None

    def note(self, error: Exception) -> None:
        """Determine the answer to an error that the framework has caught, here or in the block around this one."""
        self._answer = self._answering(error)
        if self._answer is None and self._outer is not None:
            self._outer.note(error)


def _receive(sender: object = None, exception: Exception | None = None, **_: Any) -> None:
    error = exception or sys.exc_info()[1]  # Flask passes the error; Django sends the signal while it handles it
    errors = _current.get()
    if errors is not None and isinstance(error, Exception):
        errors.note(error)
