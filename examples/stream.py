"""A stream under policies: a failure before the first item is retried; after a later one, the stream is resumed.

Look at `policy.streaming(...)`. An HTTP server on loopback sends a text word by word, as a language model does. The
first request is refused, the second one breaks off in the middle, and the third one continues after the last word that
was delivered: each word has a number, as with `Last-Event-ID`. The permit of the bulkhead is held until the last word,
and an idle limit ends a stream whose next word does not arrive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from resilience import Bulkhead, Failure, Policy, Retry, TimeoutExceeded
from resilience.events import Event, ExecutionFinished, RetryScheduled, StreamOpened

WORDS = "Four hundred and two kinds of moss grow on this roof".split()


class Words(BaseHTTPRequestHandler):
    """`/text?after=3` sends the words after number 3; `/hangs` sends one word, and then nothing."""

    requests = 0

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?after=")
        if path == "/text":
            Words.requests += 1
            if Words.requests == 1:
                self.send_error(503)
                return
        self.send_response(200)
        self.end_headers()
        for number, word in enumerate(WORDS):
            if number > int(query or -1):
                self.wfile.write(f"{number} {word}\n".encode())
            if path == "/hangs":
                time.sleep(0.5)
                return
            if path == "/text" and Words.requests == 2 and number == 4:
                self.connection.close()  # in the middle of the text
                return

    def log_message(self, *args: object) -> None:
        pass


def show(event: Event) -> None:
    match event:
        case RetryScheduled(attempt=attempt, outcome=Failure(error)):
            print(f"    attempt {attempt} failed: {type(error).__name__}")
        case StreamOpened(attempt=attempt):
            print(f"    the first word came in attempt {attempt}")
        case ExecutionFinished(items=items, attempts=attempts):
            print(f"    over after {items} words in {attempts} attempts")


pool = Bulkhead(1, name="open streams")
policy = Policy.wrap(Retry(4, on=httpx.HTTPError, backoff=[0.02]), pool, name="words", listeners=[show])


def read(client: httpx.Client, path: str, *, after: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield each word with its number."""
    with client.stream("GET", path, params={} if after is None else {"after": after}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            number, _, word = line.partition(" ")
            yield int(number), word
    if number != str(len(WORDS) - 1):
        raise httpx.RemoteProtocolError("the text has no end")


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Words)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}") as client:
        print("a text that breaks off, and is resumed:")
        words = policy.streaming(first=5.0, idle=2.0, resume={"after": lambda item: item[0]})
        text = " ".join(word for _, word in words.call(read, client, "/text"))
        print(f"    {text}")
        assert text == " ".join(WORDS), "a word is missing, or was delivered twice"
        assert pool.stats().in_flight == 0

        print("a text that hangs:")
        with closing(policy.streaming(first=5.0, idle=0.1).call(read, client, "/hangs")) as stream:
            print(f"    {next(stream)[1]} ... while {pool.stats().in_flight} stream is open")
            try:
                next(stream)
            except TimeoutExceeded as error:
                print(f"    {error}; open streams: {pool.stats().in_flight}")
    server.shutdown()
    server.server_close()
