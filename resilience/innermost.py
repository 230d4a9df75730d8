"""The innermost stages of a chain, which call the function of the context.

`enter` calls it in blocking code, `enter_driven` in blocking code with a driven chain, `enter_task` and
`enter_awaitable` in tasks. If anything will read the context (the function itself, a record, a timer), it becomes the
ambient one during the call; otherwise this step is omitted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import CodeType, CoroutineType
from typing import Any, Final

from resilience.ambient import get_ambient, innermost_open, reset_ambient, set_ambient
from resilience.callables import (
    LAZY_TYPES,
    NON_AWAITABLE_TYPES,
    is_awaitable,
    missing_awaitable,
    refuse_arguments,
    refuse_lazy,
    unexpected_awaitable,
)
from resilience.clock import clock
from resilience.context import Context
from resilience.endings import end_attempt
from resilience.errors import ArgumentMisuse, WorkersExhausted, ends_with_the_deadline
from resilience.events.dispatch import report_refusal, subscribers
from resilience.info import BARE
from resilience.outcome import StoppedIteration
from resilience.runtimes.base import Expired, Timer, has_come
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.workers import pool

# --- in blocking code ---


def enter(ctx: Context) -> Any:
    """Call the function of the context, in blocking code."""
    try:
        if ctx._info is not BARE:
            result = _call_in_context(ctx)
        else:  # not merging an empty dictionary saves 40 ns
            arguments: Any = ctx._arguments  # never None, because a bare context is not passed to the function
            result = ctx._function(*arguments, **ctx._keywords) if ctx._keywords else ctx._function(*arguments)
    except StopIteration as stop:
        raise StoppedIteration(stop) from None
    except TypeError as error:
        refuse_mismatch(ctx, error)
        raise
    if type(result) not in NON_AWAITABLE_TYPES:
        _check_result(ctx._function, result)
    return result


def _check_result(function: Callable[..., Any], result: object) -> None:
    if is_awaitable(result):
        raise unexpected_awaitable(function, result)
    if type(result) in LAZY_TYPES:
        refuse_lazy(function)


def _call_in_context(ctx: Context) -> Any:
    """Call the function with the context as the ambient one: on a worker if a timer may cut it off, and recorded.

    Other calls do not set the variable: setting and resetting it would be a quarter of a call under four policies.
    """
    function, arguments, record = ctx._function, ctx._arguments, ctx._info.record
    if arguments is None:
        arguments = (ctx,)
    timer: Any = ctx._timer  # in blocking code a `PassiveTimer`, or None
    if timer is not None:
        try:
            timer.check_before_start()
        except WorkersExhausted as refusal:
            report_refusal(refusal, ctx)
            raise
    began = clock.now() if subscribers.calls else None
    if record is not None:
        record.begin_attempt()
    outer = get_ambient()
    try:
        set_ambient(ctx)  # inside the `try`, because Ctrl-C may come between any two steps
        if timer is None:
            result = function(*arguments, **ctx._keywords) if ctx._keywords else function(*arguments)
        else:
            try:
                job = timer.begin(function, arguments, ctx._keywords)
            except WorkersExhausted as refusal:
                record = None
                _report_no_thread(refusal, ctx)
                raise
            result = function(*arguments, **ctx._keywords) if job is None else timer.wait_for(job)
    except BaseException as error:
        if record is not None:
            end_attempt(record, ctx, began, None, error)
        raise_if_cut_off(timer, None, error)
        raise
    finally:
        set_ambient(outer)
    if began is not None and record is not None:
        end_attempt(record, ctx, began, result, None)
    return result


async def enter_driven(ctx: Context) -> Any:
    """Call the function of the context, in blocking code with a driven chain."""
    return enter(ctx) if ctx.runtime is BLOCKING else await _enter_racing(ctx)


async def _enter_racing(ctx: Context) -> Any:
    """Call the function on a worker, beside other attempts whose policies run in this thread."""
    runtime: Any = ctx.runtime
    function, arguments, record = ctx._function, ctx._arguments, ctx._info.record
    assert ctx._executed is not None
    policy = ctx._executed.name
    refuse_if_exhausted(policy, ctx)
    began = clock.now() if subscribers.calls else None
    if record is not None:
        record.begin_attempt()
    try:
        job = runtime.job(function, (ctx,) if arguments is None else arguments, ctx._keywords)
        job.variables.run(set_ambient, ctx)
        try:
            job.begin(policy)
        except WorkersExhausted as refusal:
            record = None
            _report_no_thread(refusal, ctx)
            raise
        result = await job.outcome(ctx._timer)
    except BaseException as error:
        if isinstance(error, TypeError):
            refuse_mismatch(ctx, error)
        if record is not None:
            end_attempt(record, ctx, began, None, error)
        raise_if_cut_off(ctx._timer, None, error)
        raise
    if began is not None and record is not None:
        end_attempt(record, ctx, began, result, None)
    if type(result) not in NON_AWAITABLE_TYPES:
        _check_result(function, result)
    return result


def _report_no_thread(refusal: WorkersExhausted, ctx: Context) -> None:
    """Report that no thread could be started for the function, which was not entered, although it was counted."""
    if ctx._info.record is not None:
        ctx._info.record.attempts -= 1
    report_refusal(refusal, ctx)


# --- in tasks ---


def enter_task(ctx: Context) -> Awaitable[Any]:
    """Call the function of the context, and return its awaitable. To await it here would cost 100 ns."""
    if ctx._info is not BARE:
        return _await_in_context(ctx)
    function: Callable[..., Awaitable[Any]] = ctx._function
    arguments: Any = ctx._arguments  # never None, because a bare context is not passed to the function
    try:
        awaitable = function(*arguments, **ctx._keywords) if ctx._keywords else function(*arguments)
    except TypeError as error:
        refuse_mismatch(ctx, error)
        raise
    return awaitable if type(awaitable) is CoroutineType else _await_result(function, awaitable)


async def enter_awaitable(ctx: Context) -> Any:
    """Call the function, whose call may begin its work, only once this coroutine is awaited; await the result."""
    return await enter_task(ctx)


async def _await_result(function: Callable[..., Any], awaitable: Any) -> Any:
    if not is_awaitable(awaitable):
        refuse_lazy(function)
        raise missing_awaitable(function, awaitable)
    return await awaitable


async def _await_in_context(ctx: Context) -> Any:
    """Call the function with the context as the ambient one, record the call, and await the result."""
    function, arguments, record = ctx._function, ctx._arguments, ctx._info.record
    began = clock.now() if subscribers.calls else None
    if record is not None:
        record.begin_attempt()
    token = set_ambient(ctx)
    if arguments is None:
        arguments = (ctx,)
    try:
        awaitable = function(*arguments, **ctx._keywords) if ctx._keywords else function(*arguments)
        result = await (awaitable if type(awaitable) is CoroutineType else _await_result(function, awaitable))
    except BaseException as error:
        if isinstance(error, TypeError):
            refuse_mismatch(ctx, error)
        if record is not None:
            end_attempt(record, ctx, began, None, error)
        outer: Any = token.old_value
        raise_if_cut_off(ctx._timer, outer, error)
        raise
    finally:
        try:
            reset_ambient(token)
        except ValueError:  # closed in another `contextvars.Context`, where nothing was set
            pass
    if began is not None and record is not None:
        end_attempt(record, ctx, began, result, None)
    return result


#: The code objects of the coroutines that enter the function. If a chain returns such a coroutine, it was not awaited.
ENTERING: Final[frozenset[CodeType]] = frozenset(
    it.__code__ for it in (enter_driven, enter_awaitable, _await_in_context, _await_result)
)


# --- in both ---


def refuse_if_exhausted(policy: str, ctx: Context) -> None:
    """Refuse a call for which there is no worker, before the function is entered.

    :param policy: the name of the policy that needs the worker.
    """
    try:
        pool.refuse_if_exhausted(policy)
    except WorkersExhausted as refusal:
        report_refusal(refusal, ctx)
        raise


def refuse_mismatch(ctx: Context, error: TypeError) -> None:
    """Raise a misuse if the call did not enter the function, because it cannot take these arguments."""
    function, arguments = ctx._function, ctx._arguments
    if function is None:
        raise ArgumentMisuse("a policy has passed a context of its own to call: pass ctx, or ctx.child(...)") from None
    refuse_arguments(function, (ctx,) if arguments is None else arguments, ctx._keywords, error, arguments is None)


def raise_if_cut_off(timer: Timer | None, outer: Context | None, error: BaseException) -> None:
    """Raise `Expired` if an error says that no time was left, and the timer is due as well, but has not fired yet.

    :param outer: the ambient context around the execution. Not for its timer: the code there may handle that no time
        was left for a call, until that timer cuts it off. None if the timer belongs to the execution anyway.
    """
    if timer is None or not (ends_with_the_deadline(error) and has_come(timer.deadline)):
        return
    if timer is not getattr(innermost_open(outer), "_timer", None):
        raise Expired(timer) from error
