"""What a policy may ask of the runtime that it runs in. Besides `call(ctx)`, it awaits nothing else.

The methods are coroutines in every runtime. In blocking code they have done their waiting by the time
they are awaited, so they never suspend; a task suspends in its event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, final

from typing_extensions import override

from resilience.checks import format_number
from resilience.clock import clock
from resilience.errors import RaceMisuse, TimeoutExceeded
from resilience.outcome import Outcome

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)

#: How many abandoned functions may be running in the process before another one is refused.
DEFAULT_MAX_ABANDONED = 128

#: A timer of an event loop may fire that much before its time, in seconds.
EARLIEST = 0.005


@final
class Expired(BaseException):
    """The timer fired. Only the block of that timer takes it.

    No `Exception`, so that the policies between the timer and the function neither count nor answer it.
    """

    def __init__(self, timer: Timer) -> None:
        super().__init__(timer)
        self.timer: Timer = timer


class Timer:  # no ABC: CPython 3.12 and later make objects of plain classes faster, 3 % of a call with a timeout
    """A limit that cuts off what runs inside its `with` block.

    When it fires, the block ends there: what was running is left (a thread's function) or cancelled
    (a task), the `with` statement swallows what that took, and `fired` is true. A block that ends by
    itself first, in whatever way, ends as if there had been no timer.
    """

    __slots__ = ()

    deadline: float  # instant on the process clock
    fired: bool

    def covers_this_code(self) -> bool:
        """Whether it cuts off the code that asks, too: also a call inside the call that it was made for."""
        return False

    @abstractmethod
    def start(self) -> None:
        """Begin the block. Where that is interrupted, the block is still to be ended."""
        ...

    @abstractmethod
    def stop(self, error: BaseException | None) -> bool:
        """End the block, which raised `error`, if anything; true where this timer did that, and it is to be dropped."""
        ...

    @final
    def __enter__(self) -> Self:
        self.start()
        return self

    @final
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> bool:
        return self.stop(error)


class PassiveTimer(Timer):
    """A limit that nothing arms: everything that waits inside looks at it, and raises `Expired` at its deadline."""

    __slots__ = ("deadline", "fired", "max_abandoned", "policy")

    def __init__(self, deadline: float, policy: str, max_abandoned: int) -> None:
        self.deadline: float = deadline
        self.fired: bool = False
        self.policy: str = policy
        self.max_abandoned: int = max_abandoned

    @override
    def start(self) -> None:
        return

    @override
    def stop(self, error: BaseException | None) -> bool:
        self.fired = isinstance(error, Expired) and error.timer is self
        return self.fired


class Waiter(Protocol):
    """One caller in a queue: it waits in its own thread or task, and can be woken from any thread."""

    def wake(self) -> None:
        """End the wait. May be called once, from any thread; raises `RuntimeError` if the event loop has ended."""
        ...

    def is_alive(self) -> bool:
        """Whether its event loop still runs. Asked where a queue is full, to drop those that will never come."""
        ...

    def wait(self, deadline: float, timer: Timer | None) -> Awaitable[bool]:
        """Wait until woken (true) or until `deadline`, an instant on the process clock (false).

        :param timer: the tightest timer around, which cuts the wait off.
        """
        ...


class Plan(Protocol[C_co]):
    """The course of a race: which attempts begin, when, and which one decides it. It knows no runtime.

    One thread or task at a time uses it. What it raises ends the race, and is raised by it.
    """

    #: Instant on the process clock at which another attempt is to begin; infinity for none.
    due: float

    def begin(self) -> C_co | None:
        """Return the context of another attempt, the first one included, and set `due` for the next.

        None where there will be none after all; `due` has to be infinity then.
        """
        ...

    def ended(self, number: int, outcome: Outcome[Any]) -> bool:
        """Take what attempt `number` ended with; true where that decides the race.

        :param number: from 0, in the order in which the attempts began. One that was cut off is not reported.
        """
        ...


def refuse_undeclared_race(ctx: Any) -> None:
    """Raise where no policy of an execution says that it races: in threads, its chain might not be made for that.

    :param ctx: a `Context`, which stands above this module.
    """
    executed = ctx._executed
    if executed is None or not executed._resilience_races():
        where = "outside an execution" if executed is None else f"inside {executed.name}"
        raise RaceMisuse(f"a race {where}, which says nothing of it: set `races = True` in the class of the policy")


class Runtime(ABC):
    """Threads, or tasks of an event loop, or simulated time."""

    #: Whether a call that has failed may be made again, and whether another value may stand in for what it brings.
    #: Neither after a stream has delivered items.
    is_repeatable: bool = True
    is_answerable: bool = True
    #: Whether what a call brings may be kept for other calls: never the items of a stream.
    is_shareable: bool = True

    @abstractmethod
    async def sleep(self, seconds: float, timer: Timer | None) -> None:
        """Wait for `seconds`.

        :param timer: the tightest timer around, which cuts the wait off.
        """

    @abstractmethod
    def timer(
        self,
        deadline: float,
        limit: float | None = None,
        policy: str = "",
        max_abandoned: int = DEFAULT_MAX_ABANDONED,
    ) -> Timer:
        """Make a timer that fires at `deadline` (on the process clock) once its block is entered.

        :param limit: the seconds from now until then, where that is a policy's constant limit: such timers of
            one event loop end in the order in which they begin. None where the deadline is another one's.
        :param policy: the name of the policy whose timer it is, for error messages.
        :param max_abandoned: how many abandoned functions may be running in the process (threads).
        """

    @abstractmethod
    def waiter(self) -> Waiter:
        """Make the thing by which the current thread or task can be woken."""

    @abstractmethod
    async def race(self, call: Callable[[C], Awaitable[Any]], ctx: C, plan: Plan[C]) -> None:
        """Run the rest of the chain several times at once, as the plan says, until that is decided, or none runs.

        The first attempt runs in the task, or thread, that asks. When it is decided, the other attempts are cut off,
        and have ended when this returns: tasks are cancelled; in threads, policies are unwound, and functions are
        walked away from, as by a `Timeout`. Results that come too late are closed.

        :param ctx: the context that the policy was handed.
        :raises TypeError: if the policy does not say `races = True`.
        """

    @abstractmethod
    async def run(self, function: Callable[..., Any], /, *args: object) -> Any:
        """Call a user's function (a handler), and await what it returns where that can be awaited."""

    async def run_within(
        self, seconds: float, function: Callable[[], Any], policy: str, outer: Timer | None = None
    ) -> Any:
        """Call a user's function as `run` does, and cut it off after so many seconds.

        A task is cancelled. In threads the function runs on a worker, which is abandoned.

        :param policy: the name of the policy whose function it is.
        :param outer: the tightest timer around, which cuts it off, too.
        :raises TimeoutExceeded: when the time is over.
        """
        timer = self.timer(clock.now() + seconds, None, policy)
        with timer:
            return await self.run(function)
        raise late(seconds, policy)

    @abstractmethod
    async def close(self, resource: object) -> None:
        """Close what a policy discards, if it can be closed. An error in that is logged and changes nothing."""


def late(seconds: float, policy: str) -> TimeoutExceeded:
    """Return the error for a function that has taken too long."""
    return TimeoutExceeded(f"no result within {format_number(seconds)} s", policy=policy, timeout=seconds)
