"""requests: an adapter that sends every request of a session through a policy.

A `Session` hands each request, and each hop of a redirect, to the adapter that is mounted for its URL. So a policy
in there sees what really goes over the network; cookies, redirects, hooks and authentication stay above it.

Unless the user asks for a stream, requests reads the body after the adapter has returned. Here it is read inside
of the policy, as a part of the attempt: a body that breaks off is a failure like any other, and a time limit covers
it.

What can be sent twice is a question of the body. Text and bytes can; so can a file that can be wound back to where
it stood when the request was prepared. A generator cannot: requests would send it the second time as an empty body,
and the server would thank for it with 200.
"""

from resilience.integrations.extras import needed_by

with needed_by("requests"):
    from resilience.integrations.requests.adapters import ResilienceAdapter


__all__ = ["ResilienceAdapter"]
