"""Rewriting a policy's method as the stage of a chain that it will be.

A policy is written once, as `async def around(self, call, ctx)`. What runs is made from the method's
own syntax tree. For tasks it is *closed*: it becomes a function that makes the stage.

    async def around(self, call, ctx):          def around(self, call):
        result = await call(ctx)          ->        async def around(ctx, *made):
        ...                                             result = await call(ctx, *made)
                                                        ...
                                                    return around

`made`, for short here, is the function that will be called in the end, and its arguments. They go
inwards beside the context, which therefore can be the same for many executions.

For blocking code it is *lowered* besides. In that world nothing ever suspends, so the coroutine is
only a costly way to call a function, and becomes one:

        async def around(ctx, *made):               def around(ctx, *made):
            result = await call(ctx, *made)   ->        result = call(ctx, *made)
            await <anything else>                       drive(<anything else>)

There the rest of the chain is a plain function too, so `await call(ctx)` is a call; whatever else is
awaited is a coroutine that is done when it is awaited, and is driven through. A layer costs some
40 ns so. It takes 70 as a `functools.partial` of a plain function, which CPython calls by way of C,
250 as a coroutine that is made and sent through, and closing saves 20 to 40 ns a layer in tasks.

What a decorator makes is an *entrance*: the stage of the outermost policy with the user's own arguments
for parameters, and at its top the question whether an execution may begin in the common way.

        def around(*arguments, **keywords):
            if <there is a context around, or somebody listens>:
                return run(function, arguments, keywords, None)
            ctx = <what is common to all executions>
            result = call(ctx, *made)
            ...

So there is no function between the caller and the first policy, which would be another 30 ns in
blocking code and 75 in tasks. Nor is there one between the last policy and the function: where the rest
of the chain is nothing but the innermost stage of that world, `call(ctx)` becomes the *shortcut*, an
expression that makes the usual call there and then. That saves 35 ns more.

            result = call(ctx, *made)         ->            result = (
                                                                call(ctx, *made)
                                                                if <the call is not a usual one>
                                                                else function(*arguments)
                                                            )

The result is compiled under the same file name and line numbers, so that tracebacks, debuggers and
coverage show the source as it was written. It is done only where it cannot change what the code
means; otherwise the answer is None, and the method is used as it is, to the same results:

- the source must be there and compile to the very bytecode that runs (a file that was edited since
  it was imported does not; nor does a function that a decorator or a test tool has rewritten);
- the method may not close over variables (`super()` does), nor assign to `self` or `call`, nor do
  anything with `call` but `await call(...)`: somebody else would need the coroutine function that it
  is by contract;
- to be lowered, it may not use `async for` or `async with`.

`RESILIENCE_LOWERING=off` in the environment switches all of it off for the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, NamedTuple, TypeAlias

#: Set before a policy first executes or decorates anything: a chain that has been composed stays as it is.
enabled: bool = os.environ.get("RESILIENCE_LOWERING", "on").lower() not in {"off", "0", "false", "no"}

#: Runs a coroutine to its end, `drive(coroutine, owner)`.
Drive: TypeAlias = Callable[..., Any]

#: Makes the stage of a policy around another: `factory(policy, call)`.
Factory: TypeAlias = Callable[[Any, Any], Any]

#: Makes the entrance of a policy around a stage: `factory(policy, call, function, run)`.
EntranceFactory: TypeAlias = Callable[[Any, Any, Callable[..., Any], Callable[..., Any]], Callable[..., Any]]


class Gate(NamedTuple):
    """What an entrance looks at, and what it then begins with."""

    ambient: Callable[[], object]  # the context around, if any
    watched: object  # `.executions` is true where an execution has to go the long way
    unlimited: object  # the context that is common to all others


class Shortcut(NamedTuple):
    """What the innermost stage of a world does, as an expression."""

    source: str  # of `call`, `function`, `arguments`, `keywords`, what is in `given`, and `(ctx := ...)`, the context
    given: dict[str, object]


class Form(NamedTuple):
    """What a method is to become: where there is a `drive`, a plain function; where there is a gate, an entrance.

    With a shortcut it is the stage around the innermost one.
    """

    drive: Drive | None
    gate: Gate | None
    shortcut: Shortcut | None


#: Where a function keeps its factories. On itself: a table would keep modules alive that nobody needs any more.
_KEPT: Final = "_resilience_factories"


def lower(method: object, drive: Drive, shortcut: Shortcut | None = None) -> Factory | None:
    """Return what makes the blocking stages of `method`, a bound `around`; None where it has to be driven."""
    return _factory(method, Form(drive, None, shortcut))


def close(method: object, shortcut: Shortcut | None = None) -> Factory | None:
    """Return what makes the asynchronous stages of `method`; None where it has to be used as it is."""
    return _factory(method, Form(None, None, shortcut))


def entrance(
    method: object, drive: Drive | None, gate: Gate, shortcut: Shortcut | None = None
) -> EntranceFactory | None:
    """Return what makes the entrances of `method`, in blocking code with a `drive`; None where there are none."""
    return _factory(method, Form(drive, gate, shortcut))


def _factory(method: object, form: Form) -> Callable[..., Any] | None:
    if not enabled or not isinstance(method, MethodType) or not isinstance(method.__func__, FunctionType):
        return None
    function = method.__func__
    kept: tuple[CodeType, dict[object, Callable[..., Any] | None]] | None = vars(function).get(_KEPT)
    if kept is None or kept[0] is not function.__code__:  # `functools.wraps` copies what a function keeps
        kept = vars(function)[_KEPT] = function.__code__, {}
    known = kept[1]
    key = tuple(part is None for part in form)  # each world has one of each
    if key not in known:
        try:
            from resilience.runtimes.rewriting import factory  # 3 % of our import, and not wanted before

            known[key] = factory(function, form)
        except Exception:  # no source, no stack left to parse it, an interpreter that is shutting down ...
            known[key] = None
    return known[key]
