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
from resilience.context import Context, Facts, get_ambient, own_context, still_open
from resilience.errors import ArgumentMisuse
from resilience.events import watched
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

    __slots__ = ("_blocking", "_listeners", "_parts", "_policy", "_stages", "_tasks")

    def __init__(
        self, policy: Policy[Any], parts: tuple[Policy[Any], ...] = (), listeners: tuple[Listener, ...] = ()
    ) -> None:
        self._policy = policy
        self._parts = parts
        self._listeners = listeners
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
        if stage is not None and ctx is None and get_ambient() is None and not watched.executions:
            if arguments is not None:
                return stage(_UNLIMITED_IN_THREADS, function, arguments, keywords)
            return stage(own_context(_UNLIMITED_IN_THREADS, function), function, None, None)
        inner = own_context(_UNLIMITED_IN_THREADS, function if arguments is None else None)
        with Execution(self._policy, self._listeners, inner, ctx) as execution:
            execution.value = self._blocking_stage()(inner, function, arguments, keywords)
        return execution.value

    def protect(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that executes `function` with what it is called with."""
        entrance = None
        if not self._listeners:
            entrance = blocking.entrance(*self._outermost(blocking.stage, blocking.enter), function, self.run)

        def protected(*args: Any, **kwargs: Any) -> Any:
            return self.run(function, args, kwargs, None)

        return entrance or protected

    def _blocking_stage(self) -> blocking.Stage:
        if watched.policies_off:
            return blocking.enter
        innermost = _enter_and_tell if watched.calls else blocking.enter
        stage: blocking.Stage | None = self._stages.get(innermost)
        if stage is None:
            stage = self._stages[innermost] = self.compose(blocking.stage, innermost)
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
        if stage is not None and ctx is None and get_ambient() is None and not watched.executions:
            # What the stage returns, and not `await`: one coroutine less.
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
        with Execution(self._policy, self._listeners, inner, ctx) as execution:
            execution.value = await self._task_stage()(inner, function, arguments, keywords)
        return execution.value

    def aprotect(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the coroutine function that executes `function` with what it is called with."""
        entrance = None
        if not self._listeners:
            entrance = tasks.entrance(*self._outermost(tasks.stage, tasks.enter), function, self.arun)

        async def protected(*args: Any, **kwargs: Any) -> Any:
            return await self.arun(function, args, kwargs, None)

        return entrance or protected

    def _task_stage(self) -> tasks.Stage:
        if watched.policies_off:
            return tasks.enter
        innermost = _aenter_and_tell if watched.calls else tasks.enter
        stage: tasks.Stage | None = self._stages.get(innermost)
        if stage is None:
            stage = self._stages[innermost] = self.compose(tasks.stage, innermost)
            if not self._listeners and innermost is tasks.enter:
                self._tasks = stage
        return stage


@final
class Execution:
    """The block around one run of a chain. `value` is set inside it to what came out.

    :param policy: what is executed.
    :param listeners: those who listen to it alone.
    :param inner: the new context of this execution.
    :param ctx: the context that the caller passed in, if any.
    """

    __slots__ = ("_inner", "_listeners", "_policy", "_record", "value")

    def __init__(
        self, policy: Policy[Any], listeners: tuple[Listener, ...], inner: Context, ctx: Context | None
    ) -> None:
        if ctx is not None and not isinstance(ctx, Context):
            raise ArgumentMisuse(f"ctx must be a Context, not {ctx!r}")
        self._policy = policy
        self._listeners = listeners
        self._inner = inner
        self._record: Record | None = None
        self.value: Any = None
        outer = get_ambient()
        if outer is not None:
            outer = still_open(outer)
        source = outer if ctx is None else ctx
        if source is not None:
            inner.deadline = source.deadline if outer is None else min(source.deadline, outer.deadline)
            inner._facts = Facts(source.operation, source.properties)
        if ctx is not None or self._is_heard():
            self._record = Record(self._policy)
            inner._facts = Facts(inner.operation, inner.properties, (), self._record)
            if ctx is not None and ctx not in _SHARED:
                ctx._report = self._record

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._record is None:
            return
        self._record.ended = clock.now()
        if self._is_heard():
            self._tell(self._record, error)

    def _is_heard(self) -> bool:
        return bool(self._listeners) or watched.executions

    def _tell(self, record: Record, error: BaseException | None) -> None:
        heard = _heard_by(self._listeners, self._inner)
        numbers = {"attempts": record.attempts, "elapsed": record.elapsed, **_ending(self.value, error, self._inner)}
        events.emit(events.ExecutionFinished, self._policy.name, heard, **numbers)


def _heard_by(listeners: tuple[Listener, ...], ctx: Context) -> Context:
    """Return the context to tell an event with that these listeners hear, and no others but the subscribers."""
    if ctx._facts.listeners != listeners:
        ctx = ctx.child()
        ctx._facts = ctx._facts.heard_by(listeners)
    return ctx


def _ending(value: object, error: BaseException | None, ctx: Context) -> dict[str, object]:
    """Say how a block ended: with an outcome, or cancelled, which is none."""
    if error is None:
        return {"outcome": Success(value)}
    if isinstance(error, Exception):
        return {"outcome": Failure(genuine(error))}
    return {"outcome": None, "cancelled_by": canceller(error, ctx)}


#: A timer of an event loop may fire that much before its time, in seconds.
_EARLIEST = 0.005


def canceller(error: BaseException, ctx: Context) -> Canceller:
    """Say who has cancelled what ran under this context, as far as that can be known from what came through."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "interrupt"
    if isinstance(error, GeneratorExit):
        return "closed"
    return "deadline" if ctx.remaining() <= _EARLIEST else "caller"


# --- the innermost stages, where somebody listens to calls -----------------------------------


def _enter_and_tell(ctx: Context, *made: Any) -> Any:
    with _Calling(ctx) as calling:
        calling.value = blocking.enter(ctx, *made)
    return calling.value


async def _aenter_and_tell(ctx: Context, *made: Any) -> Any:
    with _Calling(ctx) as calling:
        calling.value = await tasks.enter(ctx, *made)
    return calling.value


@final
class _Calling:
    """The block around one call of the function. `value` is set inside it to what came out."""

    __slots__ = ("_before", "_began", "_ctx", "_record", "value")

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._record = ctx._facts.record
        self._before = 0 if self._record is None else self._record.attempts
        self._began = clock.now()
        self.value: Any = None

    def __enter__(self) -> _Calling:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        record = self._record
        if record is None or record.attempts == self._before:
            return  # the function was not entered, or nobody listened yet when the execution began
        events.emit(
            events.CallFinished,
            record.executed.name,
            _heard_by((), self._ctx),
            attempt=self._ctx.attempt,
            elapsed=clock.now() - self._began,
            remaining=max(0.0, self._ctx.deadline - self._began),
            **_ending(self.value, error, self._ctx),
        )
