"""The runtime of policies inside a stream: that of the consumer, with timers that are only deadlines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, final

from typing_extensions import override

from resilience.clock import clock
from resilience.context import Context
from resilience.errors import RaceMisuse
from resilience.events.dispatch import emit
from resilience.events.kinds import StreamOpened
from resilience.runtimes.base import Expired, Plan, Runtime, Timer, Waiter
from resilience.runtimes.blocking import PassiveTimer


class StreamClosed(BaseException):
    """Thrown into a chain whose consumer has stopped. Only the innermost stage catches it, and raises it if called."""


@final
class StreamWaiter(Waiter):
    """A waiter whose wait also ends at the deadline of the timer around it."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Waiter) -> None:
        self._inner = inner

    @override
    def wake(self) -> bool:
        return self._inner.wake()

    @override
    def is_alive(self) -> bool:
        return self._inner.is_alive()

    @override
    async def wait(self, deadline: float, timer: Timer | None) -> bool:
        if not isinstance(timer, PassiveTimer):
            return await self._inner.wait(deadline, timer)
        is_awake = await self._inner.wait(min(deadline, timer.deadline), None)
        if not is_awake and timer.deadline <= deadline:
            raise Expired(timer)
        return is_awake


@final
class StreamRuntime(Runtime):
    """The runtime of the consumer, with timers that are only deadlines; and what the parts of a stream share.

    :param host: the runtime of threads or of tasks.
    :param resume: the functions that compute keyword arguments of the next call from an item, by keyword.
    """

    is_shareable: bool = False

    def __init__(self, host: Runtime, resume: Mapping[str, Callable[[Any], Any]]) -> None:
        self.host = host
        self.resume = resume
        #: How many items were delivered, in all attempts.
        self.items: int = 0
        #: The keyword arguments of the next call of the function, besides its own.
        self.keywords: dict[str, Any] = {}
        #: Whether the consumer has closed the stream.
        self.is_closed: bool = False
        #: The instant of the first pull.
        self.began: float
        #: How the last attempt ended: with its last item, or with an error. A policy may answer with another value.
        self.is_exhausted: bool = False
        self.failure: Exception | None = None
        #: A source and its iterator, if the garbage collector has closed the chain, for which nothing can be awaited.
        self.left_open: tuple[Any, Any] | None = None

    def check_before_call(self) -> None:
        """Raise if the function must not be called again: no consumer is left, or it would deliver the same items."""
        if self.is_closed:
            raise StreamClosed
        if self.failure is not None and not self.is_repeatable:
            raise self.failure

    def note_item(self, item: Any, ctx: Context) -> None:
        """Record an item before the consumer gets it: the first one, and with `resume` each."""
        self.is_repeatable: bool = False  # an error of `resume` is raised, and not retried
        self.keywords = {name: token_of(item) for name, token_of in self.resume.items()}
        self.items += 1
        self.is_answerable: bool = False
        self.is_repeatable = bool(self.resume)
        if self.items == 1:
            assert ctx._executed is not None
            emit(StreamOpened, ctx._executed.name, ctx, attempt=ctx.attempt, elapsed=clock.now() - self.began)

    def mark_closed(self) -> None:
        """Record that the consumer has closed the stream, so that no policy makes another call."""
        self.is_closed, self.is_repeatable = True, False

    @override
    async def sleep(self, seconds: float, timer: Timer | None) -> None:
        if not isinstance(timer, PassiveTimer):
            return await self.host.sleep(seconds, timer)
        left = max(0.0, timer.deadline - clock.now())
        await self.host.sleep(min(seconds, left), None)
        if seconds >= left:
            raise Expired(timer)
        return None

    @override
    def timer(self, deadline: float, limit: float | None = None, policy: str = "") -> PassiveTimer:
        return PassiveTimer(deadline, policy)

    @override
    def waiter(self) -> Waiter:
        return StreamWaiter(self.host.waiter())

    @override
    async def race(self, call: Callable[[Any], Awaitable[Any]], ctx: Any, plan: Plan[Any]) -> None:
        raise RaceMisuse("a stream cannot be opened several times at once: delivered items are gone")

    @override
    async def run(self, function: Callable[..., Any], /, *args: object) -> Any:
        return await self.host.run(function, *args)

    @override
    async def _run_until(self, timer: Timer, function: Callable[[], Any], policy: str) -> Any:
        with self.host.timer(timer.deadline):
            return await self.host._run_until(timer, function, policy)
        raise Expired(timer)

    @override
    async def close(self, resource: object) -> None:
        await self.host.close(resource)
