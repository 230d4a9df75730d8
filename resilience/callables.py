"""What a callable is, decided before or just after it is called: asynchronous, a generator, a misuse."""

from __future__ import annotations

import contextlib
import functools
import inspect
from types import AsyncGeneratorType, BuiltinFunctionType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from resilience.errors import ArgumentMisuse, AwaitableMisuse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

#: Results of these types are no awaitables. Most results are of one of them, and on CPython 3.11 asking
#: any other type for an `__await__` that it does not have costs 120 ns.
NON_AWAITABLE_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset})

#: Results of these types are what a call that has not begun returns, if their function is written so.
UNBEGUN_TYPES = frozenset(
    {
        GeneratorType,
        AsyncGeneratorType,
        contextlib._GeneratorContextManager,
        contextlib._AsyncGeneratorContextManager,
    }
)

_CO_COROUTINE = inspect.CO_COROUTINE
_CO_ITERABLE = inspect.CO_ITERABLE_COROUTINE  # a generator made awaitable by `types.coroutine`


def is_coroutine_function(fn: object) -> bool:
    """Whether calling `fn` gives a coroutine: an `async def`, a method or partial of one, an async `__call__`.

    For a plain function, and the method that it may be, the answer is in its code flags (30 ns); `inspect` takes ten
    times as long, for a method 50 times.
    """
    function = fn.__func__ if type(fn) is MethodType else fn
    if type(function) is not FunctionType:
        return type(fn) is not BuiltinFunctionType and _is_coroutine_function(fn)
    if function.__code__.co_flags & _CO_COROUTINE:
        return True
    return bool(function.__dict__) and _is_coroutine_function(fn)  # where `inspect.markcoroutinefunction` leaves a mark


def _is_coroutine_function(fn: object) -> bool:
    require_callable(fn)
    while isinstance(fn, functools.partial):
        fn = fn.func
    if _is_mock(fn):
        return False
    if inspect.iscoroutinefunction(fn):
        return True
    if isinstance(fn, type) or inspect.isroutine(fn):
        return False
    return inspect.iscoroutinefunction(getattr(type(fn), "__call__", None))


def require_callable(fn: object) -> None:
    """Refuse what cannot be called, before any policy could take that for a failure of the call."""
    if callable(fn):
        return
    hint = ""
    if is_awaitable(fn):
        close_coroutine(fn)
        hint = "; hand over the function itself and its arguments, `policy.call(fetch, url)`, not what it returns"
    raise ArgumentMisuse(f"a policy runs callables, not {fn!r}{hint}")


def is_generator_function(fn: object) -> bool:
    """Whether calling `fn` gives a generator, synchronous or not: a call that has not begun when it returns."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if _is_mock(fn):
        return False
    call = getattr(type(fn), "__call__", None)
    return any(
        inspect.isgeneratorfunction(it) or inspect.isasyncgenfunction(it)
        for it in ((fn,) if inspect.isroutine(fn) or isinstance(fn, type) else (fn, call))
    )


def is_block_function(fn: object) -> bool:
    """Whether calling `fn` makes the context manager of a generator, by `contextlib`: its work is done in the block."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", None) in _BLOCK_CODES


#: All functions that `contextlib` makes have the code of one of these.
_BLOCK_CODES = (
    contextlib.contextmanager(iter).__code__,
    contextlib.asynccontextmanager(aiter).__code__,
)


def why_unbegun(fn: object) -> str | None:
    """Say why a call of `fn` does none of its work, and what to do; None where a call is a call."""
    if is_generator_function(fn):
        return (
            f"{name_of(fn)} is a generator function: calling it only makes the generator, so nothing that it does "
            "would be protected; use `policy.streaming()` in the place of the policy, or decorate what each step calls"
        )
    if is_block_function(fn):
        return (
            f"{name_of(fn)} makes a context manager, whose work is done in the `with` block, where no policy sees it; "
            "put `for attempt in retry.attempts(): with attempt:` around the block, or decorate what it calls"
        )
    return None


def refuse_unbegun(fn: object) -> None:
    """Refuse a function that has returned what its work would be done by."""
    why = why_unbegun(fn)
    if why is not None:
        raise ArgumentMisuse(why)


def _is_mock(fn: object) -> bool:
    """Whether `fn` answers every question with a mock, so that `inspect` takes it for whatever it asks for."""
    return not isinstance(getattr(getattr(fn, "__code__", None), "co_flags", 0), int)


def is_awaitable(value: object) -> TypeGuard[Awaitable[object]]:
    """Whether `value` can be awaited."""
    # By type, as `await` does: asking a lazy proxy for its class would make it work.
    kind = type(value)
    return (
        kind is CoroutineType
        or hasattr(kind, "__await__")
        or (kind is GeneratorType and bool(cast("GeneratorType[Any, Any, Any]", value).gi_code.co_flags & _CO_ITERABLE))
    )


async def maybe_await(result: Any) -> Any:
    """Return what a function has returned, or what an asynchronous one's awaitable gives."""
    return await result if is_awaitable(result) else result


def name_of(fn: object) -> str:
    """Return the name by which a user knows `fn`, whatever it is."""
    if type(fn) is FunctionType:
        return fn.__qualname__
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None)
    return name if isinstance(name, str) else type(fn).__qualname__


def named_like(wrapper: Callable[..., Any], fn: object) -> Callable[..., Any]:
    """Give a wrapper what a user sees of the function: `functools.wraps`, where names are names (a mock's are not)."""
    texts = ("__name__", "__qualname__")
    seen = [it for it in functools.WRAPPER_ASSIGNMENTS if it not in texts or isinstance(getattr(fn, it, None), str)]
    return functools.update_wrapper(wrapper, cast("Callable[..., Any]", fn), seen)


def refuse_awaitable(fn: object, value: object) -> AwaitableMisuse:
    """Close what a blocking execution was given to await, and return the error that says so."""
    close_coroutine(value)
    return AwaitableMisuse(
        f"{name_of(fn)} returned an awaitable to a blocking execution, where it cannot be awaited; "
        "use `await policy.aexecute(...)`, `await policy.acall(...)` or `policy.aproxy(...)`"
    )


def refuse_plain(fn: object, value: object) -> AwaitableMisuse:
    """Return the error for an asynchronous execution that was given nothing to await."""
    return AwaitableMisuse(
        f"{name_of(fn)} returned {type(value).__name__}, which cannot be awaited; "
        "use `policy.execute(...)` or `policy.call(...)` for blocking functions"
    )


def mismatch(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError, takes_context: bool
) -> ArgumentMisuse | None:
    """Return the error for arguments that `fn` cannot take; None where it can, and raised `error` itself.

    :param takes_context: whether the only argument is the context.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if not traceback.tb_frame.f_globals.get("__name__", "").startswith("resilience."):
            return None  # it was entered, or a function around it was
        traceback = traceback.tb_next
    try:
        signature = inspect.signature(fn)
    except Exception:  # it has none, as many builtins, or a foreign `__signature__` is no such thing
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        hint = "; use `call` or `acall` for a function that takes no context" if takes_context else ""
        what = "the context" if takes_context else "these arguments"
        return ArgumentMisuse(f"{name_of(fn)} cannot be called with {what}: {error}{hint}")
    return None


def close_coroutine(value: object) -> None:
    """Close `value` if it behaves like a coroutine, so that it is not reported as never awaited.

    By duck type: aiohttp's request objects are no coroutines but close like one. A Task or Future
    has no `send`; it is running work, and left alone.
    """
    if hasattr(value, "send") and hasattr(value, "throw") and hasattr(value, "close"):
        value.close()
