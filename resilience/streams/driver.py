"""The driver of a stream: it pulls items past the policies, and sends the chain on where there is none."""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from math import inf
from typing import Any, Final, Protocol, final

from resilience.clock import clock
from resilience.context import BareContext, Context
from resilience.endings import end_execution
from resilience.errors import ArgumentMisuse
from resilience.events.dispatch import emit
from resilience.events.kinds import StreamOpened
from resilience.execution import Executed, inherit
from resilience.info import NO_INFO
from resilience.record import Record
from resilience.runtimes.base import PassiveTimer, Runtime
from resilience.runtimes.blocking import BLOCKING
from resilience.streams.runtime import StreamRuntime
from resilience.streams.source import Closed, Opened, within

END: Final[Any] = object()


class Settings(Protocol):
    """What was asked for with `policy.streaming(...)`."""

    policy: Executed
    first: float
    idle: float
    resume: Mapping[str, Callable[[Any], Any]]

    @property
    def stage(self) -> Callable[[Context], Any]:
        """The chain around the source."""
        ...


@types.coroutine
def steps(run: Callable[..., Any], coroutine: Any, error: BaseException | None = None) -> Generator[Any, Any, Any]:
    """Await a coroutine in other context variables, until it ends or has opened a source.

    :param run: runs a function in those variables.
    :param error: what is thrown into it first.
    """
    sent = None
    try:
        while True:
            try:
                out = run(coroutine.send, sent) if error is None else run(coroutine.throw, error)
            except StopIteration as done:
                return done.value
            error = sent = None
            if type(out) is Opened:
                return out
            try:
                sent = yield out  # for the event loop
            except BaseException as thrown:  # a cancellation, say: for what the coroutine waits in
                error = thrown
    finally:
        error = None  # no cycle: error -> traceback -> this frame -> error


async def _anext(items: Any) -> Any:
    try:
        # Not awaited itself: to close a coroutine that awaits `asend()` does not close the generator, before 3.13.
        return await steps(_here, items.__anext__().__await__())
    except StopAsyncIteration:
        return END


def _here(step: Callable[[Any], Any], argument: Any) -> Any:
    return step(argument)


def _next(items: Any) -> Any:
    return next(items, END)


@final
class Driver:
    """Pulls the items of one stream, one after another. In blocking code, nothing in it suspends."""

    def __init__(
        self,
        streaming: Settings,
        host: Runtime,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] | None,
        keywords: Mapping[str, Any],
        ctx: Context | None = None,
    ) -> None:
        self._streaming = streaming
        self.runtime: StreamRuntime = StreamRuntime(host, streaming.resume)
        self._called = function, arguments, keywords
        self._given = ctx
        self._began: float
        self._ctx: Context
        self._chain: Any
        self._record: Record | None
        self._has_begun = False
        #: Runs a function in the variables of the stream. Made with the rest by the first pull.
        self.run: Callable[..., Any]
        self._opened: Opened | None = None
        self._answer: Any = None  # the iterator of another value that stands in for the stream
        self._is_over = False
        self.is_busy: bool = False
        #: Begins a pull, once the source has brought an item; None where there is more to do for it.
        self.take: Callable[[], Any] | None = None

    async def pull(self) -> Any:
        """Return the next item, or `END`."""
        if self._is_over:
            return END
        if self.is_busy:
            self.refuse()
        self.is_busy = True
        try:
            if not self._has_begun:
                await self._begin()
            item = END
            while item is END and self._opened is not None:
                item = await self._pull_from(self._opened)
            return await self._pull_answer() if item is END and self._answer is not None else item
        finally:
            self.is_busy = False

    async def go_on(self, error: BaseException | None) -> Any:
        """Return the next item after a quick pull that has brought none, but an error or the end of the source."""
        try:
            await self._advance(error)
        finally:
            error = None  # no cycle: error -> traceback -> this frame -> error
        return await self.pull()

    def refuse(self) -> None:
        """Raise, as another thread or task waits for an item."""
        raise RuntimeError("an item of this stream is being waited for already")

    async def close(self) -> None:
        """End the stream, which the consumer leaves. Where it has had an item, the call has ended well."""
        if self.is_busy:
            self.refuse()
        if self._opened is not None and self.runtime.items:
            await self._advance(Closed())
        elif not self._is_over and self._has_begun:
            self._end(None if self._answer is not None else GeneratorExit())
        self._is_over = True

    async def _begin(self) -> None:
        executed, host = self._streaming.policy, self.runtime.host
        ctx = self._ctx = BareContext()
        ctx.deadline = inf
        ctx.attempt = 1
        ctx.runtime = host
        ctx._function, ctx._arguments, ctx._keywords = self._called
        ctx._info = NO_INFO
        ctx._executed = executed
        ctx._timer = None
        self._record = inherit(ctx, executed, self._given)
        ctx.runtime = self.runtime
        self._began = clock.now()
        self.run = contextvars.copy_context().run
        self._has_begun = True
        self._chain = self._streaming.stage(ctx)
        await self._advance(None)

    async def _pull_from(self, opened: Opened) -> Any:
        """Return the next item of an open source; `END` where the chain was sent on instead."""
        try:
            item = await self._next_of(opened)
            if item is not END:
                self.runtime.hand_out(item)
                if self.runtime.items == 1:
                    self._report_opened(opened.ctx)
                self.take = self._quick(opened)
                return item
        except BaseException as error:
            await self._advance(error)
            return END
        await self._advance(None)
        return END

    def _quick(self, opened: Opened) -> Callable[[], Any] | None:
        ctx, items, idle = opened.ctx, opened.items, self._streaming.idle
        if self._streaming.resume:
            return None
        is_limited = idle != inf or isinstance(ctx._timer, PassiveTimer)
        if self.runtime.host is BLOCKING:
            return None if is_limited else functools.partial(self.run, next, items, END)
        if is_limited:
            return lambda: within(ctx, clock.now() + idle, idle, _anext, items)
        begin = items.__anext__
        return begin if type(items) is types.AsyncGeneratorType else lambda: begin().__await__()

    def _report_opened(self, ctx: Context) -> None:
        elapsed = clock.now() - self._began
        emit(StreamOpened, self._streaming.policy.name, ctx, attempt=ctx.attempt, elapsed=elapsed)

    async def _next_of(self, opened: Opened) -> Any:
        streaming, blocking = self._streaming, self.runtime.host is BLOCKING
        until, limit = inf, streaming.idle
        if opened.is_first:
            opened.is_first = False
            until, limit = opened.first_until, streaming.first
        elif limit != inf:
            until = clock.now() + limit
        step = _next if blocking else _anext
        return await steps(self.run, within(opened.ctx, until, limit, step, opened.items))

    async def _advance(self, error: BaseException | None) -> None:
        """Send the chain on, or throw the error into it, until a source is open or the chain ends."""
        was_open = self._opened is not None
        self._opened = self.take = None
        try:
            out = await steps(self.run, self._chain, error)
            if type(out) is Opened:
                self._opened = out
            elif self.runtime.items and isinstance(error, Exception):
                raise error  # a value cannot stand in for a stream that has begun
            elif self.runtime.items or (was_open and error is None and out is None):
                self._end(None)
            else:
                self._answer = self._items_of(out)
        except BaseException as raised:
            self._end(raised)
            raise
        finally:
            error = None  # no cycle: error -> traceback -> this frame -> error

    def _items_of(self, answer: Any) -> Any:
        if self.runtime.host is not BLOCKING and hasattr(type(answer), "__aiter__"):
            return answer.__aiter__()
        if not isinstance(answer, Iterable):
            raise ArgumentMisuse(f"what stands in for a stream must have items, and {answer!r} has none")
        return iter(answer)

    async def _pull_answer(self) -> Any:
        try:
            is_plain = isinstance(self._answer, Iterator)
            item = next(self._answer, END) if is_plain else await _anext(self._answer)
        except BaseException as error:
            self._end(error)
            raise
        if item is END:
            self._end(None)
        else:
            self.runtime.items += 1
        return item

    def _end(self, error: BaseException | None) -> None:
        self._is_over, self._answer = True, None
        if self._record is not None:
            end_execution(self._record, self._ctx, None, error, self.runtime.items)
