"""urllib3: pool managers that send every request through a policy."""

from importlib.metadata import version

from resilience.integrations.extras import needed_by

with needed_by("urllib3"):
    if int(version("urllib3").partition(".")[0]) < 2:
        raise ImportError(
            f"urllib3 {version('urllib3')} takes a body that breaks off for a whole one; "
            "this needs urllib3 2 or newer: pip install 'urllib3>=2'"
        )

    from resilience.integrations.urllib3.managers import ResiliencePoolManager, ResilienceProxyManager


__all__ = ["ResiliencePoolManager", "ResilienceProxyManager"]
