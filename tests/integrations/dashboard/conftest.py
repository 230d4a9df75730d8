"""A dashboard that is closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from resilience.integrations.dashboard import Dashboard
from tests.integrations.dashboard.requests import Make


@pytest.fixture
def make() -> Iterator[Make]:
    """See `Make`."""
    made: list[Dashboard] = []

    def dashboard(*policies: Any, **options: Any) -> Dashboard:
        made.append(Dashboard(*policies, **{"interval": 0.1, **options}))
        return made[-1]

    yield dashboard
    for app in made:
        app.close()
