"""A policy for each host: a breaker that counts the failures of one host must not refuse calls to another."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeAlias, cast, final
from urllib.parse import urlsplit

from typing_extensions import TypeVar

from resilience import checks
from resilience.integrations.wire import DEFAULT_PORTS
from resilience.policies.keyed import Keyed
from resilience.policy import Policy

#: What an HTTP integration takes as its policy.
Policies: TypeAlias = "Policy[Any] | PerHost"

W_co = TypeVar("W_co", bound=Policy[Any], default=Policy[Any], covariant=True)

#: The scheme of a URL, and its host, without the name and password before it, which no cache needs to keep.
_SCHEME_AND_HOST = re.compile(r"([^:/?#]+://)(?:[^/?#]*@)?([^/?#]*)")


@final
class PerHost(Generic[W_co]):
    """Create a policy for each host on first use, and keep it: a `Keyed` for HTTP clients.

    :param make: called with the host's origin, `"https://example.org:443"`; returns the policy for it.
    :param max_hosts: how many policies are kept, 1000 by default. Beyond that, the least recently used tenth is
        dropped, with the state of its breakers. Running calls finish under a dropped policy.

    A host is identified by scheme, name and port, because another server may answer at another port.

    >>> from resilience import CircuitBreaker
    >>> breakers = PerHost(lambda origin: CircuitBreaker(5, name=origin))
    >>> breakers.for_host("https://example.org/a") is breakers.for_host("https://EXAMPLE.org:443/b")
    True
    >>> list(breakers.policies)
    ['https://example.org:443']
    """

    def __init__(self, make: Callable[[str], W_co], *, max_hosts: int = 1000) -> None:
        if isinstance(make, Policy):  # a policy is callable, too: it decorates functions
            raise TypeError(f"make must be a function that makes a policy for each host, not one policy: {make!r}")
        self._keyed = Keyed(make, _origin, max_keys=checks.whole("max_hosts", max_hosts), name="PerHost")

    def for_host(self, url: str) -> W_co:
        """Return the policy for the host of a URL.

        :raises ValueError: for a URL without a scheme or a host, such as `"example.org"`.
        :raises TypeError: if `url` is not a string. For the URL object of a client, pass `str(url)`.
        """
        origin = _origin(checks.instance("url", url, str, "a string"))
        if origin.startswith(":") or "//:" in origin:
            raise ValueError(f"url must have a scheme and a host, as 'https://example.org' has, not {url!r}")
        return cast("W_co", self._keyed.policy_for(origin))

    @property
    def policies(self) -> Mapping[str, W_co]:
        """The current policies, by origin. A snapshot."""
        return cast("Mapping[str, W_co]", self._keyed.policies)


def policy_for(policy: Policies, url: str) -> Policy[Any]:
    """Return the policy for a request to this URL."""
    return policy._keyed.policy_for(_origin(url)) if isinstance(policy, PerHost) else policy


def _origin(url: str) -> str:
    found = _SCHEME_AND_HOST.match(url)
    return _origin_in(url if found is None else found[1] + found[2])


@functools.lru_cache(maxsize=4096)
def _origin_in(url: str) -> str:
    """Return the origin of a URL without its path. Many URLs have the same one, and to split a URL takes 2 us."""
    parts = urlsplit(url)
    name = (parts.hostname or "").removesuffix(".")
    port = parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    return f"{parts.scheme}://{f'[{name}]' if ':' in name else name}:{port}"
