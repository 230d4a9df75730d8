"""The way from a call into a chain: composed once, entered on every call.

Most executions inherit nothing and report to nobody, and go straight to the chain. The others take
over the deadline and the facts of the context around them, keep the record that the caller's
`Context` then shows, and tell the listeners of `ExecutionFinished`.

`run` and `arun` write out the making of a fresh context: a call of a function that did it for both
would cost as much as a policy does (40 ns).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, Any, final

from resilience import events
from resilience.clock import clock
from resilience.context import NO_FACTS, Context, Facts, Record, get_ambient, new_context
from resilience.errors import ArgumentMisuse
from resilience.events import finishing
from resilience.outcome import Failure, Outcome, StoppedIteration, Success, genuine
from resilience.runtimes import blocking, tasks
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.tasks import TASKS

if TYPE_CHECKING:
    from resilience.events import Listener
    from resilience.policy import Policy

#: Makes the stage of one policy around another stage, in one world.
StageMaker = Callable[["Policy[Any]", Any], Any]


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
        if not self._parts:
            return stage(self._policy, inner)
        for part in reversed(self._parts):
            inner = part._resilience_chain.compose(stage, inner)
        return inner

    def run(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] | None,
        keywords: dict[str, Any] | None,
        ctx: Context | None,
    ) -> Any:
        """Execute a blocking function."""
        stage = self._blocking
        inner = new_context(Context)
        inner.deadline = inf
        inner.attempt = 1
        inner._facts = NO_FACTS
        inner._timer = None
        inner._runtime = BLOCKING
        inner._function = function
        inner._arguments = arguments
        inner._keywords = keywords
        try:
            if stage is not None and ctx is None and get_ambient() is None and not finishing.is_heard:
                return stage(inner)
            with Execution(self._policy, self._listeners, inner, ctx) as execution:
                execution.value = self._blocking_stage()(inner)
            return execution.value
        except StoppedIteration as carrier:
            stopped = carrier.error
        try:
            raise stopped
        finally:
            del stopped

    def _blocking_stage(self) -> blocking.Stage:
        if finishing.policies_off:
            return blocking.enter
        innermost = _enter_and_tell if finishing.calls_are_heard else blocking.enter
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
        inner = new_context(Context)
        inner.deadline = inf
        inner.attempt = 1
        inner._facts = NO_FACTS
        inner._timer = None
        inner._runtime = TASKS
        inner._function = function
        inner._arguments = arguments
        inner._keywords = keywords
        if stage is not None and ctx is None and get_ambient() is None and not finishing.is_heard:
            return stage(inner)  # and not `await`: one coroutine less
        return self._arun_watched(inner, ctx)

    async def _arun_watched(self, inner: Context, ctx: Context | None) -> Any:
        with Execution(self._policy, self._listeners, inner, ctx) as execution:
            execution.value = await self._task_stage()(inner)
        return execution.value

    def _task_stage(self) -> tasks.Stage:
        if finishing.policies_off:
            return tasks.enter
        innermost = _aenter_and_tell if finishing.calls_are_heard else tasks.enter
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
        source = outer if ctx is None else ctx
        if source is not None:
            inner.deadline = source.deadline if outer is None else min(source.deadline, outer.deadline)
            inner._facts = Facts(source.operation, source.properties)
        if ctx is not None or self._is_heard():
            self._record = Record(self._policy)
            inner._facts = inner._facts._replace(record=self._record)
            if ctx is not None:
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
        return bool(self._listeners) or finishing.is_heard

    def _tell(self, record: Record, error: BaseException | None) -> None:
        heard = self._inner.child()
        heard._facts = heard._facts._replace(listeners=self._listeners)
        numbers = {"attempts": record.attempts, "elapsed": record.elapsed, "outcome": _outcome(self.value, error)}
        events.emit(events.ExecutionFinished, self._policy.name, heard, **numbers)


def _outcome(value: object, error: BaseException | None) -> Outcome[Any] | None:
    """Return how a block ended; None where it was cancelled or interrupted, which is no outcome."""
    if error is None:
        return Success(value)
    return Failure(genuine(error)) if isinstance(error, Exception) else None


# --- the innermost stages, where somebody listens to calls -----------------------------------


def _enter_and_tell(ctx: Context) -> Any:
    with _Calling(ctx) as calling:
        calling.value = blocking.enter(ctx)
    return calling.value


async def _aenter_and_tell(ctx: Context) -> Any:
    with _Calling(ctx) as calling:
        calling.value = await tasks.enter(ctx)
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
        heard = self._ctx.child()
        heard._facts = heard._facts._replace(listeners=())
        events.emit(
            events.CallFinished,
            record.executed.name,
            heard,
            attempt=self._ctx.attempt,
            elapsed=clock.now() - self._began,
            remaining=max(0.0, self._ctx.deadline - self._began),
            outcome=_outcome(self.value, error),
        )
