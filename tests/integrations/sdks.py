"""The SDKs of language models, imported where a test first uses them.

They take a second and a half, and every worker imports every test.
"""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """A module that is imported with the first look at something in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


anthropic: Any = Later("anthropic")
openai: Any = Later("openai")
