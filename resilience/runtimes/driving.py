"""Run a coroutine that never suspends to its end, with one `send`: a chain, or what a policy or a client awaits."""

from __future__ import annotations

import traceback
import types
from collections.abc import Awaitable, Generator
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


def run_chain(chain: Awaitable[T]) -> T:
    """Run the chain of an execution, as `drive` does, and return its result.

    A coroutine that is driven returns its result in a `StopIteration`, which takes a seventh of the time of a call
    under one policy. Instead, a *runner* awaits the chain, and yields the result. After that, an interrupt may come
    before this function returns: too late for a policy, but not for code that is driven by one.
    """
    coroutine: Any = chain if type(chain) is CoroutineType else _awaited(chain)
    try:
        runner = _idle_runners.pop()
    except IndexError:
        runner = _run_each()
        next(runner)
    result = runner.send(coroutine)
    if coroutine.cr_suspended:
        raise _close_suspended(coroutine, coroutine.__qualname__)
    _idle_runners.append(runner)  # not one that an error has ended
    return result  # type: ignore[no-any-return]


#: The runners that no call uses. Calls may be nested, or run in several threads at once.
_idle_runners: Final[list[Generator[Any, Any, None]]] = []


@types.coroutine
def _run_each() -> Generator[Any, Any, None]:
    """Run each coroutine that is sent in, and yield what it returns, without keeping that."""
    coroutine = yield
    while True:
        coroutine = yield (yield from coroutine)


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
            raise Suspended(suspension_by(type(lowered).__qualname__, failure)) from None
        raise
    error = _close_suspended(coroutine, coroutine.__qualname__ if lowered is None else type(lowered).__qualname__)
    raise error if lowered is None else Suspended(error)


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _close_suspended(coroutine: Any, culprit: str) -> SuspensionMisuse:
    """Close a coroutine that suspended, and return the error for it."""
    error = suspension_of(coroutine, culprit)
    coroutine.close()
    return error


def suspension_of(coroutine: Any, culprit: str) -> SuspensionMisuse:
    """Return the error for a coroutine that suspended, which names its innermost policy, or else `culprit`."""
    while isinstance(coroutine, CoroutineType):
        code, frame = coroutine.cr_code, coroutine.cr_frame
        if code.co_name == "around" and frame is not None:
            culprit = type(frame.f_locals[code.co_varnames[0]]).__qualname__
        coroutine = coroutine.cr_await
    return suspension_by(culprit)


def needs_event_loop(error: RuntimeError, depth: int) -> bool:
    """Whether a coroutine that a policy awaited, such as `asyncio.sleep(1)`, has raised `error` for lack of a loop.

    An error of the user's function, or of a callback, has passed a frame of this library.

    :param depth: how many frames of the traceback are outside that coroutine.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][depth:]
    packages = [str(it.f_globals.get("__name__")).partition(".")[0] for it in frames]
    is_awaited = bool(frames) and bool(frames[0].f_code.co_flags & CO_COROUTINE)
    return is_awaited and packages[-1] in _EVENT_LOOPS and "resilience" not in packages


def suspension_by(culprit: str, cause: Exception | None = None) -> SuspensionMisuse:
    """Return the error for a policy that suspended, or that would have suspended if `cause` had not been raised."""
    error = SuspensionMisuse(
        f"{culprit} suspended in blocking code: a policy may await only its call and what ctx and ctx.runtime offer"
    )
    error.__cause__ = cause
    return error
