"""The rewriting of a method, for which `lowering` has the theory: its syntax tree, before and after."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeGuard

if TYPE_CHECKING:
    from resilience.runtimes.lowering import Form

_OURS: Final = "_resilience_"  # so begins every name that we add to a method
_DRIVE: Final = _OURS + "drive"
#: What goes inwards beside the context: the function to call in the end, its arguments and its keywords.
_MADE: Final = (_OURS + "function", _OURS + "arguments", _OURS + "keywords")
_RUN: Final = _OURS + "run"
_GATE: Final = (_OURS + "ambient", _OURS + "watched", _OURS + "unlimited")
_NOT_LOWERABLE = (ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)


def factory(function: FunctionType, form: Form) -> Callable[..., Any] | None:
    """Return what makes this form of a method; None where it may not be rewritten."""
    code = function.__code__
    if not code.co_flags & inspect.CO_COROUTINE or not _takes_call_and_ctx(code) or code.co_freevars:
        return None
    module = _parsed(inspect.getsourcefile(function))
    owner, method = _find(module, code)
    if owner is None or method is None:
        return None
    if owner in module.body:
        _prune(module, owner, method)
    if not _same_code(_compiled(module, code), code):
        return None
    policy, call, ctx = (it.arg for it in _names(method))
    if (policy, call) != code.co_varnames[:2]:
        return None  # `__call`, which is `_Class__call` to the compiler
    stage = _stage(method, form, policy, call, ctx)
    if stage is None:
        return None
    given = _given(form, function.__qualname__.rpartition(".")[0])
    parameters = [policy, call] if form.gate is None else [policy, call, _MADE[0], _RUN]
    owner.body[owner.body.index(method)] = _made_by_factory(method, stage, parameters, given)
    code = _compiled(ast.fix_missing_locations(module), code)
    made = FunctionType(code, function.__globals__, function.__name__)
    made.__kwdefaults__ = given
    made.__module__ = function.__module__
    return made


def _given(form: Form, owner: str) -> dict[str, object]:
    """Return what the factory gets besides its arguments, by name."""
    given: dict[str, object] = {}
    if form.drive is not None:
        given[_DRIVE] = partial(form.drive, owner=owner)
    if form.gate is not None:
        given.update(zip(_GATE, form.gate, strict=True))
    if form.shortcut is not None:
        given.update({_OURS + name: value for name, value in form.shortcut.given.items()})
    return given


def _stage(
    method: ast.AsyncFunctionDef, form: Form, policy: str, call: str, ctx: str
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the function that the factory makes, as it stands inside of it; None where it cannot be had."""
    closed = _closed(method, policy, call)
    stage = closed if form.drive is None else _Lowering(call).apply(closed)
    if stage is not None and form.shortcut is not None:
        stage = _Shortening(call, form.shortcut.source).visit(stage)
    return stage if stage is None or form.gate is None else _entered(stage, ctx)


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


def _compiled(module: ast.Module, code: CodeType) -> CodeType:
    """Compile the module, and take the code out that begins where `code` begins."""
    flags = code.co_flags & _FUTURE_FLAGS
    found = [compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)]
    for outer in found:
        for inner in (it for it in outer.co_consts if isinstance(it, CodeType)):
            if (inner.co_name, inner.co_firstlineno) == (code.co_name, code.co_firstlineno):
                return inner
            found.append(inner)
    raise LookupError(code.co_name)  # pragma: no cover (it has been found in the tree)


def _same_code(ours: CodeType, theirs: CodeType) -> bool:
    """Whether two code objects do the same in the same lines."""
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


def _closed(method: ast.AsyncFunctionDef, policy: str, call: str) -> ast.AsyncFunctionDef | None:
    """Return the asynchronous stage, None where closing would change it."""
    inside = [node for statement in method.body for node in ast.walk(statement)]
    if any(_binds(node, (policy, call)) for node in inside):
        return None  # it would be a local variable of the stage
    if any(isinstance(node, ast.Name) and node.id == method.name for node in inside):
        return None  # the name of something in the module; inside of the factory it is that of the stage
    calls = [node.value for node in inside if isinstance(node, ast.Await) and _calls(node.value, call)]
    if len(calls) != sum(call in (getattr(node, "id", None), getattr(node, "arg", None)) for node in inside):
        return None  # kept, handed to somebody, or called now and awaited later: then `call` has to be what it was
    for node in calls:
        node.args += [ast.copy_location(ast.Name(name, ast.Load()), node) for name in _MADE]
    made = [ast.copy_location(ast.arg(name), method) for name in _MADE]
    return ast.AsyncFunctionDef(
        **{**vars(method), "args": _parameters(_names(method)[2:] + made), "decorator_list": [], "returns": None}
    )


def _entered(stage: ast.FunctionDef | ast.AsyncFunctionDef, ctx: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return the stage as an entrance: it begins where the method begins, and its first lines are the gate."""
    function, arguments, keywords = _MADE
    ambient, watched, unlimited = _GATE
    waits = "await " if isinstance(stage, ast.AsyncFunctionDef) else ""
    gate = ast.parse(
        f"if {ambient}() is not None or {watched}.executions:\n"
        f"    return {waits}{_RUN}({function}, {arguments}, {keywords}, None)\n"
        f"{ctx} = {unlimited}\n"
    )
    for node in ast.walk(gate):
        ast.copy_location(node, stage)
    parameters = _parameters([])
    parameters.vararg, parameters.kwarg = ast.arg(arguments), ast.arg(keywords)
    return type(stage)(**{**vars(stage), "args": parameters, "body": gate.body + stage.body})


def _calls(node: ast.AST, call: str) -> TypeGuard[ast.Call]:
    """Whether a node calls the rest of the chain, with one argument, as one does."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == call
        and len(node.args) == 1
        and not isinstance(node.args[0], ast.Starred)
        and not node.keywords
    )


def _binds(node: ast.AST, names: tuple[str, str]) -> bool:
    """Whether a node gives one of the names another meaning: assigns, deletes, imports, captures or defines it."""
    if isinstance(node, ast.Name):
        return node.id in names and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Global):
        return not {*names}.isdisjoint(node.names)
    return any(getattr(node, field, None) in names for field in ("name", "asname", "rest"))


def _names(method: ast.AsyncFunctionDef) -> list[ast.arg]:
    """Return the positional parameters without their annotations, which mean nothing outside of the class."""
    return [ast.copy_location(ast.arg(it.arg), it) for it in method.args.posonlyargs + method.args.args]


def _parameters(positional: list[ast.arg], *keyword_only: ast.arg) -> ast.arguments:
    return ast.arguments(
        posonlyargs=[],
        args=positional,
        kwonlyargs=list(keyword_only),
        kw_defaults=[None for _ in keyword_only],
        defaults=[],
    )


def _made_by_factory(
    method: ast.AsyncFunctionDef, stage: ast.stmt, positional: Iterable[str], given: Iterable[str]
) -> ast.FunctionDef:
    """Return the function that makes the stage. It begins where the method begins."""
    result = ast.copy_location(ast.Return(ast.Name(method.name, ast.Load())), method)
    parameters = _parameters([ast.arg(name) for name in positional], *map(ast.arg, given))
    return ast.FunctionDef(**{**vars(method), "args": parameters, "body": [stage, result], "returns": None})


class _Lowering(ast.NodeTransformer):
    """Takes the awaits out of a stage, if it may be done."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._allowed = True

    def apply(self, stage: ast.AsyncFunctionDef | None) -> ast.FunctionDef | None:
        """Return the plain function, None where it cannot be had."""
        if stage is None:
            return None
        body = [self.visit(statement) for statement in stage.body]
        return ast.FunctionDef(**{**vars(stage), "body": body}) if self._allowed else None

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _NOT_LOWERABLE):
            self._allowed = False
        return super().visit(node)

    def visit_Await(self, node: ast.Await) -> ast.expr:
        awaited = node.value
        if isinstance(awaited, ast.Call) and isinstance(awaited.func, ast.Name) and awaited.func.id == self._call:
            awaited.args = [self.visit(argument) for argument in awaited.args]
            return awaited
        drive = ast.copy_location(ast.Name(_DRIVE, ast.Load()), node)
        return ast.copy_location(ast.Call(drive, [self.visit(awaited)], []), node)

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


class _Shortening(ast.NodeTransformer):
    """Puts the shortcut in the place of each call of the innermost stage."""

    def __init__(self, call: str, source: str) -> None:
        self._call = call
        self._source = source

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        node.ifs = [self.visit(condition) for condition in node.ifs]
        return node  # no `:=` may stand in what it goes through

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Name) and node.func.id == self._call):
            return node
        shortcut = ast.parse(self._source, mode="eval").body
        for part in ast.walk(shortcut):
            ast.copy_location(part, node)
            if isinstance(part, ast.Attribute):
                part.end_lineno, part.end_col_offset = part.lineno, part.col_offset  # it is looked up where it ends
            elif isinstance(part, ast.Name):
                part.id = self._call if part.id == "call" else _OURS + part.id
            elif isinstance(part, ast.NamedExpr) and isinstance(part.value, ast.Constant):
                part.value = node.args[0]
        return shortcut
