"""Small faults to put into a module, one at a time. Each of them should make a test fail.

Two thirds come from Cosmic Ray's operators: another comparison, operator, constant, or an inverted condition. The
others leave something out: a statement, one operand of `and` or `or`, a keyword argument.

Code without effect at run time stays unchanged: annotations, decorators for type checkers, docstrings, overloads.
"""

from __future__ import annotations

import ast
import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

#: Only similar operators: `<` for `<=` is a realistic fault, `is` for `<` is one that every test notices.
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
    """One fault: its line, and the text before and after it.

    :param inside: whether it is in the body of a function, which does not run during the import of the module.
    """

    line: int
    operator: str
    before: str
    after: str
    source: str
    inside: bool


def mutants(source: str) -> list[Mutant]:
    """Return all mutants of a module that are different programs, in the order of their lines."""
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
            except AttributeError:  # Cosmic Ray 8.7 does not support a dotted name in `except (a.b, c):`
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
    """Yield all statements of a function, except those without effect and those of nested functions."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)):
            continue
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            yield node
        todo += ast.iter_child_nodes(node)


def _without(call: ast.Call, keyword: ast.keyword) -> str:
    """Return the source of a call without one of its keyword arguments."""
    shorter = ast.Call(call.func, call.args, [it for it in call.keywords if it is not keyword])
    return ast.unparse(shorter)


def _replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    """Return the source of the module with another text in place of a node."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)
    head = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    tail = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (head + text.encode() + tail).decode()


# --- equal programs --------------------------------------------------------------------------


def _program(source: str, *, outline: bool = False) -> str:
    """Return the program of a module as text, without the parts for type checkers and readers.

    :param outline: whether to leave out the bodies of functions.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""  # not a program: it is left out like a program that was seen before
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
    """Return a mutant, with the lines that differ, without their white space."""
    old, new = source.splitlines(), mutated.splitlines()
    for tag, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if tag != "equal":
            before, after = (" ".join(" ".join(it).split()) for it in (old[start:end], new[new_start:new_end]))
            inside = _program(source, outline=True) == _program(mutated, outline=True)
            return Mutant(start + 1, operator, before, after, mutated, inside)
    raise AssertionError("nothing differs")
