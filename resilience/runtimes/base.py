"""The interface of a runtime: all that a policy may await besides `call(ctx)`.

The methods are coroutines in every runtime. In blocking code they block the thread, and never suspend; in a task they
suspend in its event loop.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableSequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, final

from resilience.clock import clock
from resilience.errors import RaceMisuse, TimeoutExceeded
from resilience.formats import format_number
from resilience.outcome import Outcome

if TYPE_CHECKING:
    from resilience.state.permits import Place

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)

#: How many seconds before its time a timer of an event loop may fire. Those of uvloop are up to a millisecond early,
#: those of asyncio up to the resolution of the clock: 16 ms under Windows before Python 3.13.
TIMER_TOLERANCE = max(0.005, time.get_clock_info("monotonic").resolution)


def has_come(instant: float) -> bool:
    """Whether an instant on the process clock has come, or comes so soon that a timer may have fired for it."""
    return clock.now() >= instant - TIMER_TOLERANCE


@final
class Expired(BaseException):
    """The timer fired. Only the block of that timer catches this.

    It is no `Exception`, so that the policies between the timer and the function neither count nor answer it.
    """

    def __init__(self, timer: Timer) -> None:
        super().__init__(timer)
        self.timer: Timer = timer


class Timer:  # no ABC: CPython 3.12 and later make objects of plain classes faster, 3 % of a call with a timeout
    """A limit that cuts off what runs inside its `with` block.

    When the timer fires, a function in a thread is abandoned, and a task is cancelled. The `with` statement swallows
    the exception that ends the block, and `fired` is true. A block that ends by itself before that, with a result or
    an error, ends as if there were no timer.
    """

    __slots__ = ()

    deadline: float  # instant on the process clock
    fired: bool

    def covers_this_code(self) -> bool:
        """Whether this timer also cuts off the caller of this method, for example a call nested in the block."""
        return False

    @abstractmethod
    def start(self) -> None:
        """Begin the block. If an interrupt ends this method early, `stop` must be called nevertheless."""
        ...

    @abstractmethod
    def stop(self, error: BaseException | None) -> bool:
        """End the block, which raised `error` or None; true if this timer caused the error, which is then dropped."""
        ...

    @final
    def __enter__(self) -> Self:
        self.start()
        return self

    @final
    def __exit__(self, kind: object, error: BaseException | None, traceback: object, /) -> bool:
        return self.stop(error)


class Waiter:  # no ABC, as above
    """One caller in a queue: it waits in its own thread or task, and can be woken from any thread."""

    __slots__ = ("place",)

    #: For the queue: whether the caller still waits in it.
    place: Place

    @abstractmethod
    def wake(self) -> bool:
        """End the wait; false if its event loop has ended. May be called from any thread, and again."""
        ...

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the event loop of the waiter still runs. A full queue drops waiters whose loop has ended."""
        ...

    @abstractmethod
    def wait(self, deadline: float, timer: Timer | None) -> Awaitable[bool]:
        """Wait until woken (true) or until `deadline`, an instant on the process clock (false).

        :param timer: the tightest timer around the wait, which cuts it off.
        """
        ...


class Plan(Protocol[C_co]):
    """The rules of a race: which attempts begin, when, and which one decides it. A plan knows no runtime.

    One thread or task at a time uses it. An error that it raises ends the race, which raises it.
    """

    #: The instant on the process clock at which the next attempt begins; infinity if there is none.
    due: float

    def begin(self) -> C_co | None:
        """Return the context of the next attempt (or the first), and set `due` to the instant of the one after it.

        None if there will be no further attempt; `due` must be infinity then.
        """
        ...

    def ended(self, number: int, outcome: Outcome[Any]) -> bool:
        """Record the outcome of attempt `number`; true if that decides the race.

        :param number: from 0, in the order in which the attempts began. An attempt that was cut off is not reported.
        """
        ...


def refuse_undeclared_race(ctx: Any) -> None:
    """Raise if no policy of the execution declares `races = True`: in threads, its chain might be unable to race.

    :param ctx: a `Context`, which is defined above this module.
    """
    executed = ctx._executed
    if executed is None or not any(it.races for it in executed._resilience_chain()):
        where = "outside an execution" if executed is None else f"inside {executed.name}"
        raise RaceMisuse(f"a race {where}, which says nothing of it: set `races = True` in the class of the policy")


class Runtime(ABC):
    """What policies may await: in threads, in tasks of an event loop, or in simulated time."""

    #: Whether a call that has failed may be made again, and whether another value may replace its result.
    #: Neither after a stream has delivered items, except that `resume` allows another call.
    is_repeatable: bool = True
    is_answerable: bool = True
    #: Whether the result of a call may be kept for other calls; not for the items of a stream.
    is_shareable: bool = True

    @abstractmethod
    async def sleep(self, seconds: float, timer: Timer | None) -> None:
        """Wait for `seconds`.

        :param timer: the tightest timer around the wait, which cuts it off.
        """

    @abstractmethod
    def timer(self, deadline: float, limit: float | None = None, policy: str = "") -> Timer:
        """Make a timer that fires at `deadline`, an instant on the process clock, once its block is entered.

        :param limit: the seconds from now to `deadline`, if that is the constant limit of a policy: such timers of
            one event loop are due in the order in which they begin. None if the deadline is inherited.
        :param policy: the name of the policy to which the timer belongs, for error messages.
        """

    @abstractmethod
    def waiter(self) -> Waiter:
        """Make a waiter for the current thread or task."""

    @abstractmethod
    async def race(self, call: Callable[[C], Awaitable[Any]], ctx: C, plan: Plan[C]) -> None:
        """Run the rest of the chain several times at once, as the plan says, until it is decided or none is left.

        The first attempt runs in the caller's task or thread. Once the race is decided, the other attempts are cut off,
        and have ended when this returns: tasks are cancelled; in threads, policies are unwound, and functions are
        abandoned, as by a `Timeout`. Results that arrive too late are closed.

        :param ctx: the context that the policy received.
        :raises TypeError: if the policy does not declare `races = True`.
        """

    @abstractmethod
    async def run(self, function: Callable[..., Any], /, *args: object) -> Any:
        """Call a user's function (a handler), and await its result if that is an awaitable."""

    async def run_within(
        self, seconds: float, function: Callable[[], Any], policy: str, outer: Timer | None = None
    ) -> Any:
        """Call a user's function as `run` does, and cut it off after `seconds`.

        In tasks the function is cancelled. In threads it runs on a worker, and is abandoned.

        :param policy: the name of the policy to which the function belongs.
        :param outer: the tightest timer around the call, which cuts it off, too.
        :raises TimeoutExceeded: if the function takes longer.
        """
        ends_at = clock.now() + seconds
        if outer is not None and outer.deadline <= ends_at:
            return await self._run_until(outer, function, policy)
        timer = self.timer(ends_at, None, policy)
        with timer:
            return await self._run_until(timer, function, policy)
        raise timeout_exceeded(seconds, policy)

    async def _run_until(self, timer: Timer, function: Callable[[], Any], policy: str) -> Any:
        """Call a user's function in the block of this timer, which cuts it off."""
        return await self.run(function)

    @abstractmethod
    async def close(self, resource: object) -> None:
        """Close a resource that a policy discards, if it can be closed. An error while closing is only logged."""

    def _shield(self) -> AbstractContextManager[object]:
        """Return a block whose waits no cancel scope around it ends."""
        return nullcontext()


async def close_each(close: Callable[[Any], Awaitable[None]], resources: MutableSequence[Any]) -> None:
    """Take all of these resources from their list, and close them, even if closing one of them is cancelled.

    :param close: closes one, as `Runtime.close` does.
    """
    failure: BaseException | None = None
    while resources:
        try:
            await close(resources.pop())
        except BaseException as error:  # cancelled or interrupted: first close the others
            failure = error
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # no cycle: error -> traceback -> this frame -> error


def timeout_exceeded(seconds: float, policy: str) -> TimeoutExceeded:
    """Return the error for a function that took too long."""
    return TimeoutExceeded(f"no result within {format_number(seconds)} s", policy=policy, timeout=seconds)
