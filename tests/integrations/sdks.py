"""The SDKs of language models, imported on first use.

Their imports take a second and a half, and every worker imports every test.
"""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


anthropic: Any = Later("anthropic")
openai: Any = Later("openai")
