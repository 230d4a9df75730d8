"""The meaning of urllib3's errors, for urllib3 and for requests, which is built on it."""

from __future__ import annotations

import re
from typing import Any, Final

from typing_extensions import override
from urllib3 import exceptions as errors

from resilience.integrations.http.exchange import Exchange

#: Errors that are raised before anything has been sent.
_NEVER_SENT: Final = (
    errors.NewConnectionError,
    errors.ConnectTimeoutError,
    errors.ClosedPoolError,
    errors.EmptyPoolError,
)

_TIMED_OUT: Final = (errors.ConnectTimeoutError, errors.ReadTimeoutError, TimeoutError)

#: The message of http.client if a proxy does not open a tunnel. This error has no class of its own.
_NO_TUNNEL: Final = re.compile(r"Tunnel connection failed: ([0-9]{3})")


class Urllib3Exchange(Exchange):
    """The exchange of a client that is built on urllib3."""

    @override
    def may_have_been_sent(self, error: Exception) -> bool:
        reason = self.reason(error)
        return not isinstance(error, self.never_sent) and not isinstance(reason, _NEVER_SENT)

    @override
    def has_timed_out(self, error: Exception) -> bool:
        reason: Any = self.reason(error)
        if isinstance(reason, errors.ProtocolError):  # "connection aborted", also if a wait to send has timed out
            reason = reason.args[-1]
        return isinstance(error, self.timed_out) or isinstance(reason, _TIMED_OUT)

    @override
    def proxy_refusal(self, error: Exception) -> int | None:
        reason = self.reason(error)
        match = _NO_TUNNEL.match(str(reason)) if type(reason) is OSError else None
        return int(match[1]) if match else None

    def reason(self, error: Any) -> object:
        """Return the wrapped error. "Unable to connect to proxy" may mean that the proxy has received the request."""
        if isinstance(error, errors.MaxRetryError):
            error = error.reason
        return error.original_error if isinstance(error, errors.ProxyError) else error
