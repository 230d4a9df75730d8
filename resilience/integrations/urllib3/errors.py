"""What the errors of urllib3 say, for the two clients that stand on it: urllib3 itself and requests."""

from __future__ import annotations

import re
from typing import Any, Final

from urllib3.exceptions import (
    ClosedPoolError,
    ConnectTimeoutError,
    EmptyPoolError,
    MaxRetryError,
    NewConnectionError,
    ProtocolError,
    ProxyError,
    ReadTimeoutError,
)

#: Raised before anything has been sent.
_NEVER_SENT: Final = (NewConnectionError, ConnectTimeoutError, ClosedPoolError, EmptyPoolError)

#: What http.client says where a proxy does not connect; there is no class for it.
_NO_TUNNEL: Final = re.compile(r"Tunnel connection failed: ([0-9]{3})")


def may_have_been_sent(error: object) -> bool:
    """Whether the server may have the request: not where no connection could be made."""
    return not isinstance(_reason(error), _NEVER_SENT)


def proxy_refusal(error: object) -> int | None:
    """Return the status with which a proxy has refused to connect; None for any other error."""
    match = _NO_TUNNEL.match(str(_reason(error))) if type(_reason(error)) is OSError else None
    return int(match[1]) if match else None


def has_timed_out(error: object) -> bool:
    """Whether a wait was too long: to connect, for the answer, or to send."""
    reason = _reason(error)
    if isinstance(reason, ProtocolError):  # "connection aborted"
        reason = reason.args[-1]
    return isinstance(reason, (ConnectTimeoutError, ReadTimeoutError, TimeoutError))


def _reason(error: Any) -> object:
    """Return what happened: a proxy "to which it could not connect" may as well have hung up on the request."""
    if isinstance(error, MaxRetryError):
        error = error.reason
    return error.original_error if isinstance(error, ProxyError) else error
