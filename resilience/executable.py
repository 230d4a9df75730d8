"""The methods of a policy for its users: execute or call a function under it, decorate one, wrap a client.

`execution` runs the calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Never, ParamSpec, overload

from typing_extensions import TypeVar

from resilience.callables import (
    Unknown,
    is_coroutine_function,
    is_generator_function,
    name_of,
    named_like,
    require_callable,
    why_lazy,
)
from resilience.checks import Duration, NoBlock
from resilience.context import NO_KEYWORDS, Context
from resilience.errors import Misuse
from resilience.execution import Stage, aprotect, arun, compose, compose_for_threads, protect, run
from resilience.info import Composable, Listener
from resilience.outcome import Failure, Outcome, Success
from resilience.proxy import awaiting, make_proxy
from resilience.streams.streaming import Streaming

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")
D_co = TypeVar("D_co", covariant=True, default=Never)


class Executable(ABC, Generic[D_co]):
    """A policy, or a pipeline of them: functions can be executed under it.

    `D` is what it may return besides the call's own result.
    """

    name: str
    """The name in errors and events."""

    # The names of private attributes begin with `_resilience_`, so that they do not collide with those of a subclass.
    _resilience_keeps_record: bool = False  # whether it needs a record of each execution
    _resilience_uses_workers: bool = False  # whether, in blocking code, it may run the function in another thread
    _resilience_foresees: bool = False  # whether it may know until when all calls will be refused
    _resilience_listeners: tuple[Listener, ...] = ()
    # What protects a block: in blocking code, in tasks. By default a block has to be a function.
    _resilience_blocks: tuple[str, str] = ("policy.call(fn, *args)", "await policy.acall(fn, *args)")

    if not TYPE_CHECKING:  # pragma: no branch (type checkers know that there are no such methods)
        __enter__, __aenter__ = NoBlock(0), NoBlock(1)

    @abstractmethod
    def _resilience_chain(self) -> tuple[Composable, ...]:
        """Return the policies that a call meets, outermost first."""

    def _resilience_stage(self, innermost: Stage | None) -> Stage:
        """Return the chain of these policies: around an innermost stage for tasks; with None, for blocking code."""
        chain = self._resilience_chain()
        return compose_for_threads(chain) if innermost is None else compose(chain, innermost)

    def _resilience_hint(self) -> str:
        """Return a hint for the error message if this is called with something that it cannot decorate."""
        return ""

    # --- executing ---

    @overload
    def execute(self, fn: Callable[[Context], Unknown], ctx: Context | None = None) -> Any: ...
    @overload
    def execute(
        self, fn: Callable[[Context], Coroutine[Any, Any, T]], ctx: Context | None = None
    ) -> Coroutine[Any, Any, T | D_co]: ...
    @overload
    def execute(self, fn: Callable[[Context], T], ctx: Context | None = None) -> T | D_co: ...
    def execute(self, fn: Callable[[Context], Any], ctx: Context | None = None) -> Any:
        """Run `fn(ctx)` under this policy.

        :param fn: a plain function runs at once, and its result is returned. For a coroutine function (or a partial of
            one, or an object whose `__call__` is one) an awaitable is returned.
        :param ctx: the context of the execution; by default a child of the ambient context, or a new one.
        :raises TypeError: if a plain function returns an awaitable; use `aexecute` for that.

        >>> from resilience import Retry
        >>> Retry().execute(lambda ctx: f"attempt {ctx.attempt}")
        'attempt 1'
        """
        if is_coroutine_function(fn):
            return arun(self, fn, None, ctx=ctx)
        return run(self, fn, None, ctx=ctx)

    async def aexecute(self, fn: Callable[[Context], Awaitable[T]], ctx: Context | None = None) -> T | D_co:
        """Run `fn(ctx)` under this policy and await what it returns, which may be any awaitable.

        :param fn: any function that returns an awaitable: a coroutine function, a lambda, a bound method.
        :param ctx: as in `execute`.
        :raises TypeError: if `fn` returns something that cannot be awaited.
        """
        require_callable(fn)
        return await arun(self, fn, None, ctx=ctx)  # type: ignore[no-any-return]

    @overload
    def call(self, fn: Callable[P, Unknown], /, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def call(
        self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T | D_co]: ...
    @overload
    def call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | D_co: ...
    def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)` under this policy: for callables that take no context.

        `fn` is treated as in `execute`. Inside, `current_context()` returns the context.

        >>> from resilience import Retry
        >>> Retry().call(max, 3, 5)
        5
        """
        if is_coroutine_function(fn):
            return arun(self, fn, args, kwargs)
        return run(self, fn, args, kwargs)

    async def acall(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T | D_co:
        """Run `fn(*args, **kwargs)` under this policy and await what it returns."""
        return await arun(self, fn, args, kwargs, is_lazy=is_coroutine_function(fn))  # type: ignore[no-any-return]

    def capture(self, fn: Callable[[Context], T], ctx: Context | None = None) -> Outcome[T | D_co]:
        """Run `fn(ctx)` and return the outcome as a value: `Success(value)` or `Failure(error)`.

        Anything but an `Exception` (such as an interrupt) is still raised, and so is a usage error.

        >>> from resilience import Retry
        >>> Retry().capture(lambda ctx: 1 / 0)
        Failure(error=ZeroDivisionError('division by zero'))
        """
        require_callable(fn)
        return captured(run, self, fn, None, NO_KEYWORDS, ctx)

    async def acapture(self, fn: Callable[[Context], Awaitable[T]], ctx: Context | None = None) -> Outcome[T | D_co]:
        """Run `fn(ctx)`, await what it returns, and return the outcome as a value. A cancellation is still raised."""
        return await acaptured(self.aexecute(fn, ctx))

    def streaming(
        self,
        *,
        first: Duration | None = None,
        idle: Duration | None = None,
        resume: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> Streaming:
        """Return this policy for functions that yield items: generators, also asynchronous, and streams of clients.

        A stream is one call that ends with its last item. It is retried until it has delivered an item.

        :param first: how many seconds the first item of an attempt may take; no limit by default.
        :param idle: how many seconds each later item may take; the consumer's own time never counts. An item that takes
            longer fails with `TimeoutExceeded`, like any failure.
        :param resume: the keyword arguments with which the function is called to continue after an item, as functions
            of the last delivered item. With it, a Retry also repeats later failures.
        :raises TypeError: around a Cache, a SingleFlight or a Hedge.

        >>> from resilience import Retry
        >>> @Retry().streaming(idle=10.0)
        ... def numbers():
        ...     yield from (1, 2, 3)
        >>> list(numbers())
        [1, 2, 3]
        """
        return Streaming(self, first, idle, resume)

    # --- protecting functions and clients ---

    @overload  # type checkers treat a static method as a callable, but it has to stay a static method
    def __call__(self, fn: staticmethod[P, T], /) -> staticmethod[P, T | D_co]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: classmethod[C, P, T], /) -> classmethod[C, P, T | D_co]: ...
    @overload  # mypy would take a function that returns a bare type variable for a coroutine function
    def __call__(self: Executable[Never], fn: Callable[P, T], /) -> Callable[P, T]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: Callable[P, Unknown], /) -> Callable[P, Any]: ...
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> Callable[P, Coroutine[Any, Any, T | D_co]]: ...
    @overload
    def __call__(self, fn: Callable[P, T], /) -> Callable[P, T | D_co]: ...
    def __call__(self, fn: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        """Decorate a function: every call of it runs under this policy.

        Signature, name, documentation and types are kept. Whether it is asynchronous is decided once, at decoration. It
        works on functions, methods, above and below `staticmethod` and `classmethod`, and on callables without a name.

        :raises TypeError: for an object that cannot be called, a class, another policy, and a generator function or one
            of `contextlib.contextmanager`, whose call returns before its work has begun.
        """
        if args or kwargs:
            called = name_of(fn) if callable(fn) else "fetch"
            what = f"a policy decorates one function; to run it, write `policy.call({called}, ...)`"
            raise TypeError(what + self._resilience_hint())
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(self(fn.__func__))
        if type(fn) is not FunctionType:
            self._resilience_check_decorated(fn)
        why = why_lazy(fn)
        if why is not None:
            raise TypeError(why)
        if is_coroutine_function(fn):
            return named_like(aprotect(self, fn), fn)
        return named_like(protect(self, fn), fn)

    def _resilience_check_decorated(self, fn: object) -> None:
        """Raise if an object that is no plain function cannot be decorated."""
        if not callable(fn):
            hint = "; decorate the function below it" if hasattr(type(fn), "__get__") else ""
            if fn is None:
                hint = "; write `@policy` without parentheses, or `policy.call(fetch, ...)`"
            raise TypeError(f"a policy decorates callables, not {fn!r}{self._resilience_hint() or hint}")
        if isinstance(fn, type):
            raise TypeError(
                f"{fn.__name__} is a class, which would become a function: decorate its methods, or protect an "
                f"instance with `policy.proxy({fn.__name__}(...))`"
            )
        if isinstance(fn, Executable):
            raise TypeError(f"to put a policy around {fn.name}, write `policy.wrap({fn.name}(...))`")

    def proxy(self, client: C, /, *names: str) -> C:
        """Return the client with the named methods run under this policy; everything else is the client's own.

        :param names: methods of the client; dotted ones reach into its namespaces (``"chat.completions.create"``).
            Without names: all public methods, except those that open or close the client (``close``, ``connect`` ...),
            properties, classes and generator functions. An async method is awaited.
        :raises AttributeError: if there is no such method.
        """
        return make_proxy(client, names, self, repr(self))

    def aproxy(self, client: C, /, *names: str) -> C:
        """Like `proxy`, for methods that return an awaitable without being `async def`.

        Their results can be awaited, and entered with `async with` if the client's results can.
        """
        return make_proxy(client, names, awaiting(self, self.acall), repr(self), is_generator_function)


def captured(function: Callable[..., T], /, *args: Any) -> Outcome[T]:
    """Call a function, and return the outcome as a value. A misuse of the library is raised."""
    try:
        return Success(function(*args))
    except Misuse:
        raise
    except Exception as error:
        return Failure(error)


async def acaptured(awaitable: Awaitable[T]) -> Outcome[T]:
    """Await an awaitable, and return the outcome as a value. A misuse of the library is raised."""
    try:
        return Success(await awaitable)
    except Misuse:
        raise
    except Exception as error:
        return Failure(error)
