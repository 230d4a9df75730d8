r"""For the site: on GitHub, a pipe in the code of a table is written as `\|`; Python-Markdown shows that backslash."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Leave the backslash out: Python-Markdown does not split a row within code."""
    return markdown.replace(r"\|", "|")
