"""A client of language models: two providers, token budgets, and answers that are streamed word by word.

Look at `provider` and `main`. Each provider has its own limits, retries and breaker; if the first one cannot answer,
the second one does. An estimate is taken from the budget, and corrected when the answer is known. The providers are
fakes on loopback, which refuse requests above their limit with 429, and are down for a while.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from resilience import CircuitBreaker, Context, Fallback, Outcome, Policy, Rate, RateLimiter, Retry, Timeout
from resilience.integrations.http import TransientStatus, retry_after

TOKENS = 400  # per second, for each provider


class Provider:
    """A fake. It answers with the requested number of words, and counts the tokens of the last second."""

    def __init__(self, name: str) -> None:
        self.name, self.is_down, self.breaks_off = name, False, 0
        self.answered, self.refused, self.used = 0, 0, 0
        spent: list[tuple[float, int]] = []
        lock, provider = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                words = int(self.path.partition("?words=")[2])
                with lock:
                    now = time.monotonic()
                    recent = sum(tokens for at, tokens in spent if now - at < 1)
                    status = 500 if provider.is_down else 429 if recent + words > 1.5 * TOKENS else 200
                    if status == 200:
                        spent.append((now, words))
                        provider.answered += 1
                        provider.used += words
                    provider.refused += status == 429
                self.send_response(status)
                self.send_header("Retry-After", "0.2")
                if status == 200 and provider.breaks_off:
                    provider.breaks_off -= 1
                    self.send_header("Content-Length", "1000")  # but sends no body
                    words = 0
                self.end_headers()
                if status == 200:
                    for number in range(words):
                        self.wfile.write(f"w{number} ".encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/?words="


def checked(response: httpx.Response) -> httpx.Response:
    if response.status_code in {429, 500}:
        asked = retry_after(response.headers)
        raise TransientStatus("not now", status=response.status_code, retry_after=asked)
    return response


def budget(name: str) -> RateLimiter:
    """A third of the provider's limit stays free for late requests. We estimate 60 tokens; answers have 20 to 50."""
    return RateLimiter(Rate(TOKENS, per=1, cost=lambda ctx: 60, actual=lambda text: len(text.split())), name=name)


def provider(name: str) -> Policy[Any]:
    return Policy.wrap(Retry(3, backoff=[0.02]), CircuitBreaker(3, open_for=30, name=name), budget(name), Timeout(5))


async def main() -> bool:
    first, second = Provider("first"), Provider("second")
    policies = {it.name: provider(it.name) for it in (first, second)}
    answered: list[tuple[str, int, int]] = []
    async with httpx.AsyncClient() as client:

        async def ask(it: Provider, words: int) -> str:
            return checked(await client.get(f"{it.url}{words}")).text

        async def ask_second(failure: Outcome[str], ctx: Context) -> str:
            assert ctx.called is not None
            _, words = ctx.called.arguments
            return str(await policies["second"].acall(ask, second, words))

        model = Timeout(30).wrap(Fallback(handler=ask_second), policies["first"])

        async def user(number: int) -> None:
            words = 20 + number % 31
            text = await model.acall(ask, first, words)
            answered.append(("plain", words, len(text.split())))

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(user(number))
        with_first = first.answered
        first.is_down = True
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(user(number))

        second.breaks_off = 1

        async def words_of(number: int) -> AsyncIterator[str]:
            async with client.stream("GET", f"{second.url}{number}") as response:
                async for piece in checked(response).aiter_text():
                    for word in piece.split():
                        yield word

        # Retried only until the first word has been delivered.
        words = [word async for word in Retry(3, backoff=[0.02]).streaming(first=5, idle=2)(words_of)(30)]
    for it in (first, second):
        it.server.shutdown()
        it.server.server_close()
        print(f"{it.name}: {it.answered} answers, {it.used} tokens, {it.refused} requests over its limit")
    kept = {
        "every user has a whole answer": len(answered) == 40 and all(want == got for _, want, got in answered),
        "the first provider was enough while it was up": with_first == 20,
        "the second one answered while it was down": second.answered >= 20,
        "budgets kept both under their limits": first.refused + second.refused <= 2,
        "the stream was retried, and delivered once": words == [f"w{number}" for number in range(30)],
    }
    for what, is_so in kept.items():
        print(f"{'kept' if is_so else 'BROKEN'}: {what}")
    return all(kept.values())


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
