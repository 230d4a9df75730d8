"""A policy for each host: a breaker that counts one host's failures must not refuse calls to another."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast, final
from urllib.parse import urlsplit

from resilience import checks
from resilience.integrations.wire import DEFAULT_PORTS
from resilience.policies.keyed import Keyed
from resilience.policy import Policy

#: What an HTTP integration takes as its policy.
Policies: TypeAlias = "Policy[Any] | PerHost"

_UP_TO_THE_PATH = re.compile(r"[^:/?#]+://[^/?#]*")


@final
class PerHost:
    """Create a policy for each host on first use, and keep it: a `Keyed` for HTTP clients.

    :param make: called with the host's origin, `"https://example.org:443"`; returns the policy for it.
    :param max_hosts: how many are kept. Beyond that the tenth that was not asked for the longest time is dropped, and
        what their breakers had learned with them. Running calls finish under them.

    Hosts that differ in scheme or port are different ones: different servers may answer there.

    >>> from resilience import CircuitBreaker
    >>> breakers = PerHost(lambda origin: CircuitBreaker(5, name=origin))
    >>> breakers.for_host("https://example.org/a") is breakers.for_host("https://EXAMPLE.org:443/b")
    True
    >>> list(breakers.policies)
    ['https://example.org:443']
    """

    def __init__(self, make: Callable[[str], Policy[Any]], *, max_hosts: int = 1000) -> None:
        if isinstance(make, Policy):  # it is callable, too, as it decorates functions
            raise TypeError(f"make must be a function that makes a policy for each host, not one policy: {make!r}")
        self._keyed = Keyed(make, _origin, max_keys=checks.whole("max_hosts", max_hosts), name="PerHost")

    def for_host(self, url: str) -> Policy[Any]:
        """Return the policy for the host of a URL.

        :raises ValueError: for a URL without a scheme or a host, such as `"example.org"`.
        :raises TypeError: for what is no string. Clients have URLs of their own: `str(url)`.
        """
        if not isinstance(url, str):
            raise TypeError(f"url must be a string, not {url!r}")
        origin = _origin(url)
        if origin.startswith(":") or "//:" in origin:
            raise ValueError(f"url must have a scheme and a host, as 'https://example.org' has, not {url!r}")
        return self._keyed.policy_for(origin)

    @property
    def policies(self) -> Mapping[str, Policy[Any]]:
        """The current policies, by origin. A snapshot."""
        return cast("Mapping[str, Policy[Any]]", self._keyed.policies)


def as_policies(policy: Policies) -> Policies:
    """Return what an integration was given as its policy; refuse what is neither a policy nor has one for each host."""
    if not isinstance(policy, (Policy, PerHost)):
        raise TypeError(f"policy must be a policy, or have one for each host (PerHost), not {policy!r}")
    return policy


def policy_for(policy: Policies, url: object) -> Policy[Any]:
    """Return the policy that a request to this URL runs through: a string, or what a client has for it."""
    return (
        policy._keyed.policy_for(_origin(str(url))) if isinstance(policy, PerHost) else policy
    )  # the client refuses bad URLs


def _origin(url: str) -> str:
    found = _UP_TO_THE_PATH.match(url)
    return _origin_of(url if found is None else found[0])


@functools.lru_cache(maxsize=4096)
def _origin_of(url: str) -> str:
    """Do so for what stands before the path, which is the same for many URLs; to split it takes 2 us."""
    parts = urlsplit(url)
    host = (parts.hostname or "").removesuffix(".")
    port = parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
