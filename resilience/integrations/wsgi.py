"""The caller's deadline in a WSGI application: read from the request, ambient in the app, 504 when it is over.

A WSGI body runs after the app has returned, when the server iterates it, and the server may do so in another
thread. So the budget is made ambient for each step: the call of the app, each item, `close`. Between them the
thread is the server's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, final

from resilience.context import Context
from resilience.integrations.wire import HEADERS, Acceptance, Steps, budget, ran_out

if TYPE_CHECKING:
    from resilience.checks import Duration

__all__ = ["DeadlineMiddleware"]

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

_BODY = b"the deadline of the request has passed\n"


@final
class DeadlineMiddleware:
    """Open the deadline that the caller has sent, for everything that `app` does for the request.

    :param app: any WSGI application.
    :param headers: names of the headers that are believed. `grpc-timeout` is read in its own grammar, all others
        as whole milliseconds. What is repeated or cannot be read is ignored; of several the shortest time holds.
    :param cap: the most seconds that a caller may ask for; None for no bound.
    :param default: the seconds for a request that does not say; None for no limit.

    The body is included: the budget is ambient in each step of an iterable that the app returns, and in its
    `close`. A list or a tuple of bytes, and the file wrapper of the server, run no code of the app and are
    handed on as they are, so that the server can still tell the length, or send the file by itself.

    A request whose time is over when it comes is answered 504, and the app is not entered. So is one from which
    `DeadlineExceeded` comes out, or once the time is over a network error, before the server has sent the headers;
    afterwards the exception is raised. Nothing is cut off: a thread cannot be. What the app calls obeys the
    budget; code that looks at nothing goes on.

    In Flask: ``app.wsgi_app = DeadlineMiddleware(app.wsgi_app, cap=30.0)``; in Django, around
    ``get_wsgi_application()``.
    """

    def __init__(
        self,
        app: App,
        *,
        headers: Iterable[str] = HEADERS,
        cap: Duration | None = None,
        default: Duration | None = None,
    ) -> None:
        if not callable(app):
            raise TypeError(f"app must be a WSGI application, not {app!r}")
        self._app = app
        self._acceptance = Acceptance(headers, cap=cap, default=default)
        self._variables = {f"HTTP_{it.upper().replace('-', '_')}": it for it in self._acceptance.headers}

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        ctx = budget(self._acceptance.seconds(self._fields(environ)))
        if ctx.expired:
            return _refuse(environ, start_response)
        steps = Steps(ctx)
        try:
            with steps:
                result = self._app(environ, start_response)
                return result if _is_plain(result, environ) else _Body(result, ctx, steps, environ, start_response)
        except Exception as error:
            if not ran_out(error, ctx):
                raise
            return _refuse(environ, start_response, sys.exc_info())

    def _fields(self, environ: Environ) -> Iterable[tuple[str, str]]:
        return [(name, environ[variable]) for variable, name in self._variables.items() if variable in environ]


@final
class _Body:
    """An iterable of the app's, run in steps that have the budget."""

    def __init__(
        self, result: Iterable[bytes], ctx: Context, steps: Steps, environ: Environ, start_response: StartResponse
    ) -> None:
        self._result: Iterable[bytes] | None = result
        self._ctx = ctx
        self._steps = steps
        self._environ = environ
        self._start_response = start_response
        self._items: Iterator[bytes] | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._result is None:
            raise StopIteration
        try:
            with self._steps:
                if self._items is None:
                    self._items = iter(self._result)
                return next(self._items)
        except StopIteration:
            raise
        except Exception as error:
            if not ran_out(error, self._ctx):
                raise
            # Raises the error again where the headers have been sent: then there is no second status.
            refusal = _refuse(self._environ, self._start_response, sys.exc_info())
        self._items = iter(refusal)
        return next(self._items)

    def close(self) -> None:
        """Close the app's iterable, once."""
        result, self._result, self._items = self._result, None, None
        close = getattr(result, "close", None)
        if close is not None:
            with self._steps:
                close()


def _is_plain(result: object, environ: Environ) -> bool:
    """Whether no code of the app runs when this is iterated."""
    wrapper = environ.get("wsgi.file_wrapper")
    return type(result) in (list, tuple) or (isinstance(wrapper, type) and isinstance(result, wrapper))


def _refuse(environ: Environ, start_response: StartResponse, error: object = None) -> list[bytes]:
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(_BODY)))]
    arguments = () if error is None else (error,)
    try:
        start_response("504 Gateway Timeout", headers, *arguments)
    finally:
        del error, arguments  # no cycle: traceback -> this frame -> traceback
    # Not every server leaves out what an application returns for it; the client would read it as the next response.
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [_BODY]
