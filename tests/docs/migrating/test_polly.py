"""The page on migrating, from Polly, which is for .NET: only our side can be run."""

from __future__ import annotations

import re

import pytest

from tests.docs.migrating.rows import PAGE, written
from tests.docs.side_by_side import rows_of


@pytest.mark.parametrize("right", rows_of(PAGE, "Polly").values())
def test_the_replacements_can_be_built(right: str) -> None:
    for code in re.findall(r"`(?:backoff=)?([A-Z]\w+\([^`]*\))`", right):
        written(code)
