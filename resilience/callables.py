"""Checks of a callable, before or just after it is called: asynchronous functions, generator functions, misuses."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from types import AsyncGeneratorType, BuiltinFunctionType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from resilience.errors import ArgumentMisuse, AwaitableMisuse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

#: Types that are not awaitable. Most results have one of them, and on CPython 3.11, looking up a missing `__await__`
#: on any other type costs 120 ns.
NON_AWAITABLE_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset})

#: Types of results whose function may be lazy: calling it runs none of its code.
LAZY_TYPES = frozenset(
    {
        GeneratorType,
        AsyncGeneratorType,
        contextlib._GeneratorContextManager,
        contextlib._AsyncGeneratorContextManager,
    }
)


class Unknown:
    """For annotations: what no function returns, so it only matches results of type `Any` or `Never`.

    Such a result also matches a coroutine. Without an overload of its own, pyright would take `json.loads` for a
    coroutine function.
    """


_CO_COROUTINE = inspect.CO_COROUTINE
_CO_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_CO_ITERABLE = inspect.CO_ITERABLE_COROUTINE  # a generator made awaitable by `types.coroutine`


def without_partials(fn: Any) -> Any:
    """Return the function of a `functools.partial`, also of one of another one; anything else as it is."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def is_coroutine_function(fn: object) -> bool:
    """Whether calling `fn` returns a coroutine: an `async def`, a method or partial of one, an async `__call__`.

    For a plain function or method, the flags of its code object are enough (30 ns); `inspect` takes ten times as long
    for a function, and 50 times as long for a method.
    """
    function = fn.__func__ if type(fn) is MethodType else fn
    if type(function) is not FunctionType:
        return type(fn) is not BuiltinFunctionType and _is_coroutine_function(fn)
    if function.__code__.co_flags & _CO_COROUTINE:
        return True
    return bool(function.__dict__) and _is_coroutine_function(fn)  # `inspect.markcoroutinefunction` may have marked it


def _is_coroutine_function(fn: object) -> bool:
    require_callable(fn)
    fn = without_partials(fn)
    if not isinstance(getattr(getattr(fn, "__code__", None), "co_flags", 0), int):
        return False  # a mock: each of its attributes is a mock, so `inspect` takes it for any kind of function
    if inspect.iscoroutinefunction(fn) or _is_marked(fn):
        return True
    if isinstance(fn, type) or inspect.isroutine(fn):
        return False
    return inspect.iscoroutinefunction(getattr(type(fn), "__call__", None))


def _is_marked(fn: object) -> bool:
    """Whether `fn` has the mark by which asyncio, but not always `inspect`, knows a coroutine function.

    `unittest.mock` marks what it makes from a coroutine function: `patch.object(client, "get", autospec=True)`.
    """
    mark = getattr(fn, "_is_coroutine", None)
    if mark is None or "asyncio" not in sys.modules:
        return False
    # Not with `asyncio.iscoroutinefunction`: it is deprecated from Python 3.14 on.
    return mark is getattr(sys.modules["asyncio"].coroutines, "_is_coroutine", None)


def require_callable(fn: object, runner: str = "a policy", example: str = "policy.call(fetch, url)") -> None:
    """Raise if `fn` cannot be called, before a policy could count that as a failure of the call.

    :param runner: what was asked to run it, and an example of how to ask, for the message.
    """
    if is_policy(fn):
        raise ArgumentMisuse(
            f"a policy runs functions, not {fn!r}: to run a function under both, write "
            "`policy.wrap(other).call(fetch, url)`"
        )
    if callable(fn):
        return
    if is_awaitable(fn):
        close_coroutine(fn)
    raise ArgumentMisuse(
        f"{runner} runs callables, not {fn!r}; pass the function and its arguments, `{example}`, not its result"
    )


def is_policy(value: object) -> bool:
    """Whether `value` is a policy, which is callable, because it is a decorator."""
    return hasattr(type(value), "_resilience_chain")


def is_generator_function(fn: object) -> bool:
    """Whether calling `fn` only returns a generator, synchronous or not, and runs none of its code."""
    fn = without_partials(fn)
    if _has_generator_code(fn):
        return True
    return type(fn) is not FunctionType and _has_generator_code(getattr(type(fn), "__call__", None))


def is_async_function(fn: object) -> bool:
    """Whether calling `fn` returns a coroutine or an asynchronous generator."""
    fn = without_partials(fn)
    return any(map(inspect.isasyncgenfunction, (fn, getattr(type(fn), "__call__", None)))) or is_coroutine_function(fn)


def _has_generator_code(fn: object) -> bool:
    flags = getattr(getattr(fn, "__code__", None), "co_flags", 0)
    return isinstance(flags, int) and bool(flags & _CO_GENERATOR)  # not an int: `fn` is a mock


#: Each function made by `contextlib.contextmanager` or `asynccontextmanager` has one of these code objects.
_BLOCK_CODES = (
    contextlib.contextmanager(iter).__code__,
    contextlib.asynccontextmanager(aiter).__code__,
)


def why_lazy(fn: object) -> str | None:
    """Return why a call of `fn` does none of its work, and what to do instead; None if it does its work."""
    if is_generator_function(fn):
        return (
            f"{name_of(fn)} is a generator function: calling it only makes the generator, so nothing that it does "
            "would be protected; use `policy.streaming()` in the place of the policy, or decorate what each step calls"
        )
    if getattr(without_partials(fn), "__code__", None) in _BLOCK_CODES:
        return (
            f"{name_of(fn)} makes a context manager, whose work is done in the `with` block, where no policy sees it; "
            "put `for attempt in retry.attempts(): with attempt:` around the block, or decorate what it calls"
        )
    return None


def refuse_lazy(fn: object) -> None:
    """Raise if `fn` is a generator function, or makes a context manager of one."""
    why = why_lazy(fn)
    if why is not None:
        raise ArgumentMisuse(why)


def is_awaitable(value: object) -> TypeGuard[Awaitable[object]]:
    """Whether `value` can be awaited."""
    # By type, as `await` does: reading `__class__` of a lazy proxy would evaluate it.
    kind = type(value)
    return (
        kind is CoroutineType
        or hasattr(kind, "__await__")
        or (kind is GeneratorType and bool(cast("GeneratorType[Any, Any, Any]", value).gi_code.co_flags & _CO_ITERABLE))
    )


async def maybe_await(result: Any) -> Any:
    """Return the result of a function, awaited if it is awaitable."""
    return await result if is_awaitable(result) else result


def name_of(fn: object) -> str:
    """Return the qualified name of a callable, or of its type if it has none."""
    if type(fn) is FunctionType:
        return fn.__qualname__
    fn = without_partials(fn)
    for attribute in ("_resilience_operation", "__qualname__"):  # the first is that of an object that is no function
        if isinstance(name := getattr(fn, attribute, None), str):
            return name
    return type(fn).__qualname__


def named_like(wrapper: Callable[..., Any], fn: object) -> Callable[..., Any]:
    """Update a wrapper as `functools.wraps` does, but without what no function can have, such as the name of a mock."""
    for attribute in functools.WRAPPER_ASSIGNMENTS:
        try:
            setattr(wrapper, attribute, getattr(fn, attribute))
        except (AttributeError, TypeError):
            pass
    return functools.update_wrapper(wrapper, cast("Callable[..., Any]", fn), ())


def unexpected_awaitable(fn: object, value: object) -> AwaitableMisuse:
    """Close the awaitable that a function returned to a blocking execution, and return the error for it."""
    close_coroutine(value)
    return AwaitableMisuse(
        f"{name_of(fn)} returned an awaitable to a blocking execution, where it cannot be awaited; "
        "use `await policy.aexecute(...)`, `acall`, `acapture` or `policy.aproxy(...)`"
    )


def missing_awaitable(fn: object, value: object) -> AwaitableMisuse:
    """Return the error for a function that returned no awaitable to an asynchronous execution."""
    return AwaitableMisuse(
        f"{name_of(fn)} returned {type(value).__name__}, which cannot be awaited; "
        "use `policy.execute(...)` or `policy.call(...)` for blocking functions"
    )


def refuse_arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError, takes_context: bool
) -> None:
    """Raise a misuse if `fn` cannot take these arguments; return if it can take them, and raised `error` itself.

    :param takes_context: whether the only argument is the context.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if not str(traceback.tb_frame.f_globals.get("__name__")).startswith("resilience."):
            return  # `fn` or a wrapper of it was entered
        traceback = traceback.tb_next
    if _can_take(fn, args, kwargs, takes_context):
        return
    what, hint = "these arguments", ""
    if takes_context:
        what, hint = "the context", "; use `call` or `acall`, or pass `lambda ctx: fetch()`"
    elif not args and not kwargs:
        hint = "; use `execute` or `aexecute` for a function of the context"
    raise ArgumentMisuse(f"{name_of(fn)} cannot be called with {what}: {error}{hint}") from None


def _can_take(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], takes_context: bool) -> bool:
    signature = signature_of(fn)
    if signature is None:
        return not takes_context  # a builtin, which no context can be meant for
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of `fn`; None if it has none, as many builtins, or an invalid `__signature__`."""
    try:
        return inspect.signature(fn)
    except Exception:
        return None


def close_coroutine(value: object) -> None:
    """Close `value` if it behaves like a coroutine, so that Python does not warn that it was never awaited.

    It is recognized by its methods: aiohttp's request objects are not coroutines, but can be closed like one. A Task or
    Future has no `send`; it is running work, and is left alone.
    """
    if hasattr(value, "send") and hasattr(value, "throw") and hasattr(value, "close"):
        value.close()
