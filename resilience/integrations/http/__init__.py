"""The rules that all HTTP clients share: what is transient, what may be sent again, the `standard(...)` pipeline.

The integration of a client runs one exchange through a policy for each request (see `exchange`). Inside the policy, a
response whose status means "not now" is an exception, `TransientStatus`, just as a broken connection is one. So a
plain `Retry()` retries it, and a plain `CircuitBreaker(5)` counts it. If the last attempt ends with it, the user of the
client gets the response.
"""

from resilience.integrations.http.limits import learned
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
from resilience.integrations.http.standard_pipeline import standard

__all__ = [
    "DEFAULT_RULES",
    "IDEMPOTENT_METHODS",
    "TRANSIENT_STATUSES",
    "NotRepeatable",
    "PerHost",
    "Rules",
    "TransientStatus",
    "learned",
    "retry_after",
    "standard",
]
