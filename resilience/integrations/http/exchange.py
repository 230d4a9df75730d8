"""One request on its way through a policy: the state that all its attempts share."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack
from math import inf
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio

from resilience.ambient import current_context
from resilience.context import Context
from resilience.errors import DeadlineExceeded, Rejected, TimeoutExceeded
from resilience.integrations.http.rules import NotRepeatable, Rules, TransientStatus
from resilience.integrations.wire import OfHost
from resilience.runtimes.blocking import BLOCKING, drive
from resilience.runtimes.tasks import TASKS

if TYPE_CHECKING:
    from resilience.policy import Policy

R = TypeVar("R")

#: Seconds that closing a discarded response may take in a task, also where its caller is cancelled. It takes no time
#: unless something is broken: a close that says farewell to a server which does not answer.
CLOSING_GRACE: Final = 2.0


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
        self._open: list[tuple[R, float]] = []  # responses, and the deadlines of the attempts that brought them
        self._is_over = False
        self._budget = inf  # the deadline that the caller has set
        self._body_deadline = inf
        self._body_may_last_until: float | None = None

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent again, after all that has happened. A Retry asks this."""
        return self.why_not_again is None

    @property
    def why_not_again(self) -> str | None:
        """Why the request must not be sent again; None if it may."""
        return self._why_not_again

    @abstractmethod
    def __call__(self, ctx: Context) -> Any:
        """Send the request once, within what `ctx` leaves time for, and return the response."""

    # --- for `__call__` ---

    def begin(self) -> None:
        """Say that the request is about to be sent.

        :raises NotRepeatable: if it must not be, because it may have been sent before.
        """
        if (reason := self.why_not_again) is not None:
            raise NotRepeatable(f"the request was not sent again: {reason}")
        # Until the client tells more, the request may be under way: a Timeout tells nothing.
        self._why_not_again = self._why_not(sent=True)

    def failed(self, error: Exception, *, sent: bool) -> None:
        """Note what the client raised, and mark it if the request must not be sent again.

        :param sent: whether the request may have reached the server.
        """
        self._why_not_again = self._why_not(sent=sent and not isinstance(error, Rejected))
        self._mark(error)

    def received(self, response: R, status: int, headers: Mapping[str, str], ctx: Context) -> R:
        """Return a response, or raise the `TransientStatus` that it stands for.

        :raises DeadlineExceeded: if it came after the caller had left. It was closed then.
        """
        with self._lock:
            late = self._is_over
            if not late:
                still_open = (it for it in self._open if not _is_closed(it[0]))
                self._open = [*still_open, (response, ctx.deadline)]  # bounded, however many come
        if late:
            drive(BLOCKING.close(response))  # nobody else would
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
        except Exception as error:
            kept = self._answer_in(error)
            if kept is None:
                raise
        finally:
            for response in self._end(kept):
                drive(BLOCKING.close(response))
        return kept

    async def arun(self, policy: Policy[Any]) -> Any:
        """Do the same in a task."""
        kept: Any = None
        try:
            kept = await policy.aexecute(self, self._context())
        except Exception as error:
            kept = self._answer_in(error)
            if kept is None:
                raise
        finally:
            if discarded := self._end(kept):
                await _close_all(discarded)
        return kept

    @property
    def body_deadline(self) -> float:
        """The instant at which the body of the response has to be read; infinity for no limit."""
        return self._body_deadline if self._rules.limit_body else inf

    def body_is_late(self) -> TimeoutExceeded:
        """Return the error for a body that is not read by then."""
        kind = DeadlineExceeded if self._body_deadline >= self._budget else TimeoutExceeded
        return kind("the time was over before the whole body was read; Rules(limit_body=False) lets bodies take longer")

    def body_may_last_until(self, deadline: float) -> None:
        """Let the body take longer than the attempt that brings it."""
        self._body_may_last_until = deadline

    def _context(self) -> Context:
        outer = current_context()
        self._budget = outer.deadline
        operation = outer.operation or OfHost(f"{self._method} {self._host}", common=self._method)
        return Context(operation=operation, properties=outer.properties)

    def _answer_in(self, error: Exception) -> Any:
        """Return the response that an error stands for; None for any other error, which will be raised."""
        if isinstance(error, TransientStatus) and any(it is error.response for it, _ in self._open):
            return error.response
        self._mark(error)  # also one that a policy made, and the client had no part in
        return None

    def _end(self, kept: object) -> list[R]:
        """Say that nobody waits any more, and return the responses that are to be closed."""
        with self._lock:
            self._is_over = True
            received, self._open = self._open, []  # the one that is kept may hold on to us, for its body
        longer = self._body_may_last_until
        for response, deadline in received:
            if response is kept:  # a fallback's response has a time of its own, if any
                self._body_deadline = deadline if longer is None else longer
        return [response for response, _ in received if response is not kept]

    def _resilience_dropped(self, outcome: object) -> None:
        """Close the response that an attempt brought when its caller had left: a worker thread tells us."""
        response = outcome.response if isinstance(outcome, TransientStatus) else outcome
        with self._lock:
            is_ours = any(it is response for it, _ in self._open)
            self._open = [it for it in self._open if it[0] is not response]
        if is_ours:
            drive(BLOCKING.close(response))

    def _why_not(self, *, sent: bool) -> str | None:
        return self._rules.why_not_again(self._method, self._headers, sent=sent, replayable=self._replayable)

    def _mark(self, error: Exception) -> None:
        if (reason := self.why_not_again) is not None and getattr(error, "repeatable", True) is not False:
            try:
                error.repeatable = False  # type: ignore[attr-defined]
                error.add_note(f"the request is not sent again: {reason}")
            except Exception:  # one that refuses attributes: the exchange says it as well
                return


async def _close_all(responses: list[Any]) -> None:
    """Close every response, also where the task is cancelled, before it or in the middle of one."""
    async with AsyncExitStack() as closing:
        for response in responses:
            closing.push_async_callback(_close, response)


async def _close(response: object) -> None:
    with anyio.move_on_after(CLOSING_GRACE, shield=True):
        await TASKS.close(response)


def _is_closed(response: object) -> bool:
    """Whether a response says of itself that it is closed, in one of the ways in which clients' responses do."""
    for holder in (response, getattr(response, "raw", None)):
        if getattr(holder, "is_closed", False) is True or getattr(holder, "closed", False) is True:
            return True
    return False
