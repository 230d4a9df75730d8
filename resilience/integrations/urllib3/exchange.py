"""What the errors of urllib3 mean, for urllib3 and for requests, which is built on it."""

from __future__ import annotations

import re
from typing import Any, Final

from typing_extensions import override
from urllib3 import exceptions as errors

from resilience.integrations.http.exchange import BlockingExchange

#: Raised before anything has been sent.
_NEVER_SENT: Final = (
    errors.NewConnectionError,
    errors.ConnectTimeoutError,
    errors.ClosedPoolError,
    errors.EmptyPoolError,
)

_TIMED_OUT: Final = (errors.ConnectTimeoutError, errors.ReadTimeoutError, TimeoutError)

#: What http.client says where a proxy does not connect; there is no class for it.
_NO_TUNNEL: Final = re.compile(r"Tunnel connection failed: ([0-9]{3})")


class Urllib3Exchange(BlockingExchange):
    """What the descriptions of the clients that stand on urllib3 share: what its errors say."""

    @override
    def may_have_been_sent(self, error: Exception) -> bool:
        reason = self.reason(error)
        return not isinstance(error, self.never_sent) and not isinstance(reason, _NEVER_SENT)

    @override
    def has_timed_out(self, error: Exception) -> bool:
        reason: Any = self.reason(error)
        if isinstance(reason, errors.ProtocolError):  # "connection aborted", also by the timeout of a wait to send
            reason = reason.args[-1]
        return isinstance(error, self.timed_out) or isinstance(reason, _TIMED_OUT)

    @override
    def proxy_refusal(self, error: Exception) -> int | None:
        reason = self.reason(error)
        match = _NO_TUNNEL.match(str(reason)) if type(reason) is OSError else None
        return int(match[1]) if match else None

    def reason(self, error: Any) -> object:
        """Return what happened: a proxy "to which it could not connect" may as well have hung up on the request."""
        if isinstance(error, errors.MaxRetryError):
            error = error.reason
        return error.original_error if isinstance(error, errors.ProxyError) else error
