"""How a call runs: an execution makes one context, which carries the call, and sends it through the chain.

The chain of a pipeline is composed once: each policy's `around` with the rest of the chain as its first
argument, `partial(policy.around, inner)`, the innermost stage being the one that calls what the context
carries. Every stage takes the context, and nothing else.

In tasks the chain is awaited. In threads it is *driven*: as nothing in it ever suspends there, one `send`
runs it to its end. Where every policy's method can be had as a plain function (see `runtimes.lowering`, which
a reader may skip), the chain is made of those instead, to the same results in less time.

A `StopIteration` that the function raises can't leave a coroutine (PEP 479). It travels in a carrier from the innermost
stage to the end of the execution; what looks at exceptions on the way takes it out (`unwrap_stop_iteration`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from math import inf
from types import CoroutineType
from typing import Any, Protocol, TypeAlias

from resilience.ambient import get_ambient, innermost_open, reset_ambient, set_ambient, timer_here
from resilience.callables import (
    NON_AWAITABLE_TYPES,
    UNBEGUN_TYPES,
    close_coroutine,
    is_awaitable,
    is_coroutine_function,
    mismatch,
    refuse_awaitable,
    refuse_plain,
    refuse_unbegun,
)
from resilience.clock import clock
from resilience.context import BareContext, Context, is_over
from resilience.errors import ArgumentMisuse, AwaitableMisuse, WorkersExhausted, ends_with_the_deadline
from resilience.events.dispatch import announce, emit, subscribers
from resilience.events.kinds import CallFinished, CallRejected, Canceller, ExecutionFinished
from resilience.info import BARE, NO_INFO, ExecutionInfo, Listener
from resilience.outcome import Failure, Outcome, StoppedIteration, Success, unwrap_stop_iteration
from resilience.record import Record
from resilience.runtimes.base import EARLIEST, Expired, Runtime, Timer
from resilience.runtimes.blocking import BLOCKING, Suspended, drive
from resilience.runtimes.lowering import lower
from resilience.runtimes.tasks import TASKS
from resilience.runtimes.workers import pool

#: Runs the rest of a chain: `stage(ctx)`. In tasks, and where a chain is driven, its result is awaited.
Stage: TypeAlias = Callable[[Context], Any]


class Executed(Protocol):
    """What is executed: a policy, or a pipeline of them."""

    _resilience_listeners: tuple[Listener, ...]
    _resilience_keeps_record: bool  # whether a policy in it needs a record of each execution

    @property
    def name(self) -> str:
        """What errors and events call it."""
        ...

    def _resilience_chain(self) -> Sequence[object]: ...

    def _resilience_blocking(self) -> Stage: ...

    def _resilience_tasks(self, innermost: Stage) -> Stage: ...


class Composable(Protocol):
    """A policy, as a chain sees it."""

    @property
    def races(self) -> bool:
        """Whether it may run the rest of the chain several times at once."""
        ...

    async def around(self, call: Any, ctx: Context) -> Any:
        """Run the rest of the chain."""


# --- composing ---


def compose(policies: Sequence[Composable], innermost: Stage) -> Stage:
    """Put the policies, outermost first, around one another and around `innermost`."""
    stage = innermost
    for policy in reversed(policies):
        around = policy.around
        stage = partial(around, stage) if is_coroutine_function(around) else partial(_plain, policy, around, stage)
    return stage


async def _plain(policy: Composable, around: Callable[..., Any], stage: Stage, ctx: Context) -> Any:
    """Run a policy whose method is no coroutine function, and has to return something to await."""
    result = around(stage, ctx)
    if not is_awaitable(result):
        name = f"{type(policy).__qualname__}.around"
        raise AwaitableMisuse(f"{name} returned {type(result).__name__}: it has to be `async def around(...)`")
    return await result


def _refuse_forgotten_await(executed: Executed, function: Any, result: Any) -> None:
    """Raise where what comes out of a chain is the rest of it, which a policy has called and not awaited."""
    innermost = {_plain.__code__, _enter_driven.__code__, _await_in_context.__code__, _awaited.__code__}
    code = result.cr_code
    if code in innermost or code.co_name == "around" or code is getattr(function, "__code__", None):
        close_coroutine(result)
        theirs = [f"{type(it).__qualname__}.around" for it in executed._resilience_chain() if not _is_ours(it)]
        raise AwaitableMisuse(
            f"{' or '.join(theirs)} returned its call and has not awaited it: write `return await call(ctx)`"
        )


def _is_ours(policy: object) -> bool:
    return type(policy).__module__.startswith("resilience.")


def compose_for_threads(policies: Sequence[Composable]) -> Stage:
    """Return the stage that runs the policies around what the context carries, in the calling thread."""
    stage: Stage = enter
    for policy in reversed(policies):
        factory = None if policy.races else lower(policy)
        if factory is None:
            return partial(_driven, compose(policies, _enter_driven))
        stage = factory(drive, policy, stage)
    return stage


def _driven(stage: Stage, ctx: Context) -> Any:
    result = drive(stage(ctx))
    if type(result) is CoroutineType:
        _refuse_forgotten_await(ctx._executed, ctx._function, result)
    return result


async def _enter_driven(ctx: Context) -> Any:
    return enter(ctx) if ctx.runtime is BLOCKING else await _enter_racing(ctx)


# --- the innermost stages ---


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
            _report_refusal(timer.policy, ctx)
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
                _report_refusal(timer.policy, ctx)
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


def raise_if_expired(timer: Timer | None, error: BaseException) -> None:
    """Give to a timer what ends at its instant: calls inside found no time left, which it was to end itself."""
    if timer is not None and ends_with_the_deadline(error) and clock.now() >= timer.deadline - EARLIEST:
        raise Expired(timer) from error


def _report_refusal(policy: str, ctx: Context) -> None:
    numbers = {"retry_after": None, "waited": 0.0, "shadow": False}
    emit(CallRejected, policy, ctx, reason="WorkersExhausted", **numbers)


async def _enter_racing(ctx: Context) -> Any:
    """Do so on a worker, beside other attempts whose policies run in this thread."""
    runtime: Any = ctx.runtime
    function, arguments, record = ctx._function, ctx._arguments, ctx._info.record
    policy = ctx._executed.name
    try:
        pool.refuse_if_exhausted(policy, pool.most())
    except WorkersExhausted:
        _report_refusal(policy, ctx)
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


def refuse_mismatch(ctx: Context, error: TypeError) -> None:
    """Raise where a call cannot have entered the function, as that does not take these arguments."""
    function, arguments = ctx._function, ctx._arguments
    misuse = mismatch(function, (ctx,) if arguments is None else arguments, ctx._keywords, error, arguments is None)
    if misuse is not None:
        raise misuse from None


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


def end_attempt(record: Record, ctx: Context, began: float | None, value: object, error: BaseException | None) -> None:
    """Note why a call of the function failed, and report the call to listeners that asked for it.

    :param began: when it did; None where there was no such listener then.
    """
    if isinstance(error, Exception):
        record.note(Failure(unwrap_stop_iteration(error)))
    if began is not None:
        outcome, cancelled_by = _how_it_ended(value, error, ctx)
        announce(
            subscribers.of(CallFinished),
            CallFinished,
            record.executed.name,
            ctx,
            attempt=ctx.attempt,
            elapsed=clock.now() - began,
            remaining=max(0.0, ctx.deadline - began),
            outcome=outcome,
            cancelled_by=cancelled_by,
        )


# --- executing ---


def protect(
    executed: Executed, function: Callable[..., Any], ctx: Context | None = None, *, takes_context: bool = False
) -> Callable[..., Any]:
    """Return the function that executes a blocking `function` with what it is called with.

    :param ctx: the context that the caller passed in, if any.
    :param takes_context: whether `function` is called with the context instead.
    """
    stage: Stage | None = None
    is_observed = ctx is not None or bool(executed._resilience_listeners) or executed._resilience_keeps_record
    info = NO_INFO if takes_context else BARE

    def protected(*args: Any, **kwargs: Any) -> Any:
        nonlocal stage
        if stage is None:
            stage = executed._resilience_blocking()
        inner: Context = BareContext()  # written out: a function for it would be 6 % of a call under four policies
        inner.deadline = inf
        inner.attempt = 1
        inner.runtime = BLOCKING
        inner._function = function
        inner._arguments = None if takes_context else args
        inner._keywords = kwargs
        inner._info = info
        inner._executed = executed
        inner._timer = None
        chain, record = stage, None
        if is_observed or subscribers.executions or get_ambient() is not None:
            record = inherit(inner, executed, ctx)
            chain = enter if subscribers.policies_off else stage
        try:
            return chain(inner) if record is None else _recorded(record, executed, chain, inner)
        except (StoppedIteration, Suspended) as carrier:
            carried = carrier.error
        try:
            raise carried
        finally:
            del carried  # no cycle: error -> traceback -> this frame -> error

    return protected


def aprotect(
    executed: Executed,
    function: Callable[..., Any],
    ctx: Context | None = None,
    *,
    takes_context: bool = False,
    begins_late: bool = True,
    runtime: Runtime = TASKS,
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return the coroutine function that executes `function`, whose result is awaited. The parameters are the same.

    :param begins_late: whether to call `function` begins nothing, as with a coroutine function.
    """
    innermost = enter_task if begins_late else enter_awaitable
    stage = executed._resilience_tasks(innermost)
    is_observed = ctx is not None or bool(executed._resilience_listeners) or executed._resilience_keeps_record
    info = NO_INFO if takes_context else BARE

    async def protected(*args: Any, **kwargs: Any) -> Any:
        inner: Context = BareContext()  # as above
        inner.deadline = inf
        inner.attempt = 1
        inner.runtime = runtime
        inner._function = function
        inner._arguments = None if takes_context else args
        inner._keywords = kwargs
        inner._info = info
        inner._executed = executed
        inner._timer = None
        chain, record = stage, None
        if is_observed or subscribers.executions or get_ambient() is not None:
            record = inherit(inner, executed, ctx)
            chain = innermost if subscribers.policies_off else stage
        result = await (chain(inner) if record is None else _arecorded(record, executed, chain, inner))
        if type(result) is CoroutineType:
            _refuse_forgotten_await(executed, function, result)
        return result

    return protected


# --- the two ends of an execution ---


def inherit(inner: Context, executed: Executed, ctx: Context | None) -> Record | None:
    """Give a new context what it inherits; return the record of the execution, where something will read it.

    :param ctx: the context that the caller passed in, if any.
    """
    if ctx is not None and not isinstance(ctx, Context):
        raise ArgumentMisuse(f"ctx must be a Context, not {ctx!r}")
    outer = innermost_open(get_ambient())
    source = ctx or outer or inner
    inner.deadline = source.deadline if outer is None else min(source.deadline, outer.deadline)
    record = None
    listeners = executed._resilience_listeners
    if ctx is not None or listeners or subscribers.executions or executed._resilience_keeps_record:
        record = Record(executed)
    cap = (outer or inner)._info.cap or source._info.cap
    inner._info = ExecutionInfo(source._info.operation, source._info.properties, listeners, record, cap)
    if outer is not None and inner.runtime is not BLOCKING:  # a timer of a task cuts off no blocking code in it
        inner._timer = timer_here(outer)
    if ctx is not None and record is not None:
        ctx._report = record
    return record


def _recorded(record: Record, executed: Executed, stage: Stage, ctx: Context) -> Any:
    try:
        result = stage(ctx)
    except BaseException as error:
        end_execution(record, executed, ctx, None, error)
        raise
    end_execution(record, executed, ctx, result, None)
    return result


async def _arecorded(record: Record, executed: Executed, stage: Stage, ctx: Context) -> Any:
    try:
        result = await stage(ctx)
    except BaseException as error:
        end_execution(record, executed, ctx, None, error)
        raise
    end_execution(record, executed, ctx, result, None)
    return result


def end_execution(
    record: Record,
    executed: Executed,
    ctx: Context,
    value: object,
    error: BaseException | None,
    items: int | None = None,
) -> None:
    """Close the record, and report how the execution ended: with a value, or with an error.

    :param items: how many items a stream has handed out.
    """
    record.ended = clock.now()
    listeners = executed._resilience_listeners + subscribers.of(ExecutionFinished)
    if listeners:
        outcome, cancelled_by = _how_it_ended(value, error, ctx)
        announce(
            listeners,
            ExecutionFinished,
            executed.name,
            ctx,
            attempts=record.attempts,
            elapsed=record.elapsed,
            outcome=outcome,
            cancelled_by=cancelled_by,
            items=items,
        )


def _how_it_ended(
    value: object, error: BaseException | None, ctx: Context
) -> tuple[Outcome[Any] | None, Canceller | None]:
    """Return the outcome; or, of what was cancelled, which is none, by what."""
    if error is None:
        return Success(value), None
    if isinstance(error, Suspended):
        error = error.error
    if isinstance(error, Exception):
        return Failure(unwrap_stop_iteration(error)), None
    return None, canceller(error, ctx)


def canceller(error: BaseException, ctx: Context) -> Canceller:
    """Say what has cancelled what ran under this context, as far as that can be known from what came through."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "interrupt"
    if isinstance(error, GeneratorExit):
        return "closed"
    return "deadline" if is_over(ctx) else "caller"
