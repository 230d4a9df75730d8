"""The driver of a stream: it pulls items past the policies, and resumes the chain when there are no more."""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Protocol, final

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
from resilience.streams.source import END, Closed, Opened, close_all, pulls, within


class Settings(Protocol):
    """The parameters of `policy.streaming(...)`."""

    policy: Executed
    first: float
    idle: float
    resume: Mapping[str, Callable[[Any], Any]]

    @property
    def stage(self) -> Callable[[Context], Any]:
        """The chain around the source."""
        ...


@types.coroutine
def steps(
    run: Callable[..., Any], coroutine: Any, error: BaseException | None = None, out: Any = END
) -> Generator[Any, Any, Any]:
    """Await a coroutine in other context variables, until it ends or yields an `Opened`.

    :param run: runs a function in those variables.
    :param error: an exception to throw into the coroutine first.
    :param out: the value that the coroutine has yielded to the event loop, if it has been resumed already.
    """
    sent, step = None, coroutine
    try:
        while True:
            if out is END:
                try:
                    out = run(step.send, sent) if error is None else run(step.throw, error)
                except StopIteration as done:
                    return done.value
                error = sent = None
                if type(out) is Opened:
                    return out
            try:
                sent = yield out  # for the event loop
            except GeneratorExit as thrown:
                # Before 3.13, closing a coroutine that awaits `asend()` does not close the generator.
                error, step = thrown, getattr(coroutine, "gi_yieldfrom", None) or coroutine
            except BaseException as thrown:  # a cancellation, for example: for the awaitable on which it waits
                error = thrown
            out = END
    finally:
        error = None  # no cycle: error -> traceback -> this frame -> error


@final
class Driver:
    """Pulls the items of one stream, one after another. In blocking code, its coroutines never suspend.

    An item comes in one of two ways. `pull` does everything: it begins the stream, and resumes the chain at its end or
    after an error. `take` is shorter, for the next item of a source that has delivered one; if it finds no item, or
    raises, `pull` is called with that.
    """

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
        self._chain: Any = None  # the coroutine of the policies, from the first pull on
        self._record: Record | None
        #: Runs a function in the variables of the stream. Set, like the attributes without a value, by the first pull.
        self.run: Callable[..., Any]
        self._opened: Opened | None = None
        self._pulls: Any = None  # in tasks, the `pulls` of the open source
        self._fast_take: Callable[[], Any] | None = None  # the value of `take` once the source has delivered an item
        self._answer: tuple[Any, Any] | None = None  # a value that replaces the stream, and the iterator of its items
        self.is_over: bool = False
        self.is_busy: bool = False
        #: Takes the next item; in tasks, up to the first wait in the event loop. None if a pull has more to do.
        self.take: Callable[[], Any] | None = None

    async def pull(self, is_taken: bool = False, error: BaseException | None = None) -> Any:
        """Return the next item, or `END`.

        :param is_taken: whether `take` was called, and found no item.
        :param error: the exception that `take` raised, if any.
        """
        if self.is_over:
            return END
        if self.is_busy:
            self.refuse()
        self.is_busy, self.take = True, None
        try:
            if self._chain is None:
                await self._begin()
            item = END
            while item is END and self._opened is not None:
                item = await self._pull_from(self._opened, is_taken, error)
                is_taken, error = False, None
            if item is END and self._answer is not None:
                item = await self._pull_answer(self._answer[1])
            elif self._opened is not None:
                self.take = self._fast_take
            return item
        finally:
            self.is_busy = False
            error = None  # no cycle: error -> traceback -> this frame -> error

    def refuse(self) -> None:
        """Raise, because another thread or task waits for an item."""
        raise RuntimeError("an item of this stream is being waited for already")

    async def wait(self, out: Any) -> Any:
        """Finish a `take` that must wait in the event loop, to which `out` is to be yielded; return its result."""
        take, self.take, self.is_busy = self.take, None, True
        try:
            return await steps(self.run, self._pulls, out=out)
        finally:
            self.take, self.is_busy = take, False

    async def close(self) -> None:
        """End the stream for its consumer. If an item was delivered, the call has succeeded."""
        if self.is_busy:
            self.refuse()
        self.runtime.mark_closed()
        is_collected = getattr(self._chain, "cr_frame", self) is None  # closed already, in a cycle with the stream
        try:
            if self._opened is not None and self.runtime.items and not is_collected:
                await self._advance(Closed())
            elif not self.is_over and self._chain is not None:
                self._end(None if self._answer is not None else GeneratorExit())
        except Closed:  # pragma: no cover (a policy has made another call; the tracer has lost this frame by then)
            pass
        finally:
            self.is_over = True
            if is_collected and self._opened is not None and self.runtime.host is not BLOCKING:
                # The collector has closed the chain, which could not await. The loop closes generators itself.
                open_ones = (self._opened.source, self._opened.items)
                source, items = (None if type(it) is types.AsyncGeneratorType else it for it in open_ones)
                await close_all(self.runtime, source, items)
            elif getattr(self._chain, "cr_frame", None) is not None:  # an interrupt has left it suspended
                with suppress(GeneratorExit):
                    await steps(self.run, self._chain, GeneratorExit())
            await self._close_answer()

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
        self._chain = self._streaming.stage(ctx)
        await self._advance(None)

    async def _pull_from(self, opened: Opened, is_taken: bool, error: BaseException | None) -> Any:
        """Return the next item of an open source; `END` if the chain was resumed instead."""
        try:
            if error is None and not is_taken:
                item = await self._next_of(opened)
                if item is not END:
                    if self.runtime.items == 1:
                        self._report_opened(opened.ctx)
                    return item
        except BaseException as raised:
            error = raised
        try:
            await self._advance(error)
        finally:
            error = None  # no cycle: error -> traceback -> this frame -> error
        return END

    def _report_opened(self, ctx: Context) -> None:
        elapsed = clock.now() - self._began
        emit(StreamOpened, self._streaming.policy.name, ctx, attempt=ctx.attempt, elapsed=elapsed)

    async def _next_of(self, opened: Opened) -> Any:
        if self.runtime.host is not BLOCKING:
            return END if await steps(self.run, self._pulls) is None else opened.item
        until, limit = inf, self._streaming.idle
        if opened.is_first:
            opened.is_first = False
            until, limit = opened.first_until, self._streaming.first
        elif limit != inf:
            until = clock.now() + limit
        item = await within(opened.ctx, until, limit, functools.partial(opened.run, next, opened.items), END)
        if item is not END:
            self.runtime.hand_out(item)
        return item

    async def _advance(self, error: BaseException | None) -> None:
        """Resume the chain, or throw `error` into it, until it has opened a source or ended."""
        was_open = self._opened is not None
        if isinstance(error, GeneratorExit):  # the consumer's coroutine is closed
            self.runtime.mark_closed()
        self._opened = self._pulls = self._fast_take = self.take = None
        try:
            out = await steps(self.run, self._chain, error)
            if type(out) is Opened:
                self._open(out)
            elif self.runtime.items and isinstance(error, Exception):
                raise error  # a value cannot replace a stream that has begun
            elif self.runtime.items or (was_open and error is None and out is None):
                self._end(None)
            else:
                self._answer = out, self._items_of(out)
        except BaseException as raised:
            self._end(None if type(raised) is Closed else raised)
            raise
        finally:
            error = None  # no cycle: error -> traceback -> this frame -> error

    def _open(self, opened: Opened) -> None:
        streaming, self._opened = self._streaming, opened
        if self.runtime.host is not BLOCKING:
            self._pulls = pulls(opened, self.runtime, streaming.first, streaming.idle)
            self._fast_take = functools.partial(self.run, self._pulls.send, None)
        elif streaming.idle == inf and not streaming.resume and not isinstance(opened.ctx._timer, PassiveTimer):
            self._fast_take = functools.partial(opened.run, next, opened.items, END)

    def _items_of(self, answer: Any) -> Any:
        if self.runtime.host is not BLOCKING and hasattr(type(answer), "__aiter__"):
            return answer.__aiter__()
        if not isinstance(answer, Iterable):
            raise ArgumentMisuse(f"what stands in for a stream must have items, and {answer!r} has none")
        return iter(answer)

    async def _pull_answer(self, items: Any) -> Any:
        item, error = END, None
        try:
            item = next(items, END) if isinstance(items, Iterator) else await _anext(items)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if item is END:
                self._end(error)
                error = None  # no cycle: error -> traceback -> this frame -> error
                await self._close_answer()
        self.runtime.items += 1
        return item

    async def _close_answer(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            await close_all(self.runtime, *answer)

    def _end(self, error: BaseException | None) -> None:
        self.is_over = True
        if self._record is not None:
            end_execution(self._record, self._ctx, None, error, self.runtime.items)


async def _anext(items: Any) -> Any:
    try:
        return await steps(_directly, items.__anext__().__await__())
    except StopAsyncIteration:
        return END


def _directly(step: Callable[[Any], Any], argument: Any) -> Any:
    return step(argument)
