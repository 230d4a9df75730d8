"""`transient`, and errors as the network really makes them: refused connections, unknown names, certificates."""

from __future__ import annotations

import asyncio
import errno
import http.client
import itertools
import smtplib
import socket
import ssl
import urllib.request
from collections.abc import Callable
from typing import Any

import anyio
import httpx2
import pytest
import requests
import trio

from resilience import Retry, transient
from tests.conftest import FakeClock, World


@pytest.fixture
def unused_port() -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port: int = it.getsockname()[1]
        return port


def raised_by(function: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one is what the test asks
        function(*args)
    return caught.value


# --- a closed port -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_asyncio_cannot_connect(unused_port: int, host: str) -> None:
    error = raised_by(asyncio.run, asyncio.wait_for(asyncio.open_connection(host, unused_port), 5))
    assert transient(error)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]], ids=len)
def test_asyncio_cannot_connect_to_any_address(
    unused_port: int, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several failures asyncio makes one plain `OSError`, without a number or a cause."""
    resolves_to(monkeypatch, addresses)
    error = raised_by(asyncio.run, asyncio.wait_for(asyncio.open_connection("service", unused_port), 5))
    assert transient(error)
    if len(addresses) > 1:
        assert (type(error), error.__cause__) == (OSError, None)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]], ids=len)
def test_anyio_cannot_connect(
    tasks_world: World, unused_port: int, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises a plain `OSError`, with what happened as its cause."""
    resolves_to(monkeypatch, addresses)

    async def main() -> None:
        await anyio.connect_tcp("service", unused_port)

    error = raised_by(tasks_world.run, main)
    assert isinstance(error, OSError)
    assert not isinstance(error, (ConnectionError, TimeoutError))
    assert transient(error)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]], ids=len)
def test_trio_cannot_connect(unused_port: int, addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise."""
    resolves_to(monkeypatch, addresses)
    error = raised_by(trio.run, trio.open_tcp_stream, "service", unused_port)
    assert isinstance(error, OSError)
    assert transient(error)


def resolves_to(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (it, int(port))) for it in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_the_standard_librarys_clients_cannot_connect(unused_port: int) -> None:
    assert transient(raised_by(urllib.request.urlopen, f"http://127.0.0.1:{unused_port}/"))
    assert transient(raised_by(smtplib.SMTP, "127.0.0.1", unused_port))
    assert transient(raised_by(http.client.HTTPConnection("127.0.0.1", unused_port).request, "GET", "/"))


async def test_a_retry_tries_again_what_a_real_client_raises(world: World, clock: FakeClock, unused_port: int) -> None:
    """The default of Retry is of use with a client as it comes."""
    url = f"http://127.0.0.1:{unused_port}/"
    calls = itertools.count(1)

    async def fetch(ctx: object) -> object:
        next(calls)
        if world.blocking:
            return requests.get(url, timeout=5)
        async with httpx2.AsyncClient() as client:
            return await client.get(url)

    error = await world.attempt(Retry(3, backoff=[0.1]), fetch)
    assert isinstance(error, (requests.ConnectionError, httpx2.ConnectError))
    assert next(calls) - 1 == 3
    assert clock.sleeps == [0.1, 0.1]


def test_a_plain_os_error_says_nothing() -> None:
    """One without a number is only known by what it was made of."""
    permanent, temporary = OSError("all attempts failed"), OSError("all attempts failed")
    permanent.__cause__ = ExceptionGroup("", [ConnectionRefusedError(), PermissionError()])
    temporary.__cause__ = ExceptionGroup("", [ConnectionRefusedError(), ConnectionRefusedError()])
    assert not transient(OSError("disk full"))
    assert not transient(permanent)
    assert transient(temporary)


# --- errors without a connection -----------------------------------------------------------------


@pytest.mark.parametrize("number", ["EHOSTUNREACH", "ENETUNREACH", "ETIMEDOUT", "ENETDOWN", "EHOSTDOWN"])
def test_numbers_of_connecting_are_transient(number: str) -> None:
    assert transient(OSError(getattr(errno, number), "no"))


@pytest.mark.parametrize("number", ["ENOENT", "EACCES", "ENOSPC", "EMFILE", "EINVAL"])
def test_other_numbers_are_not(number: str) -> None:
    assert not transient(OSError(getattr(errno, number), "no"))


@pytest.mark.parametrize(("number", "expected"), [("EAI_AGAIN", True), ("EAI_NONAME", False), ("EAI_FAMILY", False)])
def test_a_name_that_cannot_be_resolved_for_now(number: str, expected: bool) -> None:
    """A name that does not exist will not exist at the next try either."""
    assert transient(socket.gaierror(getattr(socket, number), "no")) is expected


@pytest.mark.parametrize(
    "error",
    [
        http.client.IncompleteRead(b"half"),
        http.client.RemoteDisconnected("no answer"),
        http.client.BadStatusLine(""),
        smtplib.SMTPServerDisconnected("gone"),
        smtplib.SMTPConnectError(421, "busy"),
        trio.BrokenResourceError(),
        trio.TooSlowError(),
        anyio.BrokenResourceError(),
    ],
    ids=lambda it: type(it).__name__,
)
def test_the_other_errors_of_broken_connections(error: Exception) -> None:
    assert transient(error)


@pytest.mark.parametrize(
    "error",
    [
        http.client.InvalidURL("no"),
        smtplib.SMTPAuthenticationError(535, b"no"),
        smtplib.SMTPRecipientsRefused({}),
        trio.ClosedResourceError(),
        trio.BusyResourceError(),
        anyio.ClosedResourceError(),
        anyio.EndOfStream(),
    ],
    ids=lambda it: type(it).__name__,
)
def test_errors_of_use_are_not_transient(error: Exception) -> None:
    assert not transient(error)


# --- certificates --------------------------------------------------------------------------------


def test_a_certificate_itself_is_not_transient() -> None:
    assert not transient(ssl.SSLCertVerificationError(1, "certificate has expired"))


def test_another_tls_error_in_the_chain_leaves_a_connection_error_transient() -> None:
    error = httpx2.ConnectError("no")
    error.__cause__ = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    assert transient(error)
