"""The page on migrating, from libraries of other languages: only our side can be run."""

from __future__ import annotations

import re

import pytest

from resilience import RetryBudget
from tests.docs.migrating.rows import NAMES, PAGE, written
from tests.docs.side_by_side import rows_of

NAMED_BY_THE_READER = {"budget": RetryBudget(0.2), "cache": {}, "fn": str, "key": str}


@pytest.mark.parametrize("library", ["Polly", "resilience4j", "failsafe-go"])
def test_the_replacements_can_be_built(library: str) -> None:
    pieces = [re.findall(r"`(?:backoff=)?([A-Z]\w+\([^`]*\))`", right) for right in rows_of(PAGE, library).values()]
    assert len([written(code, NAMES | NAMED_BY_THE_READER) for found in pieces for code in found]) > 10
