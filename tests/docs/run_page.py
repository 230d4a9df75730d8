"""Execute a Markdown page as a reader would: its Python blocks, from top to bottom, in one namespace.

    python tests/docs/run_page.py docs/order.md

The expected results of a block are in its comments, and in the block after it:

    expression           # -> repr of its value
    statement            # raises TypeError, or # raises TypeError: the message

    ```text
    its complete output
    ```

A function `test_...` without parameters is a test, as for pytest: it is called after its block.

All output must be shown on the page, and each line with an expected result must be reached: a function that is never
called proves nothing. In an expected result, `...` stands for any text. A warning is an error, a page that takes longer
than `LIMIT` seconds is stopped, and an error is reported with the page and the line. It runs in an empty folder, which
is removed at its end. Nothing is patched, so pages use short delays.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import faulthandler
import io
import linecache
import re
import sys
import tempfile
import threading
import tokenize
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LIMIT: Final = 100.0  # seconds, for a whole page

#: The languages of fenced blocks: `python` is executed, `text` is compared, the others are only shown.
LANGUAGES: Final = frozenset({"python", "text", "mermaid", "shell", "yaml"})

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_EXPECTED = re.compile(r"#\s*(->|raises)\s+(.+)")


class Broken(Exception):
    """A page shows a wrong result."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    :param line: the number of its first line in the page, from 1.
    :param attached: whether it follows the previous block directly.
    """

    language: str
    text: str
    line: int
    attached: bool


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found, end = [], 0
    for match in _FENCE.finditer(page):
        line = page.count("\n", 0, match.start(2)) + 1
        found.append(Block(match[1], match[2], line, attached=not page[end : match.start()].strip()))
        end = match.end()
    return found


def run(path: Path, name: str) -> None:
    """Execute the page; raise `Broken` if it shows a wrong result.

    :param name: the name of the page in messages and tracebacks.
    """
    page = path.read_text(encoding="utf-8")
    linecache.cache[name] = (len(page), None, page.splitlines(keepends=True), name)
    module = sys.modules["__page__"] = types.ModuleType("__page__")  # so that frameworks can import it
    namespace: dict[str, Any] = vars(module)
    unreached: dict[int, str] = {}  # line -> the expected result, until it is reached
    through(page, name, lambda block: _execute(block, name, namespace, unreached))
    for line, text in unreached.items():
        raise Broken(f"{name}:{line}: this line was never reached, so {text!r} was not checked")


def through(page: str, name: str, execute: Callable[[Block], str]) -> None:
    """Execute the Python blocks of a page, and compare the output of each with the block after it."""
    waiting: tuple[int, str] | None = None  # line of the last Python block, and its output
    for block in blocks(page):
        where = f"{name}:{block.line}"
        if block.language not in LANGUAGES:
            raise Broken(f"{where}: a block in {block.language or 'no language'!r} is never run")
        if block.language == "text" and block.attached and waiting is not None:
            compare(where, block.text, waiting[1])
            waiting = None
        _all_shown(name, waiting)
        waiting = (block.line, execute(block)) if block.language == "python" else None
    _all_shown(name, waiting)


def _all_shown(name: str, waiting: tuple[int, str] | None) -> None:
    if waiting is not None and waiting[1]:
        raise Broken(f"{name}:{waiting[0]}: printed, but shown nowhere:\n{waiting[1]}")


def _execute(block: Block, name: str, namespace: dict[str, Any], unreached: dict[int, str]) -> str:
    source = "\n" * (block.line - 1) + block.text  # so that line numbers are those of the page
    try:
        tree = ast.parse(source, name)
    except SyntaxError as error:
        raise Broken(f"{name}:{error.lineno}: {error.msg}") from None
    checker = _Checker(name, dict(_expectations(source)), unreached)
    tree = ast.fix_missing_locations(checker.visit(tree))
    for line, expected in checker.expectations.items():
        raise Broken(f"{name}:{line}: no expression ends here that could be {expected.text!r}")
    namespace["_value_is"], namespace["_raised"] = checker.value_is, checker.raised
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, name, "exec", dont_inherit=True), namespace)  # pages are trusted
            for test in _tests(tree):
                namespace[test]()
    except Broken:
        raise
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
        raise Broken(f"{name}:{lines[-1] if lines else block.line}: {_name_and_message(error)}") from error
    return printed.getvalue()


def _tests(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not node.args.args:
            yield node.name


@dataclass(frozen=True)
class _Expected:
    kind: str
    text: str


def _expectations(source: str) -> Iterator[tuple[int, _Expected]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = _EXPECTED.fullmatch(token.string) if token.type == tokenize.COMMENT else None
        if match:
            yield token.start[0], _Expected(match[1], match[2].strip())


class _Checker(ast.NodeTransformer):
    """Replaces each statement that ends on a line with an expected result by a check."""

    def __init__(self, name: str, expectations: dict[int, _Expected], unreached: dict[int, str]) -> None:
        self._name = name
        self.expectations = expectations
        self._unreached = unreached

    def visit(self, node: ast.AST) -> Any:
        node = self.generic_visit(node)
        if not isinstance(node, (ast.Expr, ast.Assign, ast.Raise)):
            return node
        expected = self.expectations.get(node.end_lineno or 0)
        if expected is None or (expected.kind == "->" and not isinstance(node, ast.Expr)):
            return node
        del self.expectations[node.end_lineno or 0]
        self._unreached[node.end_lineno or 0] = expected.text
        line = ast.Constant(node.end_lineno)
        text = ast.Constant(expected.text)
        if isinstance(node, ast.Expr) and expected.kind == "->":
            check = ast.Call(ast.Name("_value_is", ast.Load()), [node.value, text, line], [])
            return ast.copy_location(ast.Expr(check), node)
        return ast.copy_location(self._try(node, text, line), node)

    def _try(self, node: ast.stmt, text: ast.expr, line: ast.expr) -> ast.Try:
        def tell(error: ast.expr) -> ast.stmt:
            return ast.Expr(ast.Call(ast.Name("_raised", ast.Load()), [error, text, line], []))

        caught = ast.ExceptHandler(
            ast.Name("BaseException", ast.Load()), "_error", [tell(ast.Name("_error", ast.Load()))]
        )
        return ast.Try(body=[node], handlers=[caught], orelse=[tell(ast.Constant(None))], finalbody=[])

    def value_is(self, value: object, expected: str, line: int) -> None:
        self._unreached.pop(line, None)
        compare(f"{self._name}:{line}", expected, repr(value))

    def raised(self, error: BaseException | None, expected: str, line: int) -> None:
        self._unreached.pop(line, None)
        if error is None:
            raise Broken(f"{self._name}:{line}: nothing was raised, {expected} was expected")
        name, colon, _ = expected.partition(":")
        if name not in [kind.__name__ for kind in type(error).__mro__]:  # its own name, or that of a base
            name = type(error).__name__
        compare(f"{self._name}:{line}", expected, f"{name}: {error}" if colon else name)


def _name_and_message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def compare(where: str, expected: str, got: str) -> None:
    if not doctest.OutputChecker().check_output(expected.rstrip() + "\n", got.rstrip() + "\n", doctest.ELLIPSIS):
        raise Broken(f"{where}: expected\n{expected.rstrip()}\ngot\n{got.rstrip()}")


def main(path: Path, name: str) -> int:
    """Run one page in this process, and return the exit status."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    warnings.simplefilter("error")
    unseen: list[str] = []
    sys.unraisablehook = lambda args: unseen.append(f"{args.err_msg}: {args.exc_value!r} in {args.object!r}")
    threading.excepthook = lambda args: unseen.append(f"{args.exc_value!r} in {args.thread!r}")
    path = path.resolve()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.chdir(folder):
            run(path, name)
    except Broken as error:
        print(error, file=sys.stderr)
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    for message in unseen:
        print(f"{name}: {message}", file=sys.stderr)
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[-1]))
