"""The answers of a web service when a policy has refused a call, or the time is up.

An application that raises is answered by the server with 500. Frameworks answer by themselves, before a middleware
around them sees the error: Flask and Django send a signal then, which is listened to here.
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
    """A whole response, in plain text.

    :param retry_after: in seconds, for `Retry-After`; None to leave that out.
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


#: Says what to answer to an error; None for one that is the application's own affair.
Answering: TypeAlias = Callable[[Exception], "Answer | None"]

TOO_LATE = Answer(504, "Gateway Timeout", "the deadline of the request has passed\n")
_TOO_SLOW = Answer(504, "Gateway Timeout", "there was no answer in time\n")
_TOO_MANY = Answer(429, "Too Many Requests", "there are too many requests\n")
_REFUSED = Answer(503, "Service Unavailable", "the service is not available now\n")


def answer_to(error: Exception) -> Answer | None:
    """Return 429 for a call over a rate, 503 for another refusal, 504 if the time is up; None for any other error.

    A group is answered if each error in it is; the latest `Retry-After` holds. The body names nothing: what an error
    says may be about the request of another caller.
    """
    if isinstance(error, ExceptionGroup):
        answers = [answer_to(each) for each in error.exceptions]
        known = [each for each in answers if each is not None]
        latest = max(known, key=lambda it: (it.status != 504, it.retry_after or 0), default=None)
        return latest if len(known) == len(answers) else None
    if isinstance(error, Rejected):
        answer, wait = _TOO_MANY if isinstance(error, RateLimited) else _REFUSED, error.retry_after
        return answer if wait is None or not isfinite(wait) else answer._replace(retry_after=max(1, ceil(wait)))
    if isinstance(error, TimeoutExceeded):
        return TOO_LATE if isinstance(error, DeadlineExceeded) else _TOO_SLOW
    return None


# --- frameworks ------------------------------------------------------------------------------

_FRAMEWORKS = frozenset({"flask.signals", "django.core.signals"})
_heard: set[str] = set()  # those whose signal we are connected to: a framework may be imported late
_noticed: ContextVar[Noticed | None] = ContextVar("resilience.noticed", default=None)


@final
class Noticed:
    """A block in which the errors are noticed that a framework answers by itself.

    It keeps what is to be answered, and not the errors: they refer to frames, which refer to the request.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._answer: Answer | None = None
        self._outer: Noticed | None = None

    def __enter__(self) -> None:
        for name in _FRAMEWORKS:
            if name not in _heard and name in sys.modules:
                sys.modules[name].got_request_exception.connect(_notice, weak=False)  # twice does no harm
                _heard.add(name)
        self._outer = _noticed.get()
        _noticed.set(self)

    def __exit__(self, *_: object) -> None:
        _noticed.set(self._outer)

    def answer_in_place_of(self, status: int) -> Answer | None:
        """Return what is to be answered where a framework answers with this status; None to let it."""
        return self._answer if status == 500 else None

    def note(self, error: Exception) -> None:
        """Decide what is to be answered to an error that the framework has caught."""
        self._answer = self._answering(error)


def _notice(sender: object = None, exception: Exception | None = None, **_: Any) -> None:
    error = exception or sys.exc_info()[1]  # Flask hands it over, Django is just handling it
    noticed = _noticed.get()
    if noticed is not None and isinstance(error, Exception):
        noticed.note(error)
