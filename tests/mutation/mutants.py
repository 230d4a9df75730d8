"""Small faults to put into a module, one at a time: each of them should turn some test red.

Two thirds come from Cosmic Ray's operators: a comparison, a sum, a constant, a condition turned round. The rest
is what a hurried edit leaves out: a statement, one side of `and` or `or`, a keyword argument.

What is not code is left alone: annotations, decorators that only speak to type checkers, docstrings, overloads.
"""

from __future__ import annotations

import ast
import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

#: Neighbours only: `<` for `<=` is a fault that somebody makes, `is` for `<` is one that every test sees.
OPERATORS = [
    "core/AddNot",
    "core/ExceptionReplacer",
    "core/NumberReplacer",
    "core/RemoveDecorator",
    "core/ReplaceAndWithOr",
    "core/ReplaceBinaryOperator_Add_Sub",
    "core/ReplaceBinaryOperator_Sub_Add",
    "core/ReplaceBinaryOperator_Mul_Div",
    "core/ReplaceBinaryOperator_Div_Mul",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceComparisonOperator_Eq_NotEq",
    "core/ReplaceComparisonOperator_Gt_GtE",
    "core/ReplaceComparisonOperator_Gt_LtE",
    "core/ReplaceComparisonOperator_GtE_Gt",
    "core/ReplaceComparisonOperator_GtE_Lt",
    "core/ReplaceComparisonOperator_Is_IsNot",
    "core/ReplaceComparisonOperator_IsNot_Is",
    "core/ReplaceComparisonOperator_Lt_GtE",
    "core/ReplaceComparisonOperator_Lt_LtE",
    "core/ReplaceComparisonOperator_LtE_Gt",
    "core/ReplaceComparisonOperator_LtE_Lt",
    "core/ReplaceComparisonOperator_NotEq_Eq",
    "core/ReplaceContinueWithBreak",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceOrWithAnd",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/ReplaceUnaryOperator_Delete_USub",
    "core/ZeroIterationForLoop",
]

_FOR_CHECKERS = {"abstractmethod", "final", "overload", "override"}


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is, and the lines before and after it.

    :param inside: whether it is in a function, and so in nothing that is made as the module is imported.
    """

    line: int
    operator: str
    before: str
    after: str
    source: str
    inside: bool


def mutants(source: str) -> list[Mutant]:
    """Return every mutant of a module that is not the same program, each once, in the order of their lines."""
    seen = {_program(source), ""}
    found = []
    for operator, mutated in [*_from_cosmic_ray(source), *_left_out(source)]:
        program = _program(mutated)
        if program not in seen:
            seen.add(program)
            found.append(_mutant(operator, source, mutated))
    return sorted((it for it in found if it.before != "if TYPE_CHECKING:"), key=lambda mutant: mutant.line)


def _from_cosmic_ray(source: str) -> Iterator[tuple[str, str]]:
    for name in OPERATORS:
        for occurrence in itertools.count():
            try:
                mutated = mutate_code(source, get_operator(name)(), occurrence)
            except AttributeError:  # Cosmic Ray 8.7 knows no dotted name in `except (a.b, c):`
                continue
            if mutated is None:
                break
            yield name.removeprefix("core/"), mutated


# --- left out --------------------------------------------------------------------------------


def _left_out(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _says_nothing(node):
            for statement in _statements(node):
                yield "LeaveOutStatement", _replaced(source, statement, "pass")
        elif isinstance(node, ast.BoolOp):
            for operand in node.values:
                rest = [ast.get_source_segment(source, it) or "" for it in node.values if it is not operand]
                word = " and " if isinstance(node.op, ast.And) else " or "
                yield "LeaveOutOperand", _replaced(source, node, f"({word.join(f'({it})' for it in rest)})")
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                yield "LeaveOutKeyword", _replaced(source, node, _without(node, keyword))


def _statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.stmt]:
    """All statements of a function but those of functions inside it, and what has no effect."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)):
            continue
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            yield node
        todo += ast.iter_child_nodes(node)


def _without(call: ast.Call, keyword: ast.keyword) -> str:
    """The call without one of its keyword arguments."""
    shorter = ast.Call(call.func, call.args, [it for it in call.keywords if it is not keyword])
    return ast.unparse(shorter)


def _replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    """The module with another text where the node was."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)
    head = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    tail = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (head + text.encode() + tail).decode()


# --- what is the same program ----------------------------------------------------------------


def _program(source: str, *, outline: bool = False) -> str:
    """What a module does, as text: without what only type checkers and readers see.

    :param outline: without what functions do when they are called.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""  # no program at all, so it is left out as one that has been seen
    return ast.dump(_CodeAlone(outline).visit(tree))


class _CodeAlone(ast.NodeTransformer):
    def __init__(self, outline: bool) -> None:
        self._outline = outline

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST | None:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST | None:
        if any(isinstance(it, ast.Name) and it.id == "overload" for it in node.decorator_list):
            return None
        node.returns = None
        if self._outline:
            node.body = [ast.Pass()]
        self._undecorate(node)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST | None:
        if any(isinstance(it, ast.Name) and it.id == "Protocol" for it in node.bases):
            return None
        self._undecorate(node)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        node.annotation = ast.Constant(...)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        made = node.value.func if isinstance(node.value, ast.Call) else None
        return None if isinstance(made, ast.Name) and made.id == "TypeVar" else self.generic_visit(node)

    def _undecorate(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        node.decorator_list = [
            it for it in node.decorator_list if not (isinstance(it, ast.Name) and it.id in _FOR_CHECKERS)
        ]


def _says_nothing(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return all(_is_docstring(it) or isinstance(it, ast.Pass) for it in function.body)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _mutant(operator: str, source: str, mutated: str) -> Mutant:
    """A mutant, with the lines that differ, white space apart."""
    old, new = source.splitlines(), mutated.splitlines()
    for tag, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if tag != "equal":
            before, after = (" ".join(" ".join(it).split()) for it in (old[start:end], new[new_start:new_end]))
            inside = _program(source, outline=True) == _program(mutated, outline=True)
            return Mutant(start + 1, operator, before, after, mutated, inside)
    raise AssertionError("nothing differs")
