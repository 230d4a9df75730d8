"""The page on migrating, from pybreaker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pybreaker
import pytest

from resilience import CircuitBreaker, CircuitOpen, CircuitState, Success, events
from resilience.testing import script, virtual_time
from tests.custom import Doing
from tests.docs.migrating.rows import NAMES, Check, cases, row, written
from tests.docs.side_by_side import code_in, their_time


class NotFound(Exception): ...


def after_each(
    breaker: Any, function: Callable[..., Any], *steps: Any, clock: Any, waits: dict[int, float]
) -> list[str]:
    """Make a call per step through a breaker, and return the outcome of each: a value or the name of an error."""
    ends = []
    for number in range(len(steps)):
        clock(waits.get(number, 0.0))
        try:
            ends.append(str(breaker.call(function)))
        except (pybreaker.CircuitBreakerError, CircuitOpen):
            ends.append("refused")
        except Exception as error:
            ends.append(type(error).__name__)
    return ends


def same_breakers(their: Any, our: CircuitBreaker, *steps: Any, waits: dict[int, float]) -> list[str]:
    """Assert that both admit and refuse the same calls; a refused call leaves its step to the next one."""
    with their_time() as clock:
        first = after_each(their, script(*steps, ...), *steps, clock=clock.sleep, waits=waits)
    with virtual_time() as virtual:
        second = after_each(our, script(*steps, ...), *steps, clock=virtual.advance, waits=waits)
    assert first == second
    return first


def pybreaker_with(arguments: str) -> Any:
    names = {"CircuitBreaker": pybreaker.CircuitBreaker, "NotFound": NotFound}
    return written(f"CircuitBreaker({arguments}, throw_new_error_on_trip=False)", names)


WITH_NOT_FOUND = {**NAMES, "NotFound": NotFound}


@row("pybreaker", "`CircuitBreaker(fail_max=5, reset_timeout=60)`")
def _(left: str, right: str) -> None:
    arguments = code_in(left).removeprefix("CircuitBreaker(")[:-1]
    steps = [OSError()] * 3 + [1] + [OSError()] * 6 + [2] * 5
    waits = {10: 59.0, 12: 2.0, 13: 61.0}
    ends = same_breakers(pybreaker_with(arguments), written(code_in(right)), *steps, waits=waits)
    assert ends.count("refused") >= 3
    assert ends[-1] == "2"


@row("pybreaker", "`success_threshold=3`")
def _(left: str, right: str) -> None:
    steps = [OSError(), 1, 2, OSError(), 3, 4, 5, OSError(), OSError()]
    their = pybreaker_with(f"fail_max=1, reset_timeout=60, {code_in(left)}")
    same_breakers(their, written(f"CircuitBreaker(1, open_for=60, {code_in(right)})"), *steps, waits={1: 61.0, 4: 61.0})


@row("pybreaker", "`exclude=[NotFound]`")
def _(left: str, right: str) -> None:
    steps = [OSError(), NotFound(), OSError(), NotFound(), OSError(), OSError(), 1]
    their = pybreaker_with(f"fail_max=2, reset_timeout=60, {code_in(left)}")
    our = written(f"CircuitBreaker(2, open_for=60, {code_in(right)})", WITH_NOT_FOUND)
    assert same_breakers(their, our, *steps, waits={})[-1] == "refused"


@row("pybreaker", "`exclude=[lambda error")
def _(left: str, right: str) -> None:
    steps = [OSError(), ValueError(), OSError(), ValueError(), OSError(), OSError(), 1]
    our = written(f"CircuitBreaker(2, open_for=60, {code_in(right)})")
    their = pybreaker_with(f"fail_max=2, reset_timeout=60, {code_in(left)}")
    assert same_breakers(their, our, *steps, waits={})[-1] == "refused"


@row("pybreaker", "`@breaker`", "`breaker.call(function, *args)`", "`with breaker.calling():`")
def _(left: str, right: str) -> None:
    def used(breaker: Any, form: str) -> list[str]:
        function = script(OSError(), "fine")
        decorated = breaker(function)

        def block() -> Any:
            with getattr(breaker, form)():
                return function()

        how = {"@breaker": decorated, "breaker.call(function, *args)": lambda: breaker.call(function)}
        caller = SimpleNamespace(call=lambda function: how.get(code_in(left), block)())
        return after_each(caller, function, 1, 2, clock=id, waits={})

    assert ".guard()" in right or code_in(left) == code_in(right)
    assert used(pybreaker_with("fail_max=1"), "calling") == used(CircuitBreaker(1), "guard") == ["OSError", "refused"]


@row("pybreaker", "`breaker.call_async(function, *args)`")
def _(left: str, right: str) -> None:
    async def fails() -> None:
        raise OSError

    async def through(call: Callable[..., Any]) -> list[str]:
        ends = []
        for _ in range(2):
            try:
                await call(fails)
            except Exception as error:
                ends.append(type(error).__name__)
        return ends

    their = pybreaker_with("fail_max=1")
    if find_spec("tornado"):
        assert asyncio.run(through(their.call_async)) == ["OSError", "CircuitBreakerError"]
    else:  # the failures of an `async def` are not counted
        assert asyncio.run(through(their.call)) == ["OSError", "OSError"]
    assert asyncio.run(through(CircuitBreaker(1).call)) == ["OSError", "CircuitOpen"]


@row("pybreaker", "`breaker.fail_counter`")
def _(left: str, right: str) -> None:
    their, our = pybreaker_with("fail_max=4"), CircuitBreaker(4)
    for step in (OSError(), 1, OSError(), OSError()):
        for breaker in (their, our):
            after_each(breaker, script(step), step, clock=lambda seconds: None, waits={})
        count, ours = (written(code_in(it), {"breaker": of}) for it, of in ((left, their), (right, our)))
        assert count == ours
    assert count == 2


@row("pybreaker", "`breaker.open()`", "`breaker.close()`", "`breaker.current_state", "`except CircuitBreakerError`")
def _(left: str, right: str) -> None:
    their, our = pybreaker_with("fail_max=1, reset_timeout=60"), CircuitBreaker(1, open_for=60)
    names = {**NAMES, "breaker": our}
    states = CircuitState.CLOSED, CircuitState.ISOLATED
    with their_time() as clock, virtual_time() as virtual:
        their.open()
        our.isolate()
        assert (their.current_state, our.state) == ("open", states[1])
        for breaker, error in ((their, pybreaker.CircuitBreakerError), (our, CircuitOpen)):
            with pytest.raises(error):
                breaker.call(int)
        clock.sleep(61)
        virtual.advance(61)
        assert their.call(int) == 0  # admitted after the reset timeout; our breaker stays isolated
        with pytest.raises(CircuitOpen):
            our.call(int)
        their.close()
        our.close()
        assert (their.current_state, our.state) == ("closed", states[0])
        for breaker in (their, our):
            with pytest.raises(OSError, match="down"):
                breaker.call(script(OSError("down")))
        assert their.current_state == our.state == "open"  # a `CircuitState` is also text
        assert written("breaker.state is CircuitState.OPEN", names)
    if "current_state" in left:
        assert code_in(right) == "breaker.state is CircuitState.OPEN"


@row("pybreaker", "`breaker.half_open()`")
def _(left: str, right: str) -> None:
    steps = [OSError(), 1, OSError(), OSError()]
    their, our = pybreaker_with("fail_max=1, reset_timeout=60"), CircuitBreaker(1, open_for=60)
    assert same_breakers(their, our, *steps, waits={1: 61.0}) == ["OSError", "1", "OSError", "refused"]


@row(
    "pybreaker",
    "`CircuitBreakerListener.state_change`",
    "`CircuitBreakerListener.success`",
    "`CircuitBreakerListener.before_call`",
)
def _(left: str, right: str) -> None:
    class Listener(pybreaker.CircuitBreakerListener):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def before_call(self, cb: Any, func: Any, *args: Any, **kwargs: Any) -> None:
            self.seen.append(f"before {args}")

        def success(self, cb: Any) -> None:
            self.seen.append("success")

        def failure(self, cb: Any, exc: BaseException) -> None:
            self.seen.append(f"failure {exc!r}")

        def state_change(self, cb: Any, old_state: Any, new_state: Any) -> None:
            self.seen.append(f"{old_state.name} {new_state.name}")

    seen: list[str] = []
    before = Doing(lambda ctx: seen.append(f"before {ctx.called.arguments}"))
    listener = Listener()
    their = pybreaker.CircuitBreaker(fail_max=1, reset_timeout=60, listeners=[listener])

    def note(event: Any) -> None:
        moved = isinstance(event, events.CircuitChanged)
        seen.append(f"{event.old.value} {event.new.value}".replace("_", "-") if moved else end_of(event.outcome))

    def end_of(outcome: Any) -> str:
        return "success" if isinstance(outcome, Success) else f"failure {outcome.error!r}"

    breaker = CircuitBreaker(1, open_for=60, on_transition=note)
    unsubscribe = events.subscribe(note, events.CallFinished)
    steps = [1, OSError("down"), 3, 4]
    with their_time() as clock:
        after_each(CallWith(their), script(*steps), *steps, clock=clock.sleep, waits={2: 61.0})
    with virtual_time() as virtual:
        after_each(CallWith(breaker.wrap(before)), script(*steps), *steps, clock=virtual.advance, waits={2: 61.0})
    unsubscribe()
    assert sorted(seen) == sorted(text.replace("half_open", "half-open") for text in listener.seen)


class CallWith:
    """Calls with an argument."""

    def __init__(self, breaker: Any) -> None:
        self._breaker = breaker

    def call(self, function: Callable[..., Any]) -> Any:
        return self._breaker.call(function, 7)


@row("pybreaker", "`state_storage=CircuitRedisStorage(...)`")
def _(left: str, right: str) -> None:
    assert right.startswith("nothing")
    assert "state_storage" in inspect.signature(pybreaker.CircuitBreaker).parameters
    assert not any("storage" in name for name in inspect.signature(CircuitBreaker).parameters)


@pytest.mark.parametrize(("left", "right", "check"), cases("pybreaker"))
def test_both_sides_of_a_row_behave_the_same(left: str, right: str, check: Check) -> None:
    check(left, right)
