"""Which responses are failures, how long to wait, and which requests may be sent again."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from math import isinf
from time import time
from typing import Any, Final, final

from resilience import checks
from resilience.errors import ResilienceError

#: Statuses with which a server, or a proxy before it, says "not now": another attempt may succeed.
TRANSIENT_STATUSES: frozenset[int] = frozenset({408, 425, 429, 502, 503, 504})

#: Methods for which two requests have the same effect as one (RFC 9110, 9.2.2).
IDEMPOTENT_METHODS: frozenset[str] = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PUT", "TRACE"})

#: Two clocks agree if they seem to differ by less than so many seconds.
_CLOCKS_AGREE: Final = 2.0

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?")


class TransientStatus(ResilienceError):
    """A response whose status means "not now", as policies see it: a failure.

    `Retry` handles it by default. Only policies and listeners see it; the user of the client gets the response.

    :param status: the status code.
    :param response: the client's response. A Retry closes it before another attempt; a pickle does not contain it.
    :param retry_after: how many seconds the server asks to wait; None if it does not.
    """

    repeatable: bool = True
    """Whether the request may be sent again. If it is False, a Retry gives up."""
    _exchange: object = None  # refers to the exchange whose response it stands for

    def __init__(
        self,
        message: str = "",
        *,
        policy: str | None = None,
        status: int | None = None,
        response: object = None,
        retry_after: float | None = None,
    ) -> None:
        self.policy = policy
        self.status: int | None = status
        self.response: Any = response
        self.retry_after: float | None = retry_after

    def __reduce__(self) -> Any:
        """Pickle everything but the response, which holds a connection."""
        return type(self), self.args, {**vars(self), "response": None, "_exchange": None}


class NotRepeatable(ResilienceError):
    """A request that must not be sent twice was about to be sent again. Nothing was sent."""

    repeatable: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which responses are failures, and which requests may be sent again.

    :param statuses: statuses that policies see as a failure. 500 is not one of them by default, because it is as often
        a bug that fails again on the next attempt. `TRANSIENT_STATUSES | {500}` adds it.
    :param methods: methods that may be sent again after they may have been executed.
    :param idempotency_header: a request with this header may be sent again regardless of its method, because the server
        recognises a repetition.
    :param limit_body: whether the time limit of an attempt also covers a body that is read after the policy has ended.
        False for endless streams.

    >>> from resilience.integrations.http import Rules
    >>> rules = Rules()
    >>> rules.why_not_again("POST", {}, sent=True)
    'POST may have been carried out, and carries no Idempotency-Key'
    >>> rules.why_not_again("POST", {"Idempotency-Key": "4711"}, sent=True)
    """

    statuses: Collection[int] = TRANSIENT_STATUSES
    methods: Collection[str] = IDEMPOTENT_METHODS
    idempotency_header: str = "Idempotency-Key"
    limit_body: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "statuses", _statuses(self.statuses))
        object.__setattr__(self, "methods", _methods(self.methods))
        if not checks.instance("idempotency_header", self.idempotency_header, str, "a string"):
            raise ValueError("idempotency_header must not be empty")
        checks.flag("limit_body", self.limit_body)

    def is_transient(self, status: int) -> bool:
        """Whether a response with this status is a failure."""
        return status in self.statuses

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers carries an idempotency key."""
        return bool(_header(headers, self.idempotency_header).strip())

    def why_not_again(
        self, method: str, headers: Mapping[str, str], *, sent: bool, replayable: bool = True
    ) -> str | None:
        """Return why a request must not be sent again; None if it may be sent again.

        :param headers: the headers of the request.
        :param sent: whether it may have reached the server. False only if it certainly has not: connecting failed.
        :param replayable: whether its body can be sent a second time. False for a generator or a pipe.
        """
        if not sent:
            return None
        if not replayable:
            return "its body can be sent only once"
        if method.upper() in self.methods or self.has_key(headers):
            return None
        return f"{method.upper()} may have been carried out, and carries no {self.idempotency_header}"

    def failure_of(self, status: int, headers: Mapping[str, str], response: object) -> TransientStatus | None:
        """Return the error that represents a response inside a policy; None if the response is not a failure."""
        if status not in self.statuses:
            return None
        return TransientStatus(
            f"the server answered {status}{_phrase(status)}",
            status=status,
            response=response,
            retry_after=retry_after(headers),
        )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds a response asks to wait, from `retry-after-ms` or `Retry-After`; None if it does not.

    Parses digits, decimals, and for `Retry-After` also an HTTP date, which is UTC if it has no zone. A date is compared
    with the `Date` of the response, if it has one, as the clocks of two machines differ. Negative numbers and dates in
    the past are 0. Values that cannot be parsed are ignored. There is no upper bound, because a Retry compares the wait
    with the time left.

    >>> from resilience.integrations.http import retry_after
    >>> (
    ...     retry_after({"Retry-After": "120"}),
    ...     retry_after({"retry-after-ms": "250"}),
    ...     retry_after({"Retry-After": "soon"}),
    ... )
    (120.0, 0.25, None)
    """
    milliseconds = _number(str(_header(headers, "retry-after-ms")))
    if milliseconds is not None:
        return milliseconds / 1000
    text = str(_header(headers, "retry-after"))
    seconds = _number(text)
    if seconds is None and (instant := _timestamp(text)) is not None:
        return max(0.0, instant - server_time(_header(headers, "date"), _header(headers, "age")))
    return seconds


def server_time(date: object, age: object) -> float:
    """Return the time on the clock of a server, as a timestamp: an instant that it names is on that clock.

    It is the time on this machine if the server does not tell its own, or if the two differ by less than a `Date` can
    show, which has whole seconds, and takes time to arrive.

    :param date: the header `Date`, the time at which the response was made.
    :param age: the header `Age`, for how many seconds a cache has kept it since then.
    """
    here, made = time(), _timestamp(str(date))
    there = here if made is None else made + (_number(str(age)) or 0.0)
    return here if abs(there - here) < _CLOCKS_AGREE else there


def _header(headers: Mapping[str, str], name: str) -> str:
    """Return a header by its name, in any case, from a client's mapping or a plain dictionary; empty if missing."""
    value = headers.get(name)
    if value is None:
        value = next((it for key, it in headers.items() if key.lower() == name.lower()), "")
    return value


def _number(text: str) -> float | None:
    if not _NUMBER.fullmatch(text.strip()):
        return None
    value = float(text)
    return None if isinf(value) else max(0.0, value)


def _timestamp(date: str) -> float | None:
    try:
        instant = parsedate_to_datetime(date)
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):
        return None


def _phrase(status: int) -> str:
    try:
        return f" ({HTTPStatus(status).phrase.lower()})"
    except ValueError:
        return ""


def _statuses(value: Collection[int]) -> frozenset[int]:
    statuses = frozenset(checks.several("statuses", value, "a collection of whole numbers"))
    for each in statuses:
        if isinstance(each, bool) or not isinstance(each, int):
            raise TypeError(f"statuses must be whole numbers, not {each!r}")
        if not 100 <= each <= 599:
            raise ValueError(f"statuses must lie between 100 and 599, not {each!r}")
    return statuses


def _methods(value: Collection[str]) -> frozenset[str]:
    methods = checks.several("methods", value, "a collection of names")
    for each in methods:
        if not isinstance(each, str) or not each:
            raise TypeError(f"methods must be names, not {each!r}")
    return frozenset(each.upper() for each in methods)


#: The default: which responses are failures, and which requests may be sent again.
DEFAULT_RULES: Final = Rules()
