"""For the site: put the examples of docstrings into code blocks. In Markdown, `>>>` would be a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)


class FenceExamples(griffe.Extension):
    """Fences each example, which ends at a blank line."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
