"""The page of each policy describes every parameter with its default, and has the common sections."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import resilience
from resilience import Pipeline, Policy, backoff, events

PAGES = Path(__file__).parents[2] / "docs" / "policies"
PUBLIC = [getattr(resilience, name) for name in resilience.__all__]
POLICIES: list[type[Policy[Any]]] = [
    it for it in PUBLIC if isinstance(it, type) and issubclass(it, Policy) and it not in (Policy, Pipeline)
]
PARTS = ["About", "Usage", "Defaults", "What happens", "What it promises", "Telemetry", "Patterns", "Anti-patterns"]
#: The documented defaults of parameters whose real default only marks that they were not given.
MEANT: dict[tuple[str, str], Any] = {("Fallback", "value"): None, ("RateLimiter", "more"): ()}


def page_of(policy: type[Policy[Any]]) -> str:
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", policy.__name__).lower()
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def table_under(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading, without its head."""
    section = page.split(f"\n## {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table[0].splitlines()[2:]]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_page_of_a_policy_lists_each_parameter_with_its_default(policy: type[Policy[Any]]) -> None:
    """In the order of the signature; the default is an expression that the constructor accepts."""
    parameters = inspect.signature(policy).parameters
    rows = table_under(page_of(policy), "Defaults")
    assert [row[0] for row in rows] == [f"`{name}`" for name in parameters]
    names = {**vars(backoff), **{name: getattr(resilience, name) for name in resilience.__all__}}
    for (name, parameter), (_, described, *_rest) in zip(parameters.items(), rows, strict=True):
        default = MEANT.get((policy.__name__, name), parameter.default)
        if default is inspect.Parameter.empty:
            assert described == "required"
        else:
            assert repr(eval(described.strip("`"), names)) == repr(default)  # the page is trusted


@pytest.mark.parametrize("policy", POLICIES)
def test_the_page_of_a_policy_has_the_common_sections(policy: type[Policy[Any]]) -> None:
    """In the same order, with a diagram."""
    page = page_of(policy)
    headings = [heading for heading in re.findall(r"^## (.+)$", page, re.MULTILINE) if heading in PARTS]
    assert headings == PARTS
    assert "```mermaid" in page
    assert "**Under cancellation" in page


def test_the_page_on_events_names_each_event_and_its_fields() -> None:
    page = (PAGES.parent / "events.md").read_text(encoding="utf-8")
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
    page = (PAGES.parent / "errors.md").read_text(encoding="utf-8")
    tree = page.split("\n## What the library raises\n", 1)[1].split("\n| Error", 1)[0]
    for name in resilience.errors.__all__:
        assert name in tree
