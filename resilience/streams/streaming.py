"""`policy.streaming(...)`: a policy around functions that return items."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from math import inf
from types import CoroutineType
from typing import Any, ParamSpec, TypeAlias, TypeVar, final, overload

from resilience import checks
from resilience.callables import Unknown, is_async_function, name_of, named_like, require_callable, signature_of
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context, new_context
from resilience.endings import end_execution
from resilience.events.dispatch import subscribers
from resilience.execution import begin_execution, compose, refuse_forgotten_await
from resilience.formats import format_number
from resilience.info import NO_INFO, Executed
from resilience.proxy import make_proxy
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.tasks import TASKS
from resilience.streams.driver import Driver
from resilience.streams.iterators import AsyncStream, Stream
from resilience.streams.runtime import StreamClosed, StreamRuntime
from resilience.streams.source import deliver_answer, enter_stream

P = ParamSpec("P")
C = TypeVar("C")
T = TypeVar("T")

#: What an asynchronous function returns: an iterator of its items, or a coroutine of one.
_Async: TypeAlias = AsyncIterator[T] | Coroutine[Any, Any, AsyncIterator[T]]

#: The same, for functions that are called as asynchronous ones: also any other awaitable, or a context manager.
_Awaited: TypeAlias = (
    AsyncIterator[T] | Awaitable[AsyncIterator[T]] | AbstractAsyncContextManager[AsyncIterator[T], bool | None]
)

#: What a blocking function returns: its items, or a context manager of them.
_Items: TypeAlias = Iterable[T] | AbstractContextManager[Iterable[T], bool | None]


@final
class Streaming:
    """A policy around functions that return items: the result of `policy.streaming(...)`.

    It decorates such functions, calls them, and wraps methods of clients, as the policy itself does with functions
    that return one result.
    """

    def __init__(
        self,
        policy: Executed,
        first: Duration | None,
        idle: Duration | None,
        resume: Mapping[str, Callable[[Any], Any]] | None,
    ) -> None:
        self.policy = policy
        self.first: float = inf if first is None else checks.seconds("first", first)
        self.idle: float = inf if idle is None else checks.seconds("idle", idle)
        if resume is not None and not (isinstance(resume, Mapping) and all(isinstance(it, str) for it in resume)):
            raise TypeError(f"resume must be a mapping of keywords to functions of an item, not {resume!r}")
        self.resume: Mapping[str, Callable[[Any], Any]] = {
            name: checks.plain_function(f"resume[{name!r}]", it, ("item",)) for name, it in (resume or {}).items()
        }
        innermost = functools.partial(enter_stream, self.first, self.idle)
        chain = policy._resilience_chain()
        for it in chain:
            if not it._resilience_streams:
                raise TypeError(f"{it.name} cannot be used around a stream: delivered items are gone")
        self._stage, self._innermost = compose(chain, innermost), innermost

    def __repr__(self) -> str:
        limits = {"first": self.first, "idle": self.idle}
        shown = [f"{name}={format_number(it)}" for name, it in limits.items() if it != inf]
        shown += [f"resume={self.resume!r}"] if self.resume else []
        return f"{self.policy!r}.streaming({', '.join(shown)})"

    @overload
    def __call__(self, fn: Callable[P, Unknown], /) -> Callable[P, Any]: ...
    @overload
    def __call__(self, fn: Callable[P, _Async[T]], /) -> Callable[P, AsyncStream[T]]: ...
    @overload
    def __call__(self, fn: Callable[P, _Items[T]], /) -> Callable[P, Stream[T]]: ...
    def __call__(self, fn: Any) -> Any:
        """Decorate a function that returns items: each call of it is a stream under the policy.

        It may be a generator function, asynchronous or not, or return an iterator, or be a coroutine function that
        returns an asynchronous iterator. Nothing runs before the first item is requested.
        """
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(self(fn.__func__))
        return self._protect(fn, is_async_function(fn))

    def _protect(self, fn: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        self._check(fn)

        def streamed(*args: Any, **kwargs: Any) -> Any:
            return self._stream(is_async, fn, args, kwargs)

        return named_like(streamed, fn)

    def _check(self, fn: Callable[..., Any]) -> None:
        """Refuse what is not a function, or one that does not take the keywords of `resume`."""
        require_callable(fn)
        signature = signature_of(fn) if self.resume else None
        try:
            if signature is not None:
                signature.bind_partial(**self.resume)
        except TypeError as error:
            raise TypeError(f"{name_of(fn)}{signature} cannot take the keywords of resume: {error}") from None

    def _stream(
        self,
        is_async: bool,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None,
        kwargs: Mapping[str, Any],
        ctx: Context | None = None,
    ) -> Any:
        runtime = StreamRuntime(TASKS if is_async else BLOCKING, self.resume)
        driver = Driver(runtime, functools.partial(self._execute, runtime, (fn, args, kwargs), ctx))
        return AsyncStream(driver) if is_async else Stream(driver)

    async def _execute(
        self,
        runtime: StreamRuntime,
        called: tuple[Callable[..., Any], tuple[Any, ...] | None, Mapping[str, Any]],
        given: Context | None,
    ) -> None:
        """Run the chain, and yield an `Opened` to the driver for each source, and for a value that replaces the items.

        :param called: the function, its arguments (None if it takes the context), and its keyword arguments.
        :param given: the context that the caller passed in, if any.
        """
        runtime.began = clock.now()
        ctx = new_context(self.policy, *called, NO_INFO, runtime.host)
        record, error = begin_execution(ctx, self.policy, given), None
        ctx.runtime = runtime
        try:
            answer = await (self._innermost if subscribers.policies_off else self._stage)(ctx)
            if type(answer) is CoroutineType:
                refuse_forgotten_await(self.policy, None, answer)
            if runtime.items and runtime.failure is not None:
                raise runtime.failure  # a value cannot replace a stream that has begun
            if not (runtime.items or (runtime.is_exhausted and answer is None)):
                await deliver_answer(answer, runtime)
        except BaseException as raised:
            error = None if type(raised) is StreamClosed else raised
            raise
        finally:
            runtime.failure = None
            if record is not None:
                end_execution(record, ctx, None, error, runtime.items)
            error = None  # no cycle: error -> traceback -> this frame -> error

    @overload
    def call(self, fn: Callable[P, Unknown], /, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def call(self, fn: Callable[P, _Async[T]], /, *args: P.args, **kwargs: P.kwargs) -> AsyncStream[T]: ...
    @overload
    def call(self, fn: Callable[P, _Items[T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]: ...
    def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the items of `fn(*args, **kwargs)`."""
        self._check(fn)
        return self._stream(is_async_function(fn), fn, args, kwargs)

    def acall(self, fn: Callable[P, _Awaited[T]], /, *args: P.args, **kwargs: P.kwargs) -> AsyncStream[T]:
        """Return the items of an asynchronous iterator that `fn(*args, **kwargs)` returns, or an awaitable of one."""
        self._check(fn)
        return self._stream(True, fn, args, kwargs)  # type: ignore[no-any-return]

    @overload
    def execute(self, fn: Callable[[Context], Unknown], ctx: Context | None = None) -> Any: ...
    @overload
    def execute(self, fn: Callable[[Context], _Async[T]], ctx: Context | None = None) -> AsyncStream[T]: ...
    @overload
    def execute(self, fn: Callable[[Context], _Items[T]], ctx: Context | None = None) -> Stream[T]: ...
    def execute(self, fn: Callable[..., Any], ctx: Context | None = None) -> Any:
        """Return the items of `fn(ctx)`."""
        self._check(fn)
        return self._stream(is_async_function(fn), fn, None, {}, ctx)

    def aexecute(self, fn: Callable[[Context], _Awaited[T]], ctx: Context | None = None) -> AsyncStream[T]:
        """Return the items of an asynchronous iterator that `fn(ctx)` returns, or an awaitable of one."""
        self._check(fn)
        return self._stream(True, fn, None, {}, ctx)  # type: ignore[no-any-return]

    def proxy(self, client: C, /, *names: str) -> C:
        """Return the client with the named methods, which return items, run through the policy."""
        return self._proxy(client, names, self)

    def aproxy(self, client: C, /, *names: str) -> C:
        """Do the same for asynchronous methods that are neither coroutine functions nor asynchronous generators."""
        return self._proxy(client, names, lambda fn: self._protect(fn, True))

    def _proxy(self, client: C, names: tuple[str, ...], protect: Callable[..., Any]) -> C:
        if not names:
            raise TypeError('name the methods that bring items: .proxy(client, "chat.completions.create")')
        return make_proxy(client, names, protect, repr(self))
