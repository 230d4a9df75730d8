"""The attempt that all HTTP clients share, and the exchange: one request on its way through a policy.

An exchange is the function that the policy calls. Each call is one attempt, and all attempts go the same way:

    begin       Is there time left? May the request be sent (again)? The body is rewound.
    send        The client sends, within what is left.
    failed      What the error says is noted: whether the server may have the request, and whose time was over.
    judged      The status makes the response an answer, or a failure (`TransientStatus`).

Then the response that the policy chose is returned, open and with its body limited, and all others are closed: those
that lost to a fallback, those inside of errors, those that came too late.

A client is described by a class that says how it sends, what its errors mean, and how the time of a body is limited.

Sending a request twice can do its work twice. From the moment an attempt begins, the request counts as sent, because
a `Timeout` that cuts it off tells nothing; what the client raises may show that it was not. The exchange says so in
the two places where a Retry looks: on the failure (`repeatable`), and on itself, the function that is called.
With an idempotency key, the caller's or one that an `IdempotencyKey` has made for this execution, it may be repeated.

Attempts can overlap: a thread that a `Timeout` has abandoned continues, and a policy may hedge. So what an attempt is
given is its own (`Attempt`), what all share stands behind one lock, and an attempt that was left behind has no say. Its
response is closed as soon as it comes, by the exchange itself, which knows when the attempt's time was over.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import urlsplit

import anyio
from typing_extensions import override

from resilience.ambient import get_ambient, innermost_open
from resilience.clock import clock
from resilience.context import Context, is_over
from resilience.errors import DeadlineExceeded, Rejected, TimeoutExceeded
from resilience.execution import aprotect, protect
from resilience.integrations.http.bodies import IN_MEMORY, STILL_READ, Body
from resilience.integrations.http.limits import hear
from resilience.integrations.http.perhost import policy_for
from resilience.integrations.http.rules import NotRepeatable, TransientStatus
from resilience.integrations.http.settings import Settings
from resilience.integrations.wire import OfHost
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS
from resilience.work.idempotency import key_for

#: Seconds that closing a discarded response may take in a task, also where its caller is cancelled. It takes no time
#: unless something is broken: a closing handshake with a server that does not answer.
CLOSING_GRACE: Final = 2.0


#: Where nothing is added to them.
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Attempt(NamedTuple):
    """What one attempt is given."""

    ctx: Context
    left: float | None  #: seconds; None for no limit
    headers: Mapping[str, str]  #: to be added to those of the request

    @property
    def is_cut_off(self) -> bool:
        """Whether a timer ends it when its time is over."""
        return cut_off_at(self.ctx) <= self.ctx.deadline < inf


class Exchange:
    """One request on its way through a policy. A client's description derives from one of the two below.

    :param body: what the client reads while it sends.
    """

    #: What the client returns.
    response_type: Any
    #: What it raises before anything can have reached the server, and where a wait was too long.
    never_sent: ClassVar[tuple[type[Exception], ...]] = ()
    timed_out: ClassVar[tuple[type[Exception], ...]] = (TimeoutError,)
    #: Whether threads of its own read files, and perhaps go on when an attempt has ended.
    reads_in_threads: ClassVar[bool] = False

    #: Lets the body take longer than the attempt that brings it.
    body_may_last_until: float | None = None

    _resilience_asks_for_chosen: ClassVar[bool] = True  # of a Keyed: limiters in them obey the response
    _in_tasks: ClassVar[bool]
    _is_over = False
    _why_not_again: str | None = None
    _budget = inf  # the deadline that the caller has set
    _deadline_of_body = inf

    def __init__(
        self, settings: Settings, method: str, url: object, headers: Mapping[str, str], body: Body = IN_MEMORY
    ) -> None:
        self.settings = settings
        self._method = method
        self._url = url
        self._headers = headers
        self._body = body
        self._lock = threading.Lock()
        self._open: list[tuple[Any, float]] = []  # responses, and the deadlines of the attempts that brought them
        #: Why the request must not be sent again once the server may have it; None if it may.
        self.why_not_once_sent: str | None = settings.rules.why_not_again(
            method, headers, sent=True, replayable=body.can_be_sent_again
        )

    def __getattr__(self, name: str) -> Any:
        """Name the operation, where something asks what is executed."""
        if name != "__qualname__":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return OfHost(f"{self._method} {urlsplit(str(self._url)).hostname or ''}", common=self._method)

    # --- what a client's description says ---

    @abstractmethod
    def send(self, attempt: Attempt) -> Any:
        """Send the request once, within `attempt.left`, and return the response; in a task, an awaitable of it."""

    def status_of(self, response: Any) -> tuple[int, Mapping[str, str]]:
        """Return status and headers of a response."""
        return response.status, response.headers

    def limit(self, response: Any) -> Any:
        """Return a response whose body fails where it is not read by `body_deadline`."""
        return response

    def may_have_been_sent(self, error: Exception) -> bool:
        """Whether the server may have the request, after the client has raised this."""
        return not isinstance(error, self.never_sent)

    def has_timed_out(self, error: Exception) -> bool:
        """Whether the client says that it has waited too long."""
        return isinstance(error, self.timed_out)

    def proxy_refusal(self, error: Exception) -> int | None:
        """Return the status with which a proxy has refused to connect, where this error says so."""
        return None

    def was_never_sent(self) -> bool:
        """Whether the client knows that an attempt which was cut off had not begun to send."""
        return False

    def why_not_now(self) -> str | None:
        """Return why no attempt may begin any more, whatever has been sent; None if one may."""
        return "its client was closed" if self.settings.client_is_closed else None

    # --- whether it may be sent again ---

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent again, after all that has happened. A Retry asks this."""
        return self.why_not_again is None

    @property
    def why_not_again(self) -> str | None:
        """Why the request must not be sent again; None if it may."""
        if self._is_over:
            return "its caller has left"
        if (reason := self.why_not_now()) is not None:
            return reason
        if self._why_not_again is not None and not self.was_never_sent():
            return self._why_not_again
        return STILL_READ if self._body.is_being_read else None

    @cached_property
    def _has_own_key(self) -> bool:
        """Whether its caller has given it a key. Asked before an attempt adds one to the headers."""
        return self.settings.rules.has_key(self._headers)

    # --- the attempt ---

    async def _attempt(self, ctx: Context) -> Any:
        attempt = self._begin(ctx)
        try:
            response = self.send(attempt)
            if self._in_tasks:
                response = await response
        except Exception as error:
            self._failed(error, attempt)
            raise
        finally:
            if not self.reads_in_threads:
                self._body.end()
        if not self._keep(response, ctx):
            await self._close(response)
            raise DeadlineExceeded("the response came after its time")
        return self._judged(response, ctx)

    def _begin(self, ctx: Context) -> Attempt:
        left = ctx.timeout()
        propagation = self.settings.propagation
        headers = propagation.headers_for(str(self._url), ctx) if propagation.hosts else NO_HEADERS
        if (reason := self.why_not_again) is not None:
            raise NotRepeatable(f"the request was not sent again: {reason}")
        self._why_not_again = self.why_not_once_sent
        if (key := key_for(ctx)) is not None and not self._has_own_key:
            rules, body = self.settings.rules, self._body
            headers = {**headers, rules.idempotency_header: key}
            self._why_not_again = rules.why_not_again(
                self._method, headers, sent=True, replayable=body.can_be_sent_again
            )
        self._body.begin()
        return Attempt(ctx, left, headers)

    def _failed(self, error: Exception, attempt: Attempt) -> None:
        """Note what the client raised; raise what it means, where its timeout was the end of our time."""
        refusal = self.proxy_refusal(error)
        sent = refusal is None and not isinstance(error, Rejected) and self.may_have_been_sent(error)
        if not sent and self.reads_in_threads:
            self._body.end()
        if not sent and not self._was_left_behind(attempt.ctx):
            self._why_not_again = "the proxy asks for a login" if refusal == 407 else None
        self._mark(error)
        if is_over(attempt.ctx) and self.has_timed_out(error):
            raise DeadlineExceeded("the time that was left ran out while the server was asked") from error

    def _keep(self, response: Any, ctx: Context) -> bool:
        """Keep a response until the exchange is over; false if it comes too late, and is to be closed."""
        with self._lock:
            if self._is_over or self._was_left_behind(ctx):
                return False
            if self._open:  # bounded, however many come
                self._open = [it for it in self._open if not _is_closed(it[0])]
            self._open.append((response, ctx.deadline))
            return True

    def _judged(self, response: Any, ctx: Context) -> Any:
        status, headers = self.status_of(response)
        hear(ctx, headers)
        failure = self.settings.rules.failure_of(status, headers, response)
        if failure is None:
            return response
        self._mark(failure)
        try:
            raise failure
        finally:
            del failure  # no cycle

    def _was_left_behind(self, ctx: Context) -> bool:
        """Whether the caller has abandoned this attempt. An abandoned task is cancelled, so it returns nothing."""
        return not self._in_tasks and clock.now() >= cut_off_at(ctx)

    def _mark(self, error: Exception) -> None:
        if (reason := self.why_not_again) is not None and getattr(error, "repeatable", True) is not False:
            try:
                error.repeatable = False  # type: ignore[attr-defined]
                error.add_note(f"the request is not sent again: {reason}")
            except Exception:  # one that refuses attributes: the exchange says it as well
                return

    # --- around the attempts ---

    async def _run(self) -> Any:
        outer = innermost_open(get_ambient())
        if outer is not None:
            self._budget = outer.deadline
        policy = policy_for(self.settings.policies, self._url)
        attempt: Any = self
        kept: Any = None
        try:  # and not by `execute`, which would look whether this is asynchronous
            if self._in_tasks:
                kept = await aprotect(policy, attempt, takes_context=True)()
            else:
                kept = protect(policy, attempt, takes_context=True)()
        except Exception as error:
            kept = self._answer_in(error)
            if kept is None:
                raise
        finally:
            if discarded := self._end(kept):
                await self._close(*discarded)
        if not isinstance(kept, self.response_type):
            raise TypeError(f"a policy answered with {kept!r}; a Fallback here answers with {self.response_type}")
        return self.limit(kept)

    def _answer_in(self, error: Exception) -> Any:
        """Return the response that an error stands for; None for any other error, which will be raised."""
        if isinstance(error, TransientStatus) and any(it is error.response for it, _ in self._open):
            return error.response
        self._mark(error)  # also one that a policy made, and the client had no part in
        return None

    def _end(self, kept: object) -> list[Any]:
        """End the exchange, and return the responses that are to be closed."""
        with self._lock:
            self._is_over = True
            received, self._open = self._open, []  # the one that is kept may hold on to us, for its body
        self._let_go()
        longer = self.body_may_last_until
        discarded = []
        for response, deadline in received:
            if response is not kept:
                discarded.append(response)
            else:  # a fallback's response has a time of its own, if any
                self._deadline_of_body = deadline if longer is None else longer
        return discarded

    def _let_go(self) -> None:
        """Forget what was sent, which may be large.

        A context keeps the function that it calls, and a connection in a client's pool keeps the context that it was
        made in: so it keeps the exchange, for as long as it is open.
        """
        self._body = IN_MEMORY

    @abstractmethod
    async def _close(self, *responses: Any) -> None: ...

    # --- the time of the body ---

    @property
    def body_deadline(self) -> float:
        """The instant at which the body of the response has to be read; infinity for no limit."""
        return self._deadline_of_body if self.settings.rules.limit_body else inf

    def body_is_late(self) -> TimeoutExceeded:
        """Return the error for a body that is not read by then."""
        kind = DeadlineExceeded if self._deadline_of_body >= self._budget else TimeoutExceeded
        return kind("the time was over before the whole body was read; Rules(limit_body=False) lets bodies take longer")


class BlockingExchange(Exchange):
    """An exchange of a blocking client."""

    _in_tasks = False

    def __call__(self, ctx: Context) -> Any:
        """Make one attempt."""
        return drive(self._attempt(ctx))

    def run(self) -> Any:
        """Run the request through its policy, and return the response (or a fallback's answer)."""
        return drive(self._run())

    @override
    async def _close(self, *responses: Any) -> None:
        for response in responses:
            await BLOCKING.close(response)


class TaskExchange(Exchange):
    """An exchange of an asynchronous client."""

    _in_tasks = True

    def __call__(self, ctx: Context) -> Coroutine[Any, Any, Any]:
        """Make one attempt."""
        return self._attempt(ctx)

    def run(self) -> Coroutine[Any, Any, Any]:
        """Run the request through its policy; awaited, it is the response (or a fallback's answer)."""
        return self._run()

    @override
    async def _close(self, *responses: Any) -> None:
        async with AsyncExitStack() as closing:  # each of them, also where the task is cancelled in the middle of one
            for response in responses:
                closing.push_async_callback(_close_in_time, response)


def exchange_of(ctx: Context) -> Exchange | None:
    """Return the exchange that is executed with this context; None if it is another function."""
    function = ctx._function
    return function if isinstance(function, Exchange) else None


def cut_off_at(ctx: Context) -> float:
    """Return the instant at which a timer cuts off what runs with this context; infinity for none."""
    timer = ctx._timer
    return inf if timer is None else timer.deadline


async def _close_in_time(response: Any) -> None:
    with anyio.move_on_after(CLOSING_GRACE, shield=True):
        await TASKS.close(response)


def _is_closed(response: Any) -> bool:
    """Whether a response says of itself that it is closed, in one of the ways in which clients' responses do."""
    holders = (response, getattr(response, "raw", None))
    return any(getattr(it, "is_closed", False) is True or getattr(it, "closed", False) is True for it in holders)
