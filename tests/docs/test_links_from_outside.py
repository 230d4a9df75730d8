"""Pages that are read outside of the repository, on PyPI and in `.github`, link to files that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.run_page import blocks
from tests.docs.test_snippets import anchors

ROOT = Path(__file__).parents[2]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOR_CONTRIBUTORS = [page.relative_to(ROOT).as_posix() for page in sorted((ROOT / ".github").rglob("*.md"))]

#: `https://github.com/owner/name/blob/main/path#anchor`, and the same for raw files.
OURS = re.compile(
    rf"(?:{re.escape(SOURCE)}/(?:blob|tree)|{re.escape(SOURCE.replace('//github', '//raw.githubusercontent'))})"
    r"/main/([^)\s#]+)#?([^)\s]*)"
)


def is_dead(path: str, anchor: str) -> bool:
    """Return whether a link to this file of the project, or to this heading in it, is dead."""
    target = ROOT / path
    return not target.exists() or bool(anchor and anchor not in anchors(target.read_text(encoding="utf-8")))


def test_the_readme_has_no_relative_links() -> None:
    """PyPI shows the README without other files."""
    inline = re.findall(r"\]\(([^)\s]+)\)", README)
    defined = re.findall(r"^\[[^\]]+\]: (\S+)$", README, re.MULTILINE)
    assert [link for link in inline + defined if not link.startswith(("https://", "#"))] == []
    assert len(defined) >= 30


def test_the_readme_has_no_mermaid_diagram() -> None:
    """PyPI shows its source text."""
    assert "mermaid" not in {block.language for block in blocks(README)}


def test_absolute_links_of_the_readme_name_existing_files_and_headings() -> None:
    """Links into the repository are checked locally."""
    found = OURS.findall(README)
    assert len(found) >= 30
    assert [path for path, anchor in found if is_dead(path, anchor)] == []


def test_every_reference_of_the_readme_is_defined_and_used() -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    used = set(re.findall(r"\]\[([^\]]+)\]", prose))
    assert used == set(re.findall(r"^\[([^\]]+)\]: ", prose, re.MULTILINE))


def test_absolute_links_of_the_pages_lead_to_files_and_headings() -> None:
    """What is outside `docs/` is not on the site, so pages link to it in the repository."""
    pages = {it: it.read_text(encoding="utf-8") for it in sorted((ROOT / "docs").rglob("*.md"))}
    found = [(page.name, *link) for page, text in pages.items() for link in OURS.findall(text)]
    assert len(found) >= 20
    assert [(page, path) for page, path, anchor in found if is_dead(path, anchor)] == []


@pytest.mark.parametrize("name", FOR_CONTRIBUTORS)
def test_links_of_the_contributors_pages_are_valid(name: str) -> None:
    """Relative ones, and absolute ones into the repository."""
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    relative = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    dead = [path for path, _, anchor in relative if is_dead(str((page.parent / path).resolve()), anchor)]
    assert dead + [path for path, anchor in OURS.findall(text) if is_dead(path, anchor)] == []
