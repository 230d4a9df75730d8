"""What the tests of retries share."""

from __future__ import annotations

from typing import Any

from resilience import Context, Policy
from tests.conftest import Script, World


class Other(Exception):
    """A failure that the policy under test is not told to handle."""


async def run(world: World, policy: Policy[Any], script: Script, ctx: Context | None = None) -> Any:
    """Return what comes out of one execution: the value, or the exception as a value."""
    return await world.attempt(policy, script.function(), ctx)


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


# --- results that are not good enough ----------------------------------------------------------


class Response:
    """A result that refuses truth and comparison, as SQL expressions and arrays do, and can be closed."""

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


# --- how long to wait --------------------------------------------------------------------------


class Told(Exception):
    """An error that says when to come back."""

    def __init__(self, retry_after: Any) -> None:
        super().__init__()
        self.retry_after = retry_after
