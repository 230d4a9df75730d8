"""The driver of a stream: it steps the open source past the policies, and resumes the chain when there are no items."""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, NoReturn, final

from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import suspension_of
from resilience.streams.pulls import END, Item
from resilience.streams.runtime import StreamClosed, StreamRuntime
from resilience.streams.source import Opened, close_all


@final
class Driver:
    """Steps one stream from item to item.

    :param execute: makes the coroutine of the execution, which yields an `Opened` for each source.
    """

    __slots__ = ("_execute", "_execution", "_pulls", "_run", "is_busy", "is_over", "pull", "runtime")

    def __init__(self, runtime: StreamRuntime, execute: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.runtime: StreamRuntime = runtime
        self._execute = execute
        self._execution: Any = None  # the coroutine, from the first step on
        self._run: Callable[..., Any]  # runs a function in the variables of the stream; made with the execution
        self._pulls: Generator[Any, Any, None] | None = None  # those of the open source
        #: The same as `step`, but only of the open source. If it raises, call `step` with the error.
        self.pull: Callable[[], Any] = _no_source
        self.is_busy: bool = False
        self.is_over: bool = False

    def step(self, error: BaseException | None = None, sent: object = None) -> Any:
        """Run until there is an item, or `END`; in tasks, also until there is something to yield to the event loop.

        :param error: what to throw first into the source, or into the chain while no source is open.
        :param sent: what the event loop has sent, if it has.
        """
        if self._execution is None and not self.is_over:
            self._run, self._execution = contextvars.copy_context().run, self._execute()
        self.is_over = self.is_over or self._execution.cr_frame is None  # an interrupt came before that was noted
        if type(error) is StopIteration:  # of `pull`
            error = None
        try:
            while not self.is_over:
                coroutine: Any = self._execution if self._pulls is None else self._pulls
                if isinstance(error, GeneratorExit):  # the consumer's coroutine is closed
                    self.runtime.mark_closed()
                    coroutine = _awaited_by(coroutine)
                try:
                    out = self._run(coroutine.send, sent) if error is None else self._run(coroutine.throw, error)
                except BaseException as raised:
                    error = None if type(raised) is StopIteration else raised
                    if self._pulls is None:
                        self.is_over = self._execution.cr_frame is None  # not after an interrupt between two steps
                        if error is not None:
                            raise
                    self._pulls, self.pull = None, _no_source
                else:
                    error = None
                    if type(out) is Opened:
                        self._pulls, self.pull = out.pulls, functools.partial(self._run, out.pulls.send, None)
                    elif self._pulls is None and self.runtime.host is BLOCKING:
                        error = suspension_of(self._execution, "a policy")
                    else:
                        return out
                sent = None
            return END
        finally:
            error = None  # no cycle: error -> traceback -> this frame -> error

    @types.coroutine
    def wait(self, out: Any) -> Generator[Any, Any, Any]:
        """Return the next item, or `END`, in tasks; until then, yield to the event loop what steps return.

        :param out: what a step has returned.
        """
        error: BaseException | None = None
        try:
            while type(out) is not Item and out is not END:
                sent = error = None
                try:
                    sent = yield out
                except BaseException as thrown:  # a cancellation, for example: for the awaitable on which it waits
                    error = thrown
                out = self.step(error, sent)
            return out
        finally:
            error = None  # no cycle: error -> traceback -> this frame -> error

    def refuse(self) -> NoReturn:
        """Raise, because another thread or task waits for an item."""
        raise RuntimeError("an item of this stream is being waited for already")

    async def close(self) -> None:
        """End the stream for its consumer. If an item was delivered, the call has succeeded."""
        if self.is_busy:
            self.refuse()
        self.is_busy = True  # no call since the check, so no other thread begins a pull
        runtime, execution = self.runtime, self._execution
        try:
            runtime.mark_closed()
            if execution is not None and execution.cr_frame is not None:
                with suppress(StreamClosed, GeneratorExit):
                    await self.wait(self.step(StreamClosed() if runtime.items else GeneratorExit()))
        finally:
            self.is_over, self.is_busy, self.pull = True, False, _no_source
            if execution is not None and runtime.host is BLOCKING:
                self._run(execution.close)  # an interrupt may have come between two steps
            if runtime.left_open is not None:  # the event loop closes asynchronous generators itself
                its = (None if type(it) is types.AsyncGeneratorType else it for it in runtime.left_open)
                await close_all(runtime, *its)


def _no_source() -> NoReturn:
    raise StopIteration


def _awaited_by(coroutine: Any) -> Any:
    """Return what a generator awaits in the end. Before 3.13, closing it would not close an asynchronous generator."""
    while (inner := getattr(coroutine, "gi_yieldfrom", None)) is not None:
        coroutine = inner
    return coroutine
