"""The runtime of blocking code: its methods block instead of suspending, so one `send` runs a coroutine to its end.

A function under an enforced `Timeout` runs on a worker thread and can be abandoned; all policy code stays in the
calling thread. A timer that fires raises `Expired` there. That is no `Exception`, so the policies between the timer
and the function neither count nor answer it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from typing import Any, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.callables import close_coroutine, is_awaitable, unexpected_awaitable
from resilience.clock import FOREVER, clock
from resilience.log import logger
from resilience.outcome import StoppedIteration
from resilience.runtimes import workers
from resilience.runtimes.base import Expired, Plan, Runtime, Timer, Waiter, refuse_undeclared_race
from resilience.runtimes.current import trio_task
from resilience.runtimes.driving import drive

T = TypeVar("T")


@final
class PassiveTimer(Timer):
    """A limit that no clock enforces: every wait inside the block checks it, and raises `Expired` at its deadline.

    In blocking code, these are the wait for a function on its worker, sleeps, and waits in a queue.
    """

    __slots__ = ("deadline", "fired", "policy")

    def __init__(self, deadline: float, policy: str) -> None:
        self.deadline: float = deadline
        self.fired: bool = False
        self.policy: str = policy

    @override
    def start(self) -> None:
        return

    @override
    def stop(self, error: BaseException | None) -> bool:
        self.fired = isinstance(error, Expired) and error.timer is self
        return self.fired

    def run(self, function: Callable[[], Any]) -> Any:
        """Call the function on a worker, and abandon it when the time is over."""
        self.check_before_start()
        job = self.begin(function, (), {})
        return function() if job is None else self.wait_for(job)

    def check_before_start(self) -> None:
        """Raise if the function must not begin: its time is over, or too many abandoned functions still run."""
        if clock.now() >= self.deadline:
            raise Expired(self)
        workers.pool.refuse_if_exhausted(self.policy)

    def begin(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> workers.Job | None:
        """Begin the function on a worker; None if the caller has to run it.

        :raises WorkersExhausted: if no thread can be started.
        """
        job = workers.Job(function, arguments, keywords)
        if workers.pool.begin(job, self.policy):
            return job
        # Functions that run at the exit of the interpreter often flush data, so they run, without a limit.
        logger.warning("the interpreter is shutting down: %s cannot cut off what it limits", self.policy)
        return None

    def wait_for(self, job: workers.Job) -> Any:
        """Return the result of a worker's function, or abandon it when the time is over.

        A result that came after that, before this thread woke, is dropped: it may be the answer of an inner Fallback
        that found no time left.
        """
        if not job.wait(self.deadline - clock.now()):
            _warn_in_event_loop("the wait for the function")  # not earlier: most functions are fast
            raise Expired(self)
        result = job.result()
        if job.returned_at >= self.deadline:
            raise Expired(self)
        return result


@final
class BlockingWaiter(Waiter):
    """The waiter of a thread."""

    __slots__ = ("_woken",)

    def __init__(self) -> None:
        self._woken = threading.Lock()  # looked up here: gevent may have patched it after our import
        self._woken.acquire()

    @override
    def wake(self) -> bool:
        with contextlib.suppress(RuntimeError):  # woken twice
            self._woken.release()
        return True

    @override
    def is_alive(self) -> bool:
        return True

    @override
    async def wait(self, deadline: float, timer: Timer | None) -> bool:
        _warn_in_event_loop("the wait in a queue")
        end = deadline if timer is None else min(deadline, timer.deadline)
        if clock.wait(self._woken, None if end == inf else max(0.0, end - clock.now())):
            return True
        if timer is not None and timer.deadline <= deadline:
            raise Expired(timer)
        return False


def _warn_in_event_loop(what: str) -> None:
    """Warn of a wait that blocks an event loop and all its tasks; not in a notebook, whose cells run in a loop."""
    running = getattr(sys.modules.get("asyncio.events"), "_get_running_loop", None)
    is_in_loop = (running is not None and running() is not None) or trio_task() is not None
    if is_in_loop and "ipykernel" not in sys.modules:
        checks.warn(
            f"{what} of a blocking call stops the event loop that runs in this thread, with all its tasks: use "
            "`await policy.aexecute(...)`, `await policy.acall(...)`, `async for` or `async with`, or call it in "
            "a thread, `await asyncio.to_thread(...)`"
        )


@final
class BlockingRuntime(Runtime):
    """The runtime of blocking code."""

    @override
    async def sleep(self, seconds: float, timer: Timer | None) -> None:
        if timer is None or seconds < (left := timer.deadline - clock.now()):
            if seconds > 0:  # `time.sleep(0)` takes 50 us
                _warn_in_event_loop("the sleep")
                clock.sleep(min(seconds, FOREVER))
            return
        clock.sleep(min(max(0.0, left), FOREVER))
        raise Expired(timer)

    @override
    def timer(self, deadline: float, limit: float | None = None, policy: str = "") -> PassiveTimer:
        return PassiveTimer(deadline, policy)

    @override
    def waiter(self) -> BlockingWaiter:
        return BlockingWaiter()

    @override
    async def race(self, call: Callable[[Any], Awaitable[Any]], ctx: Any, plan: Plan[Any]) -> None:
        refuse_undeclared_race(ctx)
        _run_race()(self, call, ctx, plan)

    @override
    async def run(self, function: Callable[..., Any], /, *args: object) -> Any:
        try:
            result = function(*args)
        except StopIteration as stop:
            raise StoppedIteration(stop) from None
        finally:
            del args  # no cycle if the handler raises the failure that is among them
        if is_awaitable(result):
            raise unexpected_awaitable(function, result)
        return result

    @override
    async def _run_until(self, timer: Timer, function: Callable[[], Any], policy: str) -> Any:
        with self.timer(timer.deadline, None, policy) as real:
            return real.run(lambda: drive(self.run(function)))
        raise Expired(timer)

    @override
    async def close(self, resource: object) -> None:
        try:
            close = getattr(resource, "close", None)
            result = close() if callable(close) else None
            if is_awaitable(result):
                close_coroutine(result)  # it can't be awaited here
        except Exception:
            logger.exception("closing a discarded %s raised", type(resource).__name__)


@functools.cache  # imported on first use, as most programs do not race; at the exit of the interpreter, no import works
def _run_race() -> Callable[..., None]:
    from resilience.runtimes.races.threads import run_race

    return run_race


BLOCKING: BlockingRuntime = BlockingRuntime()
