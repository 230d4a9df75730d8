"""An integration whose third party is not installed names its extra in the error."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from resilience.integrations._extras import needed_by

#: The extra and module, and the third parties that have to be missing.
SAME_NAME = ["aiohttp", "anthropic", "grpc", "openai", "opentelemetry", "redis", "sqlalchemy", "structlog", "urllib3"]
NEEDS = {name: (name,) for name in SAME_NAME} | {
    "httpx": ("httpx", "httpx2"),
    "prometheus": ("prometheus_client",),
    "temporal": ("temporalio",),
}

#: None in `sys.modules` forbids the import.
PROGRAM = """
import importlib, json, sys

sys.modules |= dict.fromkeys({modules!r})
errors = {{}}
for extra in {extras!r}:
    try:
        importlib.import_module(f"resilience.integrations.{{extra}}")
    except ModuleNotFoundError as error:
        errors[extra] = [error.name, str(error)]
print(json.dumps(errors))
"""


def errors(modules: list[str], *extras: str) -> dict[str, list[str]]:
    """Return name and message of the error of each import, in a process without these third parties."""
    program = PROGRAM.format(modules=modules, extras=extras)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_error_of_a_missing_third_party_names_the_extra() -> None:
    """The extra is named as the module is; the error is a `ModuleNotFoundError` with the missing name."""
    expected: dict[str, list[str]] = {}
    for extra, packages in NEEDS.items():
        name = " or ".join(packages)
        text = f"resilience.integrations.{extra} needs {name}: pip install 'resilience-pipeline[{extra}]'"
        expected[extra] = [name, text]
    assert errors([it for packages in NEEDS.values() for it in packages], *NEEDS) == expected
    _, message = errors(["requests"], "requests")["requests"]  # in a process with urllib3, which it needs
    assert message.endswith("needs requests: pip install 'resilience-pipeline[requests]'")


def test_every_extra_of_an_integration_is_in_the_table() -> None:
    """Except `httpx2`, for which the module of httpx is, and the dashboard, which any server can serve."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    others = {"integrations", "examples", "types", "lint", "site", "test", "slow", "dev"}
    assert extras - others == {*NEEDS, "requests", "httpx2", "dashboard"}


def test_needed_by_keeps_the_error_of_a_missing_module_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'resilience") as caught, needed_by("httpx"):
        importlib.import_module("resilience.nothing")
    assert "pip install" not in str(caught.value)
