"""The items that a consumer gets from a source that loses its connection twice: the numbers of the page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.streams.broken import handed_out


@pytest.mark.parametrize(
    ("settings", "number", "last", "ended"),
    [
        ({}, 30, 3.0, "waits"),
        ({"idle": 2.0}, 30, 3.0, "TimeoutExceeded"),
        ({"idle": 2.0, "resume": {"after": lambda number: number}}, 100, 13.0, "all"),
    ],
    ids=["plain", "idle", "resume"],
)
def test_a_resumed_stream_outlasts_two_losses(settings: dict[str, Any], number: int, last: float, ended: str) -> None:
    """The items take 10 s, the silence 2 s, and the two pauses between attempts at most 0.5 s each."""
    instants, how = handed_out(16.0, **settings)
    assert (len(instants), how) == (number, ended)
    assert instants[-1] == pytest.approx(last)
