"""Rate limits in the headers of a response: how many calls are left, and for how long.

    RateLimit: "minute";r=3;t=20               the IETF's draft-ietf-httpapi-ratelimit-headers; its older versions
    RateLimit: limit=9, remaining=3, reset=20  have one dictionary,
    RateLimit-Remaining: 3                     or three headers
    X-RateLimit-Remaining: 3                   the same with `X-`; a reset is seconds or an instant: GitHub, Discord
    x-ratelimit-remaining-requests: 3          OpenAI, Azure, Groq, by kind; a reset is a duration, `6m0s`, until *full*
    anthropic-ratelimit-tokens-remaining       Anthropic, by kind; a reset is an instant in RFC 3339 format

Of several limits, the narrowest counts. A limit that does not count calls (tokens, bytes), or whose reset is the time
at which it is full again (OpenAI), counts only if nothing is left of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import Final, NamedTuple

from resilience.context import Context
from resilience.integrations.http.rules import server_time
from resilience.policies.rate_limiter import RateLimiter

__all__ = ["learned"]

#: A reset from the first number on is an instant in seconds, in 2001 or later; from the second on, in milliseconds.
_EPOCH: Final = 1e9
_EPOCH_IN_MILLISECONDS: Final = 1e12

_UNITS: Final = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]*)?)(ms|us|µs|ns|d|h|m|s)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_NUMBER = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{0,15})?")
_PARAMETER = re.compile(r"""\s*;\s*([a-z*][a-z0-9_.*-]*)\s*=\s*("[^"]*"|[^;,\s]+)""", re.IGNORECASE)
_ITEM = re.compile(r"""\s*("[^"]*"|[^;,="\s]+)\s*((?:;[^;,"]*(?:"[^"]*"\s*)?)*)(?:,|$)""")
#: Longer headers are truncated to so many characters: none of these is that long, and the patterns take time.
_MAX_LENGTH: Final = 1000
_PARTS: Final = ("remaining", "reset-after", "reset", "limit")
_KINDS: Final = ("requests", "tokens", "input-tokens", "output-tokens", "project-tokens", "images")
#: The headers of limits that have one for each part, and whether such a limit counts calls.
_STYLES: Final = [
    ([style.format(part) for part in _PARTS], counts_calls)
    for style, counts_calls in (
        *((f"{prefix}ratelimit-{{}}", True) for prefix in ("", "x-")),
        *((f"x-ratelimit-{{}}-{kind}", False) for kind in _KINDS),
        *((f"anthropic-ratelimit-{kind}-{{}}", kind == "requests") for kind in _KINDS),
    )
]


class _Quota(NamedTuple):
    """One limit as it is written."""

    remaining: str | None
    reset: str | None
    limit: str | None
    counts_calls: bool  # otherwise it counts only if nothing is left of it


def learned(headers: Mapping[str, str]) -> tuple[float, float] | None:
    """Return how many calls are left, and for how many seconds, as arguments of `RateLimiter.learn`; None if unknown.

    Reads `RateLimit` and `RateLimit-Policy`, `RateLimit-*`, `X-RateLimit-*`, OpenAI's `x-ratelimit-*-requests` and
    `-tokens`, and `anthropic-ratelimit-*`, in any case. Values that cannot be parsed are ignored, and so are negative
    numbers, a limit of 0, and a reset in the past. An instant is compared with the `Date` of the response, if it has
    one, as the clocks of two machines differ. It never raises.

    :param headers: the headers of a response: a client's own mapping, or a plain dictionary.

    >>> from resilience.integrations.http import learned
    >>> learned({"X-RateLimit-Remaining": "3", "X-RateLimit-Reset": "20"})
    (3.0, 20.0)
    >>> learned({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"})
    (0.0, 360.0)
    """
    named = {str(name).lower(): value for name, value in headers.items()}
    fields = {name: str(value).strip()[:_MAX_LENGTH] for name, value in named.items() if "ratelimit" in name}
    now = partial(server_time, named.get("date"), named.get("age"))
    limits = [it for quota in _quotas_in(fields) if (it := _parsed(quota, now)) is not None]
    used_up = [it for it in limits if it[0] < 1]
    if used_up:
        return max(used_up, key=lambda it: it[1])
    return min(limits, default=None)


def inform_limiters(ctx: Context, headers: Mapping[str, str]) -> None:
    """Let the limiters around an attempt obey the headers of its response."""
    for policy in ctx._info.limiters:
        if isinstance(policy, RateLimiter) and (limit := learned(headers)) is not None:
            policy._learn_from_headers(*limit)


def _quotas_in(headers: Mapping[str, str]) -> Iterator[_Quota]:
    yield from _quotas_of_draft(headers)
    for names, counts_calls in _STYLES:
        remaining, reset_after, reset, limit = map(headers.get, names)
        yield _Quota(remaining, reset_after or reset, limit, counts_calls)


def _quotas_of_draft(headers: Mapping[str, str]) -> Iterator[_Quota]:
    """Read `RateLimit`, and the parameters of its limits in `RateLimit-Policy`."""
    policies = dict(_items(headers.get("ratelimit-policy", "")))
    field = headers.get("ratelimit", "")
    for name, it in _items(field):
        policy = policies.get(name, {})
        if it.get("r") is not None:
            counts_calls = policy.get("qu", "requests") == "requests"
            yield _Quota(it["r"], it.get("t", policy.get("w")), policy.get("q"), counts_calls)
    older = dict(re.findall(r"(limit|remaining|reset)\s*=\s*([^,;\s]+)", field))
    yield _Quota(older.get("remaining"), older.get("reset"), older.get("limit"), counts_calls=True)


def _items(field: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Parse a list of structured fields (RFC 9651) into names and their parameters."""
    for name, parameters in _ITEM.findall(field):
        yield name.strip('"'), {key.lower(): value.strip('"') for key, value in _PARAMETER.findall(parameters)}


def _parsed(quota: _Quota, now: Callable[[], float]) -> tuple[float, float] | None:
    """Return the remaining calls, and for how many seconds; None if the limit does not count."""
    remaining, limit, seconds = _number(quota.remaining), _number(quota.limit), _seconds(quota.reset, now)
    if remaining is None or remaining < 0 or (limit is not None and limit <= 0) or not 0 < seconds < inf:
        return None
    return (remaining, seconds) if quota.counts_calls or remaining < 1 else None


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and _NUMBER.fullmatch(text) else None


def _seconds(text: str | None, now: Callable[[], float]) -> float:
    """Return the seconds until a reset; 0 if it cannot be parsed.

    :param now: returns the time on the clock of the server.
    """
    if text is None:
        return 0.0
    number = _number(text)
    if number is not None:
        return number if number < _EPOCH else number / (1000 if number >= _EPOCH_IN_MILLISECONDS else 1) - now()
    if _DURATION.fullmatch(text):
        return sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(text))
    try:
        instant = datetime.fromisoformat(text)
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp() - now()
    except (ValueError, OverflowError):
        return 0.0
