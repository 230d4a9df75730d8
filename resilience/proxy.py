"""Proxies: a client with some of its methods run under a policy; everything else is the client's own.

This module uses only one function of a policy, `protect(method)`, which decorates a method. Each class of clients has
its own class of proxies, with the same special methods, because Python looks these up on the class, without
`__getattr__`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator, Iterable
from types import FunctionType, MethodDescriptorType
from typing import Any, TypeAlias, TypeVar, cast, final

from typing_extensions import override

from resilience.ambient import get_ambient
from resilience.callables import (
    close_coroutine,
    is_coroutine_function,
    is_generator_function,
    name_of,
    named_like,
    why_lazy,
)
from resilience.errors import AwaitableMisuse, BlockMisuse
from resilience.runtimes.current import trio_task

C = TypeVar("C")
Run: TypeAlias = Callable[..., Any]
Protect: TypeAlias = Callable[[Run], Run]

#: Public methods that open or close the client: protected only if they are named.
LIFECYCLE = frozenset(
    "open aopen close aclose connect disconnect start stop shutdown terminate quit dispose detach release".split()
)

#: Special methods whose calls do work: protected only if they are named.
_WORK_METHODS = (
    "__call__ __getitem__ __setitem__ __delitem__ __contains__ __len__ __bool__ __next__ __anext__ "
    "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __neg__ __pos__ __abs__ __invert__ __int__ __float__ __complex__ "
    "__index__ __round__ __trunc__ __floor__ __ceil__ __bytes__ __divmod__ __rdivmod__"
).split() + [
    f"__{kind}{operator}__"
    for operator in "add sub mul matmul truediv floordiv mod pow lshift rshift and xor or".split()
    for kind in ("", "r", "i")
]

#: What a class has in the place of a method of its instances.
_OF_INSTANCES = (FunctionType, MethodDescriptorType)

#: Special methods that are forwarded to the client, if it has them.
_FORWARDED = [
    *_WORK_METHODS,
    *"__iter__ __aiter__ __reversed__ __str__ __format__ __fspath__ __hash__".split(),
    *"__await__ __enter__ __exit__ __aexit__".split(),
]


def make_proxy(
    client: C,
    names: tuple[str, ...],
    protect: Protect,
    policy: str,
    is_lazy: Callable[[object], object] = why_lazy,
) -> C:
    """Return a proxy for `client` whose methods `names` (all public ones, if empty) are protected.

    :param policy: the policy, as shown by the proxy's `repr`.
    :param is_lazy: a predicate for methods that do none of their work when they are called, and are not protected.
    """
    if client is None:
        raise TypeError("there is no client to protect, only None")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a method is named by a string, not {name!r}")
    if isinstance(client, type) and not names:
        raise TypeError(f"{client.__name__} is a class: proxy an instance of it, or name its class methods")
    chosen = names or _public_methods(client, is_lazy)
    if not chosen:
        raise TypeError(f"{name_of(client)} has no public methods to protect: name some, or decorate a function")
    return cast("C", _build(client, chosen, protect, policy))


def awaiting(protect: Protect, run: Run) -> Protect:
    """Return a decorator for methods that return an awaitable, even if they are not coroutine functions.

    :param run: `Policy.acall`.
    """

    def protect_awaited(method: Run) -> Run:
        if is_coroutine_function(method) or is_generator_function(method):  # the latter is refused
            return protect(method)

        def pending(*args: Any, **kwargs: Any) -> Any:
            return _Pending(method, args, kwargs, run)

        return named_like(pending, method)

    return protect_awaited


def _build(client: Any, names: Iterable[str], protect: Protect, policy: str) -> Any:
    proxy: Any = object.__new__(_class_for(cast("type", type(client))))
    here: dict[str, Any] = {"_resilience_client": client, "_resilience_policy": policy}
    nested: dict[str, list[str]] = {}
    for name in names:
        head, dot, rest = name.partition(".")
        if dot:
            nested.setdefault(head, []).append(rest)
            continue
        method = getattr(client, head)
        if head[:2] == head[-2:] == "__" and head not in _WORK_METHODS:
            raise TypeError(
                f"{head} cannot be protected: Python calls it around the work, not for it; name the methods"
            )
        if not callable(method):
            raise TypeError(f"only methods can be protected, not {method!r}")
        is_unbound = isinstance(method, _OF_INSTANCES) and method is inspect.getattr_static(client, head, None)
        if isinstance(client, type) and is_unbound:
            raise TypeError(f"{client.__name__} is a class, and {head} a method of its instances: proxy an instance")
        here[head] = protect(method)
    for head, rests in nested.items():
        if head in here:  # a method that is a namespace, too
            rests.append("__call__")
        here[head] = _build(getattr(client, head), rests, protect, policy)
    proxy.__dict__.update(here)
    return proxy


def _public_methods(client: Any, is_lazy: Callable[[object], object]) -> list[str]:
    """Return the names of the client's public methods to protect, without running any property."""
    found = []
    for name in sorted({*dir(type(client)), *getattr(client, "__dict__", ())}):
        if name.startswith("_") or name in LIFECYCLE:
            continue
        member = inspect.getattr_static(client, name, None)
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        if _is_method(member) and not is_lazy(member):
            found.append(name)
    return found


def _is_method(member: object) -> bool:
    """Whether a class member is a method. A cached property has a `__get__` too, but it is not callable."""
    if isinstance(member, (functools.partial, functools.partialmethod, functools.singledispatchmethod)):
        return True
    return callable(member) and hasattr(type(member), "__get__") and not isinstance(member, type)


class _Proxy:
    """The base class of all proxies. Its own attributes begin with `_resilience_`; all others are the client's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_resilience_client"], name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:  # a protected method: it is replaced, by a test's mock for example, in the proxy
            self.__dict__[name] = value
        else:
            setattr(self._resilience_client, name, value)

    @override
    def __delattr__(self, name: str) -> None:
        delattr(self._resilience_client, name)

    @override
    def __dir__(self) -> Iterable[str]:
        return dir(self._resilience_client)

    @override
    def __repr__(self) -> str:
        return f"<{self._resilience_client!r} through {self._resilience_policy}>"

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a proxy cannot be copied or pickled: its policy is shared state of this process")


@functools.lru_cache(maxsize=256)
def _class_for(client_class: type) -> type:
    body: dict[str, Any] = {name: _forward(name) for name in _FORWARDED if _defines(client_class, name)}
    if _defines(client_class, "__aenter__"):
        body["__aenter__"] = _aenter
    body["__doc__"] = client_class.__doc__
    body["__class__"] = property(lambda proxy: proxy._resilience_client.__class__)  # for `isinstance`
    return type(f"{client_class.__name__}Proxy", (_Proxy,), body)


def _defines(client_class: type, name: str) -> bool:
    """Whether instances have this special method: looked up on the class, without its metaclass and `object`."""
    return any(name in vars(kind) for kind in client_class.__mro__ if kind is not object)


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        client = self._resilience_client
        method = vars(self).get(name)  # the protected method, if it was named
        result = (getattr(client, name) if method is None else method)(*args, **kwargs)
        # After `iter(proxy)` and `proxy += 1`, and inside a block, calls stay protected.
        return self if result is client or name == "__enter__" else result

    forward.__name__ = name
    return forward


async def _aenter(self: Any) -> Any:
    """Enter the client, and return the proxy."""
    await self._resilience_client.__aenter__()
    return self


def _cancel_scope() -> Any:
    """Return trio's internal state of the innermost cancel scope of this task; None in other event loops."""
    return getattr(trio_task(), "_cancel_status", None)


@final
class _Pending(Coroutine[Any, Any, Any]):
    """The result of a protected method that returns an awaitable: it can be awaited, and entered with `async with`.

    A `Coroutine`, because `asyncio.create_task` accepts nothing else.
    """

    def __init__(self, method: Run, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> None:
        self._method = method
        self._arguments = args
        self._keywords = kwargs
        self._run = run
        # Created at once, so that Python warns as usual if it is never awaited.
        self._coroutine: Coroutine[Any, Any, Any] = run(method, *args, **kwargs)
        self._entered: Any = None

    @override
    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    @override
    def send(self, value: Any, /) -> Any:
        return self._coroutine.send(value)

    @override
    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    @override
    def close(self) -> None:
        self._coroutine.close()

    async def __aenter__(self) -> Any:
        """Create and enter the client's context manager under the policy, a new one for each attempt."""
        self._coroutine.close()
        value = None

        async def enter(*args: Any, **kwargs: Any) -> Any:
            nonlocal value
            await self.__aexit__(None, None, None)  # the context manager of an earlier attempt
            manager = self._method(*args, **kwargs)
            if not hasattr(type(manager), "__aenter__"):
                close_coroutine(manager)
                raise AwaitableMisuse(f"{type(manager).__name__} is no asynchronous context manager: use `await`")
            before = _cancel_scope()
            value = await manager.__aenter__()
            self._entered = manager
            if _cancel_scope() is not before and (ctx := get_ambient()) is not None and ctx._timer is not None:
                await self.__aexit__(None, None, None)
                raise BlockMisuse(
                    f"{name_of(self._method)} leaves a nursery or a cancel scope open, which trio can't have end after "
                    "the Timeout in which it was entered: enter it under policies without one, and limit the time "
                    "outside, with `async with deadline(...)`"
                )
            return value

        enter.__qualname__ = name_of(self._method)  # the operation, for logs and metrics
        try:
            answer = await self._run(enter, *self._arguments, **self._keywords)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        if answer is not value:  # a policy answered with another value, so the context manager is not needed
            await self.__aexit__(None, None, None)
        return answer

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> Any:
        manager, self._entered = self._entered, None
        return None if manager is None else await manager.__aexit__(kind, error, traceback)
