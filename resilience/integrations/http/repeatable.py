"""Whether a request may be sent again: the one place that answers this.

Sending a request twice can execute it twice. As soon as an attempt begins, the request counts as sent, because a
`Timeout` may cut the attempt off at any point; an error of the client may prove that nothing was sent. A request with
an idempotency key, from the caller or from an `IdempotencyKey` in the policy, may be repeated.

A Retry reads the answer in two places: on the called function, which is the exchange, and on the failure of an attempt
(`mark`). A policy that reads neither is refused when it begins the next attempt (`count_as_sent`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from resilience.context import Context
from resilience.errors import Rejected
from resilience.hints import forbid_repeat
from resilience.integrations.http.bodies import IN_MEMORY, Body
from resilience.integrations.http.rules import NotRepeatable
from resilience.integrations.http.settings import Settings
from resilience.network_errors import proxy_status
from resilience.work.idempotency import key_for


class Repeatable:
    """A request that knows whether it may be sent again."""

    #: Errors of the client that prove that nothing has reached the server.
    never_sent: ClassVar[tuple[type[Exception], ...]] = ()
    #: Whether the client reads files in threads of its own, which may continue after an attempt has ended.
    reads_in_threads: ClassVar[bool] = False

    _is_over = False  # whether its caller has left
    _forbidden: str | None = None  # why, if the attempts so far do not allow another one

    def __init__(
        self, settings: Settings, method: str, url: str, headers: Mapping[str, str], body: Body = IN_MEMORY
    ) -> None:
        self.settings = settings
        self._method = method
        self._url = url
        self._headers = headers
        self._body = body
        #: Why the request must not be sent again once the server may have received it; None if it may be sent again.
        self.why_not_once_sent: str | None = self._rule_against(headers)
        #: Whether an attempt may begin beside one that has not begun yet, which a Hedge reads besides `repeatable`.
        self._resilience_may_overlap: bool = self.why_not_once_sent is None

    # --- the description of a client ---

    def reason(self, error: Any) -> Any:
        """Return the error inside an error of the client, if it wraps another one."""
        return error

    def may_have_been_sent(self, error: Exception) -> bool:
        """Whether the server may have received the request, although the client has raised this error."""
        return not self.is_of(self.never_sent, error)

    def is_of(self, kinds: tuple[type[Exception], ...], error: Exception) -> bool:
        """Whether an error of the client, or the one inside it, is of one of these classes."""
        return isinstance(error, kinds) or isinstance(self.reason(error), kinds)

    def was_never_sent(self) -> bool:
        """Whether the client knows that an attempt that was cut off had not begun to send."""
        return False

    # --- the answer ---

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent again, given all attempts so far. A Retry reads this."""
        return self.why_not_again is None

    @property
    def why_not_again(self) -> str | None:
        """Why the request must not be sent again; None if it may be sent again."""
        if self._is_over:
            return "its caller has left"
        if self.settings.client_is_closed:
            return "its client was closed"
        if self._forbidden is not None and not self.was_never_sent():
            return self._forbidden
        return self._body.why_not_now

    def _rule_against(self, headers: Mapping[str, str]) -> str | None:
        replayable = self._body.can_be_sent_again
        return self.settings.rules.why_not_again(self._method, headers, sent=True, replayable=replayable)

    def mark(self, error: Exception) -> None:
        """Mark an error if the request must not be sent again, and note the reason on it."""
        if (reason := self.why_not_again) is not None:
            forbid_repeat(error, f"the request is not sent again: {reason}")

    # --- what an attempt does ---

    def count_as_sent(self, ctx: Context, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Count the request as sent, and its body as being read.

        :param headers: to add to those of the request. They are returned, with the idempotency key of the execution.
        :raises NotRepeatable: if the request must not be sent again.
        """
        if (reason := self.why_not_again) is not None:
            raise NotRepeatable(f"the request was not sent again: {reason}")
        rules = self.settings.rules
        if (key := key_for(ctx)) is not None and not rules.has_key(self._headers):
            headers = {**headers, rules.idempotency_header: key}
            self.why_not_once_sent = self._rule_against(headers)
        self._forbidden = self.why_not_once_sent
        self._resilience_may_overlap = True
        self._body.begin()
        return headers

    def note_failure(self, error: Exception, *, is_over: bool) -> None:
        """Note whether an error proves that an attempt has sent nothing, and mark it.

        :param is_over: whether the caller has abandoned the attempt, so that it no longer decides about the next one.
        """
        refusal = proxy_status(self.reason(error))
        if refusal is not None or isinstance(error, Rejected) or not self.may_have_been_sent(error):
            if self.reads_in_threads:
                self._body.end()
            if not is_over:
                self._forbidden = "the proxy asks for a login" if refusal == 407 else None
        self.mark(error)
