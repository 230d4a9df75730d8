"""The way from a call into a chain: composed once, entered on every call.

Most executions inherit nothing and report to nobody. They go straight to the chain: with the context
that is common to all of them, or with one of their own where the function is handed it, and might
keep it. The others take over the deadline and the facts of the context around them, keep the record
that the caller's `Context` then shows, and tell the listeners of `ExecutionFinished`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, final

from resilience import events
from resilience.clock import clock
from resilience.context import NOTHING, Context, Facts, get_ambient, is_over, own_context, still_open
from resilience.errors import ArgumentMisuse
from resilience.events import CallFinished, ExecutionFinished, watched
from resilience.outcome import Failure, Success, genuine
from resilience.record import Record
from resilience.runtimes import blocking, tasks

if TYPE_CHECKING:
    from resilience.events import Canceller, Listener
    from resilience.policy import Policy

_UNLIMITED_IN_THREADS = blocking.UNLIMITED
_UNLIMITED_IN_TASKS = tasks.UNLIMITED
_SHARED = (_UNLIMITED_IN_THREADS, _UNLIMITED_IN_TASKS)

#: Makes the stage of one policy around another stage, in one world.
StageMaker: TypeAlias = Callable[["Policy[Any]", Any], Any]


@final
class Chain:
    """The chain of a policy, or of a pipeline's parts, for each world; and the way into it."""

    __slots__ = ("_blocking", "_listeners", "_own", "_parts", "_policy", "_stages", "_tasks", "is_last")

    def __init__(
        self, policy: Policy[Any], parts: tuple[Policy[Any], ...] = (), listeners: tuple[Listener, ...] = ()
    ) -> None:
        self._policy = policy
        self._parts = parts
        #: Whether in tasks nothing stands between this policy and the function, in whatever chain it is part of.
        self.is_last: bool = True
        self._listeners = listeners
        # What an execution of this pipeline runs: its context begins with the listeners. (Inside of another one, they
        # come in with the first part, which costs a context more.)
        self._own: Chain = Chain(policy, parts[1:]) if listeners else self
        self._stages: dict[object, Any] = {}  # innermost stage -> the composed chain
        # The same, once composed, where nobody listens to this pipeline alone: then there is a short way.
        self._blocking: blocking.Stage | None = None
        self._tasks: tasks.Stage | None = None

    def compose(self, stage: StageMaker, inner: Any) -> Any:
        """Return the stage that runs the whole chain around `inner`."""
        return stage(*self._outermost(stage, inner))

    def _outermost(self, stage: StageMaker, inner: Any) -> tuple[Policy[Any], Any]:
        """Return the outermost policy, and the stage that runs all the others around `inner`."""
        if not self._parts:
            return self._policy, inner
        for part in reversed(self._parts[1:]):
            inner = part._resilience_chain.compose(stage, inner)
        return self._parts[0]._resilience_chain._outermost(stage, inner)

    async def around(self, call: Callable[[Context], Awaitable[Any]], ctx: Context) -> Any:
        """Run the whole chain around the rest of another one."""

        async def rest(ctx: Context, *_made: object) -> Any:
            return await call(ctx)

        return await self.compose(tasks.stage, rest)(ctx, call, None, None)

    def run(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] | None,
        keywords: dict[str, Any] | None,
        ctx: Context | None,
    ) -> Any:
        """Execute a blocking function."""
        stage = self._blocking
        if stage is not None and ctx is None and not watched.executions:
            if get_ambient() is not None:
                return stage(_heir(_UNLIMITED_IN_THREADS, function, arguments), function, arguments, keywords)
            if arguments is not None:
                return stage(_UNLIMITED_IN_THREADS, function, arguments, keywords)
            return stage(own_context(_UNLIMITED_IN_THREADS, function), function, None, None)
        inner = own_context(_UNLIMITED_IN_THREADS, function if arguments is None else None)
        record = self._begin(inner, ctx)
        try:
            result = self._blocking_stage()(inner, function, arguments, keywords)
        except BaseException as error:
            self._end(record, inner, None, error)
            raise
        self._end(record, inner, result, None)
        return result

    def protect(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that executes `function` with what it is called with."""
        entrance = None
        if not self._listeners:
            entrance = blocking.entrance(*self._outermost(blocking.stage, blocking.enter), function, self.run)

        def protected(*args: Any, **kwargs: Any) -> Any:
            return self.run(function, args, kwargs, None)

        return entrance or protected

    def _blocking_stage(self) -> blocking.Stage:
        innermost: blocking.Stage = blocking.enter
        if watched.executions:
            if watched.policies_off:
                return innermost
            if watched.calls:
                innermost = _enter_and_tell
        stage: blocking.Stage | None = self._stages.get(innermost)
        if stage is None:
            stage = self._stages[innermost] = self._own.compose(blocking.stage, innermost)
            if not self._listeners and innermost is blocking.enter:
                self._blocking = stage
        return stage

    def arun(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] | None,
        keywords: dict[str, Any] | None,
        ctx: Context | None,
    ) -> Awaitable[Any]:
        """Execute a function whose result is awaited. What this returns is to be awaited at once."""
        stage = self._tasks
        if stage is not None and ctx is None and not watched.executions:
            # What the stage returns, and not `await`: one coroutine less.
            if get_ambient() is not None:
                return stage(_heir(_UNLIMITED_IN_TASKS, function, arguments), function, arguments, keywords)
            if arguments is not None:
                return stage(_UNLIMITED_IN_TASKS, function, arguments, keywords)
            return stage(own_context(_UNLIMITED_IN_TASKS, function), function, None, None)
        inner = own_context(_UNLIMITED_IN_TASKS, function if arguments is None else None)
        return self._arun_with(inner, function, arguments, keywords, ctx)

    def arun_in(self, unlimited: Context, function: Callable[..., Any], ctx: Context | None) -> Awaitable[Any]:
        """Do the same in another world of tasks, with the function being handed its context.

        :param unlimited: the context that is common to all executions there.
        """
        inner = own_context(unlimited, function)
        if ctx is None and not self._listeners and get_ambient() is None and not watched.executions:
            return self._task_stage()(inner, function, None, None)
        return self._arun_with(inner, function, None, None, ctx)

    async def _arun_with(
        self,
        inner: Context,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] | None,
        keywords: dict[str, Any] | None,
        ctx: Context | None,
    ) -> Any:
        record = self._begin(inner, ctx)
        try:
            result = await self._task_stage()(inner, function, arguments, keywords)
        except BaseException as error:
            self._end(record, inner, None, error)
            raise
        self._end(record, inner, result, None)
        return result

    def aprotect(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the coroutine function that executes `function` with what it is called with."""
        entrance = None
        if not self._listeners:
            entrance = tasks.entrance(*self._outermost(tasks.stage, tasks.enter), function, self.arun)

        async def protected(*args: Any, **kwargs: Any) -> Any:
            return await self.arun(function, args, kwargs, None)

        return entrance or protected

    def _task_stage(self) -> tasks.Stage:
        innermost: tasks.Stage = tasks.enter
        if watched.executions:
            if watched.policies_off:
                return innermost
            if watched.calls:
                innermost = _aenter_and_tell
        stage: tasks.Stage | None = self._stages.get(innermost)
        if stage is None:
            stage = self._stages[innermost] = self._own.compose(tasks.stage, innermost)
            if not self._listeners and innermost is tasks.enter:
                self._tasks = stage
        return stage

    # --- the two ends of the long way ---

    def _begin(self, inner: Context, ctx: Context | None) -> Record | None:
        """Give the new context of an execution what it inherits, and a record where somebody will read it.

        :param ctx: the context that the caller passed in, if any.
        """
        if ctx is not None and not isinstance(ctx, Context):
            raise ArgumentMisuse(f"ctx must be a Context, not {ctx!r}")
        outer = still_open(get_ambient())
        record = None
        if ctx is not None or self._listeners or watched.executions:
            record = Record(self._policy)
        source = outer if ctx is None else ctx
        operation, properties = None, NOTHING
        if source is not None:
            inner.deadline = source.deadline if outer is None else min(source.deadline, outer.deadline)
            operation, properties = source._facts.operation, source._facts.properties
        inner._facts = Facts(operation, properties, self._listeners, record)
        if ctx is not None and record is not None and ctx not in _SHARED:
            ctx._report = record
        return record

    def _end(self, record: Record | None, inner: Context, value: object, error: BaseException | None) -> None:
        """Close the record, and tell those who listen how the execution ended: with a value, or with an error."""
        if record is None:
            return
        record.ended = ended = clock.now()
        listeners = self._listeners + events._subscribers[ExecutionFinished]
        if not listeners:
            return
        name = self._policy.name
        properties = inner._facts.properties
        outcome, cancelled_by = (Success(value), None) if error is None else _failed(error, inner)
        # All fields stand here, and not only those that `announce` does not know: it would take 330 ns to merge them.
        fields: dict[str, object] = {
            "policy": name,
            "operation": inner._facts.operation,
            "time": ended,
            "properties": dict(properties) if properties else {},
            "pipeline": name,
            "attempts": record.attempts,
            "elapsed": record.elapsed,
            "outcome": outcome,
            "cancelled_by": cancelled_by,
        }
        events.tell(listeners, ExecutionFinished, fields)


def _heir(unlimited: Context, function: Callable[..., Any], arguments: tuple[Any, ...] | None) -> Context:
    """Make the context of an execution inside another one, or a block, that reports to nobody.

    :param unlimited: the context that is common to all executions that inherit nothing.
    """
    outer = still_open(get_ambient()) or unlimited
    inner = own_context(unlimited, function if arguments is None else None)
    inner.deadline = outer.deadline
    facts = outer._facts
    if facts.record is not None or facts.listeners:
        facts = Facts(facts.operation, facts.properties)
    inner._facts = facts
    return inner


def _failed(error: BaseException, ctx: Context) -> tuple[Failure | None, Canceller | None]:
    """Say how a block ended that raised: with an outcome, or cancelled, which is none."""
    if isinstance(error, Exception):
        return Failure(genuine(error)), None
    return None, canceller(error, ctx)


def canceller(error: BaseException, ctx: Context) -> Canceller:
    """Say who has cancelled what ran under this context, as far as that can be known from what came through."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "interrupt"
    if isinstance(error, GeneratorExit):
        return "closed"
    return "deadline" if is_over(ctx) else "caller"


# --- the innermost stages, where somebody listens to calls -----------------------------------


def _enter_and_tell(ctx: Context, *made: Any) -> Any:
    before, began = _attempts(ctx), clock.now()
    try:
        result = blocking.enter(ctx, *made)
    except BaseException as error:
        _tell_of_call(ctx, before, began, None, error)
        raise
    _tell_of_call(ctx, before, began, result, None)
    return result


async def _aenter_and_tell(ctx: Context, *made: Any) -> Any:
    before, began = _attempts(ctx), clock.now()
    try:
        result = await tasks.enter(ctx, *made)
    except BaseException as error:
        _tell_of_call(ctx, before, began, None, error)
        raise
    _tell_of_call(ctx, before, began, result, None)
    return result


def _attempts(ctx: Context) -> int:
    return 0 if ctx._facts.record is None else ctx._facts.record.attempts


def _tell_of_call(ctx: Context, before: int, began: float, value: object, error: BaseException | None) -> None:
    """Tell those who asked for it how one call of the function ended."""
    record = ctx._facts.record
    if record is None or record.attempts == before:
        return  # the function was not entered, or nobody listened yet when the execution began
    outcome, cancelled_by = (Success(value), None) if error is None else _failed(error, ctx)
    numbers: dict[str, object] = {
        "attempt": ctx.attempt,
        "elapsed": clock.now() - began,
        "remaining": max(0.0, ctx.deadline - began),
        "outcome": outcome,
        "cancelled_by": cancelled_by,
    }
    events.announce(events._subscribers[CallFinished], CallFinished, record.executed.name, ctx, numbers)
