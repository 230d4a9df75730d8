"""Shared by the tests of retries."""

from __future__ import annotations

from typing import Any

import pytest

from resilience import Context, Policy, Retry
from resilience.callables import maybe_await
from resilience.clock import clock as process_clock
from tests.conftest import FakeClock, Script, World


async def run(world: World, policy: Policy[Any], script: Script, ctx: Context | None = None) -> Any:
    """Run one execution; return the value, or the exception as a value."""
    return await world.attempt(policy, script.function(), ctx)


class Attempts:
    """`async for attempt in Attempts(world, retry)`: the loop of a block in each world."""

    def __init__(self, world: World, retry: Retry) -> None:
        self._next = iter(retry.attempts()).__next__ if world.blocking else aiter(retry.attempts()).__anext__

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Any:
        try:
            return await maybe_await(self._next())
        except StopIteration:
            raise StopAsyncIteration from None


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


class Response:
    """A result without a truth value and without equality, like SQL expressions and arrays, that can be closed."""

    retry_after: Any = None

    def __init__(self, status: int = 503, **attributes: Any) -> None:
        self.status = status
        self.closed = 0
        vars(self).update(attributes)

    def __bool__(self) -> bool:
        raise TypeError("the truth of a response is ambiguous")

    def __eq__(self, other: object) -> bool:
        raise TypeError("responses cannot be compared")

    __hash__ = object.__hash__

    def close(self) -> None:
        self.closed += 1


def bad(response: Response) -> bool:
    return response.status >= 500


class RetryAfter(Exception):
    """An error with a `retry_after`."""

    def __init__(self, retry_after: Any) -> None:
        super().__init__()
        self.retry_after = retry_after


def oversleep(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Make every wait take `seconds` longer."""
    sleep = clock.sleep

    def late(delay: float) -> None:
        sleep(delay)
        clock.advance(seconds)

    monkeypatch.setattr(process_clock, "sleep", late)
    monkeypatch.setattr(process_clock, "shorten", lambda delay: late(delay) or 0.0)
