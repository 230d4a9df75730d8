"""How the items of an open source are pulled, in blocking code and in tasks, and how a pull is cut off."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Iterator
from math import inf
from typing import Any, Final, NamedTuple, cast, final

from resilience.clock import clock
from resilience.context import Context
from resilience.errors import TimeoutExceeded
from resilience.formats import format_number
from resilience.runtimes.base import Expired
from resilience.runtimes.blocking import BLOCKING, PassiveTimer
from resilience.runtimes.tasks import TASKS
from resilience.streams.runtime import StreamRuntime

#: The name of a stream's own limits in errors.
_NAME: Final = "streaming"


@final
class Item:
    """An item of a stream in tasks. All else that its pulls yield is for the event loop."""

    __slots__ = ("value",)

    value: Any


#: What the consumer gets when there are no more items.
END: Final[Any] = object()


class Limits(NamedTuple):
    """The limits of one attempt.

    :param timer: that of a policy around the source.
    :param first: in how many seconds the first item must arrive; and `idle`, each later one.
    """

    timer: PassiveTimer | None
    first: float
    idle: float

    def deadline(self, until: float) -> float:
        """Return the earlier instant: `until`, or that of the timer."""
        return until if self.timer is None else min(until, self.timer.deadline)

    def policy(self) -> str:
        """Return the name of the policy that a worker is needed for."""
        return _NAME if self.timer is None else self.timer.policy

    def exceeded(self, until: float, limit: float) -> BaseException:
        """Return the error for a pull that was cut off."""
        if self.timer is not None and self.timer.deadline <= until:
            return Expired(self.timer)
        return TimeoutExceeded(f"no item within {format_number(limit)} s", policy=_NAME, timeout=limit)

    def run(self, step: Callable[[], Any], until: float, limit: float) -> Any:
        """Return what `step()` returns, in blocking code, or cut it off.

        :param until: the instant at which the stream's own limit ends, which is `limit` in seconds.
        """
        deadline = self.deadline(until)
        if deadline == inf:
            return step()
        with PassiveTimer(deadline, self.policy()) as timer:
            return timer.run(step)
        raise self.exceeded(until, limit)

    def items(self, pull: Callable[[], Any], until: float) -> Iterator[Any]:
        """Yield what `pull()` returns, in blocking code, until that is `END`; each pull may be cut off.

        :param until: the instant by which the first item must arrive.
        """
        limit = self.first
        while (item := self.run(pull, until, limit)) is not END:
            yield item
            limit = self.idle
            until = clock.now() + limit


# --- in blocking code ---


def pulls(ctx: Context, items: Iterator[Any]) -> Generator[Any, Any, None]:
    """Yield the items."""
    runtime, is_plain, uncounted = cast("StreamRuntime", ctx.runtime), False, 0
    try:
        for item in items:
            if is_plain:
                uncounted += 1
            else:
                runtime.note_item(item, ctx)
                is_plain = not runtime.resume
            yield item
    finally:
        runtime.items += uncounted


# --- in tasks ---


def apulls(ctx: Context, items: Any, limits: Limits, until: float | None) -> Generator[Any, Any, None]:
    """Yield the items, each as an `Item`.

    A pull is a part of this generator. With a generator for each pull, catching the `StopIteration` with which it ends
    would cost as much as all the rest.
    """
    runtime = cast("StreamRuntime", ctx.runtime)
    pull, is_native = items.__anext__, type(items) is types.AsyncGeneratorType
    item, is_plain, (timer, limit, idle) = Item(), False, limits
    while True:
        try:
            if limit == inf and timer is None:
                item.value = yield from (pull() if is_native else pull().__await__())
            else:
                now, item.value = clock.now(), END
                until = now + limit if until is None else until
                deadline = until if timer is None else limits.deadline(until)
                with TASKS.timer(deadline, limit if timer is None else None):
                    if now < deadline:
                        item.value = yield from pull().__await__()
                if item.value is END:
                    raise limits.exceeded(until, limit)
        except StopAsyncIteration:
            return
        if is_plain:
            runtime.items += 1
        else:
            runtime.note_item(item.value, ctx)
            is_plain = not runtime.resume
        yield item
        limit, until = idle, None


# --- in both ---


def answer_pulls(items: Any, runtime: StreamRuntime) -> Generator[Any, Any, None]:
    """Yield the items of a value that replaces those of the source, in tasks each as an `Item`."""
    out, is_blocking, is_plain = Item(), runtime.host is BLOCKING, isinstance(items, Iterator)
    while True:
        try:
            out.value = next(items) if is_plain else (yield from items.__anext__().__await__())
        except (StopIteration, StopAsyncIteration):
            return
        runtime.items += 1
        yield out.value if is_blocking else out
