"""The front door: what a program imports of the package is what it has asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import resilience


def imported_for_checkers() -> dict[str, str]:
    """Return which name a checker finds in which module."""
    tree = ast.parse(Path(resilience.__file__).read_text(encoding="utf-8"))
    block = next(it for it in tree.body if isinstance(it, ast.If))
    found = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        module = (statement.module or "").removeprefix("resilience").removeprefix(".")
        assert all(it.asname == it.name for it in statement.names), "to a checker, what is not `as` itself is private"
        found.update({it.name: module or it.name for it in statement.names})
    return found


def test_a_name_is_found_where_checkers_find_it() -> None:
    """The table and the imports say the same, and it is what the front door exports."""
    assert imported_for_checkers() == resilience._HOME_OF
    assert sorted(resilience._HOME_OF) == resilience.__all__


def test_every_name_is_there() -> None:
    assert set(resilience.__all__) <= set(dir(resilience))
    for name in resilience.__all__:
        assert resilience.__getattr__(name) is getattr(resilience, name)
    with pytest.raises(AttributeError, match="module 'resilience' has no attribute 'Retyr'"):
        _ = resilience.Retyr  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Retyr'"):
        from resilience import Retyr  # type: ignore[attr-defined]  # noqa: F401


def test_a_program_imports_the_policies_that_it_uses() -> None:
    """And no event loop, no client and no integration."""
    program = "import sys; from resilience import Pipeline, Retry, errors; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    modules = set(run.stdout.split())
    assert "resilience.policies.retry" in modules
    others = {f"resilience.{it}" for it in ("policies.cache", "policies.bulkhead", "testing", "integrations")}
    assert not modules & (others | {"anyio", "asyncio", "trio", "socket", "httpx"})
