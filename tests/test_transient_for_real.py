"""`transient` with real errors of the network: refused connections, unknown names, certificates."""

from __future__ import annotations

import asyncio
import errno
import http.client
import smtplib
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
import requests
import trio

from resilience import TimeoutExceeded, transient
from tests.versions import is_installed


@pytest.fixture
def unused_port() -> int:
    """Return a port of this machine at which no server listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


def raised_by(function: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the tests check which one
        function(*args)
    return caught.value


# --- a closed port -------------------------------------------------------------------------------


async def connect(port: int) -> None:
    await anyio.connect_tcp("service", port)


CONNECTING: dict[str, Callable[[int], Any]] = {
    "asyncio": lambda port: asyncio.run(asyncio.wait_for(asyncio.open_connection("service", port), 5)),
    "trio": lambda port: trio.run(trio.open_tcp_stream, "service", port),
    "anyio in asyncio": lambda port: anyio.run(connect, port),
    "anyio in trio": lambda port: anyio.run(connect, port, backend="trio"),
}


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]], ids=len)
@pytest.mark.parametrize("client", CONNECTING)
def test_a_refused_connection_to_every_address_is_transient(
    unused_port: int, client: str, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Often a plain `OSError`, with the real errors as its causes; that of asyncio for several addresses has none."""
    resolves_to(monkeypatch, addresses)
    error = raised_by(CONNECTING[client], unused_port)
    assert transient(error)
    if client == "asyncio" and len(addresses) > 1:
        assert (type(error), error.__cause__) == (OSError, None)


def resolves_to(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port))) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_refused_connection_of_the_standard_library_is_transient(unused_port: int) -> None:
    assert transient(raised_by(urllib.request.urlopen, f"http://127.0.0.1:{unused_port}/"))
    assert transient(raised_by(smtplib.SMTP, "127.0.0.1", unused_port))
    assert transient(raised_by(http.client.HTTPConnection("127.0.0.1", unused_port).request, "GET", "/"))


@pytest.mark.parametrize(("length", "expected"), [(19, True), (20, False), (5000, False)])
def test_a_plain_os_error_with_a_chain_of_causes_without_end_is_not_transient(length: int, expected: bool) -> None:
    """Each is judged by the next one, so a longer chain would exhaust the stack."""
    cause: Exception = ConnectionError()
    for _ in range(length):
        error = OSError("no connection")
        error.__cause__ = cause
        cause = error
    assert transient(cause) is expected


def test_a_ring_of_causes_says_nothing() -> None:
    """After `raise error from error`, `raise first from second`, or `raise group.exceptions[0] from group`."""
    itself, first, second = OSError("no"), OSError("no"), OSError("no")
    itself.__cause__ = itself
    first.__cause__, second.__cause__ = second, first
    outside = OSError("no")
    outside.__cause__ = first
    member = OSError("no")
    member.__cause__ = ExceptionGroup("several", [member, ConnectionError("reset")])
    assert [it for it in (itself, first, second, outside, member) if transient(it)] == []


# --- errors without a connection -----------------------------------------------------------------


def os_error(name: str) -> OSError:
    return OSError(getattr(errno, name), "no")


def resolver_error(name: str) -> OSError:
    return socket.gaierror(getattr(socket, name), "no")


class OwnError(OSError):
    """The error of a client."""


ERRORS: dict[bool, list[Exception]] = {
    True: [
        *(ConnectionError(), ConnectionResetError(), ConnectionRefusedError(), BrokenPipeError()),
        *(TimeoutError(), TimeoutExceeded()),
        *map(os_error, ["EHOSTUNREACH", "ENETUNREACH", "ETIMEDOUT", "ENETDOWN", "EHOSTDOWN"]),
        resolver_error("EAI_AGAIN"),
        http.client.IncompleteRead(b"half"),
        http.client.RemoteDisconnected("no answer"),
        http.client.BadStatusLine(""),
        ssl.SSLZeroReturnError(6, "closed"),
        smtplib.SMTPServerDisconnected("gone"),
        smtplib.SMTPConnectError(421, "busy"),
        trio.BrokenResourceError(),
        trio.TooSlowError(),
        anyio.BrokenResourceError(),
        *([anyio.ConnectionFailed("no")] if is_installed("anyio>=4.10") else []),
        OwnError(errno.ETIMEDOUT, "Python makes no TimeoutError of it"),
    ],
    False: [
        *(Exception(), OSError(), FileNotFoundError(), PermissionError(), ValueError(), KeyError(), EOFError()),
        *map(os_error, ["ENOENT", "EACCES", "ENOSPC", "EMFILE", "EINVAL"]),
        *map(resolver_error, ["EAI_NONAME", "EAI_FAMILY"]),  # the name will not exist at the next attempt either
        http.client.InvalidURL("no"),
        smtplib.SMTPAuthenticationError(535, b"no"),
        smtplib.SMTPRecipientsRefused({}),
        trio.ClosedResourceError(),
        trio.BusyResourceError(),
        anyio.ClosedResourceError(),
        anyio.EndOfStream(),
        ssl.SSLCertVerificationError(1, "certificate has expired"),
    ],
}


@pytest.mark.parametrize(
    ("error", "expected"), [(error, expected) for expected, errors in ERRORS.items() for error in errors], ids=repr
)
def test_errors_of_connections_are_transient_and_those_of_wrong_use_are_not(error: Exception, expected: bool) -> None:
    assert transient(error) is expected


@pytest.mark.parametrize(
    ("answer", "expected"), [(b"", True), (b"HTTP/1.1 400 no\r\n\r\n", False)], ids=["end of connection", "no TLS"]
)
@pytest.mark.parametrize("get", [requests.get, urllib.request.urlopen])
def test_a_tls_error_is_transient_if_the_peer_is_gone(get: Callable[[str], Any], answer: bytes, expected: bool) -> None:
    """Also where a client has one class for all errors of TLS."""

    def serve() -> None:
        with suppress(OSError), server.accept()[0] as connection:  # the client may leave first
            connection.recv(10_000)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(10_000)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        error = raised_by(get, f"https://127.0.0.1:{server.getsockname()[1]}/")
        thread.join(10)
    assert transient(error) is expected
