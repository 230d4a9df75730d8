"""A real HTTP/1.1 server on loopback that fails as scripted.

    with flaky_server() as server:                  # or the fixture `server`
        server.script("/orders", 503, Answer(200, body=b"fine"))
        client.get(f"{server.url}/orders")
        assert [it.method for it in server.requests] == ["GET", "GET"]

A path has a queue of answers; the last one is repeated, and a path without a script answers
200 with `b"ok"`. A script is for the path with or without a query. An answer is an `Answer`, or an
`int` for a status with a body of `b"ok"`:

    Answer(429, {"Retry-After": "2"})               headers: a mapping, or pairs if one of them is repeated
    Answer(200, hold=event)                         wait for a `threading.Event` before answering
    Answer(200, delay=5.0)                          wait for seconds before answering (the end of the server ends it)
    Answer(200, body=[b"a", b"b"], chunked=True)    pieces, as chunks; without `chunked` under one Content-Length
    Answer(200, body=[b"a", b"b"], drip=event)      wait for the event between one piece and the next
    Answer(200, body=[b"a", b"b"], pause=0.1)       wait for seconds there
    Answer(fault="reset")                           read the whole request, then reset the connection
    Answer(fault="close")                           read the whole request, then close without an answer
    Answer(fault="garbage")                         read the whole request, then send what is no HTTP, and close
    Answer(fault="refuse")                          read the headers alone, without a 100 Continue, then reset
    Answer(200, body=[b"a", b"b"], fault="cut")     close after the first piece of the body
    Answer(fault="drip")                            send a header without an end, byte by byte

What was received is in `server.requests` (`server.requests_to(path)`): method, path with its query, headers
(names in any case), body as it arrived with chunks joined, and the number of the connection that it came on.
A request is recorded once it has been read, before it is answered. `server.connections` counts the connections
ever made, `server.open_connections` those that are open; `server.wait_until(condition)` waits for a condition.
`unused_url()` is the address of a port without a listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import uvicorn

from tests.callers import wait_until

#: Close with a reset: linger for no time.
_RESET: Final = struct.pack("ii", 1, 0)

#: Seconds after which a test that waits for the server has failed.
PATIENCE: Final = 20.0


@dataclass(frozen=True)
class Answer:
    """What the server does with one request."""

    status: int = 200
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = ()
    body: bytes | list[bytes] = b"ok"
    hold: threading.Event | None = None
    delay: float = 0.0
    chunked: bool = False
    drip: threading.Event | None = None
    pause: float = 0.0
    fault: Literal["reset", "close", "garbage", "refuse", "cut", "drip"] | None = None

    @property
    def pieces(self) -> list[bytes]:
        return self.body if isinstance(self.body, list) else [self.body]

    @property
    def header_pairs(self) -> list[tuple[str, str]]:
        return list(self.headers.items() if isinstance(self.headers, Mapping) else self.headers)


@dataclass(frozen=True)
class Received:
    """A request as the server has read it. `connection` counts from 1; `headers[...]` ignores the case."""

    method: str
    path: str
    headers: Message
    body: bytes
    connection: int


@dataclass
class _Script:
    answers: list[Answer]
    given: int = 0

    def next(self) -> Answer:
        answer = self.answers[min(self.given, len(self.answers) - 1)]
        self.given += 1
        return answer


@dataclass
class Server:
    """The server, as tests use it."""

    url: str
    requests: list[Received] = field(default_factory=list)
    connections: int = 0
    _scripts: dict[str, _Script] = field(default_factory=dict)
    _open: dict[socket.socket, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def script(self, path: str, *answers: Answer | int) -> str:
        """Set the answers of a path; return its URL."""
        assert answers, "a script needs an answer"
        with self._lock:
            self._scripts[path] = _Script([Answer(it) if isinstance(it, int) else it for it in answers])
        return self.url + path

    def requests_to(self, path: str) -> list[Received]:
        """The requests to a path, with any query."""
        return [it for it in list(self.requests) if path in {it.path, it.path.partition("?")[0]}]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; fail after `PATIENCE`."""
        wait_until(condition, PATIENCE)

    # --- the server's side ---

    def _enter(self, connection: socket.socket) -> int:
        with self._lock:
            self.connections += 1
            self._open[connection] = self.connections
            if self._ended.is_set():
                connection.shutdown(socket.SHUT_RDWR)
            return self.connections

    def _leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)

    def _next_answer(self, path: str) -> Answer:
        with self._lock:
            script = self._scripts.get(path) or self._scripts.get(path.partition("?")[0])
            return Answer() if script is None else script.next()

    def _record(self, request: Received) -> None:
        with self._lock:
            self.requests.append(request)

    def _pause(self, seconds: float, event: threading.Event | None) -> None:
        end = time.monotonic() + PATIENCE
        while event is not None and not event.wait(0.01) and not self._ended.is_set() and time.monotonic() < end:
            pass
        if seconds > 0:
            self._ended.wait(seconds)

    def _end(self) -> None:
        with self._lock:
            self._ended.set()
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    scripted: Server
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.number = self.scripted._enter(self.connection)

    def finish(self) -> None:
        self.scripted._leave(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle_expect_100(self) -> bool:
        return True  # when the body is about to be read

    def answer(self) -> None:
        answer = self.scripted._next_answer(self.path)
        body = b"" if answer.fault == "refuse" else self._read_body()
        self.scripted._record(Received(self.command, self.path, self.headers, body, self.number))
        self.scripted._pause(answer.delay, answer.hold)
        if answer.fault == "garbage":
            self.wfile.write(b"\x15\x03\x01\r\n\r\n")
        if answer.fault in {"reset", "close", "garbage", "refuse"}:
            self._hang_up(reset=answer.fault in {"reset", "refuse"})
        elif answer.fault == "drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not self.scripted._ended.wait(0.02):
                self.wfile.write(b".")
        else:
            self._respond(answer)

    do_CONNECT = do_DELETE = do_GET = do_HEAD = do_OPTIONS = do_PATCH = do_POST = do_PUT = do_QUERY = answer

    def _read_body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return b"".join(iter(self._read_chunk, b""))
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _read_chunk(self) -> bytes:
        chunk = self.rfile.read(int(self.rfile.readline().split(b";")[0], 16))
        self.rfile.readline()
        return chunk

    def _respond(self, answer: Answer) -> None:
        self.send_response(answer.status)
        bodiless = answer.status in {204, 304} or answer.status < 200
        for name, value in answer.header_pairs:
            self.send_header(name, value)
        if answer.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif not bodiless:
            self.send_header("Content-Length", str(sum(map(len, answer.pieces))))
        self.end_headers()
        if not bodiless and self.command != "HEAD":
            self._send_body(answer)

    def _send_body(self, answer: Answer) -> None:
        for number, piece in enumerate(answer.pieces):
            if number and answer.fault == "cut":
                return self._hang_up(reset=False)
            if number:
                self.scripted._pause(answer.pause, answer.drip)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if answer.chunked else piece)
        if answer.chunked:
            self.wfile.write(b"0\r\n\r\n")
        return None

    def _hang_up(self, *, reset: bool) -> None:
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.rfile.close()
            self.connection.close()
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = False  # so that the end of the server waits for its threads

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (OSError, ValueError)):  # a client that has left
            super().handle_error(request, client_address)


@contextlib.contextmanager
def flaky_server() -> Iterator[Server]:
    """Run a server on a free port of loopback; at the end every connection is closed and every thread has ended."""
    with _Server(("127.0.0.1", 0), _Handler) as listener:
        scripted = Server(f"http://127.0.0.1:{listener.server_port}")
        listener.RequestHandlerClass = type("Handler", (_Handler,), {"scripted": scripted})
        thread = threading.Thread(target=listener.serve_forever, args=(0.001,), daemon=True)
        thread.start()
        try:
            yield scripted
        finally:
            listener.shutdown()
            thread.join()
            scripted._end()


def unused_url() -> str:
    """Return the URL of a port without a listener: connections to it are refused."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


class _Uvicorn(uvicorn.Server):
    """uvicorn that checks every 5 ms whether to exit, not every 100 ms, because tests run hundreds of servers."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def asgi_service(app: Any) -> Iterator[str]:
    """Serve an ASGI application with uvicorn, in its own thread."""
    # Old versions of uvicorn make uvloop, if they choose it, the event loop of the whole process.
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, loop="asyncio", http="h11", ws="none")
    server = _Uvicorn(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), PATIENCE)
        assert server.started, "uvicorn did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


def exchange(url: str, data: bytes) -> bytes:
    """Send bytes, and return all bytes that the server sends before it closes the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received
