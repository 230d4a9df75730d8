"""How a thread waits in real time."""

from __future__ import annotations

import threading
import time

import pytest

from resilience import Timeout, TimeoutExceeded
from resilience.clock import sleep_for_real, wait_for_real


class Slices:
    """A lock that records the timeouts of its waits."""

    def __init__(self, released_after: int) -> None:
        self.waits: list[float] = []
        self._released_after = released_after

    def acquire(self, blocking: bool = True, timeout: float = -1, /) -> bool:
        self.waits.append(timeout)
        if len(self.waits) == self._released_after:
            return True
        time.sleep(max(0.0, timeout))
        return False


@pytest.fixture
def _windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")


@pytest.mark.usefixtures("_windows")
@pytest.mark.parametrize("seconds", [None, 60.0, 1e300])
def test_under_windows_a_wait_is_cut_into_slices(seconds: float | None) -> None:
    """`KeyboardInterrupt` is raised between two calls of `acquire`, which it does not interrupt there."""
    lock = Slices(released_after=3)
    assert wait_for_real(lock, seconds)
    assert lock.waits == [0.1, 0.1, 0.1]


@pytest.mark.usefixtures("_windows")
@pytest.mark.parametrize("seconds", [0.0, 0.15])
def test_the_last_slice_ends_with_the_wait(seconds: float) -> None:
    """A wait of zero seconds tries once."""
    lock = Slices(released_after=0)
    began = time.monotonic()
    assert not wait_for_real(lock, seconds)
    assert time.monotonic() - began >= seconds
    assert all(0 <= wait <= 0.1 for wait in lock.waits)
    assert sum(lock.waits) <= seconds + 1e-6
    assert seconds or len(lock.waits) == 1


@pytest.mark.usefixtures("_windows")
def test_a_timeout_works_with_slices() -> None:
    """Its caller waits for the worker in slices."""
    release = threading.Event()
    assert Timeout(5).call(lambda: release.wait(0.15)) is False
    with pytest.raises(TimeoutExceeded):
        Timeout(0.15).call(release.wait, 5)
    release.set()


@pytest.mark.parametrize(("seconds", "waits"), [(None, []), (60.0, [60.0]), (1e300, [threading.TIMEOUT_MAX])])
def test_elsewhere_no_wait_is_cut(seconds: float | None, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    lock = Slices(released_after=1)
    assert wait_for_real(lock, seconds)
    assert lock.waits == (waits or [-1])


def test_a_thread_really_sleeps() -> None:
    began = time.monotonic()
    sleep_for_real(0.02)
    assert time.monotonic() - began >= 0.019
