"""A dashboard that is closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resilience.integrations.dashboard import Dashboard


@pytest.fixture
def make() -> Iterator[Callable[..., Dashboard]]:
    """`make(*policies)` is a dashboard with quick updates that is closed after the test."""
    made: list[Dashboard] = []

    def dashboard(*policies: Any, **options: Any) -> Dashboard:
        made.append(Dashboard(*policies, **{"interval": 0.1, **options}))
        return made[-1]

    yield dashboard
    for it in made:
        it.close()
