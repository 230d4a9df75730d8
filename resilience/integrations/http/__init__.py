"""What the HTTP clients share, knowing none of them: what is transient, what may be sent again, `standard(...)`.

A client's integration runs one exchange through a policy for each request (see `exchange`). Inside the policy a
response whose status says "not now" is an exception like a broken connection, a `TransientStatus`: so a plain `Retry()`
or `CircuitBreaker(5)` sees it as the failure that it is. Where one comes out at the end, the client's user gets the
response, as without us.
"""

from resilience.integrations.http.perhost import PerHost
from resilience.integrations.http.rules import (
    DEFAULT_RULES,
    IDEMPOTENT_METHODS,
    TRANSIENT_STATUSES,
    NotRepeatable,
    Rules,
    TransientStatus,
    retry_after,
)
from resilience.integrations.http.standard import standard

__all__ = [
    "DEFAULT_RULES",
    "IDEMPOTENT_METHODS",
    "TRANSIENT_STATUSES",
    "NotRepeatable",
    "PerHost",
    "Rules",
    "TransientStatus",
    "retry_after",
    "standard",
]
