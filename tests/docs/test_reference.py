"""The reference lists the public surface, each name once."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from tests.test_public_api import home_of, modules, public_names

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_the_reference_lists_each_public_name_once() -> None:
    """A name that two modules export is listed in its own module. The site takes the rest from the docstrings."""
    listed = [
        name
        for page in sorted(REFERENCE.glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    public = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name in public_names(module)
        if not isinstance(getattr(module, name), ModuleType) and not (module.__name__ == "resilience" and home_of(name))
    ]
    assert sorted(listed) == sorted(public)
