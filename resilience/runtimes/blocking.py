"""Blocking code: every await has already blocked and finished, so one `send` runs a policy to its end.

The chain of a pipeline is made of plain functions, `stage(ctx, ...) -> result`. A policy becomes such a
function in one of two ways: *lowered*, where its coroutine is rewritten as the plain function that
it is in this world (see `lowering`), or *driven*, where the coroutine is made and sent through.

A function under an enforced `Timeout` runs on a worker thread and can be walked away from; all
policy code stays in the calling thread. There the timer that fired travels as `Expired`, no
`Exception`, so that the policies between the timer and the function neither count nor answer it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from threading import Lock
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, final

from typing_extensions import override

from resilience.callables import PLAIN, close_coroutine, is_awaitable, refuse_awaitable
from resilience.clock import clock
from resilience.context import Context, get_ambient, reset_ambient, set_ambient, unlimited
from resilience.errors import SuspensionMisuse, WorkersExhausted
from resilience.events import CallRejected, emit, logger, watched
from resilience.outcome import Failure, StoppedIteration
from resilience.runtimes import lowering, workers
from resilience.runtimes.base import Runtime, Timer, TimerOwner, Waiter

if TYPE_CHECKING:
    from resilience.policy import Policy

T = TypeVar("T")

#: A plain function that runs the rest of a chain around the call of a function: `stage(ctx, function, arguments,
#: keywords)`. Without arguments the function takes the context itself.
Stage: TypeAlias = Callable[[Context, Callable[..., Any], tuple[Any, ...] | None, dict[str, Any] | None], Any]


@final
class Expired(BaseException):
    """The timer fired. Only the block of that timer takes it."""

    def __init__(self, timer: BlockingTimer) -> None:
        super().__init__(timer)
        self.timer: BlockingTimer = timer


@final
class BlockingTimer(Timer):
    """A limit that everything that waits below it looks at: the innermost stage, sleeps and queues."""

    __slots__ = ("deadline", "fired", "owner")

    def __init__(self, owner: TimerOwner, deadline: float) -> None:
        self.owner: TimerOwner = owner
        self.deadline: float = deadline
        self.fired: bool = False

    @override
    def start(self, ctx: Context | None = None) -> None:
        return

    @override
    def stop(self, error: BaseException | None) -> bool:
        self.fired = isinstance(error, Expired) and error.timer is self
        return self.fired


@final
class BlockingWaiter(Waiter):
    """A thread in a queue."""

    __slots__ = ("_woken",)

    def __init__(self) -> None:
        self._woken = Lock()
        self._woken.acquire()

    @override
    def wake(self) -> None:
        self._woken.release()

    @override
    def is_alive(self) -> bool:
        return True

    @override
    async def wait(self, deadline: float, ctx: Context) -> bool:
        timer = ctx._timer
        end = deadline if timer is None else min(deadline, timer.deadline)
        seconds = None if end == float("inf") else max(0.0, end - clock.now())
        if clock.wait(self._woken, seconds):
            return True
        if isinstance(timer, BlockingTimer) and timer.deadline <= deadline:
            raise Expired(timer)
        return False


@final
class BlockingRuntime(Runtime):
    """The world of threads."""

    @override
    async def sleep(self, seconds: float, ctx: Context) -> None:
        timer = ctx._timer  # first whether there is one: to ask what it is, where its class is abstract, takes 170 ns
        if timer is None or not isinstance(timer, BlockingTimer) or seconds < (left := timer.deadline - clock.now()):
            if seconds > 0:  # `time.sleep(0)` takes 50 us
                clock.sleep(seconds)
            return
        clock.sleep(max(0.0, left))
        raise Expired(timer)

    @override
    def timer(self, owner: TimerOwner, deadline: float, limit: float | None = None) -> BlockingTimer:
        return BlockingTimer(owner, deadline)

    @override
    def waiter(self) -> BlockingWaiter:
        return BlockingWaiter()

    @override
    async def run(self, function: Callable[..., Any], ctx: Context, /, *args: object) -> Any:
        outer = get_ambient()
        try:
            set_ambient(ctx)
            result = function(*args)
        except StopIteration as stop:
            raise StoppedIteration(stop) from None
        finally:
            set_ambient(outer)
            del args  # they hold the failure: no cycle where the handler raises it again
        return _refuse(function, result) if is_awaitable(result) else result

    @override
    async def close(self, resource: object) -> None:
        try:
            close = getattr(resource, "close", None)
            result = close() if callable(close) else None
            if is_awaitable(result):
                close_coroutine(result)  # nobody here can await it
        except Exception:
            logger.exception("closing a discarded %s raised", type(resource).__name__)


BLOCKING: BlockingRuntime = BlockingRuntime()


#: The context of executions that inherit nothing and do not hand it to their function, which might keep it.
UNLIMITED: Context = unlimited(BLOCKING)
_GATE = lowering.Gate(get_ambient, watched, UNLIMITED)


def _refuse(function: Callable[..., Any], result: object) -> NoReturn:
    raise refuse_awaitable(function, result)


def enter(ctx: Context, function: Callable[..., Any], arguments: Any, keywords: dict[str, Any] | None) -> Any:
    """Make the call: the innermost stage.

    A function that is not handed its context can find it as the ambient one. Where that would be the very one that
    `current_context` makes, the variable is left alone: to set it and to set it back takes 100 ns.
    """
    if ctx is not UNLIMITED:
        return _enter_with(ctx, function, arguments, keywords)
    # Merging an empty dictionary takes 40 ns.
    result = function(*arguments, **keywords) if keywords else function(*arguments)
    return result if type(result) in PLAIN or not is_awaitable(result) else _refuse(function, result)


def _enter_with(
    ctx: Context, function: Callable[..., Any], arguments: tuple[Any, ...] | None, keywords: dict[str, Any] | None
) -> Any:
    """Do the same with `ctx` as the ambient context, on a worker where a timer can cut the function off."""
    if arguments is None:
        arguments = (ctx,)
    timer: Any = ctx._timer  # in this world a BlockingTimer, or None
    if timer is not None:
        _refuse_in_vain(timer, ctx)
    record = ctx._facts.record
    if record is not None:
        record.begin_attempt()
    outer, token = get_ambient(), None
    try:
        token = set_ambient(ctx)  # inside of the `try`: Ctrl-C may come between any two steps
        if timer is not None:
            result = _run_until(timer, function, arguments, keywords or {})
        else:
            result = function(*arguments, **keywords) if keywords else function(*arguments)
    except Exception as error:
        if record is not None:
            record.note(Failure(error))
        raise
    finally:
        if token is None:
            set_ambient(outer)
        else:
            reset_ambient(token)  # 100 ns less
    return result if type(result) in PLAIN or not is_awaitable(result) else _refuse(function, result)


#: The same as an expression, for those stages whose `call` this would be.
_SHORTCUT = lowering.Shortcut(
    """(
        enter_with(ctx, function, arguments, keywords) if (ctx := ...) is not unlimited
        else call(ctx, function, arguments, keywords) if keywords
        else result if type(result := function(*arguments)) in plain or not is_awaitable(result)
        else refuse(function, result)
    )""",
    {
        "enter_with": _enter_with,
        "unlimited": UNLIMITED,
        "type": type,
        "plain": PLAIN,
        "is_awaitable": is_awaitable,
        "refuse": _refuse,
    },
)


def _refuse_in_vain(timer: BlockingTimer, ctx: Context) -> None:
    """Raise where the function is not to be entered: its time is over, or too many of its like still run."""
    if clock.now() >= timer.deadline:
        raise Expired(timer)
    try:
        most: int = getattr(timer.owner, "max_abandoned", workers.DEFAULT_MAX_ABANDONED)
        workers.pool.refuse_if_exhausted(timer.owner.name, most)
    except WorkersExhausted:
        emit(CallRejected, timer.owner.name, ctx, reason="WorkersExhausted", retry_after=None, waited=0.0)
        raise


def _run_until(
    timer: BlockingTimer, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Run the function on a worker; walk away from it when the timer says so."""
    job = workers.Job(function, arguments, keywords)
    if not workers.pool.begin(job):  # what is flushed at the exit is wanted, and this is how it would run without us
        logger.warning("the interpreter is shutting down: %s cannot cut off what it limits", timer.owner.name)
        return function(*arguments, **keywords)
    if not job.wait(timer.deadline - clock.now()):
        raise Expired(timer)
    return job.result()


def stage(policy: Policy[Any], inner: Stage) -> Stage:
    """Return the plain function that runs `policy` around `inner`."""
    lowered = lowering.lower(policy.around, drive, _SHORTCUT if inner is enter else None)
    return partial(_driven, policy, inner) if lowered is None else lowered(policy, inner)


def entrance(
    policy: Policy[Any], inner: Stage, function: Callable[..., Any], run: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Return the function that executes `function` under `policy` around `inner`, or by `run`, if it can be had."""
    factory = lowering.entrance(policy.around, drive, _GATE, _SHORTCUT if inner is enter else None)
    return factory and factory(policy, inner, function, run)


def _driven(policy: Policy[Any], inner: Stage, ctx: Context, *made: Any) -> Any:
    """Run a policy as it is written. `drive` stands here once more: with its frame, 200 policies would not nest."""

    async def call(ctx: Context) -> Any:
        try:
            return inner(ctx, *made)
        except StopIteration as stop:
            raise StoppedIteration(stop) from None

    coroutine = _as_coroutine(policy.around(call, ctx))
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    except StoppedIteration as carrier:
        stopped = carrier.error
    else:
        raise _suspended(coroutine, type(policy).__qualname__)
    try:
        raise stopped
    finally:
        del stopped


def drive(awaitable: Awaitable[T], owner: str) -> T:
    """Run an awaitable, usually a coroutine, in which nothing is left to wait for, and return its result.

    A suspension is a bug of `owner`, the policy that awaited something else than its `call` and the runtime.
    A `StopIteration` of the user's, which no coroutine may raise, travels in a carrier to here.
    """
    coroutine = _as_coroutine(awaitable)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    except StoppedIteration as carrier:
        stopped = carrier.error
    else:
        raise _suspended(coroutine, owner)
    try:
        raise stopped
    finally:
        del stopped


def _as_coroutine(awaitable: Awaitable[T]) -> Coroutine[Any, Any, T]:
    return awaitable if isinstance(awaitable, CoroutineType) else _awaited(awaitable)


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _suspended(coroutine: Coroutine[Any, Any, object], owner: str) -> SuspensionMisuse:
    coroutine.close()
    return SuspensionMisuse(
        f"{owner} suspended in blocking code: a policy may await only its call and what ctx and ctx.runtime offer"
    )
