"""The ambient context, which code finds without receiving it as an argument, and the blocks that set it.

It is a `contextvars` variable, so it follows tasks, `anyio.to_thread` and the workers of `Timeout`. A block
(`with deadline(...)`, an attempt of a Retry) makes its own context ambient, and restores the previous one at its end.
Blocks may end out of order: if a coroutine is closed by another task or by the garbage collector, its `finally` runs
with other context variables than those that the block has set, and interleaved generators end in any order. So a
context that stays ambient after the end of its block is marked as over, and lookups use the context around it instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar, Token
from math import inf
from types import FrameType
from typing import TypeAlias

from resilience import forks
from resilience.context import NO_KEYWORDS, BlankContext, Context
from resilience.info import BARE, NO_INFO
from resilience.runtimes.base import Timer

AmbientToken: TypeAlias = Token[Context | None]

_ambient: ContextVar[Context | None] = forks.context_variable("resilience.context", None)

# Bound once: a call through the variable would create a bound method each time (40 ns).
get_ambient: Callable[[], Context | None] = _ambient.get
set_ambient: Callable[[Context | None], AmbientToken] = _ambient.set
reset_ambient: Callable[[AmbientToken], None] = _ambient.reset


def current_context() -> Context:
    """Return the context of the execution around this code; a new, unlimited one if there is none.

    It follows tasks and `anyio.to_thread` (it is a `contextvars` variable) and the workers of `Timeout`. There is one
    exception: the first attempt of a plain `call` without a deadline, a listener and an execution around it, whose
    context contains nothing but the call.
    """
    return innermost_open(get_ambient()) or _bare_context() or Context()


def _bare_context() -> Context | None:
    """Return the context of the closest call around this code that inherits nothing; None if there is none.

    Setting the variable for a bare call (see `BARE`) would let it take a quarter longer. Instead, this looks for
    `inner` in the frames of `execution`.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not forks.starting_frame:
        if frame.f_globals.get("__name__") == "resilience.execution":
            ctx = frame.f_locals.get("inner")
            if isinstance(ctx, BlankContext) and (ctx._info is BARE or ctx._info is NO_INFO):
                return ctx
        frame = frame.f_back
    return None


def innermost_open(ctx: Context | None) -> Context | None:
    """Return an ambient context; if it belongs to a block that is over, the closest one around it that does not."""
    while isinstance(ctx, BlockContext) and ctx.is_over:
        ctx = ctx.outer
    return ctx


def ambient_deadline() -> float:
    """Return the deadline of the ambient context; infinity if there is none. A bare call has no deadline either."""
    ctx = innermost_open(get_ambient())
    return inf if ctx is None else ctx.deadline


#: The parent of a block's context if no context is ambient.
_ROOT = Context()


class BlockContext(BlankContext):  # type: ignore[misc]  # final for users
    """The context of a block, which may still be ambient after the end of the block."""

    __slots__ = ("is_over", "outer")

    is_over: bool  # whether the block has ended out of order, or was cut short by an interrupt
    outer: Context | None  # the context that was ambient before the block; set while it is open, and if `is_over` is

    _function = _arguments = None  # a block is not a call
    _keywords = NO_KEYWORDS


def block_context(inside: Context | None = None, deadline: float = inf) -> BlockContext:
    """Make the context of a block.

    It inherits a timer only if that timer cuts off the current code: new tasks and threads inherit the context, but are
    not covered by the timer.

    :param inside: the context around it; the ambient one by default.
    :param deadline: an instant on the process clock; a later one than that of the context around it has no effect.
    """
    block: BlockContext = BlockContext()
    block.outer = ambient = get_ambient()
    found = inside or ambient
    outer = _ROOT if found is None else innermost_open(found) or _ROOT
    block.deadline = deadline if deadline < outer.deadline else outer.deadline
    block.attempt = outer.attempt
    block.runtime = outer.runtime
    block._info = outer._info
    block._executed = outer._executed
    block._timer = None if outer._timer is None else timer_here(outer)
    block.is_over = False
    return block


def timer_here(ctx: Context) -> Timer | None:
    """Return the timer of `ctx` if it cuts off the current code."""
    timer = ctx._timer
    return timer if timer is not None and timer.covers_this_code() else None


class Block:
    """A block that makes a context ambient: `__enter__` sets `_ctx`, and then `_token` to `set_ambient(ctx)`.

    If that is interrupted, it marks the context as over, as the block may be kept: by the traceback, for example.
    """

    __slots__ = ("_ctx", "_token")

    _ctx: BlockContext | None  # set while the block is open, and after an interrupt as it began or ended
    _token: AmbientToken | None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Restore the context that was ambient before the block."""
        ctx, token = self._ctx, self._token
        if ctx is None or token is None:
            return
        outer = ctx.outer
        if get_ambient() is ctx:
            try:
                reset_ambient(token)
                ctx.outer = None  # tasks that inherited this context keep no others alive
            except ValueError:  # this runs in a copy of the context variables
                ctx.is_over = True
                set_ambient(outer)
            if outer is not None:
                set_ambient(innermost_open(outer))
        else:
            ctx.is_over = True
        self._ctx = self._token = None

    def __del__(self) -> None:
        try:
            if self._ctx is not None:
                self._ctx.is_over = True
        except AttributeError:  # a signal handler raised before `_ctx` was set
            pass
