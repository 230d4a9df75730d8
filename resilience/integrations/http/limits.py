"""What the headers of a response say about rate limits: how many calls are left, and for how long.

    RateLimit: "minute";r=3;t=20          the IETF's draft-ietf-httpapi-ratelimit-headers, of which older versions
    RateLimit: limit=9, remaining=3, reset=20               have one dictionary
    RateLimit-Remaining: 3                                  or three headers
    X-RateLimit-Remaining: 3              the same with `X-`, where a reset is seconds or an instant: GitHub, Discord
    x-ratelimit-remaining-requests: 3     OpenAI, Azure, Groq: per kind; a reset is a duration, `6m0s`, until *full*
    anthropic-ratelimit-tokens-remaining  Anthropic: per kind; a reset is an instant of RFC 3339

Where several kinds are limited, the narrowest says it all. What counts no calls (tokens, bytes), or names the time at
which the whole limit is there again (OpenAI), matters only where nothing is left of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import inf
from time import time
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from resilience.context import Context
from resilience.policies.rate_limiter import RateLimiter

__all__ = ["learned"]

#: From here on a number of seconds is an instant, of the year 2001 or later; and from there on, one in milliseconds.
_EPOCH: Final = 1e9
_EPOCH_IN_MILLISECONDS: Final = 1e12

_UNITS: Final = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]*)?)(ms|us|µs|ns|d|h|m|s)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_NUMBER = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{0,15})?")
_PARAMETER = re.compile(r"""\s*;\s*([a-z*][a-z0-9_.*-]*)\s*=\s*("[^"]*"|[^;,\s]+)""", re.IGNORECASE)
_ITEM = re.compile(r"""\s*("[^"]*"|[^;,="\s]+)\s*((?:;[^;,"]*(?:"[^"]*"\s*)?)*)(?:,|$)""")
#: Characters of a header that are looked at: what is longer is no such header, and patterns take their time.
_LONGEST: Final = 1000
_ANTHROPIC = "anthropic-ratelimit-"
_KINDS: Final = ("requests", "tokens", "input-tokens", "output-tokens", "project-tokens", "images")


class _Said(NamedTuple):
    """One limit. `counts_calls`: whether it matters before nothing is left."""

    remaining: str | None
    reset: str | None
    limit: str | None = None
    counts_calls: bool = True


def learned(headers: Mapping[str, str]) -> tuple[float, float] | None:
    """Return how many calls are left, and for how many seconds, as `RateLimiter.learn` takes it; None for nothing.

    Reads `RateLimit` and `RateLimit-Policy`, `RateLimit-*`, `X-RateLimit-*`, OpenAI's `x-ratelimit-*-requests` and
    `-tokens`, and `anthropic-ratelimit-*`, in any case. What cannot be understood means nothing; nor do a negative
    number, a limit of 0, and a reset in the past. It never raises.

    :param headers: of a response: a client's own mapping, or a plain dictionary.

    >>> from resilience.integrations.http.limits import learned
    >>> learned({"X-RateLimit-Remaining": "3", "X-RateLimit-Reset": "20"})
    (3.0, 20.0)
    >>> learned({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"})
    (0.0, 360.0)
    """
    known = {name.lower(): value.strip()[:_LONGEST] for name, value in headers.items() if "ratelimit" in name.lower()}
    understood = [it for it in map(_understood, _all_said(known)) if it is not None]
    closed = [it for it in understood if it[0] < 1]
    if closed:
        return max(closed, key=lambda it: it[1])
    return min(understood, default=None)


def hear(ctx: Context, headers: Mapping[str, str]) -> None:
    """Let the limiters around an attempt obey the headers of its response."""
    limiters = [it for policy in (ctx._executed, *ctx._info.chosen) for it in _limiters_in(policy)]
    if limiters and (said := learned(headers)) is not None:
        for limiter in limiters:
            limiter._learn_from_headers(*said)


# --- inside ----------------------------------------------------------------------------------

#: The limiters in each policy that has been asked for: to look for them takes 3 us, for each response.
_known: WeakKeyDictionary[Any, tuple[RateLimiter, ...]] = WeakKeyDictionary()


def _limiters_in(policy: Any) -> tuple[RateLimiter, ...]:
    limiters = _known.get(policy)
    if limiters is None:
        if isinstance(policy, RateLimiter):
            return (policy,)  # not remembered: the entry would keep its own key alive
        limiters = _known[policy] = tuple(it for it in policy._resilience_chain() if isinstance(it, RateLimiter))
    return limiters


def _all_said(headers: Mapping[str, str]) -> Iterator[_Said]:
    """Find every limit that is named."""
    yield from _of_the_draft(headers)
    for prefix in ("ratelimit-", "x-ratelimit-"):
        reset = headers.get(f"{prefix}reset-after", headers.get(f"{prefix}reset"))
        yield _Said(headers.get(f"{prefix}remaining"), reset, headers.get(f"{prefix}limit"))
    for kind in _KINDS:
        remaining, reset, limit = (headers.get(f"x-ratelimit-{it}-{kind}") for it in ("remaining", "reset", "limit"))
        yield _Said(remaining, reset, limit, counts_calls=False)
        remaining, reset, limit = (headers.get(f"{_ANTHROPIC}{kind}-{it}") for it in ("remaining", "reset", "limit"))
        yield _Said(remaining, reset, limit, counts_calls=kind == "requests")


def _of_the_draft(headers: Mapping[str, str]) -> Iterator[_Said]:
    """Read `RateLimit`, with what `RateLimit-Policy` says of the limits that it names."""
    policies = dict(_items(headers.get("ratelimit-policy", "")))
    field = headers.get("ratelimit", "")
    for name, it in _items(field):
        policy = policies.get(name, {})
        if it.get("r") is not None:
            of_calls = policy.get("qu", "requests") == "requests"
            yield _Said(it["r"], it.get("t", policy.get("w")), policy.get("q"), of_calls)
    older = dict(re.findall(r"(limit|remaining|reset)\s*=\s*([^,;\s]+)", field))
    yield _Said(older.get("remaining"), older.get("reset"), older.get("limit"))


def _items(field: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Read a list of structured fields (RFC 9651): names, and their parameters."""
    for name, parameters in _ITEM.findall(field):
        yield name.strip('"'), {key.lower(): value.strip('"') for key, value in _PARAMETER.findall(parameters)}


def _understood(said: _Said) -> tuple[float, float] | None:
    """Return calls and seconds; None where that says nothing that matters."""
    remaining, limit = _number(said.remaining), _number(said.limit)
    seconds = _seconds(said.reset)
    if remaining is None or remaining < 0 or (limit is not None and limit <= 0) or not 0 < seconds < inf:
        return None
    return (remaining, seconds) if said.counts_calls or remaining < 1 else None


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and _NUMBER.fullmatch(text) else None


def _seconds(text: str | None) -> float:
    """Return the seconds until a reset; 0 where it is none."""
    if text is None:
        return 0.0
    number = _number(text)
    if number is not None:
        return number if number < _EPOCH else number / (1000 if number >= _EPOCH_IN_MILLISECONDS else 1) - time()
    if _DURATION.fullmatch(text):
        return sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(text))
    try:
        instant = datetime.fromisoformat(text)
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp() - time()
    except (ValueError, OverflowError):
        return 0.0
