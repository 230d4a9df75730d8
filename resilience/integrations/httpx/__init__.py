"""Transports for httpx and for httpx2, its continuation: every request of a client runs through a policy.

    client = httpx.Client(transport=ResilienceTransport(Policy.wrap(Timeout(8), Retry(3))))

A client calls its transport once for each request on the wire, a redirect being another one. So `get`, `stream`,
`send`, auth and cookies are what they were; what happens in here happens between the client and the network.

One module for both libraries: they have the same classes under two names, and the request says whose it is.
"""

from resilience.integrations.httpx.transports import AsyncResilienceTransport, ResilienceTransport

__all__ = ["AsyncResilienceTransport", "ResilienceTransport"]
