"""Run a coroutine that never suspends to its end, with one `send`."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable
from inspect import CO_COROUTINE
from types import CoroutineType
from typing import Any, Final, TypeVar, final

from resilience.errors import SuspensionMisuse

T = TypeVar("T")

#: The packages whose awaitables raise a `RuntimeError` where no event loop runs, if they would have to wait.
_EVENT_LOOPS: Final = frozenset({"asyncio", "trio", "anyio", "sniffio"})


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
    except RuntimeError as failure:
        if lowered is not None and needs_event_loop(failure, 1):
            raise Suspended(misuse_of(type(lowered).__qualname__, failure)) from None
        raise
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
    return misuse_of(culprit)


def needs_event_loop(error: RuntimeError, depth: int) -> bool:
    """Whether a coroutine that a policy awaited, such as `asyncio.sleep(1)`, has raised `error` for lack of a loop.

    An error of the user's function, or of a callback, has passed a frame of this library.

    :param depth: how many frames of the traceback are outside that coroutine.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][depth:]
    packages = [str(it.f_globals.get("__name__")).partition(".")[0] for it in frames]
    is_awaited = bool(frames) and bool(frames[0].f_code.co_flags & CO_COROUTINE)
    return is_awaited and packages[-1] in _EVENT_LOOPS and "resilience" not in packages


def misuse_of(culprit: str, cause: Exception | None = None) -> SuspensionMisuse:
    """Return the error for a policy that suspended, or that would have suspended if `cause` had not been raised."""
    error = SuspensionMisuse(
        f"{culprit} suspended in blocking code: a policy may await only its call and what ctx and ctx.runtime offer"
    )
    error.__cause__ = cause
    return error
