"""The project files agree with one another."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def as_included(requirement: str) -> list[str | dict[str, str]]:
    """An extra's line as a dependency group would say it."""
    own = re.fullmatch(re.escape(PROJECT["name"]) + r"\[(.*)\]", requirement)
    return [{"include-group": name} for name in own[1].split(",")] if own else [requirement]


def test_extras_and_dependency_groups_name_the_same_requirements():
    """What pip 23 installs as an extra is what newer installers take from the group of that name."""
    extras = PROJECT["optional-dependencies"]
    assert {
        name: [line for requirement in requirements for line in as_included(requirement)]
        for name, requirements in extras.items()
    } == PYPROJECT["dependency-groups"]


def test_the_changelog_tells_of_the_version_that_is_built():
    """A version that is built has an entry, and the entry a link."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.escape(PROJECT["version"])
    assert re.search(rf"^## \[{version}\] - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE)
    assert re.search(rf"^\[{version}\]: https://", changelog, re.MULTILINE)
