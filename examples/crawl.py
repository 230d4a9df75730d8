"""A crawler: many pages of several hosts, a few at a time, politely, with a progress bar.

Look at `polite`: `Keyed` has a bulkhead and a breaker for each host, and `each` reads only a few addresses ahead. The
hosts are servers on loopback: one answers, one is slow, one is down. At the end, the requests that they got are
compared with the promises.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.progress import Progress

from resilience import Bulkhead, CircuitBreaker, CircuitOpen, Failure, Keyed, Policy, Retry, Success, Timeout
from resilience.work import each

PAGES = 40
AT_ONCE = 3


class Host:
    """A server on loopback that counts its requests."""

    def __init__(self, name: str, status: int = 200, seconds: float = 0.0) -> None:
        self.name, self.requests, self.inside, self.most = name, 0, 0, 0
        lock, host = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with lock:
                    host.requests += 1
                    host.inside += 1
                    host.most = max(host.most, host.inside)
                time.sleep(seconds)
                with lock:
                    host.inside -= 1
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"<html>")

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.netloc = f"127.0.0.1:{self.server.server_port}"


def for_host(host: str) -> Policy[Any]:
    return Policy.wrap(
        Retry(2, on=httpx.HTTPError, backoff=[0.01]),
        Bulkhead(AT_ONCE, queue=1000, name=host),
        CircuitBreaker(5, open_for=60, name=host),
        Timeout(2.0),
    )


polite = Keyed(for_host, key=lambda url: urlsplit(url).netloc, max_keys=10_000)


def addresses(hosts: list[Host], read: list[str]) -> Iterator[str]:
    for number in range(PAGES):
        for host in hosts:
            read.append(host.name)
            yield f"http://{host.netloc}/{number}"


def main() -> bool:
    hosts = [Host("good"), Host("slow", seconds=0.01), Host("down", status=503)]
    names = {host.netloc: host.name for host in hosts}
    came: Counter[tuple[str, str]] = Counter()
    read: list[str] = []
    ahead = taken = 0
    with httpx.Client() as client, Progress(transient=True) as bar:

        def fetch(url: str) -> int:
            return len(client.get(url).raise_for_status().content)

        task = bar.add_task("crawling", total=PAGES * len(hosts))
        with each(polite, fetch, addresses(hosts, read), limit=8, progress=lambda n: bar.advance(task, n)) as outcomes:
            for url, outcome in outcomes:
                taken += 1
                ahead = max(ahead, len(read) - taken)
                name = names[urlsplit(url).netloc]
                match outcome:
                    case Success():
                        came[name, "pages"] += 1
                    case Failure(CircuitOpen()):
                        came[name, "refused by the breaker"] += 1
                    case Failure(error):
                        came[name, type(error).__name__] += 1
    for host in hosts:
        host.server.shutdown()
        host.server.server_close()
        results = ", ".join(f"{number} {what}" for (name, what), number in sorted(came.items()) if name == host.name)
        print(f"{host.name}: {results}; {host.requests} requests, at most {host.most} at once")
    down = hosts[-1]
    kept = {
        "every page of the hosts that answer": came["good", "pages"] == came["slow", "pages"] == PAGES,
        f"at most {AT_ONCE} requests at once to each host": max(host.most for host in hosts) <= AT_ONCE,
        "the host that is down is left alone": down.requests <= 5 + AT_ONCE,
        "at most 16 addresses read ahead": ahead <= 16,
        "each address once": len(read) == taken == sum(came.values()) == PAGES * len(hosts),
    }
    for what, is_so in kept.items():
        print(f"{'kept' if is_so else 'BROKEN'}: {what}")
    return all(kept.values())


if __name__ == "__main__":
    sys.exit(not main())
