"""Rewriting a policy's coroutine as the plain function that it is in blocking code.

A policy is written once, as `async def around(self, call, ctx)`. In blocking code nothing in it ever
suspends, so the coroutine is only a costly way to call a function. Here the function's own syntax
tree is rewritten:

    async def around(self, call, ctx):          def around(self, call):
        result = await call(ctx)          ->        def around(ctx):
        await <anything else>                           result = call(ctx)
                                                        drive(<anything else>)
                                                    return around

The rest of the chain is a plain function too, so `await call(ctx)` is a call; whatever else is
awaited is a coroutine that is done when it is awaited, and is driven through. The inner function is
the stage of the chain. It closes over the policy and the next stage, because CPython runs a call
from one plain function to another without leaving its loop: a layer costs some 40 ns so, 70 by way
of `functools.partial`, and 250 as a coroutine that is made and sent through.

The result is compiled under the same file name and line numbers, so that tracebacks, debuggers and
coverage show the source as it was written. It is done only where it cannot change what the code
means; otherwise `lower` returns None and the coroutine is driven, to the same results:

- the source must be there and compile to the very bytecode that runs (a file that was edited since
  it was imported does not; nor does a function that a decorator or a test tool has rewritten);
- the function may not close over variables (`super()` does), nor use `async for` or `async with`,
  nor assign to `self` or `call`;
- `call` may only be awaited where it is called. Handed to somebody else it would have to be a
  coroutine function.

`RESILIENCE_LOWERING=off` in the environment switches it off for the process.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

#: Set before the first execution of a policy; a chain that has been composed stays as it is.
enabled: bool = os.environ.get("RESILIENCE_LOWERING", "on").lower() not in {"off", "0", "false", "no"}

#: Runs a coroutine to its end, `drive(coroutine, owner)`.
Drive: TypeAlias = Callable[..., Any]

_DRIVE: Final = "_resilience_drive"
_NOT_LOWERABLE = (ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)

_lowered: WeakKeyDictionary[FunctionType, FunctionType | None] = WeakKeyDictionary()


def lower(method: object, drive: Drive) -> Callable[..., Any] | None:
    """Return the plain function of `method`, a bound `around`, or None where it has to be driven."""
    if not enabled or not isinstance(method, MethodType) or not isinstance(method.__func__, FunctionType):
        return None
    function = method.__func__
    if function not in _lowered:
        try:
            _lowered[function] = _rewritten(function, drive)
        except (OSError, TypeError, SyntaxError, ValueError):  # no source, or none that can be read
            _lowered[function] = None
    return _lowered[function]


def _rewritten(function: FunctionType, drive: Drive) -> FunctionType | None:
    code = function.__code__
    if not code.co_flags & inspect.CO_COROUTINE or not _takes_call_and_ctx(code) or code.co_freevars:
        return None
    module = _parsed(inspect.getsourcefile(function))
    owner, definition = _find(module, code)
    if owner is None or definition is None:
        return None
    if owner in module.body:
        _prune(module, owner, definition)
    if not _same_code(_compiled(module, code), code):
        return None
    factory = _Lowering(*code.co_varnames[:2]).apply(definition)
    if factory is None:
        return None
    owner.body[owner.body.index(definition)] = factory
    factory_code = _compiled(ast.fix_missing_locations(module), code)
    assert factory_code is not None
    make = FunctionType(factory_code, function.__globals__, function.__name__)
    make.__kwdefaults__ = {_DRIVE: partial(drive, owner=function.__qualname__.rpartition(".")[0])}
    make.__module__ = function.__module__
    return make


def _takes_call_and_ctx(code: CodeType) -> bool:
    variable = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return (code.co_argcount, code.co_kwonlyargcount, variable) == (3, 0, 0)


def _parsed(file: str | None) -> ast.Module:
    if file is None:
        raise OSError("no source file")
    return ast.parse("".join(linecache.getlines(file)))


def _find(module: ast.Module, code: CodeType) -> tuple[ast.ClassDef | None, ast.AsyncFunctionDef | None]:
    """Find the method that begins where `code` begins, with its decorators."""
    for owner in (it for it in ast.walk(module) if isinstance(it, ast.ClassDef)):
        for node in owner.body:
            if isinstance(node, ast.AsyncFunctionDef) and node.name == code.co_name:
                first = min([node.lineno] + [it.lineno for it in node.decorator_list])
                if first == code.co_firstlineno:
                    return owner, node
    return None, None


def _prune(module: ast.Module, owner: ast.ClassDef, definition: ast.AsyncFunctionDef) -> None:
    """Leave out the other definitions. The imports have to stay: CPython compiles `imported.name()` differently."""
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    module.body = [it for it in module.body if it is owner or not isinstance(it, definitions)]
    owner.body = [definition]


def _compiled(module: ast.Module, code: CodeType) -> CodeType | None:
    """Compile the module, and take the code out that begins where `code` begins."""
    flags = code.co_flags & _FUTURE_FLAGS
    found = [compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)]
    for outer in found:
        for inner in (it for it in outer.co_consts if isinstance(it, CodeType)):
            if (inner.co_name, inner.co_firstlineno) == (code.co_name, code.co_firstlineno):
                return inner
            found.append(inner)
    return None


def _same_code(ours: CodeType | None, theirs: CodeType) -> bool:
    """Whether two code objects do the same in the same lines."""
    if ours is None:
        return False
    return (
        ours.co_code == theirs.co_code
        and ours.co_names == theirs.co_names
        and ours.co_varnames == theirs.co_varnames
        and ours.co_firstlineno == theirs.co_firstlineno
        and len(ours.co_consts) == len(theirs.co_consts)
        and all(
            _same_code(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else (type(a), a) == (type(b), b)
            for a, b in zip(ours.co_consts, theirs.co_consts, strict=True)
        )
    )


def _future_flags() -> int:
    import __future__

    return sum(
        getattr(__future__, name).compiler_flag for name in __future__.all_feature_names if name != "nested_scopes"
    )


_FUTURE_FLAGS = _future_flags()


class _Lowering(ast.NodeTransformer):
    """Takes the awaits out of one method; says whether it may be done."""

    def __init__(self, policy: str, call: str) -> None:
        self._policy = policy
        self._call = call
        self._allowed = True

    def apply(self, method: ast.AsyncFunctionDef) -> ast.FunctionDef | None:
        """Return the function that makes the stage, None where it cannot be had."""
        method.body = [self.visit(statement) for statement in method.body]
        if not self._allowed:
            return None
        closed_over, taken = method.args.args[:2], method.args.args[2:]
        stage = ast.FunctionDef(**{**vars(method), "decorator_list": [], "args": _arguments(taken)})
        result = ast.copy_location(ast.Return(ast.Name(method.name, ast.Load())), method)
        outer = _arguments(closed_over, ast.arg(_DRIVE))
        return ast.FunctionDef(**{**vars(method), "args": outer, "body": [stage, result], "returns": None})

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _NOT_LOWERABLE):
            self._allowed = False
        return super().visit(node)

    def visit_Await(self, node: ast.Await) -> ast.expr:
        awaited = node.value
        if isinstance(awaited, ast.Call) and isinstance(awaited.func, ast.Name) and awaited.func.id == self._call:
            awaited.args = [self.visit(argument) for argument in awaited.args]
            awaited.keywords = [self.visit(keyword) for keyword in awaited.keywords]
            return awaited
        drive = ast.copy_location(ast.Name(_DRIVE, ast.Load()), node)
        return ast.copy_location(ast.Call(drive, [self.visit(awaited)], []), node)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        handed_on = node.id == self._call  # then it would have to be a coroutine function
        replaced = node.id == self._policy and not isinstance(node.ctx, ast.Load)
        if handed_on or replaced:
            self._allowed = False
        return node

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        if any(isinstance(inner, ast.Await) for inner in ast.walk(node)):
            self._allowed = False  # an await makes it an asynchronous generator
        return self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        if node.is_async:
            self._allowed = False
        return self.generic_visit(node)

    def _nested(self, node: ast.AST) -> ast.AST:
        if any(isinstance(inner, ast.Name) and inner.id == self._call for inner in ast.walk(node)):
            self._allowed = False
        return node  # its awaits are its own

    visit_AsyncFunctionDef = visit_FunctionDef = visit_Lambda = visit_ClassDef = _nested


def _arguments(positional: list[ast.arg], *keyword_only: ast.arg) -> ast.arguments:
    return ast.arguments(
        posonlyargs=[],
        args=positional,
        kwonlyargs=list(keyword_only),
        kw_defaults=[None for _ in keyword_only],
        defaults=[],
    )
