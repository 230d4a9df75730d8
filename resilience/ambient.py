"""The ambient context, which code finds without receiving it, and the blocks that set it.

It is a `contextvars` variable, so it follows tasks, `anyio.to_thread` and the workers of `Timeout`. A block
(`with deadline(...)`, an attempt of a Retry) makes a context of its own ambient, and restores the one before.
Blocks may end out of their turn: a coroutine that is closed by another task, or by the collector, runs its
`finally` in other variables than the block has set, and generators that are consumed in turn end in any order. So a
block's context that stays ambient after its end is marked, and whatever finds it takes the one around it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TypeAlias

from resilience.context import NO_KEYWORDS, BareContext, Context
from resilience.info import BARE, NO_INFO
from resilience.runtimes.base import Timer

AmbientToken: TypeAlias = Token[Context | None]

_ambient: ContextVar[Context | None] = ContextVar("resilience.context", default=None)

# Bound once: called as a method of an imported name, each makes a bound method anew (40 ns).
get_ambient: Callable[[], Context | None] = _ambient.get
set_ambient: Callable[[Context | None], AmbientToken] = _ambient.set
reset_ambient: Callable[[AmbientToken], None] = _ambient.reset


def current_context() -> Context:
    """Return the context of the execution around this code; a new, unlimited one if there is none.

    It follows tasks and `anyio.to_thread` (it is a `contextvars` variable) and the workers of `Timeout`. A call without
    a deadline, a context from its caller and a listener sets none for its first attempt: that saves a quarter of its
    cost, and such a context would contain nothing but the call.
    """
    return innermost_open(get_ambient()) or Context()


def innermost_open(ctx: Context | None) -> Context | None:
    """Return an ambient context, or the one around it where it is that of a block which is over."""
    while isinstance(ctx, BlockContext) and ctx.is_over:
        ctx = ctx.outer
    return ctx


def leave_ambient(token: AmbientToken) -> None:
    """Make ambient again what was so before `token`, past the blocks that a function has left open.

    In other variables than those in which the token was made there is nothing to restore.
    """
    try:
        reset_ambient(token)
    except ValueError:
        return


#: The context around a block that is in no other.
_NOWHERE = Context()


class BlockContext(BareContext):  # type: ignore[misc]  # final to everybody else
    """The context of a block: it has a beginning and an end, and may be found after that."""

    __slots__ = ("is_over", "outer")

    is_over: bool  # whether the block has ended out of its turn
    outer: Context | None  # what was ambient before it, then


def block_context(
    inside: Context | None = None, *, deadline: float | None = None, attempt: int | None = None
) -> BlockContext:
    """Make the context of a block.

    It has no function, as a block is no call, and no timer but one that cuts off this code: a context follows new tasks
    and threads, a timer does not.

    :param inside: the context around it; the ambient one by default.
    :param deadline: an instant on the process clock; it can only shorten what is there.
    """
    found = inside or get_ambient()
    outer = _NOWHERE if found is None else innermost_open(found) or _NOWHERE
    block: BlockContext = BlockContext()
    block.deadline = deadline if deadline is not None and deadline < outer.deadline else outer.deadline
    block.attempt = outer.attempt if attempt is None else attempt
    block.runtime = outer.runtime
    block._function = block._arguments = None
    block._keywords = NO_KEYWORDS
    block._info = outer._info if outer._info is not BARE else NO_INFO
    block._executed = outer._executed
    block._timer = None if outer._timer is None else timer_here(outer)
    block.is_over = False
    return block


def timer_here(ctx: Context) -> Timer | None:
    """Return the timer of a context found by this code, if it cuts this code off."""
    timer = ctx._timer
    return timer if timer is not None and timer.covers_this_code() else None


def leave_block(ctx: BlockContext, token: AmbientToken) -> None:
    """Make ambient again what was so before a block that made `ctx` the ambient context, which gave `token`."""
    outer = None if token.old_value is Token.MISSING else token.old_value
    if get_ambient() is not ctx:
        ctx.outer, ctx.is_over = outer, True
        return
    try:
        reset_ambient(token)
    except ValueError:  # these variables are a copy
        ctx.outer, ctx.is_over = outer, True
        set_ambient(outer)
    if outer is not None:
        set_ambient(innermost_open(outer))
