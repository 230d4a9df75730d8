"""Run a coroutine in which nothing is left to wait for to its end, by one `send`."""

from __future__ import annotations

from collections.abc import Awaitable
from types import CoroutineType
from typing import Any, TypeVar, final

from resilience.errors import SuspensionMisuse

T = TypeVar("T")


@final
class Suspended(GeneratorExit):
    """Ends the policies around a lowered one that has suspended, as closing their coroutines does where it is driven.

    :param error: what is raised at the end of the execution.
    """

    def __init__(self, error: SuspensionMisuse) -> None:
        super().__init__(error)
        self.error: SuspensionMisuse = error


def drive(awaitable: Awaitable[T], lowered: object = None) -> T:
    """Run an awaitable, usually a coroutine, in which nothing is left to wait for, and return its result.

    A suspension is a bug: something in it awaited more than its `call` and the runtime. A user's `StopIteration`,
    which no coroutine may raise, comes out in its carrier.

    :param lowered: the policy that awaits it, where its method is a plain function: then the bug comes as `Suspended`.
    """
    coroutine: Any = awaitable if type(awaitable) is CoroutineType else _awaited(awaitable)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    error = suspension(coroutine, coroutine.__qualname__ if lowered is None else type(lowered).__qualname__)
    coroutine.close()
    raise error if lowered is None else Suspended(error)


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def suspension(coroutine: Any, culprit: str) -> SuspensionMisuse:
    """Return the error that names the innermost policy in what has suspended, or else `culprit`."""
    while isinstance(coroutine, CoroutineType):
        code, frame = coroutine.cr_code, coroutine.cr_frame
        if code.co_name == "around" and frame is not None:
            culprit = type(frame.f_locals[code.co_varnames[0]]).__qualname__
        coroutine = coroutine.cr_await
    return SuspensionMisuse(
        f"{culprit} suspended in blocking code: a policy may await only its call and what ctx and ctx.runtime offer"
    )
