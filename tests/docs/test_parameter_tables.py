"""The pages describe every parameter with its default; those of policies have the common sections."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import resilience
from resilience import Pipeline, Policy, RetryBudget, backoff, events
from resilience.integrations.http import Rules, standard
from resilience.integrations.httpx import AsyncResilienceTransport, ResilienceTransport
from tests.test_public_api import home_of, modules, public_names

PAGES = Path(__file__).parents[2] / "docs"
PUBLIC = [getattr(resilience, name) for name in resilience.__all__]
POLICIES: list[type[Policy[Any]]] = [
    it for it in PUBLIC if isinstance(it, type) and issubclass(it, Policy) and it not in (Policy, Pipeline)
]
WITH_PAGES: list[type] = [*POLICIES, RetryBudget]  # which is no policy, but has a page like one
PARTS = ["About", "Usage", "Defaults", "What happens", "What it promises", "Telemetry", "Patterns", "Anti-patterns"]
#: The documented defaults of parameters whose real default only marks that they were not given.
MEANT: dict[tuple[str, str], Any] = {("Fallback", "value"): None, ("RateLimiter", "more"): ()}


def page_of(policy: type) -> str:
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", policy.__name__).lower()
    return (PAGES / "policies" / f"{name}.md").read_text(encoding="utf-8")


def parameters_under(page: str, heading: str) -> dict[str, str]:
    """Return the parameters in the first table of parameters after a heading, with their defaults."""
    section = page.split(f"\n## {heading}\n", 1)[1]
    table = re.search(r"^\| Parameter \|.*\n.*\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table is not None
    rows = [[cell.strip("` ") for cell in row.strip("|").split(" | ")] for row in table[1].splitlines()]
    return {name: default for name, default, *_ in rows}


@pytest.mark.parametrize("policy", WITH_PAGES)
def test_the_page_of_a_policy_lists_each_parameter_with_its_default(policy: type) -> None:
    """In the order of the signature; the default is an expression that the constructor accepts."""
    parameters = inspect.signature(policy).parameters
    described = parameters_under(page_of(policy), "Defaults")
    assert list(described) == list(parameters)
    names = {**vars(backoff), **{name: getattr(resilience, name) for name in resilience.__all__}}
    for name, parameter in parameters.items():
        default = MEANT.get((policy.__name__, name), parameter.default)
        if default is inspect.Parameter.empty:
            assert described[name] == "required"
        else:
            assert repr(eval(described[name], names)) == repr(default)  # the page is trusted


@pytest.mark.parametrize(
    ("page", "heading", "what"),
    [
        ("http.md", "The standard pipeline", standard),
        ("http.md", "What is sent again", Rules),
        ("httpx.md", "Parameters", ResilienceTransport),
        ("httpx.md", "Parameters", AsyncResilienceTransport),
    ],
)
def test_the_page_of_an_integration_lists_its_parameters(page: str, heading: str, what: Callable[..., object]) -> None:
    parameters = inspect.signature(what).parameters
    described = parameters_under((PAGES / "integrations" / page).read_text(encoding="utf-8"), heading)
    assert list(described) == list(parameters)
    for name, parameter in parameters.items():
        written = eval(described[name], {**vars(backoff), "Rules": Rules, "required": parameter.empty})
        assert repr(written) == repr(parameter.default) or written == parameter.default


@pytest.mark.parametrize("policy", WITH_PAGES)
def test_the_page_of_a_policy_has_the_common_sections(policy: type) -> None:
    """In the same order, with a diagram."""
    page = page_of(policy)
    headings = [heading for heading in re.findall(r"^## (.+)$", page, re.MULTILINE) if heading in PARTS]
    assert headings == PARTS
    assert "```mermaid" in page
    assert "**Under cancellation" in page


def test_the_page_on_events_names_each_event_and_its_fields() -> None:
    page = (PAGES / "events.md").read_text(encoding="utf-8")
    section = page.split("\n## The events\n", 1)[1]
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
    common = set(events.Event.__dataclass_fields__)
    for field in common:
        assert f"| `{field}` |" in section
    for kind in kinds:
        if kind is not events.Event:
            row = re.search(rf"^\| `{kind.__name__}` \|.*$", section, re.MULTILINE)
            assert row is not None, kind
            for field in set(kind.__dataclass_fields__) - common:
                assert f"`{field}`" in row[0], (kind, field)


def test_the_page_on_errors_names_each_error() -> None:
    page = (PAGES / "errors.md").read_text(encoding="utf-8")
    tree = page.split("\n## What the library raises\n", 1)[1].split("\n| Error", 1)[0]
    for name in resilience.errors.__all__:
        assert name in tree


REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_the_reference_lists_each_public_name_once() -> None:
    """A name that two modules export is listed in its own module. The site takes the rest from the docstrings."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md"))]
    listed = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    public = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name in public_names(module)
        if not isinstance(getattr(module, name), ModuleType) and not (module.__name__ == "resilience" and home_of(name))
    ]
    assert sorted(listed) == sorted(public)
