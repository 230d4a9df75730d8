"""Shared by the tests of virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=it, daemon=True) for it in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
