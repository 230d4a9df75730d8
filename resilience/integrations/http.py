"""What the HTTP clients share, knowing none of them: what is transient, what may be sent again, `standard(...)`.

A client's integration runs one `Exchange` through a policy for each request. Inside the policy a response whose
status says "not now" is an exception like a broken connection, a `TransientStatus`: so a plain `Retry()` or
`CircuitBreaker(5)` sees it as the failure that it is. Where one comes out at the end, the client's user gets the
response, as without us.

Sending a request twice can do its work twice. So an exchange knows at any time whether it may be sent again, and
tells it in the two places where a Retry looks: on the failure itself, and, for a call that was cut off by a
Timeout and left no failure of its own, on the function that the policy calls, which is the exchange.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from math import isinf
from typing import Any, Generic, TypeVar, final

from resilience.clock import clock
from resilience.context import Context, current_context
from resilience.errors import DeadlineExceeded, ResilienceError
from resilience.policy import Policy
from resilience.runtimes.blocking import BLOCKING, drive
from resilience.runtimes.tasks import TASKS

__all__ = [
    "IDEMPOTENT_METHODS",
    "TRANSIENT_STATUSES",
    "Exchange",
    "NotRepeatable",
    "Rules",
    "TransientStatus",
    "retry_after",
]

R = TypeVar("R")

#: Statuses with which a server, or a proxy before it, says "not now": another try may be answered.
TRANSIENT_STATUSES: frozenset[int] = frozenset({408, 425, 429, 502, 503, 504})

#: Methods for which two requests have the effect of one (RFC 9110, 9.2.2).
IDEMPOTENT_METHODS: frozenset[str] = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PUT", "TRACE"})

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?")


class TransientStatus(ResilienceError):
    """A response whose status says "not now", as the failure that it is to policies.

    `Retry` handles it by default. It lives inside of a policy: what leaves the client is the response.

    :param status: the status code.
    :param response: the client's response. Closed by a Retry that makes another attempt; left out by pickling.
    :param retry_after: how many seconds the server asks to wait; None if it does not.
    """

    #: Whether the request may be sent again. Where it is False, no Retry does.
    repeatable: bool = True

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
        return type(self), self.args, {**vars(self), "response": None}


class NotRepeatable(ResilienceError):
    """A policy tried to send a request again that may not be sent twice. Nothing was sent."""

    repeatable: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which responses are failures, and which requests may be sent again.

    :param statuses: statuses that policies see as a failure. 500 is not one of them by default: it is as often a
        bug that will be there at the next try. `TRANSIENT_STATUSES | {500}` adds it.
    :param methods: methods that may be sent again after they may have been carried out.
    :param idempotency_header: a request with this header may be sent again whatever its method, because the
        server knows a repetition when it sees one.

    >>> from resilience.integrations.http import Rules
    >>> rules = Rules()
    >>> rules.why_not_again("POST", {}, sent=True)
    'POST may have been carried out, and carries no Idempotency-Key'
    >>> rules.why_not_again("POST", {"Idempotency-Key": "4711"}, sent=True)
    """

    statuses: Collection[int] = TRANSIENT_STATUSES
    methods: Collection[str] = IDEMPOTENT_METHODS
    idempotency_header: str = "Idempotency-Key"

    def __post_init__(self) -> None:
        object.__setattr__(self, "statuses", _statuses(self.statuses))
        object.__setattr__(self, "methods", _methods(self.methods))
        if not isinstance(self.idempotency_header, str):
            raise TypeError(f"idempotency_header must be a string, not {self.idempotency_header!r}")
        if not self.idempotency_header:
            raise ValueError("idempotency_header must not be empty")

    def is_transient(self, status: int) -> bool:
        """Whether a response with this status is a failure."""
        return status in self.statuses

    def why_not_again(
        self, method: str, headers: Mapping[str, str], *, sent: bool, replayable: bool = True
    ) -> str | None:
        """Return why a request must not be sent again, None if it may.

        :param headers: those of the request.
        :param sent: whether it may have reached the server. False where it provably has not: connecting failed.
        :param replayable: whether its body can be produced a second time. False for a generator or a file.
        """
        if not sent:
            return None
        if not replayable:
            return "its body can be sent only once"
        if method.upper() in self.methods or (_header(headers, self.idempotency_header) or "").strip():
            return None
        return f"{method.upper()} may have been carried out, and carries no {self.idempotency_header}"

    def failure_of(self, status: int, headers: Mapping[str, str], response: object) -> TransientStatus | None:
        """Return the error that stands for a response inside of a policy; None for a response that is none."""
        if status not in self.statuses:
            return None
        return TransientStatus(
            f"the server answered {status}{_phrase(status)}",
            status=status,
            response=response,
            retry_after=retry_after(headers),
        )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds a response asks to wait, from `retry-after-ms` or `Retry-After`; None for none.

    Takes digits, decimals, and for `Retry-After` an HTTP date, where one without a zone is UTC. Negative numbers and
    dates in the past are 0. What cannot be understood is none. There is no upper bound: a Retry compares the wait
    with the time that is left.

    >>> from resilience.integrations.http import retry_after
    >>> (
    ...     retry_after({"Retry-After": "120"}),
    ...     retry_after({"retry-after-ms": "250"}),
    ...     retry_after({"Retry-After": "soon"}),
    ... )
    (120.0, 0.25, None)
    """
    milliseconds = _number(_header(headers, "retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = _header(headers, "retry-after")
    seconds = _number(text)
    return _seconds_until(text) if seconds is None else seconds


class Exchange(ABC, Generic[R]):
    """One request on its way through a policy: the function that the policy calls for each attempt.

    A client's integration derives from it and writes `__call__(ctx)` (`async def` for an asynchronous client):
    `begin()`, then send what the context leaves time for, then `failed(error, sent=...)` for what that raises, or
    `received(...)` with the response. `run(policy)` or `arun(policy)` does the rest: it returns a response that is
    open, and closes all others: those that lost to a fallback, those inside of errors, those that came too late.

    :param rules: what is transient and what may be sent again.
    :param replayable: whether the body can be produced a second time.
    :param host: for the name of the operation, `GET example.org`, where the ambient context has none.
    """

    def __init__(self, rules: Rules, method: str, headers: Mapping[str, str], *, replayable: bool, host: str) -> None:
        self._rules = rules
        self._method = method
        self._headers = headers
        self._replayable = replayable
        self._host = host
        self._why_not_again: str | None = None
        self._lock = threading.Lock()  # an attempt that was walked away from ends in its own time
        self._open: list[R] = []
        self._is_over = False

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent again, after all that has happened. A Retry asks this."""
        return self._why_not_again is None

    @abstractmethod
    def __call__(self, ctx: Context) -> Any:
        """Send the request once, within what `ctx` leaves time for, and return the response."""

    # --- for `__call__` ---

    def begin(self) -> None:
        """Say that the request is about to be sent.

        :raises NotRepeatable: if it must not be, because it may have been sent before.
        """
        if self._why_not_again is not None:
            raise NotRepeatable(f"the request was not sent again: {self._why_not_again}")
        # Until the client tells more, the request may be under way: a Timeout tells nothing.
        self._why_not_again = self._why_not(sent=True)

    def failed(self, error: Exception, *, sent: bool) -> None:
        """Note what the client raised, and mark it if the request must not be sent again.

        :param sent: whether the request may have reached the server.
        """
        self._why_not_again = self._why_not(sent=sent)
        self._mark(error)

    def received(self, response: R, status: int, headers: Mapping[str, str], ctx: Context) -> R:
        """Return a response, or raise the `TransientStatus` that it stands for.

        :raises DeadlineExceeded: if it came after the caller had left. It was closed then.
        """
        timer = ctx._timer
        with self._lock:
            late = self._is_over or (ctx.runtime is BLOCKING and timer is not None and clock.now() >= timer.deadline)
            if not late:
                self._open.append(response)
        if late:
            # Nobody else would close it. (Tasks are cancelled, not left behind: there it is always in time.)
            drive(BLOCKING.close(response), type(self).__qualname__)
            raise DeadlineExceeded("the response came after its time")
        failure = self._rules.failure_of(status, headers, response)
        if failure is None:
            return response
        self._mark(failure)
        try:
            raise failure
        finally:
            del failure

    # --- for the integration ---

    def run(self, policy: Policy[Any]) -> Any:
        """Run this exchange through a policy in blocking code, and return the response (or a fallback's answer)."""
        kept: Any = None
        try:
            kept = policy.execute(self, self._context())
        except TransientStatus as error:
            kept = self._own(error)
        finally:
            for response in self._end(kept):
                drive(BLOCKING.close(response), type(self).__qualname__)
        return kept

    async def arun(self, policy: Policy[Any]) -> Any:
        """Do the same in a task."""
        kept: Any = None
        try:
            kept = await policy.aexecute(self, self._context())
        except TransientStatus as error:
            kept = self._own(error)
        finally:
            for response in self._end(kept):
                await TASKS.close(response)
        return kept

    def _context(self) -> Context:
        outer = current_context()
        return Context(operation=outer.operation or f"{self._method} {self._host}", properties=outer.properties)

    def _own(self, error: TransientStatus) -> Any:
        """Return the response of this exchange that an error stands for; raise the error if there is none."""
        if not any(it is error.response for it in self._open):
            raise error
        return error.response

    def _end(self, kept: object) -> Iterable[R]:
        """Say that nobody waits any more, and return the responses that are to be closed."""
        with self._lock:
            self._is_over = True
            return [it for it in self._open if it is not kept]

    def _why_not(self, *, sent: bool) -> str | None:
        return self._rules.why_not_again(self._method, self._headers, sent=sent, replayable=self._replayable)

    def _mark(self, error: Exception) -> None:
        if self._why_not_again is not None:
            try:
                error.repeatable = False  # type: ignore[attr-defined]
                error.add_note(f"the request is not sent again: {self._why_not_again}")
            except Exception:  # one that refuses attributes: the exchange says it as well
                return


# --- reading what others wrote ---------------------------------------------------------------


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header by its name in any case, from a client's own mapping or a plain dictionary."""
    value = headers.get(name)
    if value is None:
        value = next((it for key, it in headers.items() if key.lower() == name.lower()), None)
    return value


def _number(text: str | None) -> float | None:
    if text is None or not _NUMBER.fullmatch(text.strip()):
        return None
    value = float(text)
    return None if isinf(value) else max(0.0, value)


def _seconds_until(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        instant = parsedate_to_datetime(date)
        if instant.tzinfo is None:
            instant = instant.replace(tzinfo=UTC)
        return max(0.0, (instant - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError, IndexError, OverflowError):
        return None


def _phrase(status: int) -> str:
    try:
        return f" ({HTTPStatus(status).phrase.lower()})"
    except ValueError:
        return ""


def _statuses(value: Collection[int]) -> frozenset[int]:
    statuses = frozenset(value)
    for each in statuses:
        if isinstance(each, bool) or not isinstance(each, int):
            raise TypeError(f"statuses must be whole numbers, not {each!r}")
        if not 100 <= each <= 599:
            raise ValueError(f"statuses must lie between 100 and 599, not {each!r}")
    return statuses


def _methods(value: Collection[str]) -> frozenset[str]:
    if isinstance(value, str):
        raise TypeError(f"methods must be a collection of names, not {value!r}")
    for each in value:
        if not isinstance(each, str) or not each:
            raise TypeError(f"methods must be names, not {each!r}")
    return frozenset(each.upper() for each in value)
