"""Lowering: the accelerator for blocking code. A reader may skip it, and `RESILIENCE_LOWERING=off` switches it off.

In threads nothing suspends, and a coroutine that never suspends is only a costly way to call a function. So the method
of a policy runs with its awaits removed there. Line numbers stay, so tracebacks and debuggers show the source:

    async def around(self, call, ctx):        def around(ctx):
        result = await call(ctx)        ->        result = call(ctx)
        await ctx.sleep(1.0)                      drive(ctx.sleep(1.0), self)

`self` and `call` become closure variables, at half the cost of a `functools.partial`. `lower` returns None, and the
chain is driven, if the lowered method might differ: the source must compile to the very code that runs; `call` may only
be awaited; the method may not have free variables (`super()`), inspect its frame, or use `async for` or `async with`.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final

#: Read when a chain is composed.
enabled: bool = os.environ.get("RESILIENCE_LOWERING", "on").lower() not in {"off", "0", "false", "no"}

_CACHE_ATTRIBUTE: Final = "_resilience_lowered"  # caches the lowered form, with the code that it was made from
#: The code around the method: a coroutine turns a `StopIteration` that leaves it into a `RuntimeError` (PEP 479).
_FACTORY_SOURCE: Final = """
def _resilience_factory(_resilience_drive):
    try: pass
    except StopIteration as _resilience_stopped:
        raise RuntimeError("coroutine raised StopIteration") from _resilience_stopped
    return method
"""
_REFUSED_NAMES = {"locals", "vars", "dir", "eval", "exec", "super"}
_CACHE, _GLOBAL, _ATTR, _METHOD = (dis.opmap.get(it, -1) for it in ("CACHE", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"))


def lower(policy: Any) -> Callable[..., Any] | None:
    """Return a `factory(drive, policy, call)` of the blocking stage; None if the policy must be driven."""
    method = policy.around
    function = getattr(method, "__func__", None)
    if not enabled or type(function) is not FunctionType or method.__self__ is not policy:
        return None
    cached: Any = function.__dict__.get(_CACHE_ATTRIBUTE)
    if cached is None or cached[0] is not function.__code__:
        cached = function.__dict__[_CACHE_ATTRIBUTE] = function.__code__, _lowered(function)
    return cached[1]  # type: ignore[no-any-return]


def _lowered(function: FunctionType) -> Callable[..., Any] | None:
    code, flags = function.__code__, function.__code__.co_flags & ~inspect.CO_NESTED
    usual = flags & inspect.CO_COROUTINE and code.co_argcount == 3 and not (code.co_freevars or function.__defaults__)
    try:
        module: Any = _parsed(function)
        if not usual or _compiled(module, code.co_filename, flags, code.co_name) != code.replace(co_flags=flags):
            return None
        module.body[0].body = [_without_awaits(module.body[0].body[0])]
        factory = _compiled(module, code.co_filename, annotations.compiler_flag, "_resilience_factory")
        plain = [it for it in factory.co_consts if isinstance(it, CodeType)][-1]  # the last, as in `_compiled`
        rebound = {*plain.co_varnames, *plain.co_cellvars} & {*code.co_varnames[:2]}  # `except Error as call`
        return None if rebound else FunctionType(factory, function.__globals__)
    except Exception:  # refused below; no source, no stack left to parse it, the interpreter is shutting down
        return None


def _parsed(function: FunctionType) -> ast.Module:
    """Parse the method alone, at its own lines and columns, in a class with the name that mangles its private names."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    first, last = code.co_firstlineno, max(end for _, end, _, _ in code.co_positions() if end is not None)
    while last < len(lines) and lines[last].lstrip()[:1] in {")", "]", "}"}:  # the brackets around the last expression
        last += 1
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    method = "".join(lines[first - 1 : last])
    return ast.parse("\n" * (first - 2) + f"class {owner}:\n{method}\nimport {', '.join(_imported(code)) or 'sys'}")


def _imported(code: CodeType) -> set[str]:
    """Return the names that the compiler knew to be imported: it loads their methods like any other attribute."""
    imported, others, after = set[str](), set[str](), 0
    operations, arguments = code.co_code[::2], code.co_code[1::2]
    while (at := operations.find(_GLOBAL, after)) >= 0:
        after = next(it for it in range(at + 1, len(operations)) if operations[it] != _CACHE)
        if operations[after] in (_ATTR, _METHOD):
            is_method = operations[after] == _METHOD or arguments[after] & (sys.version_info >= (3, 12))  # a bit there
            (others if is_method else imported).add(code.co_names[arguments[at] >> 1])
    return imported.union(*(_imported(it) for it in code.co_consts if isinstance(it, CodeType))) - others


def _compiled(module: ast.Module, file: str, flags: int, name: str) -> CodeType:
    """Compile the module, and return the code object with this name."""
    made: CodeType = compile(module, file, "exec", flags & annotations.compiler_flag, dont_inherit=True)
    while made.co_name != name:
        made = [it for it in made.co_consts if isinstance(it, CodeType)][-1]  # 3.14 has one for annotations before it
    return made


def _without_awaits(method: ast.AsyncFunctionDef) -> ast.FunctionDef:
    factory: Any = ast.parse(_FACTORY_SOURCE).body[0]
    for node in ast.walk(factory):
        ast.copy_location(node, method)  # a line that has run already, so that coverage stays correct
    policy, call, ctx = method.args.posonlyargs + method.args.args
    guarded, removing = factory.body[0], _RemovingAwaits(policy.arg, call.arg, method.name)
    guarded.body = [removing.visit(it) for it in method.body[ast.get_docstring(method) is not None :]]
    if removing.mentions != removing.calls:  # `call` is not only awaited
        removing.refuse(method)
    factory.args.args += [policy, call]
    method.args.posonlyargs, method.args.args = [], [ctx]
    factory.body[0] = ast.copy_location(ast.FunctionDef(method.name, method.args, [guarded], []), method)
    factory.body[1].value.id = method.name
    return factory  # type: ignore[no-any-return]


class _RemovingAwaits(ast.NodeTransformer):
    """Replace `await call(...)` by `call(...)`, and every other await by `drive(..., policy)`."""

    def __init__(self, policy: str, call: str, method: str) -> None:
        self.calls = self.mentions = 0
        self._names, self._call, self._refused = ("_resilience_drive", policy), call, {method, *_REFUSED_NAMES}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        self.mentions += node.id == self._call
        return self.refuse(node) if node.id in self._refused else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:  # most nodes are names or attributes
        node.value = self.visit(node.value)
        return node

    def visit_Await(self, node: ast.Await) -> ast.expr:
        value: Any = self.visit(node.value)
        if isinstance(value, ast.Call) and getattr(value.func, "id", None) == self._call:
            self.calls += 1
            return ast.copy_location(value, node)
        drive, policy = (ast.copy_location(ast.Name(it, ast.Load()), node) for it in self._names)
        return ast.copy_location(ast.Call(drive, [value, policy], []), node)

    def _visit_function(self, node: Any) -> ast.AST:  # an await makes it a coroutine; before 3.12, comprehensions too
        suspends = any(isinstance(it, ast.Await) or getattr(it, "is_async", False) for it in ast.walk(node))
        return self.refuse(node) if suspends else self.generic_visit(node)

    def refuse(self, node: ast.AST) -> Any:
        raise ValueError("it would not mean the same")

    visit_GeneratorExp = visit_ListComp = visit_SetComp = visit_DictComp = _visit_function
    visit_AsyncFor = visit_AsyncWith = visit_AsyncFunctionDef = visit_Nonlocal = refuse
