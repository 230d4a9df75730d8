"""Transports for httpx and for httpx2, its continuation, that run every request of a client through a policy.

    client = httpx.Client(transport=ResilienceTransport(Policy.wrap(Timeout(8), Retry(3))))

A client calls its transport once for each request on the wire; a redirect is another request. So `get`, `stream`,
`send`, auth and cookies work as before: the policy is between the client and the network.

The libraries have the same classes under two names, so one integration serves both. It checks the type of the request.
"""

from resilience.integrations.httpx.transports import AsyncResilienceTransport, ResilienceTransport

__all__ = ["AsyncResilienceTransport", "ResilienceTransport"]
