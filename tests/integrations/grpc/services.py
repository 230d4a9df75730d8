"""A gRPC server that fails as scripted, and a client that calls it in either world.

Messages are bytes: no compiler of protocol buffers is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest

from resilience import CircuitBreaker, Fallback, Policy, Retry
from resilience.integrations.grpc import PolicyInterceptor, aio_interceptors
from tests.conftest import World
from tests.integrations.servers import PATIENCE

STATUS = grpc.StatusCode
UNAVAILABLE, EXCEEDED, INTERNAL = STATUS.UNAVAILABLE, STATUS.DEADLINE_EXCEEDED, STATUS.INTERNAL


@dataclass
class Dependency:
    """A server whose calls take one step each: a status to fail with, or the replies that come before the end.

    `hang` waits until the caller is gone, `early` fails just before its deadline. The last step is repeated.
    """

    steps: list[Any] = field(default_factory=lambda: [b"fine"])
    seen: list[tuple[str, bytes, float]] = field(default_factory=list)  # method, requests, seconds left
    metadata: list[dict[str, Any]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)  # a caller has left a call that hangs
    pushback: str | None = None

    hang: ClassVar[object] = object()
    early: ClassVar[object] = object()
    methods: ClassVar[tuple[str, ...]] = ("One", "Many", "Join", "Chat")

    def step(self, method: str, requests: bytes, context: Any) -> Any:
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        remaining = context.time_remaining()
        self.seen.append((method, requests, inf if remaining > 1e9 else remaining))
        self.metadata.append(dict(context.invocation_metadata()))
        if step is self.hang:
            self.wait_until_gone(context)
        if step is self.early:
            time.sleep(max(0.0, remaining - 0.03))
            step = EXCEEDED
        if isinstance(step, grpc.StatusCode):
            if self.pushback is not None:
                context.set_trailing_metadata((("grpc-retry-pushback-ms", self.pushback),))
            context.abort(step, "as the script says")
        return step

    def wait_until_gone(self, context: Any) -> None:
        over = threading.Event()
        if not context.add_callback(over.set) or over.wait(PATIENCE):
            self.gone.set()

    def one(self, request: bytes, context: Any) -> bytes:
        step = self.step("One", request, context)
        return step if isinstance(step, bytes) else b""

    def many(self, request: bytes, context: Any) -> Iterator[bytes]:
        step = self.step("Many", request, context)
        for reply in step if isinstance(step, list) else [step]:
            if isinstance(reply, grpc.StatusCode):
                context.abort(reply, "in the middle")
            if reply is self.hang:
                self.wait_until_gone(context)
                return
            try:
                yield reply
            except GeneratorExit:
                self.gone.set()
                raise

    def join(self, requests: Iterator[bytes], context: Any) -> bytes:
        step = self.step("Join", b"".join(requests), context)
        return step if isinstance(step, bytes) else b""

    def chat(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if self.steps != [b"echo"]:
            yield from self.many(b"".join(requests), context)
            return
        self.seen.append(("Chat", b"", context.time_remaining()))
        yield from requests


@contextlib.contextmanager
def serving(handlers: dict[str, Any], *interceptors: Any) -> Iterator[str]:
    """Serve handlers on a blocking server; yield its address."""
    with futures.ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, interceptors=interceptors)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait(PATIENCE)


@contextlib.contextmanager
def protected(target: str, *policies: Policy[Any]) -> Iterator[Any]:
    """Open a blocking channel under these policies, the outermost first."""
    with grpc.insecure_channel(target) as channel:
        yield grpc.intercept_channel(channel, *map(PolicyInterceptor, policies))


@contextlib.asynccontextmanager
async def aprotected(target: str, policy: Policy[Any], *around: Any) -> AsyncIterator[Any]:
    """Open a channel of grpc.aio under a policy, with interceptors around it."""
    async with grpc.aio.insecure_channel(target, interceptors=[*around, *aio_interceptors(policy)]) as channel:
        yield channel


class Client:
    """Calls each kind of method in one of the two worlds, to the end, and returns bytes."""

    def __init__(self, target: str, world: str) -> None:
        self.target = target
        self.is_blocking = world == "blocking"
        self.world = World("threads" if self.is_blocking else "asyncio")
        self.run = self.world.run

    def __repr__(self) -> str:
        return "blocking" if self.is_blocking else "asyncio"

    def call(
        self, policy: Policy[Any], method: str, request: Any = b"?", *, settings: Any = None, **kwargs: Any
    ) -> Any:
        if not self.is_blocking:
            return asyncio.run(self._acall(policy, method, request, settings or {}, kwargs))
        with grpc.insecure_channel(self.target) as plain:
            channel = grpc.intercept_channel(plain, PolicyInterceptor(policy, **(settings or {})))
            outcome = getattr(channel, KINDS[method])(f"/test.Test/{method}")(request, **kwargs)
            return outcome if isinstance(outcome, bytes) else list(outcome)

    async def _acall(self, policy: Policy[Any], method: str, request: Any, settings: Any, kwargs: Any) -> Any:
        interceptors = aio_interceptors(policy, **settings)
        async with grpc.aio.insecure_channel(self.target, interceptors=interceptors) as channel:
            call = getattr(channel, KINDS[method])(f"/test.Test/{method}")(request, **kwargs)
            return [reply async for reply in call] if hasattr(call, "__aiter__") else await call


KINDS = {"One": "unary_unary", "Many": "unary_stream", "Join": "stream_unary", "Chat": "stream_stream"}
FINE = {"One": b"fine", "Many": [b"fine"], "Join": b"fine", "Chat": [b"fine"]}
REQUEST: dict[str, Any] = {"One": b"ab", "Many": b"ab", "Join": [b"a", b"b"], "Chat": (b"a", b"b")}
NOW = Retry(3, backoff=[0])


def answering(answer: Any) -> Policy[Any]:
    """Return a fallback that answers every call."""
    breaker = CircuitBreaker(1)
    breaker.isolate()
    return Fallback(answer).wrap(breaker)


def status(call: Callable[[], Any]) -> Any:
    """Return the status that a call fails with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()
