"""The front door: a program imports only the parts of the package that it uses."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import resilience


def imported_for_checkers() -> dict[str, str]:
    """Return the module in which a type checker finds each name."""
    tree = ast.parse(Path(resilience.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    found = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        module = (statement.module or "").removeprefix("resilience").removeprefix(".")
        assert all(alias.asname == alias.name for alias in statement.names), "checkers take other names for private"
        found.update({alias.name: module or alias.name for alias in statement.names})
    return found


def test_type_checkers_find_the_names_that_can_be_imported() -> None:
    found = imported_for_checkers()
    assert sorted(found) == resilience.__all__
    for name, module in found.items():
        home = importlib.import_module(f"resilience.{module}")
        assert getattr(resilience, name) is (home if module == name else getattr(home, name))


def test_a_name_that_does_not_exist_cannot_be_imported() -> None:
    assert set(resilience.__all__) <= set(dir(resilience))
    with pytest.raises(AttributeError, match="module 'resilience' has no attribute 'Retyr'"):
        _ = resilience.Retyr  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Retyr'"):
        from resilience import Retyr  # type: ignore[attr-defined]  # noqa: F401


def test_a_program_imports_only_the_policies_it_uses() -> None:
    """And no event loop, client or integration, not even for a call under a timeout."""
    program = "import sys; from resilience import Timeout, errors; Timeout(5).call(len, 'four'); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    modules = set(run.stdout.split())
    assert "resilience.policies.timeout" in modules
    others = {f"resilience.{name}" for name in ("policies.cache", "policies.retry", "testing", "integrations")}
    assert not modules & (others | {"anyio", "asyncio", "trio", "socket", "httpx"})
