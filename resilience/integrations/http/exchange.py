"""The attempt that all HTTP clients share, and the exchange: one request on its way through a policy.

An exchange is the function that the policy calls. Each call is one attempt, and each attempt takes the same steps:

    count_as_sent  Check that the request may be sent (again). Rewind the body.
    send           Let the client send the request, within the time left.
    note_failure   Find out from an error whether the server may have the request.
    _judge         Decide by the status whether the response is a result or a failure (`TransientStatus`).

Finally the response that the policy chose is returned, open and with a time limit on its body. All other responses are
closed: those that a fallback replaced, those inside errors, and those that came too late.

A subclass describes a client: how it sends, what its errors mean, and how it limits the time of a body. Whether the
request may be sent again is answered by the base class, `Repeatable`.

Attempts can overlap: a thread that a `Timeout` has abandoned continues, and a policy may hedge. If the response of an
abandoned attempt arrives, the exchange closes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit
from weakref import ref

import anyio
from typing_extensions import override

from resilience.ambient import ambient_deadline
from resilience.clock import clock
from resilience.context import Context, waits_until
from resilience.errors import DeadlineExceeded, TimeoutExceeded
from resilience.integrations._calls import ClientCall
from resilience.integrations.http.bodies import IN_MEMORY
from resilience.integrations.http.limits import inform_limiters
from resilience.integrations.http.perhost import policy_for
from resilience.integrations.http.repeatable import Repeatable
from resilience.integrations.http.rules import TransientStatus
from resilience.integrations.wire import OfHost
from resilience.runtimes.base import close_each, has_come
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.tasks import TASKS

#: Seconds that closing a discarded response may take in a task, even if its caller is cancelled. Closing takes no time
#: unless something is broken: for example, a closing handshake with a server that does not answer.
CLOSING_GRACE: Final = 2.0

_WAS_DISCARDED = "time ran out in a wait that took too long, and the last response was closed before it"
_BODY_IS_LATE = "the time was over before the whole body was read; Rules(limit_body=False) lets bodies take longer"


class Exchange(ClientCall, Repeatable):
    """One request on its way through a policy. A client's description derives from this."""

    #: The class of the client's responses.
    response_type: Any
    #: The name of their attribute for the status.
    status_name: ClassVar[str] = "status"
    #: Errors of the client for a wait that was too long.
    timed_out: ClassVar[tuple[type[Exception], ...]] = (TimeoutError,)

    #: What refers to the client's request, besides its body. It may be large, so it is released at the end: a context
    #: refers to the function that it calls, and a connection in a client's pool to the context in which it was created.
    _request: Any = None

    #: The instant by which a body has to be read, if a policy sets another one than the deadline of the attempt.
    body_may_last_until: float | None = None

    _resilience_asks_for_limiters: ClassVar[bool] = True  # to let them obey the headers of responses

    _budget: float  # the deadline of the request, without those of the policies
    _open: dict[int, Any]  # the responses that have arrived, by id; what takes one out closes it

    @property
    def _resilience_operation(self) -> str:
        """The name of the operation, which is built only if something reads it."""
        return OfHost(f"{self._method} {urlsplit(self._url).hostname or ''}", common=self._method)

    # --- the description of a client ---

    @abstractmethod
    async def send(self, ctx: Context, left: float | None, headers: Mapping[str, str]) -> Any:
        """Send the request once, and return the response, with a time limit on its body (`limit_of_body`).

        :param left: the seconds within which the attempt has to end; None for no limit.
        :param headers: to add to the headers of the request.
        """

    def was_discarded(self, response: Any) -> bool:
        """Whether a response was closed before its body was read: by a Retry, whose last wait then took too long.

        This is the answer for httpx, which the SDKs use, too.
        """
        return bool(response.is_closed and not response.is_stream_consumed)

    # --- the attempt ---

    @override
    async def _attempt(self, ctx: Context) -> Any:
        left = ctx.timeout()
        headers = self.count_as_sent(ctx, self.settings.propagation.headers_for(self._url, ctx))
        try:
            try:
                response = await self.send(ctx, left, headers)
            finally:  # before the error is noted: it forbids a repetition while the body is being read
                if not self.reads_in_threads:
                    self._body.end()
        except Exception as error:
            self.note_failure(error, is_over=self._was_abandoned(ctx))
            if has_come(ctx.deadline) and self.is_of(self.timed_out, error):
                raise attempt_is_late() from error
            raise
        if not self._keep(response, ctx):
            await self._close(response)
            raise DeadlineExceeded("the response came after its time")
        return self._judge(response, ctx)

    def _keep(self, response: Any, ctx: Context) -> bool:
        """Keep a response until the exchange is over; return False if it came too late and has to be closed."""
        if self._was_abandoned(ctx):
            return False
        if self._open:  # so that there are few, however many responses arrive
            for number, it in self._open.copy().items():
                if _is_closed(it):
                    self._open.pop(number, None)
        self._open[id(response)] = response
        # If the exchange has ended meanwhile, in another thread, the response is taken out either there or here.
        return not self._is_over or self._open.pop(id(response), None) is None

    def _judge(self, response: Any, ctx: Context) -> Any:
        headers = response.headers
        inform_limiters(ctx, headers)
        failure = self.settings.rules.failure_of(getattr(response, self.status_name), headers, response)
        if failure is None:
            return response
        self.mark(failure)
        failure._exchange = ref(self)  # weakly: no cycle
        try:
            raise failure
        finally:
            del failure  # no cycle: error -> traceback -> this frame -> error

    def _was_abandoned(self, ctx: Context) -> bool:
        """Whether the caller has abandoned this attempt. An abandoned task is cancelled, so it returns nothing."""
        timer = ctx._timer
        return not self.in_tasks and timer is not None and clock.now() >= timer.deadline

    # --- around the attempts ---

    @override
    async def _run(self) -> Any:
        """Return the response that the policy chose, or a fallback's answer."""
        self._budget = ambient_deadline()
        self._open = {}
        kept: Any = None
        try:
            result = self._execute(policy_for(self.settings.policies, self._url))
            kept = await result if self.in_tasks else result
        except Exception as error:
            kept = self._response_in(error)
            if kept is None:
                raise
        finally:
            if discarded := self._end(kept):
                await self._close(*discarded)
        if not isinstance(kept, self.response_type):
            raise TypeError(f"a policy answered with {kept!r}; a Fallback here answers with {self.response_type}")
        return kept

    def _response_in(self, error: Exception) -> Any:
        """Return the response that an error stands for; None if the error is to be raised."""
        if isinstance(error, TransientStatus) and error._exchange == ref(self):
            if self.was_discarded(error.response):
                raise DeadlineExceeded(_WAS_DISCARDED) from error
            return error.response
        self.mark(error)  # the error may come from a policy, and not from an attempt
        return None

    def _end(self, kept: object) -> list[Any]:
        """End the exchange, and return the responses to close."""
        self._is_over = True
        self._body = IN_MEMORY
        if self.in_tasks:  # an abandoned thread may still need it
            self._request = None
        self._open.pop(id(kept), None)
        return [it for number in self._open.copy() if (it := self._open.pop(number, None)) is not None]

    async def _close(self, *responses: Any) -> None:
        await close_each(_close_in_time if self.in_tasks else BLOCKING.close, list(responses))

    # --- the time of the body ---

    def limit_of_body(self, ctx: Context, *, in_attempt: bool) -> tuple[float, Callable[[], Exception]]:
        """Return the instant by which the body must be read, and what creates the error for later.

        The instant is infinity for no limit, and if a timer cuts off the task in which an attempt reads the body.

        :param in_attempt: whether the body is read in this attempt, or after it.
        """
        if in_attempt:
            return waits_until(ctx) if self.in_tasks else ctx.deadline, attempt_is_late
        deadline = inf
        if self.settings.rules.limit_body:
            deadline = ctx.deadline if self.body_may_last_until is None else self.body_may_last_until
        return deadline, partial(DeadlineExceeded if self._budget <= deadline else TimeoutExceeded, _BODY_IS_LATE)


def attempt_is_late() -> DeadlineExceeded:
    """Return the error for an attempt that has used up the time that was left, including that for a body in it."""
    return DeadlineExceeded("the time that was left ran out while the server was asked")


async def _close_in_time(response: Any) -> None:
    with anyio.move_on_after(CLOSING_GRACE, shield=True):
        await TASKS.close(response)


def _is_closed(response: Any) -> bool:
    """Whether a response is closed, by the attributes that the clients' responses have for it."""
    holders = (response, getattr(response, "raw", None))
    return any(getattr(it, "is_closed", False) is True or getattr(it, "closed", False) is True for it in holders)
