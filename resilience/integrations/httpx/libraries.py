"""httpx and httpx2: the same classes under two names. At least one of them must be installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from resilience.integrations._extras import missing

LIBRARIES: tuple[ModuleType, ...] = tuple(import_module(name) for name in ("httpx", "httpx2") if find_spec(name))
if not LIBRARIES:
    raise missing("httpx", "httpx or httpx2")


def classes(*names: str) -> tuple[Any, ...]:
    """Return the classes with these names of each library that is installed."""
    return tuple(getattr(library, name) for library in LIBRARIES for name in names)


if TYPE_CHECKING:
    import httpx
    import httpx2

    class Transport(httpx.BaseTransport, httpx2.BaseTransport):
        """A transport for both libraries."""

        def handle_request(self, request: Any) -> Any:
            """Send a request of either library, and return a response of the same library."""

    class AsyncTransport(httpx.AsyncBaseTransport, httpx2.AsyncBaseTransport):
        """An asynchronous transport for both libraries."""

        async def handle_async_request(self, request: Any) -> Any:
            """Send a request of either library, and return a response of the same library."""

    class Stream(httpx.SyncByteStream, httpx2.SyncByteStream):
        """A body for both libraries."""

    class AsyncStream(httpx.AsyncByteStream, httpx2.AsyncByteStream):
        """An asynchronous body for both libraries."""
else:
    Transport = type("Transport", classes("BaseTransport"), {})
    AsyncTransport = type("AsyncTransport", classes("AsyncBaseTransport"), {})
    Stream = type("Stream", classes("SyncByteStream"), {})
    AsyncStream = type("AsyncStream", classes("AsyncByteStream"), {})


def library_of(request: Any) -> ModuleType:
    """Return the library that a request belongs to."""
    for library in LIBRARIES:
        if isinstance(request, library.Request):
            return library
    raise TypeError(f"a request of httpx or httpx2 is needed, not {request!r}")
