"""One stream as an execution: the chain around the source, and then the items of a value that stands in for it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import CoroutineType
from typing import Any

from resilience.clock import clock
from resilience.context import Context, new_context
from resilience.endings import end_execution
from resilience.errors import ArgumentMisuse
from resilience.execution import Executed, begin_execution, refuse_forgotten_await
from resilience.info import NO_INFO
from resilience.runtimes.blocking import BLOCKING
from resilience.streams.pulls import Item
from resilience.streams.runtime import StreamClosed, StreamRuntime
from resilience.streams.source import hold_open


async def execute(
    policy: Executed,
    chain: Callable[[Context], Any],
    runtime: StreamRuntime,
    called: tuple[Callable[..., Any], tuple[Any, ...] | None, Mapping[str, Any]],
    given: Context | None,
) -> None:
    """Run the chain, and yield an `Opened` to the driver for each source, and for a value that replaces the items.

    :param chain: the chain around the source.
    :param called: the function, its arguments (None if it takes the context), and its keyword arguments.
    :param given: the context that the caller passed in, if any.
    """
    runtime.began = clock.now()
    ctx = new_context(policy, *called, NO_INFO, runtime.host)
    record, error = begin_execution(ctx, policy, given), None
    ctx.runtime = runtime
    try:
        answer = await chain(ctx)
        if type(answer) is CoroutineType:
            refuse_forgotten_await(policy, None, answer)
        if runtime.items and runtime.failure is not None:
            raise runtime.failure  # a value cannot replace a stream that has begun
        if not (runtime.items or (runtime.is_exhausted and answer is None)):
            await _deliver(answer, runtime)
    except BaseException as raised:
        error = None if type(raised) is StreamClosed else raised
        raise
    finally:
        runtime.failure = None
        if record is not None:
            end_execution(record, ctx, None, error, runtime.items)
        error = None  # no cycle: error -> traceback -> this frame -> error


async def _deliver(answer: Any, runtime: StreamRuntime) -> None:
    """Deliver the items of the value, and close it."""
    if runtime.host is not BLOCKING and hasattr(type(answer), "__aiter__"):
        items = answer.__aiter__()
    elif isinstance(answer, Iterable):
        items = iter(answer)
    else:
        raise ArgumentMisuse(f"what replaces a stream must have items, and {answer!r} has none")
    await hold_open(runtime, (answer, items), _pulls(items, runtime))


def _pulls(items: Any, runtime: StreamRuntime) -> Generator[Any, Any, None]:
    out, is_blocking, is_plain = Item(), runtime.host is BLOCKING, isinstance(items, Iterator)
    while True:
        try:
            out.value = next(items) if is_plain else (yield from items.__anext__().__await__())
        except (StopIteration, StopAsyncIteration):
            return
        runtime.items += 1
        yield out.value if is_blocking else out
