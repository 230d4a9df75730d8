"""A real HTTP server on loopback that fails according to a script, so that every run sees the same failures.

The first part of a path is the name of a script, with one step for each request for that path; the last step repeats.
So `/flaky/trio` and `/flaky/threads` follow the same script independently.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from typing_extensions import override


class Step(enum.Enum):
    """The answer to one request."""

    ANSWER = "200 with a body"
    SLOWLY = "the same, after a moment"
    ERROR = "503"
    DROP = "the connection is closed without an answer"
    HANG = "nothing at all, for seconds"


SCRIPTS: dict[str, tuple[Step, ...]] = {
    "flaky": (Step.ERROR, Step.DROP, Step.ANSWER),
    "hangs-once": (Step.HANG, Step.ANSWER),
    "hangs": (Step.HANG,),
    "busy": (Step.SLOWLY,),
}

MOMENT = 0.15  # seconds that a slow answer takes
HANG = 2.2  # seconds for which a hanging request is held
BODY = b"sunny"


class FlakyServer(ThreadingHTTPServer):
    """Serves in its `with` block, and counts the requests."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.outage = False  # if true, every request gets a 503
        self.requests: Counter[str] = Counter()  # path -> number of requests
        self.at_once = 0  # slow answers in progress
        self.most_at_once = 0  # the most of them at any time
        self.counting = threading.Lock()
        self.closing = threading.Event()

    @override
    def __enter__(self) -> Self:
        for name in ("NO_PROXY", "no_proxy"):  # no proxy for loopback
            os.environ[name] = "127.0.0.1"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    @override
    def __exit__(self, *exc: object) -> None:
        self.closing.set()  # ends hanging requests
        self.shutdown()
        self.server_close()

    def next_step(self, path: str) -> Step:
        """Count a request, and return its step."""
        with self.counting:
            number = self.requests[path]
            self.requests[path] += 1
        if self.outage:
            return Step.ERROR
        script = SCRIPTS.get(path.split("/")[1], (Step.ANSWER,))
        return script[min(number, len(script) - 1)]

    def take_a_moment(self) -> None:
        """Wait for a moment, and record how many requests do so at once."""
        with self.counting:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(MOMENT)
        with self.counting:
            self.at_once -= 1

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: FlakyServer

    def do_GET(self) -> None:
        step = self.server.next_step(self.path)
        if step is Step.HANG:
            self.server.closing.wait(HANG)
        elif step is Step.ERROR:
            self._respond(503, b"out of order")
        elif step is not Step.DROP:
            if step is Step.SLOWLY:
                self.server.take_a_moment()
            self._respond(200, BODY)

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing, because the clients print what happens."""
