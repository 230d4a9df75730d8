"""Functions and awaitables that the tests call, and a retry that does not wait."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import anyio

from resilience import Retry
from tests.conftest import Boom


def quick(attempts: int = 3, on: Any = Boom, **settings: Any) -> Retry:
    return Retry(attempts, on=on, backoff=[0], **settings)


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises this, whatever it is called with."""

    def fn(*args: object, **kwargs: object) -> Any:
        raise error

    return fn


class Later:
    """An awaitable that is not a coroutine."""

    def __await__(self) -> Generator[Any, Any, str]:
        yield from anyio.sleep(0).__await__()
        return "later"


async def coroutine(*args: object) -> str:
    return "never awaited"


async def fail_on_the_way_out(*args: object) -> None:
    """Wait in a task group until it is cancelled. A child then raises, which trio adds to the cancellation."""

    async def child() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise Boom("on the way out")

    async with anyio.create_task_group() as group:
        group.start_soon(child)
        group.start_soon(anyio.sleep_forever)
