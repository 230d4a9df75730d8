"""A dashboard that is closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resilience import events
from resilience.integrations.dashboard import Dashboard
from tests.integrations.dashboard.requests import SUBSCRIBED, Make


@pytest.fixture(autouse=True)
def subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the active subscriptions, for `is_subscribed(kind)`."""
    really_subscribe = events.subscribe

    def subscribe(listener: events.Listener, *kinds: type[events.Event]) -> Callable[[], None]:
        unsubscribe = really_subscribe(listener, *kinds)
        SUBSCRIBED.append(kinds)

        def end() -> None:
            if kinds in SUBSCRIBED:
                SUBSCRIBED.remove(kinds)
            unsubscribe()

        return end

    monkeypatch.setattr(events, "subscribe", subscribe)
    SUBSCRIBED.clear()


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
