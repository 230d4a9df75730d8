"""Chaos: inject faults into a share of the calls, to test the policies around them.

Netflix's Chaos Monkey (2011) did it to machines, and Polly's Simmy to calls. Off until it is switched on for a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, Never, TypeAlias, TypeVar, cast, final, overload

from typing_extensions import override

from resilience import checks, forks
from resilience.backoff import Randomness, happens
from resilience.callables import name_of
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context, waits_until
from resilience.errors import DeadlineExceeded
from resilience.events.dispatch import emit
from resilience.events.kinds import ChaosInjected
from resilience.formats import format_number, format_percent
from resilience.policy import Call, Policy

T = TypeVar("T")
A_co = TypeVar("A_co", covariant=True)

#: An exception, a class of them, or a function of the context that returns one.
ErrorLike: TypeAlias = Exception | type[Exception] | Callable[[Context], Exception]

_Effect: TypeAlias = Literal["error", "result", "delay", "action"]

#: The default of `result`: None is a result.
_NOT_GIVEN: Final[Any] = ...

#: The environment variable that forbids chaos if it is "off".
VARIABLE: Final = "RESILIENCE_CHAOS"
_A_DAY: Final = 86_400.0


class Switch(NamedTuple):
    """A period for which a Chaos is switched on."""

    rate: float
    until: float
    epoch: int


@final
class Chaos(Policy[A_co], Generic[A_co]):
    """Make a share of the calls fail, return another result, take longer, or begin with an action of yours.

    It does nothing until it is switched on, with `on()` or for a block, `with chaos.injecting():`, and switches itself
    off after some time. `Chaos.stop_all()` ends it everywhere in the process. With `RESILIENCE_CHAOS=off` in the
    environment it cannot be switched on. Give exactly one of `error`, `result`, `delay` and `action`.

    :param rate: the share of the calls that are affected while it is on, from 0 to 1; 0.01 by default.
    :param error: what is raised instead of making the call: an `Exception`, a class of them that needs no arguments, or
        a function of the context that returns one. Calls that share one exception share its traceback, so prefer a
        class.
    :param result: what is returned instead of making the call, as it is: a function is not called, and causes a
        warning.
    :param delay: seconds before the call is made, or a function of the context that returns them. Timeouts around it
        cut the wait off; a wait that does not fit into the deadline ends there, with `DeadlineExceeded`.
    :param action: a function of the context that is called before the call is made. May be asynchronous in asynchronous
        code. What it raises reaches the caller.
    :param when: a predicate over the context: which calls may be affected; all by default.
    :param name: the name of this policy in events; "Chaos" by default.
    :param rng: source of randomness, `random` by default; `random.Random(seed)` makes it repeatable.

    Place it innermost, next to the function, so that all policies around it react to its faults. In a simulation it is
    seeded.

    >>> from resilience import Chaos, Retry
    >>> chaos = Chaos(error=ConnectionError)
    >>> with chaos.injecting(rate=1.0):
    ...     chaos.capture(lambda ctx: "fine")
    Failure(error=ConnectionError())
    >>> chaos.capture(lambda ctx: "fine")
    Success(value='fine')
    """

    _epoch: ClassVar[int] = 0  # incremented by `stop_all`, which ends all earlier switches
    _resilience_shares = "switch"

    @overload
    def __init__(
        self: Chaos[Never],
        rate: float = 0.01,
        *,
        error: ErrorLike,
        when: Callable[[Context], object] | None = None,
        name: str | None = None,
        rng: Randomness | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        rate: float = 0.01,
        *,
        result: A_co,
        when: Callable[[Context], object] | None = None,
        name: str | None = None,
        rng: Randomness | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: Chaos[Never],
        rate: float = 0.01,
        *,
        delay: Duration | Callable[[Context], Duration],
        when: Callable[[Context], object] | None = None,
        name: str | None = None,
        rng: Randomness | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: Chaos[Never],
        rate: float = 0.01,
        *,
        action: Callable[[Context], object],
        when: Callable[[Context], object] | None = None,
        name: str | None = None,
        rng: Randomness | None = None,
    ) -> None: ...
    def __init__(
        self,
        rate: float = 0.01,
        *,
        error: ErrorLike | None = None,
        result: Any = _NOT_GIVEN,
        delay: Duration | Callable[[Context], Duration] | None = None,
        action: Callable[[Context], object] | None = None,
        when: Callable[[Context], object] | None = None,
        name: str | None = None,
        rng: Randomness | None = None,
    ) -> None:
        checks.not_bare("@Chaos(error=...)", rate)
        self._rate = checks.within("rate", rate, 0, 1)
        given: dict[_Effect, Any] = {"error": error, "result": result, "delay": delay, "action": action}
        given = {key: value for key, value in given.items() if value is not (_NOT_GIVEN if key == "result" else None)}
        if len(given) != 1:
            those = ", ".join(f"{key}={value!r}" for key, value in given.items()) or "none of them"
            raise ValueError(f"give exactly one of error, result, delay and action, not {those}")
        self._effect, value = given.popitem()
        self._value = _CHECKS[self._effect](value)
        self._when = checks.optional_function("when", when, ("ctx",))
        self._rng = checks.optional_randomness("rng", rng)
        self._resilience_set_up({"rate": rate, self._effect: self._value, "when": when, "name": name, "rng": rng})
        self._reset()
        forks.reset_after_fork(self, Chaos._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._switches: tuple[Switch, ...] = ()  # the last one applies; the others again after the blocks inside them
        self._injected = 0

    @override
    async def around(self, call: Call[T], ctx: Context) -> T | A_co:
        if not self._switches or not self._draw(ctx):
            return await call(ctx)
        emit(ChaosInjected, self.name, ctx, effect=self._effect)
        if self._effect == "error":
            return cast("T", await ctx.runtime.run(self._raise_error, ctx))
        if self._effect == "result":
            return cast("A_co", self._value)
        if self._effect == "delay":
            await self._wait(ctx)
        else:
            await ctx.runtime.run(self._value, ctx)
        return await call(ctx)

    # --- switching ---

    def on(self, rate: float | None = None, lasts: Duration = 300.0) -> None:
        """Switch it on.

        :param rate: the share of the calls that are affected; that of the constructor by default.
        :param lasts: after how many seconds it switches itself off; 300 by default, at most a day.
        :raises RuntimeError: if `RESILIENCE_CHAOS=off` in the environment forbids it.
        """
        switch = self._make_switch(rate, lasts)
        with self._lock:
            self._switches = (switch,)

    def off(self) -> None:
        """Switch it off."""
        with self._lock:
            self._switches = ()

    @contextmanager
    def injecting(self, rate: float | None = None, lasts: Duration = 300.0) -> Iterator[None]:
        """Switch it on for a block, such as a test. Afterwards it is as before; off, if it was switched off inside.

        :param rate: as in `on`.
        :param lasts: as in `on`.
        """
        switch = self._make_switch(rate, lasts)
        with self._lock:
            self._switches += (switch,)
        try:
            yield
        finally:
            with self._lock:
                self._switches = tuple(it for it in self._switches if it is not switch)

    @staticmethod
    def stop_all() -> None:
        """Switch off every `Chaos` in this process."""
        Chaos._epoch += 1

    @property
    def is_on(self) -> bool:
        """Whether calls may be affected now."""
        return self._find_switch() is not None

    @property
    def injected(self) -> int:
        """How many faults it has injected so far."""
        return self._injected

    @override
    def describe(self) -> str:
        switch = self._find_switch()
        rate = self._rate if switch is None else switch.rate
        state = "off" if switch is None else f"on for {max(0.0, switch.until - clock.now()):.0f} s more"
        return f"{self.name}: {_in_words(self._effect, self._value, f'{format_percent(rate)} of the calls')}; {state}"

    # --- private ---

    def _make_switch(self, rate: float | None, lasts: Duration) -> Switch:
        share = self._rate if rate is None else checks.within("rate", rate, 0, 1)
        seconds = checks.seconds("lasts", lasts)
        if seconds > _A_DAY:
            raise ValueError(f"lasts must be at most a day, {_A_DAY:g} s, not {lasts!r}: chaos has to end by itself")
        if os.environ.get(VARIABLE, "").lower() in {"off", "0", "false", "no"}:
            raise RuntimeError(f"{VARIABLE}={os.environ[VARIABLE]} in the environment forbids to switch {self.name} on")
        return Switch(share, clock.now() + seconds, Chaos._epoch)

    def _find_switch(self) -> Switch | None:
        """Return the switch that applies, or None if it is off; discard those that are over."""
        with self._lock:
            now = clock.now()
            self._switches = tuple(it for it in self._switches if now < it.until and it.epoch == Chaos._epoch)
            return self._switches[-1] if self._switches else None

    def _draw(self, ctx: Context) -> bool:
        """Draw whether this call is affected. If so, count it."""
        switch = self._find_switch()
        if switch is None or (self._when is not None and not self._when(ctx)) or not happens(switch.rate, self._rng):
            return False
        with self._lock:
            self._injected += 1
        return True

    def _raise_error(self, ctx: Context) -> Never:
        """Raise the error: in a function, because a `StopIteration` cannot leave a coroutine."""
        raise self._make_error(ctx)

    def _make_error(self, ctx: Context) -> Exception:
        error = self._value
        if not _is_error(error):
            error = error(ctx)
            if not _is_error(error):
                raise TypeError(f"error(ctx) must return an Exception, not {error!r}")
        if isinstance(error, type):
            return cast("Exception", error())
        return cast("Exception", error.with_traceback(None))  # otherwise it would collect the frames of all calls

    async def _wait(self, ctx: Context) -> None:
        seconds = self._value
        if callable(seconds):
            seconds = checks.seconds("what delay(ctx) returned", seconds(ctx), zero=True)
        left = max(0.0, waits_until(ctx) - clock.now())
        await ctx.sleep(min(seconds, left))
        if seconds > left:
            raise DeadlineExceeded("the deadline passed in a delay that was injected", policy=self.name)


def _is_error(value: object) -> bool:
    return isinstance(value, Exception) or (isinstance(value, type) and issubclass(value, Exception))


def _checked_error(value: Any) -> Any:
    if isinstance(value, type) and _is_error(value):
        try:
            value()
        except Exception as error:
            name = value.__name__
            raise TypeError(
                f"error must be made without arguments: {error}; use error=lambda ctx: {name}(...)"
            ) from None
    if _is_error(value):
        return value
    if isinstance(value, (type, BaseException)) or not callable(value):
        raise TypeError(f"error must be an Exception, a class of them or a function that returns one, not {value!r}")
    return checks.plain_function("error", value, ("ctx",))


def _checked_result(value: Any) -> Any:
    """Warn if the result is a function: its author may expect that it is called, as those of the other effects."""
    if isinstance(value, (FunctionType, MethodType)):
        checks.warn(
            f"this Chaos returns the function {name_of(value)} itself, and does not call it: for a new result each "
            "time, write Fallback(handler=..., on=Injected) around a Chaos(error=Injected)"
        )
    return value


def _checked_delay(value: Any) -> Any:
    return checks.plain_function("delay", value, ("ctx",)) if callable(value) else checks.seconds("delay", value)


_CHECKS: dict[_Effect, Callable[[Any], Any]] = {
    "error": _checked_error,
    "result": _checked_result,
    "delay": _checked_delay,
    "action": lambda value: checks.optional_callable("action", value, ("ctx",)),
}


def _in_words(effect: _Effect, value: Any, calls: str) -> str:
    if effect == "error":
        return f"raises {repr(value) if isinstance(value, Exception) else name_of(value)} in {calls}"
    if effect == "result":
        return f"returns {value!r} in {calls}"
    if effect == "delay":
        return f"delays {calls} by {name_of(value) if callable(value) else f'{format_number(value)} s'}"
    return f"calls {name_of(value)} before {calls}"
