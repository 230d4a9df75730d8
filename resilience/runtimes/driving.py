"""Run a coroutine that never suspends to its end, with one `send`."""

from __future__ import annotations

from collections.abc import Awaitable
from types import CoroutineType
from typing import Any, TypeVar, final

from resilience.errors import SuspensionMisuse

T = TypeVar("T")


@final
class Suspended(GeneratorExit):
    """Ends the policies around a lowered policy that suspended, as `close()` ends the coroutines of a driven chain.

    :param error: the error that the execution raises.
    """

    def __init__(self, error: SuspensionMisuse) -> None:
        super().__init__(error)
        self.error: SuspensionMisuse = error


def drive(awaitable: Awaitable[T], lowered: object = None) -> T:
    """Run an awaitable that never suspends, usually a coroutine, and return its result.

    A suspension is a bug: a policy awaited something other than its `call` and the runtime. A user's `StopIteration`,
    which no coroutine may raise, is raised as a `StoppedIteration`.

    :param lowered: the lowered policy that awaits it, if any. A suspension is then raised as `Suspended`.
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
    """Return the error for a coroutine that suspended, which names its innermost policy, or else `culprit`."""
    while isinstance(coroutine, CoroutineType):
        code, frame = coroutine.cr_code, coroutine.cr_frame
        if code.co_name == "around" and frame is not None:
            culprit = type(frame.f_locals[code.co_varnames[0]]).__qualname__
        coroutine = coroutine.cr_await
    return SuspensionMisuse(
        f"{culprit} suspended in blocking code: a policy may await only its call and what ctx and ctx.runtime offer"
    )
