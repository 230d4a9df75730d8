"""The project files agree with one another."""

from __future__ import annotations

import re
import tomllib
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def test_the_changelog_has_a_dated_and_linked_entry_for_the_current_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.escape(PROJECT["version"])
    assert re.search(rf"^## \[{version}\] - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE)
    assert re.search(rf"^\[{version}\]: https://", changelog, re.MULTILINE)


def test_the_oldest_versions_that_are_tested_are_those_that_users_may_have():
    """`tests/oldest.txt` has each lower bound: of the package, of trio, and of the extras for users, the first ones."""
    extras = PROJECT["optional-dependencies"]
    allowed = {*PROJECT["dependencies"], *(it for it in extras["examples"] if it.startswith("trio"))}
    allowed.update(*(extras[name] for name in takewhile(lambda name: name != "integrations", extras)))
    lines = (ROOT / "tests" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    assert {line.replace("==", ">=") for line in lines if not line.startswith("#")} == allowed
