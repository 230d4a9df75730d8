"""How a call runs: an execution makes one context, which carries the call, and passes it through the chain.

The chain of a pipeline is composed once. Each stage is a policy's `around` with the rest of the chain as its first
argument, `partial(policy.around, inner)`; the innermost stage calls the function that the context carries. Each stage
takes the context as its only argument.

In tasks, the chain is awaited. In threads, it is *driven*: nothing in it ever suspends there, so one `send` runs it to
its end. If the methods of all policies are available as plain functions (see `runtimes.lowering`, which a reader may
skip), the chain consists of these instead, which takes less time and gives the same results.

A `StopIteration` that the function raises cannot leave a coroutine (PEP 479). A carrier exception takes it from the
innermost stage to the end of the execution; code that inspects exceptions unwraps it (`unwrap_stop_iteration`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from math import inf
from types import CoroutineType
from typing import Any, Final, TypeAlias

from resilience.ambient import get_ambient, innermost_open, timer_here
from resilience.callables import close_coroutine, is_awaitable, is_coroutine_function, without_partials
from resilience.context import NO_KEYWORDS, BlankContext, Context, new_context
from resilience.endings import end_execution
from resilience.errors import ArgumentMisuse, AwaitableMisuse
from resilience.events.dispatch import subscribers
from resilience.info import BARE, NO_INFO, Composable, Executed, ExecutionInfo
from resilience.innermost import ENTERING, enter, enter_awaitable, enter_driven, enter_task
from resilience.outcome import StoppedIteration
from resilience.record import Record
from resilience.runtimes.base import Runtime
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import Suspended, drive, needs_event_loop, run_chain, suspension_by
from resilience.runtimes.lowering import lower
from resilience.runtimes.tasks import TASKS

#: A part of a chain: `stage(ctx)` runs the rest of it. In tasks, and in a driven chain, the result is awaited.
Stage: TypeAlias = Callable[[Context], Any]


#: The exceptions that carry another one to the end of a blocking execution.
_CARRIERS: Final = (StoppedIteration, Suspended)


# --- composing ---


def compose(policies: Sequence[Composable], innermost: Stage, *, in_threads: bool = False) -> Stage:
    """Compose the policies, outermost first, around one another and around `innermost`."""
    stage = innermost
    for policy in reversed(policies):
        around = policy.around
        stage = partial(around, stage) if is_coroutine_function(around) else partial(_plain, policy, around, stage)
        if in_threads and not _is_ours(policy):
            stage = partial(_without_event_loop, policy, stage)
    return stage


def compose_for_threads(policies: Sequence[Composable]) -> Stage:
    """Return the stage that runs the policies around the function of the context, in the calling thread."""
    stage: Stage = enter
    for policy in reversed(policies):
        factory = None if policy.races else lower(policy)
        if factory is None:
            return _driven(compose(policies, enter_driven, in_threads=True))
        stage = factory(drive, policy, stage)
    return stage


def _driven(stage: Stage) -> Stage:
    """Return the stage that runs a chain of coroutines in the calling thread."""

    def driven(ctx: Context) -> Any:
        result = run_chain(stage(ctx))
        if type(result) is CoroutineType:
            assert ctx._executed is not None
            refuse_forgotten_await(ctx._executed, ctx._function, result)
        return result

    return driven


async def _without_event_loop(policy: Composable, stage: Stage, ctx: Context) -> Any:
    """Run a user's policy in a driven chain, and report it by name if it awaits what needs an event loop."""
    try:
        return await stage(ctx)
    except RuntimeError as error:
        if needs_event_loop(error, 2):
            raise Suspended(suspension_by(type(policy).__qualname__, error)) from None
        raise


async def _plain(policy: Composable, around: Callable[..., Any], stage: Stage, ctx: Context) -> Any:
    """Run a policy whose `around` is not a coroutine function, and must return an awaitable."""
    result = around(stage, ctx)
    if not is_awaitable(result):
        name = f"{type(policy).__qualname__}.around"
        raise AwaitableMisuse(f"{name} returned {type(result).__name__}: it has to be `async def around(...)`")
    return await result


def _is_ours(policy: object) -> bool:
    return type(policy).__module__.startswith("resilience.")


def refuse_forgotten_await(executed: Executed, function: Any, result: Any) -> None:
    """Raise if the result of a chain is the coroutine of an inner stage, which a policy has called but not awaited."""
    function = without_partials(function)
    code = result.cr_code
    called = [getattr(it, "__code__", None) for it in (function, type(function).__call__)]
    has_not_begun = code in (*ENTERING, *called, _plain.__code__, _without_event_loop.__code__)
    if has_not_begun or code.co_name in ("around", "enter_stream"):  # of a policy, or of a stream
        close_coroutine(result)
        theirs = [f"{type(it).__qualname__}.around" for it in executed._resilience_chain() if not _is_ours(it)]
        raise AwaitableMisuse(
            f"{' or '.join(theirs)} returned its call and has not awaited it: write `return await call(ctx)`"
        )


# --- executing ---

# Each of these functions has its new context in the variable `inner`, where `current_context` may look for it.


def run(
    executed: Executed,
    function: Callable[..., Any],
    arguments: tuple[Any, ...] | None,
    keywords: Mapping[str, Any] = NO_KEYWORDS,
    ctx: Context | None = None,
) -> Any:
    """Execute a blocking function once.

    :param arguments: None if it is called with its context instead.
    :param ctx: the context that the caller passed in, if any.
    """
    # A function on a worker needs an ambient context: it is not in the thread in which `current_context` would look.
    is_bare = arguments is not None and not executed._resilience_uses_workers
    inner = new_context(executed, function, arguments, keywords, BARE if is_bare else NO_INFO, BLOCKING)
    stage = executed._resilience_stage(None)
    try:
        if ctx is not None or get_ambient() is not None or subscribers.executions or executed._resilience_keeps_record:
            return _begin_and_run(inner, executed, ctx, stage, enter, _recorded)
        return stage(inner)
    except _CARRIERS as carrier:
        carried = carrier.error
    try:
        raise carried
    finally:
        del carried  # no cycle: error -> traceback -> this frame -> error


def protect(executed: Executed, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `run` does with the arguments of each call.

    It repeats `run` and `new_context`, because to call them would be a fifth of a call under one policy.
    """
    stage: Stage | None = None
    keeps_record = executed._resilience_keeps_record
    info = NO_INFO if executed._resilience_uses_workers else BARE

    def protected(*args: Any, **kwargs: Any) -> Any:
        nonlocal stage
        if stage is None:
            stage = executed._resilience_stage(None)
        inner: Context = BlankContext()
        inner.deadline = inf
        inner.attempt = 1
        inner.runtime = BLOCKING
        inner._function = function
        inner._arguments = args
        inner._keywords = kwargs
        inner._info = info
        inner._executed = executed
        inner._timer = None
        try:
            if keeps_record or subscribers.executions or get_ambient() is not None:
                return _begin_and_run(inner, executed, None, stage, enter, _recorded)
            return stage(inner)
        except _CARRIERS as carrier:
            carried = carrier.error
        try:
            raise carried
        finally:
            del carried  # no cycle, as in `run`

    return protected


async def arun(
    executed: Executed,
    function: Callable[..., Any],
    arguments: tuple[Any, ...] | None,
    keywords: Mapping[str, Any] = NO_KEYWORDS,
    ctx: Context | None = None,
    *,
    is_lazy: bool = True,
    runtime: Runtime = TASKS,
) -> Any:
    """Execute a function once, and await its result. See `run`.

    :param is_lazy: whether a call of `function` begins no work, as with a coroutine function.
    """
    innermost = enter_task if is_lazy else enter_awaitable
    inner = new_context(executed, function, arguments, keywords, NO_INFO if arguments is None else BARE, runtime)
    stage = executed._resilience_stage(innermost)
    if ctx is not None or get_ambient() is not None or subscribers.executions or executed._resilience_keeps_record:
        result = await _begin_and_run(inner, executed, ctx, stage, innermost, _arecorded)
    else:
        result = await stage(inner)
    if type(result) is CoroutineType:
        refuse_forgotten_await(executed, function, result)
    return result


def aprotect(executed: Executed, function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a coroutine function that does what `arun` does with the arguments of each call."""
    stage = executed._resilience_stage(enter_task)
    keeps_record = executed._resilience_keeps_record

    async def protected(*args: Any, **kwargs: Any) -> Any:
        inner: Context = BlankContext()
        inner.deadline = inf
        inner.attempt = 1
        inner.runtime = TASKS
        inner._function = function
        inner._arguments = args
        inner._keywords = kwargs
        inner._info = BARE
        inner._executed = executed
        inner._timer = None
        if keeps_record or subscribers.executions or get_ambient() is not None:
            result = await _begin_and_run(inner, executed, None, stage, enter_task, _arecorded)
        else:
            result = await stage(inner)
        if type(result) is CoroutineType:
            refuse_forgotten_await(executed, function, result)
        return result

    return protected


# --- beginning and ending an execution ---


def _begin_and_run(
    inner: Context,
    executed: Executed,
    ctx: Context | None,
    stage: Stage,
    innermost: Stage,
    recorded: Callable[[Record, Stage, Context], Any],
) -> Any:
    """Begin an execution that may inherit from another context or may need a record, and run its chain.

    In tasks, await the result.
    """
    record = begin_execution(inner, executed, ctx)
    chain = innermost if subscribers.policies_off else stage
    return chain(inner) if record is None else recorded(record, chain, inner)


def begin_execution(inner: Context, executed: Executed, ctx: Context | None) -> Record | None:
    """Set the fields that a new context inherits; return a new record, if anything will read the execution's.

    :param ctx: the context that the caller passed in, if any.
    """
    if ctx is not None and not isinstance(ctx, Context):
        raise ArgumentMisuse(f"ctx must be a Context, not {ctx!r}; use `call` or `acall` to pass arguments")
    outer = innermost_open(get_ambient())
    source = ctx or outer or inner
    inner.deadline = source.deadline if outer is None or source.deadline < outer.deadline else outer.deadline
    record = None
    if ctx is not None or subscribers.executions or executed._resilience_keeps_record:
        record = Record(executed.name)
    elif outer is None:  # there is nothing to inherit: at most, the context of a block that is over is ambient
        return None
    cap = (outer or inner)._info.cap or source._info.cap
    inner._info = info = source._info
    if info is not NO_INFO or record is not None:
        inner._info = ExecutionInfo(info.operation, info.properties, executed._resilience_listeners, record, cap)
    if outer is not None and inner.runtime is not BLOCKING:  # a task's timer cannot cut off blocking code
        inner._timer = timer_here(outer)
    if ctx is not None and record is not None:
        ctx._record = record
    return record


def _recorded(record: Record, stage: Stage, ctx: Context) -> Any:
    try:
        result = stage(ctx)
    except BaseException as error:
        end_execution(record, ctx, None, error)
        raise
    end_execution(record, ctx, result, None)
    return result


async def _arecorded(record: Record, stage: Stage, ctx: Context) -> Any:
    try:
        result = await stage(ctx)
    except BaseException as error:
        end_execution(record, ctx, None, error)
        raise
    end_execution(record, ctx, result, None)
    return result
