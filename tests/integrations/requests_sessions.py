"""Shared by the tests of requests: a policy, and functions that make requests."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import requests
from requests.adapters import BaseAdapter
from typing_extensions import override

from resilience import Retry

QUICK = Retry(3, backoff=[0])

#: `session(policy, **options)` makes a session that sends everything through the policy.
Make = Callable[..., requests.Session]


def outcome_of(fn: Callable[[], requests.Response]) -> Any:
    """Return the response, or the exception as a value."""
    try:
        return fn()
    except requests.RequestException as error:
        return error


class Recorder(BaseAdapter):
    """An adapter that sends nothing, and records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[Any] = []
        self.is_closed = False

    @override
    def send(self, request: Any, stream: Any = False, timeout: Any = None, *args: Any, **options: Any) -> Any:
        self.timeouts.append(timeout)
        response = requests.Response()
        response.status_code, response.request, response.url = 200, request, request.url
        response.raw = io.BytesIO(b"recorded")
        return response

    @override
    def close(self) -> None:
        self.is_closed = True
