"""Scripted functions take one step per call."""

from __future__ import annotations

import asyncio
import inspect
import threading
from math import inf
from typing import Any

import pytest

from resilience import Context, Failure, Fallback, Retry, Timeout
from resilience.clock import clock
from resilience.testing import ScriptEnded, Simulation, ascript, hang, items, script, virtual_time
from tests.callers import in_threads, wait_until
from tests.conftest import Boom


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_each_call_takes_the_next_step(kind: str) -> None:
    """Exceptions and their classes are raised, everything else is returned."""

    def step() -> object:
        try:
            result: Any = fn("argument", key="word")
            return asyncio.run(result) if kind == "async" else result
        except (Boom, KeyError) as error:
            return error

    error = Boom("mine")
    fn: Any = (script if kind == "sync" else ascript)(error, KeyError, None, Exception.mro)
    assert step() is error
    assert isinstance(step(), KeyError)
    assert step() is None
    assert step() == Exception.mro
    with pytest.raises(ScriptEnded, match="call 5 of a script that has 4 steps"):
        step()
    assert {(it.args, tuple(it.kwargs.items())) for it in fn.calls} == {(("argument",), (("key", "word"),))}
    assert len(fn.calls) == 5


def test_the_step_before_an_ellipsis_repeats() -> None:
    """Without end; the traceback of an error that is raised again does not grow."""
    fn = script("first", Boom("again"), ...)
    assert fn() == "first"
    depths = []
    for _ in range(3):
        with pytest.raises(Boom, match="again") as caught:
            fn()
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_concurrent_calls_take_different_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the attempts of a hedge do, each on a worker."""
    both = threading.Barrier(2)
    taken: list[str] = []
    function = script("one", "other")

    def now() -> float:
        both.wait(5)  # each is in the middle of its call
        return 0.0

    monkeypatch.setattr(clock, "now", now)
    in_threads(*[lambda: taken.append(function())] * 2)
    assert sorted(taken) == ["one", "other"]


def test_a_call_after_the_last_step_is_no_outcome() -> None:
    """No policy hides it from the test."""
    policies = Fallback("hidden").wrap(Retry(on=Exception, backoff=[0]))
    fn = script(Boom())
    with pytest.raises(ScriptEnded):
        policies.call(fn)
    assert len(fn.calls) == 2
    assert issubclass(ScriptEnded, AssertionError)


def test_calls_record_the_attempt_and_the_time_left() -> None:
    """Also if the library passes the context."""
    fn = script(Boom(), "fine")
    with virtual_time():
        Timeout(10, cooperative=True).wrap(Retry(on=Boom, backoff=[4])).execute(fn, Context())
    assert [(it.at, it.attempt, it.remaining) for it in fn.calls] == [(0, 1, 10), (4, 2, 6)]
    assert isinstance(fn.calls[0].args[0], Context)
    alone = script("fine")
    alone()
    assert alone.calls[0].remaining == inf


def test_a_hang_takes_real_time_without_virtual_time() -> None:
    assert script(hang(0.001, then=hang(0.001, then="done")))() == "done"
    assert asyncio.run(ascript(hang(0.001, then="done"))()) == "done"


def test_scripts_are_recognized_as_blocking_or_asynchronous() -> None:
    assert Retry().call(script("fine")) == "fine"
    coroutine = Retry().call(ascript("fine"))
    assert inspect.iscoroutine(coroutine)
    assert asyncio.run(coroutine) == "fine"


@pytest.mark.parametrize("steps", [(), (...,), (1, ..., 2), (..., 1)])
def test_a_script_without_steps_is_refused(steps: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="a script has one step or more"):
        script(*steps)
    with pytest.raises(ValueError, match="seconds must be more than zero"):
        hang(0)


def test_repr_shows_the_steps() -> None:
    fn = script(KeyError("k"), hang(5), ...)
    assert repr(fn) == "<script KeyError('k'), Hang(seconds=5.0, then=None), ...; 0 calls>"


def test_a_step_may_return_items() -> None:
    """And fail before the first, or after some; each item has its own time."""
    steps = [items(Boom("early")), hang(2, items("a", hang(3, "b"), Boom("late")))]
    failed, got = [], []
    with virtual_time() as clock:
        for read in (script(*steps), script(*steps)):
            try:
                got.extend((it, clock.now()) for it in Retry(on=Boom, backoff=[0]).streaming().call(read))
            except Boom as error:
                failed.append(str(error))
            assert [call.attempt for call in read.calls] == [1, 2]
    assert got == [("a", 2.0), ("b", 5.0), ("a", 7.0), ("b", 10.0)]
    assert failed == ["late", "late"]
    assert list(script(items("a", "b"))()) == ["a", "b"]


def test_a_coroutine_function_may_return_items() -> None:
    """As an SDK's stream: it is awaited, and then iterated."""

    async def consume() -> list[str]:
        read = ascript(Boom, items("a", hang(0.01, "b")))
        return [it async for it in Retry(on=Boom, backoff=[0]).streaming().call(read)]

    assert asyncio.run(consume()) == ["a", "b"]


def test_an_ellipsis_among_items_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be one of the items"):
        items("a", ...)


def test_a_hang_that_a_timeout_has_abandoned_ends_with_virtual_time() -> None:
    """Otherwise, 128 of these would make every later test fail with `WorkersExhausted`."""
    before = Timeout.abandoned()
    with virtual_time():
        assert isinstance(Timeout(5).capture(script(hang(3600))), Failure)
        assert Timeout.abandoned() == before + 1
    wait_until(lambda: Timeout.abandoned() == before)


def test_a_hang_in_a_simulation_takes_simulated_time() -> None:
    fetch = ascript(hang(30), hang(2, "fine"))

    async def client() -> None:
        assert await simulation.execute(Retry(on=TimeoutError, backoff=[1]).wrap(Timeout(5)), fetch) == "fine"

    with Simulation() as simulation:
        simulation.start(client())
        assert simulation.run() == 8
    assert [(call.at, call.attempt) for call in fetch.calls] == [(0, 1), (6, 2)]
