"""The hook that runs tests: an `async def` test runs in its world, and is refused without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import World, pytest_pyfunc_call


def test_a_failure_of_an_async_test_is_raised(world: World) -> None:
    """Otherwise every such test would pass."""

    async def fails(world: World) -> None:
        raise AssertionError("red")

    with pytest.raises(AssertionError, match="red"):
        pytest_pyfunc_call(item(fails, world=world))


def test_an_async_test_without_a_world_is_refused() -> None:
    """It would pass without having run."""

    async def without_world() -> None: ...

    with pytest.raises(pytest.fail.Exception, match="takes a world to run in"):
        pytest_pyfunc_call(item(without_world))


def test_an_async_test_in_threads_may_not_suspend() -> None:
    """There is no event loop to wait for."""

    class Suspends:
        def __await__(self) -> Any:
            yield

    async def suspends(world: World) -> None:
        await Suspends()

    with pytest.raises(AssertionError, match="may not wait"):
        pytest_pyfunc_call(item(suspends, world=World("threads")))


def item(test: Any, **funcargs: Any) -> Any:
    """Return the attributes of a test that the hook uses."""
    return SimpleNamespace(obj=test, funcargs=funcargs)
