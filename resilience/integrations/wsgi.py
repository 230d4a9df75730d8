"""Middlewares for a WSGI application: the caller's deadline, ambient in the app; responses to the errors of policies.

A WSGI body runs after the app has returned, when the server iterates over it, perhaps in another thread. So the
budget is made ambient for each step: the call of the app, each item, `close`. Between two steps, the thread belongs to
the server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, final

from resilience import checks
from resilience.checks import Duration
from resilience.integrations._serving import Steps, budget, ran_out
from resilience.integrations.answers import TOO_LATE, Answer, Answering, FrameworkErrors, answer_to
from resilience.integrations.wire import HEADERS, Acceptance

__all__ = ["DeadlineMiddleware", "ResilienceMiddleware"]

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]


@final
class ResilienceMiddleware:
    """Answer 503 if a policy refuses a call that `app` makes, and 504 if its time is up.

    :param app: any WSGI application.

    `RateLimited` becomes 429, any other `Rejected` (an open circuit, a full bulkhead) 503, both with `Retry-After` if
    the error has a `retry_after`; `TimeoutExceeded` and `DeadlineExceeded` become 504; a group is answered if each
    error in it is. Once the server has sent the headers, the exception is raised. Any other error is not changed.

    In Flask: ``app.wsgi_app = ResilienceMiddleware(app.wsgi_app)``; in Django, around ``get_wsgi_application()``.
    """

    def __init__(self, app: App) -> None:
        self._app = checks.function("app", app)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        return _Request(environ, start_response, answer_to, nullcontext()).answer(self._app)


@final
class DeadlineMiddleware:
    """Open the deadline that the caller has sent, for everything that `app` does for the request.

    :param app: any WSGI application.
    :param headers: names of the headers that are read. `grpc-timeout` has its own grammar, all others are whole
        milliseconds. Repeated or unparsable headers are ignored; of several, the shortest time applies.
    :param cap: the most seconds that a caller may ask for; as many as `default` by default, infinity for no bound.
    :param default: the seconds for a request without a header; as many as `cap` by default, infinity for no limit. If
        neither is given, both are 60 seconds.

    The body is included: the budget is ambient in each step of an iterable that the app returns, and in its
    `close`. A list or a tuple of bytes, and the file wrapper of the server, run no code of the app. They are passed
    on unchanged, so that the server can still determine the length, or send the file itself.

    A request whose time is already up is answered 504, and the app is not entered. 504 is also the answer if the app
    raises `DeadlineExceeded` or, after the deadline, a network error or that of a statement that a database has ended,
    before the server has sent the headers; afterwards the exception is raised. Nothing is cut off, because a thread
    cannot be. The policies of the app respect the budget; code that does not check it continues.

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
        self._app = checks.function("app", app)
        self._acceptance = Acceptance(headers, cap=cap, default=default)
        self._variables = {f"HTTP_{it.upper().replace('-', '_')}": it for it in self._acceptance.headers}

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        fields = ((name, environ[variable]) for variable, name in self._variables.items() if variable in environ)
        ctx = budget(self._acceptance.seconds(fields))
        request = _Request(environ, start_response, lambda error: TOO_LATE if ran_out(error, ctx) else None, Steps(ctx))
        return request.respond(TOO_LATE) if ctx.expired else request.answer(self._app)


@final
class _Request:
    """One request, and the answer to an error of the app.

    :param steps: the block in which each step of the app runs: its call, each item of its body, `close`.
    """

    def __init__(
        self,
        environ: Environ,
        start_response: StartResponse,
        answering: Answering,
        steps: AbstractContextManager[object],
    ) -> None:
        self.steps: AbstractContextManager[object] = steps
        self._environ = environ
        self._start_response = start_response
        self.answering: Answering = answering
        self._framework_errors = FrameworkErrors(answering)
        self._replacement: Answer | None = None  # replaces a framework's own response to an error

    def answer(self, app: App) -> Iterable[bytes]:
        """Run the app, and answer the error that it raises."""
        try:
            with self._framework_errors, self.steps:
                result = app(self._environ, self._start)
            if self._replacement is None:
                return result if _is_plain(result, self._environ) else _Body(result, self)
            _Body(result, self).close()
            return self.respond(self._replacement)
        except Exception as error:
            answer = self.answering(error)
            if answer is None:
                raise
            return self.respond(answer, sys.exc_info())

    def respond(self, answer: Answer, *error: object) -> list[bytes]:
        """Send an answer, in place of an error if there is one."""
        try:
            self._start_response(f"{answer.status} {answer.reason}", answer.headers, *error)
        finally:
            del error  # no cycle: traceback -> this frame -> traceback
        # Not every server drops the body of a response to HEAD; the client would read it as the next response.
        return [] if self._environ.get("REQUEST_METHOD") == "HEAD" else [answer.body]

    def _start(self, status: str, headers: Any, *error: Any) -> Any:
        self._replacement = self._framework_errors.answer_in_place_of(int(status[:3]))
        if self._replacement is not None:
            return lambda data: None
        return self._start_response(status, headers, *error)


@final
class _Body:
    """The iterable that the app has returned, run in steps."""

    def __init__(self, result: Iterable[bytes], request: _Request) -> None:
        self._result: Any = result  # None after `close`
        self._request = request
        self._items: Iterator[bytes] | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            with self._request.steps:
                if self._items is None:
                    self._items = iter(self._result)
                return next(self._items)
        except StopIteration:
            raise
        except Exception as error:
            answer = self._request.answering(error)
            if answer is None:
                raise
            # If the headers have been sent, this raises the error again: the status cannot change any more.
            response = self._request.respond(answer, sys.exc_info())
        self._items = iter(response)
        return next(self._items)

    def close(self) -> None:
        result, self._result, self._items = self._result, None, iter(())
        close = getattr(result, "close", None)
        if close is not None:
            with self._request.steps:
                close()


def _is_plain(result: object, environ: Environ) -> bool:
    """Whether iterating over this result runs no code of the app."""
    wrapper = environ.get("wsgi.file_wrapper")
    return type(result) in (list, tuple) or (isinstance(wrapper, type) and isinstance(result, wrapper))
