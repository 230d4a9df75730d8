"""The servers, as processes. They do as little as possible, because the client is measured.

`python -m benchmarks.clients.serving http 8000`
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

from typing_extensions import override

from benchmarks.functions import ANSWER

METHOD: Final = "/benchmarks.Answering/Answer"

_BODY = str(ANSWER).encode()
_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)


class _Answering(asyncio.Protocol):
    """Answers each request, and inspects only where it ends."""

    def __init__(self) -> None:
        self._received = b""

    @override
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        *requests, self._received = (self._received + data).split(b"\r\n\r\n")
        self._transport.write(_RESPONSE * len(requests))


async def _serve_http(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Answering, "127.0.0.1", port)
    await server.serve_forever()


async def _serve_grpc(port: int) -> None:
    import grpc  # type: ignore[import-untyped]
    import grpc.aio  # type: ignore[import-untyped]

    async def answer(request: bytes, context: object) -> bytes:
        return _BODY

    service, _, method = METHOD[1:].partition("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run({"http": _serve_http, "grpc": _serve_grpc}[sys.argv[1]](int(sys.argv[2])))
