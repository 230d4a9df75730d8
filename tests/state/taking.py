"""Permits are taken and released by the policies, inline; the same steps as functions, for tests of the machine."""

from __future__ import annotations

from typing import Any

from resilience.state.permits import ONE_PERMIT, Permits


def take(permits: Permits[Any]) -> bool:
    """Take a permit if one is free and no caller waits."""
    try:
        if permits.free and not permits.busy:
            del permits.free[-1]
            return True
    except IndexError:  # another thread was faster
        pass
    return False


def give_back(permits: Permits[Any]) -> None:
    """Release a permit."""
    permits.free += ONE_PERMIT
    if permits.busy:
        permits.settle()
