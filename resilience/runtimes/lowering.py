"""Lowering: the accelerator for blocking code. A reader may skip it, and `RESILIENCE_LOWERING=off` switches it off.

A policy is one coroutine, `async def around(self, call, ctx)`. In threads nothing ever suspends, and a
coroutine that never suspends is only a costly way to call a function. So there the same method runs
with its awaits taken out:

    async def around(self, call, ctx):        def around(ctx):
        result = await call(ctx)        ->        result = call(ctx)
        await ctx.sleep(1.0)                      drive(ctx.sleep(1.0), self)

It has the same name, file and lines, so tracebacks and debuggers show the source as it was written. `self` and
`call` are closed over: Python calls a closure in half the time of a `functools.partial`, which it calls by way of C.
It means the same, too: as in a coroutine, a `StopIteration` that leaves the method becomes a `RuntimeError`.

Where that can't be promised, `lower` answers None, and the chain is driven as it is. The source must compile to
the very code that runs: no decorator, debugger or test tool has changed it. `call` may only be awaited: what else
it is handed to expects the coroutine function that it is by contract. The method may not close over variables
itself (as `super()` does), look at its own frame, bind `self` or `call` anew, use a global of its own name, which it
would take for itself, or suspend in the middle (`async for`).
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

#: Looked at when a policy first executes something: a pipeline that has been composed stays as it is.
enabled: bool = os.environ.get("RESILIENCE_LOWERING", "on").lower() not in {"off", "0", "false", "no"}

#: Where a function keeps its lowered form, beside the code that this was made from (`functools.wraps` copies both).
_KEPT: Final = "_resilience_lowered"
_DRIVE: Final = "_resilience_drive"
_FACTORY: Final = "_resilience_factory"
#: What stands around the method, and what a coroutine does with a `StopIteration` that leaves it (PEP 479).
_AROUND_THE_METHOD: Final = """
def _resilience_factory(_resilience_drive):
    try: pass
    except StopIteration as _resilience_stopped:
        raise RuntimeError("coroutine raised StopIteration") from _resilience_stopped
    return method
"""
_LOOKING_AROUND = {"locals", "vars", "dir", "eval", "exec", "super"}
_CACHE, _GLOBAL, _ATTR, _METHOD = map(dis.opmap.get, ("CACHE", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"))
_AS_METHOD = sys.version_info >= (3, 12)  # from then on a bit of LOAD_ATTR, and LOAD_METHOD a name that is never met


def lower(policy: Any) -> Callable[..., Any] | None:
    """Return what makes blocking stages of a policy; None where it has to be driven.

    It is called as `factory(drive, policy, call)`, where `drive(awaitable, policy)` runs one that never suspends.
    """
    method = policy.around
    if not enabled or type(method) is not MethodType or method.__self__ is not policy:
        return None
    function = method.__func__
    if type(function) is not FunctionType:
        return None
    kept: Any = function.__dict__.get(_KEPT)
    if kept is None or kept[0] is not function.__code__:
        kept = function.__dict__[_KEPT] = function.__code__, _lowered(function)
    return kept[1]  # type: ignore[no-any-return]


def _lowered(function: FunctionType) -> Callable[..., Any] | None:
    code = function.__code__
    has_defaults = function.__defaults__ or function.__kwdefaults__
    if not code.co_flags & inspect.CO_COROUTINE or code.co_argcount != 3 or code.co_freevars or has_defaults:
        return None
    try:
        module = _parsed(function)
        if _compiled(module, code, code.co_name) != code.replace(co_flags=code.co_flags & ~inspect.CO_NESTED):
            return None
        owner: Any = module.body[0]
        owner.body = [_without_awaits(owner.body[0])]
        factory = _compiled(module, code, _FACTORY)
        plain = next(it for it in factory.co_consts if isinstance(it, CodeType))
        binds_them = {*plain.co_varnames, *plain.co_cellvars} & {*code.co_varnames[:2]}  # `except Error as call`
        return None if binds_them else FunctionType(factory, function.__globals__)
    except Exception:  # refused below; no source, no stack left to parse it, an interpreter that is shutting down
        return None


def _parsed(function: FunctionType) -> ast.Module:
    """Parse the method alone, at its own lines and columns, in a class of the name that mangles its private names."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    first, last = code.co_firstlineno, max(end for _, end, _, _ in code.co_positions() if end is not None)
    while last < len(lines) and lines[last].lstrip()[:1] in {")", "]", "}"}:  # of what the last expression stands in
        last += 1
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    method = "".join(lines[first - 1 : last])
    return ast.parse("\n" * (first - 2) + f"class {owner}:\n{method}\nimport {', '.join(_imported(code)) or 'sys'}")


def _imported(code: CodeType) -> set[str]:
    """Return the names that the compiler knew as imported: a method of those is loaded like any other attribute."""
    imported: set[str] = set()
    others, name = {""}, ""
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if operation in (_ATTR, _METHOD):
            is_method = operation == _METHOD or argument & _AS_METHOD
            (others if is_method else imported).add(name)
        if operation != _CACHE:
            name = code.co_names[argument >> 1] if operation == _GLOBAL else ""
    return imported.union(*(_imported(it) for it in code.co_consts if isinstance(it, CodeType))) - others


def _compiled(module: ast.Module, code: CodeType, name: str) -> CodeType:
    """Compile the module as `code` was, and return the code in it that has this name."""
    flags = code.co_flags & annotations.compiler_flag
    made: CodeType = compile(module, code.co_filename, "exec", flags, dont_inherit=True)
    while made.co_name != name:
        made = next(it for it in made.co_consts if isinstance(it, CodeType))
    return made


def _without_awaits(method: ast.AsyncFunctionDef) -> ast.FunctionDef:
    factory: Any = ast.parse(_AROUND_THE_METHOD).body[0]
    for node in ast.walk(factory):
        ast.copy_location(node, method)  # a line that has run by then, so that coverage stays true
    policy, call, ctx = method.args.posonlyargs + method.args.args
    guarded, removing = factory.body[0], _RemovingAwaits(policy.arg, call.arg, method.name)
    has_docstring = ast.get_docstring(method, clean=False) is not None
    guarded.body = [removing.visit(statement) for statement in method.body[has_docstring:]]
    if removing.mentions != removing.calls:
        raise NotImplementedError("it does more with its call than to await it")
    factory.args.args += [policy, call]
    method.args.posonlyargs, method.args.args = [], [ctx]
    for argument in (*factory.args.args, ctx, method.args.vararg, method.args.kwarg, *method.args.kwonlyargs):
        vars(argument or ctx)["annotation"] = None  # evaluated once, where it can see the names of the class
    factory.body[0] = ast.copy_location(ast.FunctionDef(method.name, method.args, [guarded], []), method)
    factory.body[1].value.id = method.name
    return factory  # type: ignore[no-any-return]


class _RemovingAwaits(ast.NodeTransformer):
    """Make `call(...)` of `await call(...)`, and `drive(..., policy)` of every other await."""

    def __init__(self, policy: str, call: str, method: str) -> None:
        self.calls = self.mentions = 0
        self._policy, self._call, self._method = policy, call, method

    def visit_Name(self, node: ast.Name) -> ast.Name:
        self.mentions += node.id == self._call
        return self._refuse(node) if node.id == self._method or node.id in _LOOKING_AROUND else node

    def visit_Await(self, node: ast.Await) -> ast.expr:
        value: Any = self.visit(node.value)
        if isinstance(value, ast.Call) and getattr(value.func, "id", None) == self._call:
            self.calls += 1
            return ast.copy_location(value, node)
        drive, policy = (ast.copy_location(ast.Name(it, ast.Load()), node) for it in (_DRIVE, self._policy))
        return ast.copy_location(ast.Call(drive, [value, policy], []), node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        return self._refuse(node) if node.is_async else self.generic_visit(node)

    def _visit_function(self, node: Any) -> ast.AST:  # a coroutine of its own, until Python 3.12 those in brackets too
        awaits = any(isinstance(it, ast.Await) for it in ast.walk(node))
        return self._refuse(node) if awaits else self.generic_visit(node)

    def _refuse(self, node: ast.AST) -> Any:
        raise NotImplementedError("it would not mean the same")

    visit_GeneratorExp = visit_ListComp = visit_SetComp = visit_DictComp = _visit_function
    visit_AsyncFor = visit_AsyncWith = visit_AsyncFunctionDef = visit_Nonlocal = _refuse
