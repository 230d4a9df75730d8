"""Wrong arguments of integrations are refused when they are passed, with the parameter and the value in the message."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client import CollectorRegistry
from requests.adapters import HTTPAdapter
from temporalio.common import RetryPolicy

from resilience import Policy, Retry, events
from resilience.integrations import asgi, dbapi, sqlalchemy, structlog, wsgi
from resilience.integrations.dashboard import Dashboard
from resilience.integrations.grpc import PolicyInterceptor, aio_interceptors
from resilience.integrations.http import PerHost, Rules, standard
from resilience.integrations.httpx import AsyncResilienceTransport, ResilienceTransport
from resilience.integrations.logging import log_events
from resilience.integrations.opentelemetry import Tracing
from resilience.integrations.opentelemetry import instrument as export_to_opentelemetry
from resilience.integrations.prometheus import instrument as export_to_prometheus
from resilience.integrations.requests import ResilienceAdapter
from resilience.integrations.temporal import from_retry_policy, to_retry_policy
from resilience.integrations.urllib3 import ResilienceProxyManager
from resilience.integrations.wire import Acceptance, Propagation
from tests.integrations.http_clients import CLIENTS


class Case(NamedTuple):
    """A wrong argument."""

    make: Callable[..., object]
    given: dict[str, Any]
    error: type[Exception]
    message: str

    def __str__(self) -> str:
        name = getattr(self.make, "func", self.make).__qualname__
        shown = [f"{key}={value!r}" for key, value in self.given.items() if " at 0x" not in repr(value)]
        return " ".join([name, *shown])


def of(make: Callable[..., object], *cases: tuple[dict[str, Any], type[Exception], str]) -> list[Case]:
    return [Case(make, *case) for case in cases]


class OpenConnection:
    """A connection of sqlite3 can be called, too."""

    def __call__(self) -> None: ...
    def cursor(self) -> None: ...


class AsynchronousLogger:
    async def critical(self, event: str, **values: Any) -> None: ...


CASES = [
    # --- HTTP ---
    *of(
        Rules,
        ({"statuses": {"503"}}, TypeError, "statuses must be whole numbers, not '503'"),
        ({"statuses": {True}}, TypeError, "statuses must be whole numbers, not True"),
        ({"statuses": {99}}, ValueError, "statuses must lie between 100 and 599, not 99"),
        ({"statuses": {600}}, ValueError, "statuses must lie between 100 and 599, not 600"),
        ({"statuses": 500}, TypeError, "statuses must be a collection of whole numbers, not 500"),
        ({"methods": None}, TypeError, "methods must be a collection of names, not None"),
        ({"methods": "POST"}, TypeError, "methods must be a collection of names, not 'POST'"),
        ({"methods": [1]}, TypeError, "methods must be names, not 1"),
        ({"methods": [""]}, TypeError, "methods must be names, not ''"),
        ({"idempotency_header": ""}, ValueError, "idempotency_header must not be empty"),
        ({"idempotency_header": None}, TypeError, "idempotency_header must be a string, not None"),
        ({"limit_body": 1}, TypeError, "limit_body must be True or False, not 1"),
    ),
    *of(
        standard,
        ({"attempt_timeout": 31}, ValueError, "attempt_timeout must be at most total_timeout: 31 s is more than 30 s"),
        ({"total_timeout": 5}, ValueError, "attempt_timeout must be at most total_timeout: 10 s is more than 5 s"),
        ({"window": 19.5}, ValueError, r"window must be at least twice attempt_timeout: 19.5 s is less than 2 \* 10 s"),
        ({"failure_ratio": 0}, ValueError, "failure_ratio must be more than 0"),
        ({"concurrency": 0}, ValueError, "concurrency must be at least 1"),
        ({"attempts": 0}, ValueError, "attempts must be at least 1"),
        ({"max_hosts": 0}, ValueError, "max_hosts must be at least 1"),
        ({"total_timeout": -1}, ValueError, "total_timeout must be more than zero"),
        ({"rate": 0}, ValueError, "rate"),
        ({"hedge": -1}, ValueError, "hedge must be zero or more seconds, not -1"),
        ({"hedge": [0.1]}, TypeError, r"hedge must be seconds .* or a timedelta, not \[0.1\]"),
        ({"listeners": print}, TypeError, "listeners must be a sequence of functions, not <built-in function print>"),
    ),
    *of(
        PerHost,
        ({"make": None}, TypeError, "make must be callable"),
        ({"make": Retry()}, TypeError, "make must be a function that makes a policy for each host, not one policy"),
    ),
    *of(
        standard().for_host,  # a name alone would be another host than the one of the requests
        *(({"url": it}, ValueError, "url must have a scheme and a host, as ") for it in ("a.org", "a.org:443", "//a")),
        *(({"url": it}, ValueError, "url must have a scheme and a host, as ") for it in ("https://", "/users", "")),
        ({"url": httpx.URL("https://a.org")}, TypeError, "url must be a string, not URL"),
    ),
    *of(partial(Policy.wrap, Retry(), standard()), ({}, TypeError, "wrap the policy of each host, PerHost")),
    *(
        case
        for client in CLIENTS
        for case in of(
            partial(client.make, policy=Retry()),
            ({"policy": None}, TypeError, r"policy must be .* each host, as standard\(\) and PerHost\(make\) have"),
            ({"policy": Retry}, TypeError, "policy must be a policy"),
            ({"rules": 503}, TypeError, "rules must be Rules, not 503"),
            ({"propagate_to": "localhost"}, TypeError, "propagate_to must be a sequence of hosts"),
        )
    ),
    *of(
        partial(ResilienceAdapter, Retry()),
        ({"adapter": 1}, TypeError, "adapter must be an adapter of requests, not 1"),
        ({"adapter": HTTPAdapter(max_retries=1)}, ValueError, "must not retry by itself"),
        ({"adapter": HTTPAdapter(), "pool_maxsize": 3}, ValueError, "belong to the adapter that is wrapped"),
    ),
    *of(
        partial(ResilienceProxyManager, proxy_url=Retry()),
        ({"policy": "http://proxy"}, TypeError, "^policy must be a policy.*, not 'http://proxy'$"),
    ),
    *of(
        partial(ResilienceTransport, Retry()),
        ({"transport": httpx.AsyncBaseTransport()}, TypeError, "transport must have a method handle_request"),
        ({"transport": httpx.HTTPTransport}, TypeError, r"transport must be an object.*mean HTTPTransport\(\)\?"),
        ({"read_body": 1}, TypeError, "read_body must be True or False, not 1"),
    ),
    *of(
        partial(AsyncResilienceTransport, Retry()),
        ({"transport": httpx.BaseTransport()}, TypeError, "transport must have a method handle_async_request"),
        ({"read_body": 1}, TypeError, "read_body must be True or False, not 1"),
    ),
    # --- services, and the deadline on the wire ---
    *(
        case
        for module in (asgi, wsgi)
        for case in of(
            partial(module.DeadlineMiddleware, app=print),
            ({"app": "nonsense"}, TypeError, "app must be"),
            ({"cap": "nonsense"}, TypeError, "cap"),
            ({"default": "nonsense"}, TypeError, "default"),
            ({"headers": [""]}, ValueError, "headers"),
        )
        + of(module.ResilienceMiddleware, ({"app": "nonsense"}, TypeError, "app must be"))
    ),
    *of(partial(asgi.DeadlineMiddleware, app=print), ({"cut_off": "nonsense"}, TypeError, "cut_off")),
    *of(
        Acceptance,
        ({"cap": 0}, ValueError, "cap"),
        ({"default": float("nan")}, ValueError, "default"),
        ({"headers": "grpc-timeout"}, TypeError, "headers"),
        ({"headers": [""]}, ValueError, "headers"),
    ),
    *of(
        partial(Propagation, hosts=[]),
        ({"hosts": "users.internal"}, TypeError, "hosts"),  # instead of a list of one
        ({"hosts": [42]}, TypeError, "hosts must be strings, not 42"),
        # patterns that would never match, or not as meant; cookies write a domain with its subdomains as the last one
        *(({"hosts": [it]}, ValueError, "hosts must be") for it in ("", "http://a", "a/b", "a*", "a b", "a@b", "a:b")),
        *(({"hosts": [it]}, ValueError, "hosts must be") for it in ("*.*", "[::1", "a:", "a:0", "a:65536", "*..a")),
        ({"hosts": [".internal"]}, ValueError, r"not '\.internal'; did you mean '\*\.internal'\?$"),
        ({"header": "x: y"}, ValueError, "header"),
        ({"header": None}, TypeError, "header"),
    ),
    *of(
        Propagation.to,
        *(({"propagate_to": it}, TypeError, "^propagate_to must be") for it in ("", 42, [42])),
        ({"propagate_to": ["a/b"]}, ValueError, "^propagate_to must be"),
    ),
    *(
        case
        for make in (PolicyInterceptor, aio_interceptors)
        for case in of(
            partial(make, policy=Retry()),
            ({"policy": "nonsense"}, TypeError, "policy"),
            ({"unrepeatable": "/test.Test/One"}, TypeError, "unrepeatable"),
            *(
                ({"unrepeatable": [it]}, ValueError, "unrepeatable must name methods as '/package.Service/Method', not")
                for it in ("One", 1, "/One", "/test.Test/", "/test.Test/*", "test.Test/One", "/test.Test/One ")
            ),
        )
    ),
    # --- databases ---
    *of(
        partial(dbapi.unit_of_work, policy=Retry(), connect=sqlite3.connect),
        ({"connect": OpenConnection()}, TypeError, "connect must be a function that opens a connection, not"),
        ({"policy": None}, TypeError, "policy must be a policy, not None"),
        ({"connect": "test.db"}, TypeError, "connect must be callable, not 'test.db'"),
        ({"repeat_unknown_commits": 1}, TypeError, "repeat_unknown_commits must be True or"),
        ({"limit_statements": None}, TypeError, "limit_statements must be True or False"),
    ),
    *of(
        partial(sqlalchemy.unit_of_work, policy=Retry()),
        (
            {"source": "sqlite://"},
            TypeError,
            "source must be an engine, a sessionmaker or a function .* not 'sqlite://'",
        ),
    ),
    # --- logs, metrics and spans ---
    *of(
        log_events,
        ({"logger": print}, TypeError, "logger must be a logging.Logger or LoggerAdapter, not <built-in"),
        ({"repeats": 0}, ValueError, "repeats must be at least 1, not 0"),
        ({"interval": -1}, ValueError, "interval must be more than zero seconds, not -1"),
        ({"messages": "yes"}, TypeError, "messages must be True or False, not 'yes'"),
        ({"levels": 10}, TypeError, "levels must be a mapping of kinds of events to levels, not 10"),
        ({"levels": {Retry: 10}}, TypeError, "levels must be for RetryScheduled, .*, not <class"),
        ({"levels": {events.TimedOut: "INFO"}}, TypeError, r"levels, such as logging\.INFO, must be a .*, not 'INFO'"),
    ),
    *of(
        structlog.log_events,
        ({"logger": logging.getLogger()}, TypeError, r"use resilience\.integrations\.logging"),
        ({"logger": AsynchronousLogger()}, TypeError, r"logger\.critical must be a plain function"),
        ({"logger": 7}, TypeError, r"logger must be a structlog logger, which 7 is not: it has no critical\(\)"),
        ({"interval": 0}, ValueError, "interval must be more than zero seconds, not 0"),
    ),
    *of(
        partial(export_to_prometheus, registry=CollectorRegistry()),
        ({"registry": "REGISTRY"}, TypeError, "registry must be a CollectorRegistry, not 'REGISTRY'"),
        ({"buckets": 5}, TypeError, "buckets must be numbers, not 5"),
        ({"buckets": []}, ValueError, r"buckets must ascend, not \[\]"),
        ({"buckets": [2, 1]}, ValueError, r"buckets must ascend, not \[2, 1\]"),
        ({"buckets": [1, 1]}, ValueError, r"buckets must ascend, not \[1, 1\]"),
        ({"buckets": ["1"]}, TypeError, r"buckets must be a number \(an int or a float\), not '1'"),
    ),
    *of(export_to_opentelemetry, ({"meter_provider": 1}, TypeError, "meter_provider must be a MeterProvider, not 1")),
    *of(
        Tracing,
        ({"each": "call"}, ValueError, "each must be 'execution' or 'attempt', not 'call'"),
        ({"tracer_provider": 1}, TypeError, "tracer_provider must be a TracerProvider, not 1"),
        ({"record_exceptions": 1}, TypeError, "record_exceptions must be True or False, not 1"),
        ({"name": ""}, ValueError, "name must not be empty"),
    ),
    *of(
        Dashboard,
        ({"title": 3}, TypeError, "title must be a string, not 3"),
        ({"interval": 0}, ValueError, "interval must be more than zero seconds, not 0"),
        ({"interval": 0.01}, ValueError, r"interval must be at least 0\.1 s, not 0\.01"),
        ({"history": 1}, TypeError, "history must be True or False, not 1"),
        ({"keep": 0}, ValueError, "keep must be at least 1, not 0"),
        ({"messages": "no"}, TypeError, "messages must be True or False, not 'no'"),
        ({"allowed_hosts": "localhost"}, TypeError, "allowed_hosts must be a sequence of names, not 'localhost'"),
        ({"allowed_hosts": [1]}, TypeError, "allowed_hosts must be a sequence of names, not"),
        ({"max_viewers": 0}, ValueError, "max_viewers must be at least 1, not 0"),
    ),
    *of(partial(Dashboard, print), ({}, TypeError, "policies")),
    # --- others ---
    *of(to_retry_policy, ({"retry": RetryPolicy()}, TypeError, "retry must be a Retry, not")),
    *of(from_retry_policy, ({"policy": Retry()}, TypeError, "policy must be a RetryPolicy of temporalio, not")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_argument_is_refused_with_its_name_and_value(case: Case) -> None:
    """By the constructor, and not at the first call."""
    with pytest.raises(case.error, match=case.message):
        case.make(**case.given)
