"""Windows, against a simple model that keeps every result and counts again."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from resilience.state.windows import TimeWindow

#: Results as (seconds since the previous one, whether it was bad).
streams = st.lists(st.tuples(st.floats(0, 40, allow_nan=False) | st.sampled_from([0.0, 0.001, 30.0]), st.booleans()))


@given(seconds=st.floats(0.5, 60), stream=streams)
def test_a_time_window_forgets_at_nine_tenths_or_later(seconds: float, stream: list[tuple[float, bool]]) -> None:
    """A result counts at least up to nine tenths of the window, and never longer than the window."""
    window = TimeWindow(seconds)
    now = 5000.0
    kept: list[tuple[float, bool]] = []
    for pause, bad in stream:
        now += pause
        kept.append((now, bad))
        window.add(bad, now)
        at_least = [was_bad for at, was_bad in kept if now - at < 0.9 * seconds]
        at_most = [was_bad for at, was_bad in kept if now < at + seconds]
        assert len(at_least) <= window.total <= len(at_most)
        assert sum(at_least) <= window.bad <= sum(at_most)


@given(seconds=st.floats(0.5, 60), stream=streams, later=st.floats(0, 100))
def test_a_time_window_is_read_without_a_change(seconds: float, stream: list[tuple[float, bool]], later: float) -> None:
    """It is what would be left if another result came at that instant."""
    window, read = TimeWindow(seconds), TimeWindow(seconds)
    now = 5000.0
    for pause, bad in stream:
        now += pause
        for it in (window, read):
            it.add(bad, now)
        assert read.at(now) == (read.bad, read.total) == (window.bad, window.total)
        read.at(now + later)
    held = read.at(now + later)
    window.add(False, now + later)
    assert held == (window.bad, window.total - 1)


def test_a_result_expires_at_the_end_of_the_window_despite_rounding() -> None:
    """In floats, (now + 0.3) - now is less than 0.3 at many instants."""
    for number in range(50):
        window, now = TimeWindow(0.3), number * 0.1
        window.add(True, now)
        window.add(False, now + 0.3)
        assert (window.total, window.bad) == (1, 0)


def test_a_time_window_counts_results_that_arrive_out_of_order() -> None:
    """Threads read the clock before they take the lock; a slightly older result is counted."""
    window = TimeWindow(10.0)
    window.add(True, 100.5)
    window.add(True, 100.2)
    window.add(False, 100.4)
    assert (window.total, window.bad) == (3, 2)
    window.add(False, 111.0)
    assert (window.total, window.bad) == (1, 0)


def test_a_step_is_a_32nd_of_the_window_and_begins_with_the_first_result_in_it() -> None:
    """In a window of 32 s, results within one second expire together, with the first of them."""
    window = TimeWindow(32.0)
    for at in (100.0, 100.98, 101.0):
        window.add(True, at)
    window.add(False, 131.9)
    assert (window.total, window.bad) == (4, 3)
    window.add(False, 132.0)
    assert (window.total, window.bad) == (3, 1)  # the first two expired together
    window.add(False, 133.0)
    assert (window.total, window.bad) == (3, 0)


def test_the_memory_of_a_time_window_is_independent_of_the_number_of_results() -> None:
    """It keeps counts for each step: 3,000 results need no more memory than 32."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        window = TimeWindow(30.0)
        for number in range(4000):
            window.add(number % 2 == 0, number * 0.01)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2900 <= window.total <= 3000
    assert after - before < 20_000  # one result as a float and a flag would take 24 bytes: more than 70,000
