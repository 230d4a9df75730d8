"""Functions with a script for their calls: raise, raise, hang for five seconds, return."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple, final

from resilience import checks
from resilience.ambient import current_context
from resilience.checks import Duration
from resilience.clock import clock
from resilience.errors import Misuse
from resilience.runtimes.tasks import TASKS, find_runtime


class ScriptEnded(Misuse, AssertionError):
    """A scripted function was called more often than it has steps. No policy retries, counts or answers it."""


@final
@dataclass(frozen=True, slots=True)
class Hang:
    """A step that waits before it does `then`."""

    seconds: float
    then: Any


def hang(seconds: Duration, then: Any = None) -> Hang:
    """Return a step that waits for `seconds`, in virtual time if that is active, and then does `then`.

    In a thread, it ends at the latest with the block of virtual time in which it began.

    :param then: another step, None by default: an exception to raise, or the value to return.
    """
    return Hang(checks.seconds("seconds", seconds), then)


@final
@dataclass(frozen=True, slots=True)
class Items:
    """A step that yields items, one for each of its own steps."""

    steps: tuple[Any, ...]


def items(*steps: Any) -> Items:
    """Return a step that yields items, for `policy.streaming()`: an iterator, or an asynchronous iterator in tasks.

    :param steps: an exception (or a class of them) is raised, `hang(5)` waits, anything else is an item.

    >>> from resilience import Retry
    >>> from resilience.testing import items, script
    >>> read = script(items(ConnectionError("reset")), items("a", "b"))
    >>> list(Retry(backoff=[0]).streaming().call(read))
    ['a', 'b']
    """
    if any(isinstance(step, EllipsisType) for step in steps):
        raise ValueError(f"`...` cannot be one of the items, which are delivered once each: {steps!r}")
    return Items(steps)


class Call(NamedTuple):
    """One call of a scripted function.

    :param at: instant on the process clock.
    :param attempt: the number of the attempt, from 1.
    :param remaining: seconds left of the deadline; infinity for none.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    at: float
    attempt: int
    remaining: float


class _Scripted:
    def __init__(self, *steps: Any) -> None:
        self._repeats = bool(steps) and steps[-1] is Ellipsis
        self._steps = steps[:-1] if self._repeats else steps
        if not self._steps or any(isinstance(step, EllipsisType) for step in self._steps):
            raise ValueError(f"a script has one step or more, and `...` only at its end, not {steps!r}")
        #: The calls so far.
        self.calls: list[Call] = []
        self._lock = threading.RLock()  # in threads, a hedge calls from several workers, and a finalizer from any

    def __repr__(self) -> str:
        steps = [repr(step) for step in self._steps] + ["..."] * self._repeats
        return f"<script {', '.join(steps)}; {len(self.calls)} calls>"

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        ctx = current_context()
        call = Call(args, kwargs, clock.now(), ctx.attempt, ctx.remaining())
        with self._lock:
            number = len(self.calls)
            self.calls.append(call)
        if number >= len(self._steps) and not self._repeats:
            steps = "1 step" if len(self._steps) == 1 else f"{len(self._steps)} steps"
            raise ScriptEnded(f"call {number + 1} of a script that has {steps}: {self!r}")
        return self._steps[min(number, len(self._steps) - 1)]


@final
class Script(_Scripted):
    """A blocking function that performs one step per call, made by `script(...)`. `calls` lists its calls so far."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Perform the next step."""
        step = _wait(self._begin(args, kwargs))
        return _iterate(step.steps) if isinstance(step, Items) else _finish(step)


@final
class AsyncScript(_Scripted):
    """A coroutine function that performs one step per call, made by `ascript(...)`. `calls` lists its calls so far."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Perform the next step."""
        step = await _await(self._begin(args, kwargs))
        return _aiterate(step.steps) if isinstance(step, Items) else _finish(step)


def script(*steps: Any) -> Script:
    """Return a function that takes any arguments and performs one step per call.

    :param steps: an exception (or a class of them) is raised, `hang(5)` waits, `items("a", "b")` yields items, any
        other value is returned. If the last step is `...`, the step before it repeats for ever; otherwise a call
        after the last step raises `ScriptEnded`.

    >>> from resilience import Retry
    >>> from resilience.testing import script
    >>> fetch = script(ConnectionError("reset"), "fine")
    >>> Retry(backoff=[0]).call(fetch, "/users", timeout=3)
    'fine'
    >>> [(call.args, call.attempt) for call in fetch.calls]
    [(('/users',), 1), (('/users',), 2)]
    """
    return Script(*steps)


def ascript(*steps: Any) -> AsyncScript:
    """Like `script`, for asyncio and trio: the function is a coroutine function."""
    return AsyncScript(*steps)


def _wait(step: Any) -> Any:
    while isinstance(step, Hang):
        clock.wait(_Never(), step.seconds)
        step = step.then
    return step


@final
class _Never:
    """A lock that nothing releases but the end of virtual time: a hang that a Timeout has abandoned ends then."""

    def __init__(self) -> None:
        self._wait = clock.wait
        self._lock = threading.Lock()
        self._lock.acquire()

    def acquire(self, blocking: bool = True, timeout: float = -1, /) -> bool:
        return clock.wait is not self._wait or self._lock.acquire(blocking, timeout)


async def _await(step: Any) -> Any:
    runtime = TASKS if find_runtime() is TASKS else current_context().runtime  # without an event loop: of a simulation
    while isinstance(step, Hang):
        await runtime.waiter().wait(clock.now() + step.seconds, None)
        step = step.then
    return step


def _iterate(steps: tuple[Any, ...]) -> Iterator[Any]:
    for step in steps:
        yield _finish(_wait(step))


async def _aiterate(steps: tuple[Any, ...]) -> AsyncIterator[Any]:
    for step in steps:
        yield _finish(await _await(step))


def _finish(step: Any) -> Any:
    if isinstance(step, type) and issubclass(step, BaseException):
        raise step
    if isinstance(step, BaseException):
        try:
            raise step.with_traceback(None)
        finally:
            del step  # no cycle: error -> traceback -> this frame -> error
    return step
