"""An integration whose third party is not installed says which extra brings it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from resilience.integrations.extras import needed_by

#: The extra and module, and what has to be missing.
NEEDS = {
    "aiohttp": ("aiohttp",),
    "anthropic": ("anthropic",),
    "grpc": ("grpc",),
    "httpx": ("httpx", "httpx2"),
    "openai": ("openai",),
    "opentelemetry": ("opentelemetry",),
    "prometheus": ("prometheus_client",),
    "redis": ("redis",),
    "sqlalchemy": ("sqlalchemy",),
    "structlog": ("structlog",),
    "temporal": ("temporalio",),
    "urllib3": ("urllib3",),
}

#: None in `sys.modules` forbids the import. Of an own module that is broken, the error is its own.
PROGRAM = """
import importlib, json, sys
from resilience.integrations.extras import needed_by

sys.modules |= dict.fromkeys({modules!r})
said = {{}}
for extra in {extras!r}:
    try:
        importlib.import_module(f"resilience.integrations.{{extra}}")
    except ModuleNotFoundError as error:
        said[extra] = [error.name, str(error)]
try:
    with needed_by("httpx"):
        import resilience.integrations.nothing
except ModuleNotFoundError as error:
    said["ours"] = [error.name, str(error)]
print(json.dumps(said))
"""


@cache
def said() -> dict[str, list[str]]:
    """Return name and message of the error of each import, in a process that has none of the third parties."""
    modules = [module for each in NEEDS.values() for module in each]
    program = PROGRAM.format(modules=modules, extras=list(NEEDS))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("extra", NEEDS)
def test_a_missing_third_party_says_which_extra_brings_it(extra: str) -> None:
    """The extra is named as the module is, and the error is still a `ModuleNotFoundError` with its name."""
    name, message = said()[extra]
    assert name == " or ".join(NEEDS[extra])
    assert message == f"resilience.integrations.{extra} needs {name}: pip install 'resilience-pipeline[{extra}]'"


def test_a_module_of_ours_that_is_missing_is_no_extra() -> None:
    """Installing something would not bring it."""
    assert said()["ours"] == ["resilience.integrations.nothing", "No module named 'resilience.integrations.nothing'"]


def test_every_extra_of_an_integration_is_in_the_table() -> None:
    """But `httpx2`, which the module of httpx serves, and the dashboard, which any server can serve."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert extras - {"integrations", "examples", "types", "lint", "test", "dev"} == {
        *NEEDS,
        "requests",
        "httpx2",
        "dashboard",
    }


def test_requests_is_missed_by_its_own_extra() -> None:
    """In a process that has urllib3, on which both stand."""
    program = PROGRAM.format(modules=["requests"], extras=["requests"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["requests"][1].endswith(
        "needs requests: pip install 'resilience-pipeline[requests]'"
    )


def test_the_error_in_this_process_names_the_extra_too() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"pip install 'resilience-pipeline\[httpx\]'") as caught,
        needed_by("httpx"),
    ):
        importlib.import_module("no_such_third_party")
    assert caught.value.name == "no_such_third_party"


def test_a_broken_module_of_ours_keeps_its_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'resilience") as caught, needed_by("httpx"):
        importlib.import_module("resilience.nothing")
    assert "pip install" not in str(caught.value)
