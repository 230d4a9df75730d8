"""urllib3: pool managers whose every request runs through a policy.

A `PoolManager` asks a connection pool for each request, and for each hop of a redirect. A policy in the pool sees what
really goes over the network, and redirects stay above it, as with requests.
"""

from importlib.metadata import version

from resilience.integrations.extras import needed_by

with needed_by("urllib3"):
    import urllib3  # noqa: F401

if int(version("urllib3").partition(".")[0]) < 2:
    raise ImportError(
        f"urllib3 {version('urllib3')} takes a body that breaks off for a whole one; this needs urllib3 2 or newer: "
        "pip install 'urllib3>=2'"
    )

from resilience.integrations.urllib3.pools import ResiliencePoolManager, ResilienceProxyManager

__all__ = ["ResiliencePoolManager", "ResilienceProxyManager"]
