"""The innermost stages of a chain: they call the function that the context carries.

`enter` calls it in blocking code; `enter_driven` does so where the chain around it is driven, and `enter_task` and
`enter_awaitable` in tasks. Where something will look at the context (the function itself, a record, a timer), it is
made the ambient one for the call; elsewhere that is left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import CodeType, CoroutineType
from typing import Any, Final

from resilience.ambient import get_ambient, reset_ambient, set_ambient
from resilience.callables import (
    NON_AWAITABLE_TYPES,
    UNBEGUN_TYPES,
    is_awaitable,
    mismatch,
    refuse_awaitable,
    refuse_plain,
    refuse_unbegun,
)
from resilience.clock import clock
from resilience.context import Context
from resilience.endings import end_attempt
from resilience.errors import WorkersExhausted, ends_with_the_deadline
from resilience.events.dispatch import report_refusal, subscribers
from resilience.info import BARE
from resilience.outcome import StoppedIteration
from resilience.runtimes.base import EARLIEST, Expired, Timer
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.workers import pool

# --- in blocking code ---


def enter(ctx: Context) -> Any:
    """Call what the context carries, in blocking code."""
    function, arguments = ctx._function, ctx._arguments
    if arguments is None:
        arguments = (ctx,)
    try:
        if ctx._info is not BARE:
            result = _call_in_context(ctx, function, arguments)
        else:  # without an empty dictionary to merge: 40 ns
            result = function(*arguments, **ctx._keywords) if ctx._keywords else function(*arguments)
    except StopIteration as stop:
        raise StoppedIteration(stop) from None
    except TypeError as error:
        refuse_mismatch(ctx, error)
        raise
    if type(result) not in NON_AWAITABLE_TYPES:
        _check_result(function, result)
    return result


def _check_result(function: Callable[..., Any], result: object) -> None:
    if is_awaitable(result):
        raise refuse_awaitable(function, result)
    if type(result) in UNBEGUN_TYPES:
        refuse_unbegun(function)


def _call_in_context(ctx: Context, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Do so with the context as the ambient one, on a worker if a timer may cut it off, and noted in the record.

    Elsewhere the variable is left alone: to set it and to set it back would be a quarter of a call under four policies.
    """
    timer: Any = ctx._timer  # in blocking code a `BlockingTimer`, or None
    record = ctx._info.record
    if timer is not None:
        try:
            timer.check_before_start()
        except WorkersExhausted:
            report_refusal(timer.policy, ctx, "WorkersExhausted")
            raise
    began = clock.now() if subscribers.calls else None
    if record is not None:
        record.begin_attempt()
    outer = get_ambient()
    try:
        set_ambient(ctx)  # inside of the `try`: Ctrl-C may come between any two steps
        if timer is None:
            result = function(*arguments, **ctx._keywords) if ctx._keywords else function(*arguments)
        else:
            try:
                job = timer.begin(function, arguments, ctx._keywords)
            except WorkersExhausted:  # there is no thread: the function was not entered after all
                if record is not None:
                    record.attempts -= 1
                    record = None
                report_refusal(timer.policy, ctx, "WorkersExhausted")
                raise
            result = function(*arguments, **ctx._keywords) if job is None else timer.wait_for(job)
    except BaseException as error:
        if record is not None:
            end_attempt(record, ctx, began, None, error)
        raise_if_expired(timer, error)
        raise
    finally:
        set_ambient(outer)
    if began is not None and record is not None:
        end_attempt(record, ctx, began, result, None)
    return result


async def enter_driven(ctx: Context) -> Any:
    """Call what the context carries, in blocking code where the chain is driven."""
    return enter(ctx) if ctx.runtime is BLOCKING else await _enter_racing(ctx)


async def _enter_racing(ctx: Context) -> Any:
    """Do so on a worker, beside other attempts whose policies run in this thread."""
    runtime: Any = ctx.runtime
    function, arguments, record = ctx._function, ctx._arguments, ctx._info.record
    policy = ctx._executed.name
    try:
        pool.refuse_if_exhausted(policy, pool.most())
    except WorkersExhausted:
        report_refusal(policy, ctx, "WorkersExhausted")
        raise
    began = clock.now() if subscribers.calls else None
    if record is not None:
        record.begin_attempt()
    try:
        token = set_ambient(ctx)
        try:  # the worker gets a copy of the variables
            job = runtime.job(function, (ctx,) if arguments is None else arguments, ctx._keywords)
        finally:
            reset_ambient(token)
        result = await runtime.done(job, policy)
    except BaseException as error:
        if isinstance(error, TypeError):
            refuse_mismatch(ctx, error)
        if record is not None:
            end_attempt(record, ctx, began, None, error)
        raise_if_expired(ctx._timer, error)
        raise
    if began is not None and record is not None:
        end_attempt(record, ctx, began, result, None)
    if type(result) not in NON_AWAITABLE_TYPES:
        _check_result(function, result)
    return result


# --- in tasks ---


def enter_task(ctx: Context) -> Awaitable[Any]:
    """Call what the context carries, and return what is to be awaited. A coroutine around it would cost 100 ns."""
    if ctx._info is not BARE:
        return _await_in_context(ctx)
    function: Callable[..., Awaitable[Any]] = ctx._function
    arguments: Any = ctx._arguments  # and never None: what is called with the context is not bare
    try:
        return function(*arguments, **ctx._keywords) if ctx._keywords else function(*arguments)
    except TypeError as error:
        refuse_mismatch(ctx, error)
        raise


async def enter_awaitable(ctx: Context) -> Any:
    """Do so where the function begins its work when it is called: only once this is awaited."""
    awaitable = enter_task(ctx)
    return await (awaitable if type(awaitable) is CoroutineType else _awaited(ctx._function, awaitable))


async def _awaited(function: Callable[..., Any], awaitable: Any) -> Any:
    if not is_awaitable(awaitable):
        refuse_unbegun(function)
        raise refuse_plain(function, awaitable)
    return await awaitable


async def _await_in_context(ctx: Context) -> Any:
    """Do so with the context as the ambient one, and noted in the record."""
    function, arguments, record = ctx._function, ctx._arguments, ctx._info.record
    began = clock.now() if subscribers.calls else None
    if record is not None:
        record.begin_attempt()
    token = set_ambient(ctx)
    if arguments is None:
        arguments = (ctx,)
    try:
        awaitable = function(*arguments, **ctx._keywords) if ctx._keywords else function(*arguments)
        result = await (awaitable if type(awaitable) is CoroutineType else _awaited(function, awaitable))
    except BaseException as error:
        if isinstance(error, TypeError):
            refuse_mismatch(ctx, error)
        if record is not None:
            end_attempt(record, ctx, began, None, error)
        if getattr(token.old_value, "_timer", None) is not ctx._timer:  # it was not inherited
            raise_if_expired(ctx._timer, error)
        raise
    finally:
        try:
            reset_ambient(token)  # `leave_ambient`, without its frame
        except ValueError:
            pass
    if began is not None and record is not None:
        end_attempt(record, ctx, began, result, None)
    return result


#: The code of the coroutines that are to enter the function: one of them that has not begun was not awaited.
NOT_ENTERED: Final[frozenset[CodeType]] = frozenset(it.__code__ for it in (enter_driven, _await_in_context, _awaited))


# --- what all of them need ---


def refuse_mismatch(ctx: Context, error: TypeError) -> None:
    """Raise where a call cannot have entered the function, as that does not take these arguments."""
    function, arguments = ctx._function, ctx._arguments
    misuse = mismatch(function, (ctx,) if arguments is None else arguments, ctx._keywords, error, arguments is None)
    if misuse is not None:
        raise misuse from None


def raise_if_expired(timer: Timer | None, error: BaseException) -> None:
    """Give to a timer what ends at its instant: calls inside found no time left, which it was to end itself."""
    if timer is not None and ends_with_the_deadline(error) and clock.now() >= timer.deadline - EARLIEST:
        raise Expired(timer) from error
