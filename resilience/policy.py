"""Policies, and pipelines of them.

A policy is one coroutine, `around(call, ctx)`: what it does around the rest of the chain, which it
runs with `await call(ctx)`. Everything else here turns that into things a user can do: execute a
function, call one, decorate one, wrap a client, and put one policy around another. A chain is
composed once for each world and kept; an execution calls it with a context, and with the function.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Never, ParamSpec, TypeAlias, final, overload

from typing_extensions import TypeVar, override

from resilience import checks
from resilience.callables import is_coroutine_function, is_generator_function, name_of, named_like, require_callable
from resilience.context import Context
from resilience.errors import Misuse
from resilience.execution import Chain
from resilience.outcome import Failure, Outcome, Success
from resilience.proxy import awaiting, make_proxy

if TYPE_CHECKING:
    from resilience.events import Listener
    from resilience.wrapping import WrapAll, WrapInside

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")
D_co = TypeVar("D_co", covariant=True, default=Never)

#: The rest of a chain, as a policy sees it.
Call: TypeAlias = Callable[[Context], Awaitable[T]]


class _Wrap:
    """`wrap`, on a policy and on the class: `a.wrap(b, c)` and `Policy.wrap(a, b, c)` are the same.

    A descriptor, because pyright sees a method that is called on the bare generic class as Unknown.
    """

    @overload
    def __get__(self, policy: None, owner: object) -> WrapAll: ...
    @overload
    def __get__(self, policy: Policy[D_co], owner: object) -> WrapInside[D_co]: ...
    def __get__(self, policy: Policy[Any] | None, owner: object) -> Any:
        return _wrap if policy is None else MethodType(_wrap, policy)


class Policy(ABC, Generic[D_co]):
    """What to do around a call. `Policy[D]`: `D` is what it may answer besides the call's own result.

    Subclass it and write `around`; the same code then runs in threads, in asyncio and in trio:

    >>> class Shout(Policy):
    ...     async def around(self, call, ctx):
    ...         return (await call(ctx)).upper()
    >>> Shout().call(str.strip, "  hello ")
    'HELLO'
    """

    #: What errors and events call this policy: the name of its class, unless it was given another.
    name: str = "Policy"

    # The private attributes, under names that a subclass will not choose. What may run the rest of a chain more
    # than once says so: to those inside it, a limit is one for each attempt.
    _resilience_chain: Chain
    _resilience_repeats: ClassVar[bool] = False

    #: `a.wrap(b, c, name=None, listeners=())` or `Policy.wrap(a, b, c, ...)`: the pipeline a(b(c(fn))).
    wrap: _Wrap = _Wrap()

    # A checker would hold its parameters against those of every `__init__`.
    if not TYPE_CHECKING:  # pragma: no branch

        def __new__(cls, *args, **kwargs):
            """Prepare what every policy has. Not in `__init__`, which a policy of a user's need not call."""
            make = super().__new__
            self = make(cls) if make is object.__new__ else make(cls, *args, **kwargs)  # `object` takes no arguments
            object.__setattr__(self, "_resilience_chain", Chain(self))  # so that it may be a frozen dataclass
            return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name the policies of a class after it."""
        super().__init_subclass__(**kwargs)
        owner = next(it for it in cls.__mro__ if "name" in vars(it))  # pragma: no branch (`Policy` has one)
        if owner is not cls and vars(owner)["name"] == owner.__name__:  # not a name that somebody has chosen
            cls.name = cls.__name__

    def __getstate__(self) -> object:
        """Leave out what belongs to this very object, so that a copy runs as itself."""
        attributes = {key: value for key, value in vars(self).items() if key != "_resilience_chain"}
        state = super().__getstate__()
        return (attributes, state[1]) if isinstance(state, tuple) else attributes  # with slots it is a pair

    @abstractmethod
    async def around(self, call: Call[T], ctx: Context) -> T | D_co:
        """Run the rest of the chain with `await call(ctx)`, as often as this policy sees fit.

        Await nothing else but what `ctx` and `ctx.runtime` offer. Hand a derived context inwards
        (`ctx.child(...)`), never a changed one. Only an `Exception` is an outcome: let everything
        else through, and give back what you hold in a `finally`.
        """

    def settings(self) -> Mapping[str, object]:
        """Return the parameters that this policy was built with, by name."""
        return {}

    def describe(self) -> str:
        """Say what this policy does, with every number, in a line."""
        return repr(self)

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self).__init__).parameters
        changed = (
            f"{key}={value!r}"
            for key, value in self.settings().items()
            if key not in parameters or not _same(value, parameters[key].default)
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    # --- executing ---

    @overload
    def execute(
        self, fn: Callable[[Context], Coroutine[Any, Any, T]], ctx: Context | None = None
    ) -> Coroutine[Any, Any, T | D_co]: ...
    @overload
    def execute(self, fn: Callable[[Context], T], ctx: Context | None = None) -> T | D_co: ...
    def execute(self, fn: Callable[[Context], Any], ctx: Context | None = None) -> Any:
        """Run `fn(ctx)` under this policy.

        :param fn: a plain function runs here, and its result is returned. For a coroutine function (or a
            partial of one, or an object whose `__call__` is one) the result is to be awaited.
        :param ctx: what travels with the execution. By default a child of the ambient context, or a fresh one.
        :raises TypeError: if a plain function returns an awaitable; that is what `aexecute` is for.

        >>> from resilience import Retry
        >>> Retry().execute(lambda ctx: f"attempt {ctx.attempt}")
        'attempt 1'
        """
        if is_coroutine_function(fn):
            return self._later(fn, None, None, ctx)
        return self._resilience_chain.run(fn, None, None, ctx)

    async def aexecute(self, fn: Callable[[Context], Awaitable[T]], ctx: Context | None = None) -> T | D_co:
        """Run `fn(ctx)` under this policy and await what it returns, whatever kind of awaitable that is.

        :param fn: any function that returns an awaitable: a coroutine function, a lambda, a bound method.
        :param ctx: as in `execute`.
        :raises TypeError: if `fn` returns something that cannot be awaited.
        """
        require_callable(fn)
        return await self._resilience_chain.arun(fn, None, None, ctx)  # type: ignore[no-any-return]

    @overload
    def call(
        self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T | D_co]: ...
    @overload
    def call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | D_co: ...
    def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)` under this policy: for callables that take no context.

        Looks at `fn` as `execute` does. Inside, `current_context()` tells what `ctx` would have told.

        >>> from resilience import Retry
        >>> Retry().call(max, 3, 5)
        5
        """
        if is_coroutine_function(fn):
            return self._later(fn, args, kwargs, None)
        return self._resilience_chain.run(fn, args, kwargs, None)

    async def acall(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T | D_co:
        """Run `fn(*args, **kwargs)` under this policy and await what it returns."""
        require_callable(fn)
        return await self._resilience_chain.arun(fn, args, kwargs, None)  # type: ignore[no-any-return]

    async def _later(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None,
        kwargs: dict[str, Any] | None,
        ctx: Context | None,
    ) -> Any:
        """Execute a coroutine function: nothing of that begins before it is awaited."""
        return await self._resilience_chain.arun(fn, args, kwargs, ctx)

    def capture(self, fn: Callable[[Context], T], ctx: Context | None = None) -> Outcome[T | D_co]:
        """Run `fn(ctx)` and return the outcome as a value: `Success(value)` or `Failure(error)`.

        What is not an `Exception` (an interrupt, say) is still raised, and so is a misuse of the library.

        >>> from resilience import Retry
        >>> Retry().capture(lambda ctx: 1 / 0)
        Failure(error=ZeroDivisionError('division by zero'))
        """
        require_callable(fn)
        try:
            return Success(self._resilience_chain.run(fn, None, None, ctx))
        except Misuse:
            raise
        except Exception as error:
            return Failure(error)

    async def acapture(self, fn: Callable[[Context], Awaitable[T]], ctx: Context | None = None) -> Outcome[T | D_co]:
        """Run `fn(ctx)`, await what it returns, and return the outcome as a value. A cancellation is still raised."""
        require_callable(fn)
        try:
            return Success(await self.aexecute(fn, ctx))
        except Misuse:
            raise
        except Exception as error:
            return Failure(error)

    # --- protecting what exists ---

    @overload  # what a static method is to a checker, a callable, it is again after the decoration
    def __call__(self, fn: staticmethod[P, T], /) -> staticmethod[P, T | D_co]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: classmethod[C, P, T], /) -> classmethod[C, P, T | D_co]: ...
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> Callable[P, Coroutine[Any, Any, T | D_co]]: ...
    @overload
    def __call__(self, fn: Callable[P, T], /) -> Callable[P, T | D_co]: ...
    def __call__(self, fn: Any, /) -> Any:
        """Decorate a function: every call of it runs under this policy.

        Signature, name, documentation and types are kept. Whether it is asynchronous is decided here,
        once. Works on functions, methods, above and below `staticmethod` and `classmethod`, and on
        callables without a name.

        :raises TypeError: for what cannot be called, and for a generator function, whose call ends
            before its work has begun.
        """
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(self(fn.__func__))
        if not callable(fn):
            raise TypeError(f"a policy decorates callables, not {fn!r}")
        if is_generator_function(fn):
            raise TypeError(
                f"{name_of(fn)} is a generator function: calling it only makes the generator, "
                "so nothing that it does would be protected; decorate what each step calls instead"
            )
        if is_coroutine_function(fn):
            return named_like(self._resilience_chain.aprotect(fn), fn)
        return named_like(self._resilience_chain.protect(fn), fn)

    def proxy(self, client: C, /, *names: str) -> C:
        """Return the client with the named methods run through this policy; the rest is the client's own.

        :param names: methods of the client; dotted ones reach into its namespaces (``"chat.completions.create"``).
            None named: all public methods, except those that begin or end the client's own life (``close``,
            ``connect`` ...), properties, classes and generator functions. An async method is awaited.
        :raises AttributeError: if there is no such method.
        """
        return make_proxy(client, names, self, repr(self))

    def aproxy(self, client: C, /, *names: str) -> C:
        """Do as `proxy` for methods that return an awaitable without being `async def`.

        What they return can be awaited, and entered with `async with` where the client's result can.
        """
        return make_proxy(client, names, awaiting(self, self.acall), repr(self))


@final
class Pipeline(Policy[D_co]):
    """Policies around one another, outermost first. Itself a policy: it nests, and wraps further.

    Made by `Policy.wrap(a, b, c)` or `a.wrap(b, c)`.
    """

    def __init__(self, parts: tuple[Policy[Any], ...], *, name: str | None, listeners: Iterable[Listener]) -> None:
        self._given_name = checks.optional_name(name)
        self.name: str = name or "Pipeline"
        if not isinstance(listeners, Iterable):
            raise TypeError(f"listeners must be a sequence of functions, not {listeners!r}")
        self._listeners = tuple(listeners)
        for listener in self._listeners:
            checks.plain_function("listeners", listener)
        self._parts: tuple[Policy[Any], ...] = sum(
            (part._dissolved() if isinstance(part, Pipeline) else (part,) for part in parts), ()
        )
        # The listeners stand around the parts, as one more stage.
        heard: tuple[Policy[Any], ...] = (_Listening(self._listeners),) if self._listeners else ()
        self._resilience_chain = Chain(self, heard + self._parts, self._listeners)

    @property
    def policies(self) -> tuple[Policy[Any], ...]:
        """Every policy in the order in which a call meets them, outermost first; nested pipelines are spelled out."""
        return sum((part.policies if isinstance(part, Pipeline) else (part,) for part in self._parts), ())

    @override
    async def around(self, call: Call[T], ctx: Context) -> T | D_co:
        return await self._resilience_chain.around(call, ctx)  # type: ignore[no-any-return]

    @override
    def settings(self) -> Mapping[str, object]:
        return {"policies": self.policies, "name": self._given_name, "listeners": self._listeners}

    @override
    def describe(self) -> str:
        how_many = "1 policy" if len(self.policies) == 1 else f"{len(self.policies)} policies, outermost first"
        lines = [f"{self.name}: {how_many}"]
        lines += [f"{number}. {policy.describe()}" for number, policy in enumerate(self.policies, 1)]
        return "\n".join(lines)

    @override
    def __repr__(self) -> str:
        extras = [f"name={self._given_name!r}"] if self._given_name else []
        if self._listeners:
            extras.append(f"listeners={list(self._listeners)!r}")
        return f"Policy.wrap({', '.join([repr(part) for part in self._parts] + extras)})"

    def __reduce__(self) -> Any:
        """Copy a pipeline as a pipeline of the same policies."""
        return functools.partial(_wrap, name=self._given_name, listeners=self._listeners), self._parts

    def _dissolved(self) -> tuple[Policy[Any], ...]:
        # Without a name or listeners of its own it is only a way of writing its policies.
        return (self,) if self._listeners or self._given_name else self._parts


@final
class _Listening(Policy[Never]):
    """Lets a pipeline's listeners hear what happens inside it."""

    def __init__(self, listeners: tuple[Listener, ...]) -> None:
        self._heard = listeners

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        inside = ctx.child()
        inside._facts = ctx._facts.heard_by(ctx._facts.listeners + self._heard)
        return await call(inside)


def _wrap(*policies: Policy[Any], name: str | None = None, listeners: Iterable[Listener] = ()) -> Pipeline[Any]:
    """Put policies around one another, the first one outermost: `wrap(a, b, c)` is a(b(c(fn))).

    :param name: what errors and events call the pipeline; "Pipeline" by default.
    :param listeners: plain functions of one event, for what happens inside this pipeline.
    :raises TypeError: for what is no policy, and for listeners that cannot be called.

    >>> from resilience import Policy, Retry, Timeout
    >>> Policy.wrap(Retry(), Timeout(2.0)).policies
    (Retry(), Timeout(seconds=2.0))
    """
    if not policies:
        raise TypeError("wrap() needs at least one policy")
    for policy in policies:
        if not isinstance(policy, Policy):
            hint = ": make an instance of it" if isinstance(policy, type) and issubclass(policy, Policy) else ""
            raise TypeError(f"only policies can be wrapped, not {policy!r}{hint}")
    return Pipeline(policies, name=name, listeners=listeners)


def _same(value: object, default: object) -> bool:
    """Whether a setting is what it is by default. By `repr`: a backoff made anew is the same backoff."""
    return value is default or (type(value) is type(default) and repr(value) == repr(default))
