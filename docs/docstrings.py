"""For the site: prepare docstrings for its parser of the Sphinx style, and show what it would not see.

The parser would add what follows the fields (`:param:` and so on) to the last of them, so the fields are moved to the
end. Examples are put into code blocks, because in Markdown `>>>` would be a quotation. The `#:` comments above an
attribute become its docstring. Private names are not shown: a default is shown as its value, a value that is made of
private constants and a private base class not at all.
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)
PRIVATE = re.compile(r"(?<!\w)_[A-Z]\w*")


class PrepareDocstrings(griffe.Extension):
    """Changes each object after its source was read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Move the fields to the end, and fence each example, which ends at a blank line."""
        if obj.docstring is not None:
            paragraphs = sorted(obj.docstring.value.split("\n\n"), key=lambda it: it.startswith(":"))
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", "\n\n".join(paragraphs))

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Read the comments above."""
        if attr.docstring is None and attr.lineno is not None and isinstance(attr.filepath, Path):
            above = (it.strip() for it in reversed(attr.lines_collection[attr.filepath][: attr.lineno - 1]))
            comments = [it[2:].strip() for it in takewhile(lambda it: it.startswith("#:"), above)]
            if comments:
                attr.docstring = griffe.Docstring(" ".join(reversed(comments)), parent=attr)
        if not attr.is_private and PRIVATE.search(str(attr.value)):
            attr.value = None

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Replace the private constants that are defaults by their values."""
        for parameter in func.parameters:
            if PRIVATE.fullmatch(str(parameter.default)):
                parameter.default = func.module[str(parameter.default)].value

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Drop the private base classes."""
        cls.bases = [it for it in cls.bases if not str(it).startswith("_")]
