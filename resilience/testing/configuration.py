"""A pipeline as plain data, for tests of how it is configured."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from resilience import checks
from resilience.callables import name_of
from resilience.policy import Pipeline, Policy


def as_data(policy: Policy[Any]) -> list[dict[str, Any]]:
    """Return the policies of a pipeline, outermost first, each with its class, its name and all its settings.

    The values are JSON types: numbers, strings, booleans, None, lists. An exception type or a function becomes its
    name, a duration its seconds; any other object (a backoff, a trip condition) becomes its `repr`.

    >>> from resilience import Retry, Timeout
    >>> from resilience.testing import as_data
    >>> timeout, retry = as_data(Timeout(8).wrap(Retry(4, on=OSError)))
    >>> timeout
    {'policy': 'Timeout', 'name': 'Timeout', 'settings': {'seconds': 8.0, 'cooperative': False, 'on_timeout': None}}
    >>> retry["settings"]["attempts"], retry["settings"]["on"], retry["settings"]["backoff"]
    (4, 'OSError', 'Exponential(0.1, cap=10)')
    """
    checks.instance("policy", policy, Policy, "a policy")
    parts = policy.policies if isinstance(policy, Pipeline) else (policy,)
    return [
        {
            "policy": type(part).__name__,
            "name": part.name,
            "settings": {key: _plain(value) for key, value in part.settings().items() if key != "name"},
        }
        for part in parts
    ]


def _plain(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): _plain(it) for key, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(it) for it in value]
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return name_of(value)
    return repr(value)
