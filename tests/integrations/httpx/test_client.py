"""The clients of httpx around a transport: what stays unchanged, and wrong arguments."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import httpx
import httpx2
import pytest
import requests

from resilience import CircuitBreaker, CircuitOpen, Fallback, Policy, Retry, Timeout, integrations
from resilience.callables import maybe_await
from resilience.integrations.httpx import AsyncResilienceTransport, ResilienceTransport
from resilience.testing import script
from tests.callers import wait_until
from tests.conftest import Watched, World, no_collector
from tests.integrations.http_clients import QUICK, Httpx
from tests.integrations.servers import PATIENCE, Server


async def test_without_an_inner_transport_the_default_one_of_the_library_is_used(kit: Httpx, server: Server) -> None:
    """The library is that of the first request."""
    url = server.script("/", 503, 200)
    async with kit.over(kit.make(QUICK)) as client:
        assert (await maybe_await(client.get(url))).status_code == 200


def test_one_transport_serves_clients_of_both_libraries(server: Server) -> None:
    """They share its policy."""
    breaker = CircuitBreaker(2)
    transport = ResilienceTransport(breaker)
    url = server.script("/", 503)
    with httpx.Client(transport=transport) as first, httpx2.Client(transport=transport) as second:
        assert [type(it.get(url)) for it in (first, second)] == [httpx.Response, httpx2.Response]
        with pytest.raises(CircuitOpen):
            first.get(url)


async def test_a_client_of_the_other_kind_is_told_which_transport_it_needs() -> None:
    """When it is entered, and when it sends without that."""
    client = httpx.Client(transport=AsyncResilienceTransport(QUICK))  # type: ignore[arg-type]
    for use in (client.__enter__, lambda: client.get("http://example.org/")):
        with pytest.raises(AttributeError, match=r"no attribute '\w+': a Client needs ResilienceTransport$"):
            use()
    other = httpx.AsyncClient(transport=ResilienceTransport(QUICK))  # type: ignore[arg-type]
    for enter in (other.__aenter__, lambda: other.get("http://example.org/")):
        with pytest.raises(AttributeError, match=r"no attribute '\w+': an AsyncClient needs AsyncResilienceTransport$"):
            await enter()
    with pytest.raises(AttributeError, match=r"no attribute 'send'$"):
        ResilienceTransport(QUICK).send  # type: ignore[attr-defined]  # noqa: B018


async def test_the_inner_transport_is_entered_and_closed_with_the_client(kit: Httpx) -> None:
    inner = MagicMock(spec=type(kit.network()))
    async with kit.client(QUICK, inner):
        pass
    transport = kit.make(QUICK, inner)
    await maybe_await(transport.close() if kit.world.blocking else transport.aclose())
    calls = [name.strip("_") for name, *_ in inner.mock_calls]
    assert calls == (["enter", "exit", "close"] if kit.world.blocking else ["aenter", "aexit", "aclose"])


def test_responses_are_freed_without_the_cyclic_collector(kit: Httpx) -> None:
    """That of a failed attempt, with its error, and the one that is returned with a limited body."""
    answers = Watched()

    def handler(request: Any) -> Any:
        status = 200 if answers.seen else 503
        return answers.watch(kit.library.Response(status, headers={"Retry-After": "0"}, content=b"ok"))

    async def main() -> None:
        transport = kit.make(Policy.wrap(Timeout(PATIENCE), QUICK), kit.library.MockTransport(handler))
        request = kit.library.Request("GET", "http://example.org/")
        if kit.world.blocking:
            assert transport.handle_request(request).read() == b"ok"
        else:
            assert await (await transport.handle_async_request(request)).aread() == b"ok"

    with no_collector():
        kit.run(main)
        wait_until(lambda: not answers.alive)  # a worker may still be about to drop its job
        assert answers.seen == 2


# --- wrong arguments -------------------------------------------------------------------------


@pytest.fixture
def imported_without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Import our module again without some libraries."""
    name = "resilience.integrations.httpx"

    def import_without(*missing: str) -> ModuleType:
        monkeypatch.setattr(integrations, "httpx", sys.modules[name])  # restored after the test
        for module in [it for it in sys.modules if it == name or it.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, module)
        for module in missing:
            monkeypatch.setitem(sys.modules, module, None)
        return importlib.import_module(name)

    return import_without


@pytest.mark.parametrize(("installed", "missing"), [(httpx, "httpx2"), (httpx2, "httpx")])
def test_one_of_the_libraries_is_enough(installed: Any, missing: str, imported_without: Callable[..., Any]) -> None:
    """The transports are those of the installed library."""
    ours = imported_without(missing)
    assert issubclass(ours.ResilienceTransport, installed.BaseTransport)
    assert issubclass(ours.AsyncResilienceTransport, installed.AsyncBaseTransport)
    handler = script(installed.Response(503), installed.Response(200))
    transport = ours.ResilienceTransport(Retry(2, backoff=[0]), installed.MockTransport(handler))
    with installed.Client(transport=transport) as client:
        assert client.get("http://example.org/").status_code == 200


def test_without_either_library_the_error_says_what_to_install(imported_without: Callable[..., Any]) -> None:
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'resilience-pipeline[httpx]'")):
        imported_without("httpx", "httpx2")


@pytest.mark.parametrize("request_", ["GET http://example.org/", None, requests.Request("GET", "http://example.org/")])
async def test_a_request_of_another_library_is_refused(tasks_world: World, request_: Any) -> None:
    """By both transports, before the policy is called."""
    called: list[object] = []
    policy = Fallback(handler=lambda failure, ctx: called.append(failure))
    with pytest.raises(TypeError, match="a request of httpx or httpx2 is needed, not"):
        ResilienceTransport(policy).handle_request(request_)
    with pytest.raises(TypeError, match="a request of httpx or httpx2 is needed, not"):
        await AsyncResilienceTransport(policy).handle_async_request(request_)
    assert called == []
