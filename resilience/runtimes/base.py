"""What a policy may ask of the world it runs in. Besides `call(ctx)`, it awaits nothing else.

The methods are coroutines in every world. In blocking code they have done their waiting by the time
they are awaited, so they never suspend; a task suspends in its event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from resilience.context import Context


class TimerOwner(Protocol):
    """Whose timer it is: a policy.

    In threads its `max_abandoned`, where it has one, says how many functions that were walked away from may be
    running in the process before another one is refused; for those that have none it is 128.
    """

    @property
    def name(self) -> str:
        """What errors and events call it."""
        ...


class Timer(ABC):
    """A limit that cuts off what runs inside its `with` block.

    When it fires, the block ends there: what was running is left (a thread's function) or cancelled
    (a task), the `with` statement swallows what that took, and `fired` is true. A block that ends by
    itself first, in whatever way, ends as if there had been no timer.
    """

    __slots__ = ()

    deadline: float  # instant on the process clock
    fired: bool

    @abstractmethod
    def start(self, ctx: Context | None = None) -> None:
        """Begin the block. Where that is interrupted, the block is still to be ended.

        :param ctx: the context of the function, if nothing else runs in the block. A timer may make it the ambient one
            for as long as its block lasts; where it does not, the innermost stage will, which takes longer.
        """

    @abstractmethod
    def stop(self, error: BaseException | None) -> bool:
        """End the block, which raised `error`, if anything; true where this timer did that, and it is to be dropped."""

    @final
    def __enter__(self) -> Self:
        self.start()
        return self

    @final
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> bool:
        return self.stop(error)


class Waiter(Protocol):
    """One caller in a queue: it waits in its own world, and can be woken from any thread."""

    def wake(self) -> None:
        """End the wait. May be called once, from any thread; raises `RuntimeError` if the world has ended."""
        ...

    def is_alive(self) -> bool:
        """Whether its world still runs. Asked where a queue is full, to drop those who will never come."""
        ...

    async def wait(self, deadline: float, ctx: Context) -> bool:
        """Wait until woken (true) or until `deadline`, an instant on the process clock (false)."""
        ...


class Runtime(ABC):
    """One world."""

    @abstractmethod
    async def sleep(self, seconds: float, ctx: Context) -> None:
        """Wait for `seconds`; cut off by the timers around."""

    @abstractmethod
    def timer(self, owner: TimerOwner, deadline: float, limit: float | None = None) -> Timer:
        """Make a timer that fires at `deadline` (on the process clock) once its block is entered.

        :param owner: the policy whose timer it is; threads ask for it.
        :param limit: the seconds from now until then, where that is the owner's constant limit: such timers of
            one event loop end in the order in which they begin. None where it is somebody else's deadline.
        """

    @abstractmethod
    def waiter(self) -> Waiter:
        """Make the thing by which the current thread or task can be woken."""

    @abstractmethod
    async def run(self, function: Callable[..., Any], ctx: Context, /, *args: object) -> Any:
        """Call a function of the user's (a handler) with `ctx` as the ambient context, and await it where one can."""

    @abstractmethod
    async def close(self, resource: object) -> None:
        """Close what a policy throws away, if it can be closed. An error in that is logged and changes nothing."""
