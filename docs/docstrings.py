"""For the site: prepare docstrings for its parser of the Sphinx style.

The parser would add what follows the fields (`:param:` and so on) to the last of them, so the fields are moved to the
end. Examples are put into code blocks, because in Markdown `>>>` would be a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)


class PrepareDocstrings(griffe.Extension):
    """Moves the fields to the end, and fences each example, which ends at a blank line."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            paragraphs = sorted(obj.docstring.value.split("\n\n"), key=lambda it: it.startswith(":"))
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", "\n\n".join(paragraphs))
