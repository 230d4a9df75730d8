"""What the HTTP clients share, knowing none of them: what is transient, what may be sent again, `standard(...)`.

A client's integration runs one `Exchange` through a policy for each request. Inside the policy a response whose
status says "not now" is an exception like a broken connection, a `TransientStatus`: so a plain `Retry()` or
`CircuitBreaker(5)` sees it as the failure that it is. Where one comes out at the end, the client's user gets the
response, as without us.

Sending a request twice can do its work twice. So an exchange knows at any time whether it may be sent again, and
tells it in the two places where a Retry looks: on the failure itself, and, for a call that was cut off by a
Timeout and left no failure of its own, on the function that the policy calls, which is the exchange.
"""

from resilience.integrations.http.bodies import is_used_up
from resilience.integrations.http.exchange import Exchange
from resilience.integrations.http.perhost import PerHost, as_policies, policy_for
from resilience.integrations.http.rules import (
    DEFAULT_RULES,
    IDEMPOTENT_METHODS,
    TRANSIENT_STATUSES,
    NotRepeatable,
    Rules,
    TransientStatus,
    as_rules,
    retry_after,
)
from resilience.integrations.http.standard import standard

__all__ = [
    "DEFAULT_RULES",
    "IDEMPOTENT_METHODS",
    "TRANSIENT_STATUSES",
    "Exchange",
    "NotRepeatable",
    "PerHost",
    "Rules",
    "TransientStatus",
    "as_policies",
    "as_rules",
    "is_used_up",
    "policy_for",
    "retry_after",
    "standard",
]
