"""The ways of the tests themselves: an `async def` test runs in its world, and is refused without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import sniffio

from tests.conftest import World, pytest_pyfunc_call


async def test_a_coroutine_function_runs_in_its_world(world: World) -> None:
    """In threads there is no loop around it."""
    if world.blocking:
        with pytest.raises(sniffio.AsyncLibraryNotFoundError):
            sniffio.current_async_library()
    else:
        await anyio.sleep(0)
        assert sniffio.current_async_library() == world.name


def test_what_it_raises_comes_out(world: World) -> None:
    """A hook that did not await the test would call every test green."""

    async def fails(world: World) -> None:
        raise AssertionError("red")

    with pytest.raises(AssertionError, match="red"):
        pytest_pyfunc_call(item(fails, world=world))


def test_it_has_to_ask_for_a_world() -> None:
    """A coroutine that nothing runs would pass."""

    async def homeless() -> None: ...

    with pytest.raises(pytest.fail.Exception, match="takes a world to run in"):
        pytest_pyfunc_call(item(homeless))


def test_a_test_in_threads_may_not_suspend() -> None:
    """It would be waiting for a loop that is not there."""

    class Suspends:
        def __await__(self) -> Any:
            yield

    async def suspends(world: World) -> None:
        await Suspends()

    with pytest.raises(AssertionError, match="may not wait"):
        pytest_pyfunc_call(item(suspends, world=World("threads")))


def item(test: Any, **funcargs: Any) -> Any:
    """What the hook looks at of a test."""
    return SimpleNamespace(obj=test, funcargs=funcargs)
