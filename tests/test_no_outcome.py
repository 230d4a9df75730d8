"""Misuse, interrupts and cancellation are no outcomes, for any setting of a policy; `StopIteration` is one."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resilience import (
    Bulkhead,
    CircuitBreaker,
    CircuitState,
    Context,
    Failure,
    Fallback,
    Pipeline,
    Policy,
    ResilienceError,
    RetriesExhausted,
    Retry,
    Success,
    Timeout,
    deadline,
    detached,
)
from tests.conftest import Boom, FakeClock, Script, World, nothing_is_left_unawaited
from tests.custom import Driven
from tests.functions import coroutine, quick, raising

# --- misuse is no outcome ---


def always(error: object) -> bool:
    return True


#: The five policies, each set to handle every failure, and to record whether it did.
GREEDY: dict[str, Callable[[list[Any]], Policy[Any]]] = {
    "Retry": lambda seen: Retry(3, on=always, backoff=[0], on_retry=seen.append),
    "Timeout": lambda seen: Timeout(5.0, on_timeout=seen.append),
    "cooperative Timeout": lambda seen: Timeout(5.0, cooperative=True, on_timeout=seen.append),
    "CircuitBreaker": lambda seen: CircuitBreaker(1, on=always, on_transition=seen.append),
    "Bulkhead": lambda seen: Bulkhead(1),
    "Fallback": lambda seen: Fallback("answered", on=always, on_fallback=seen.append),
    "all of them": lambda seen: Policy.wrap(*(make(seen) for name, make in GREEDY.items() if name != "all of them")),
}


@pytest.fixture(params=GREEDY)
def greedy(request: pytest.FixtureRequest) -> Iterator[Policy[Any]]:
    """Each of them in turn. At the end of the test, it has handled nothing, and holds nothing."""
    seen: list[Any] = []
    policy = GREEDY[request.param](seen)
    yield policy
    assert seen == []
    assert released(policy)


def released(policy: Policy[Any]) -> bool:
    """Return whether no permit is held and no circuit has counted anything."""
    policies = policy.policies if isinstance(policy, Pipeline) else (policy,)
    return all(
        (not isinstance(each, Bulkhead) or each.stats().in_flight == 0)
        and (not isinstance(each, CircuitBreaker) or (each.state is CircuitState.CLOSED and each.stats().opened == 0))
        for each in policies
    )


WAYS: dict[str, Callable[[Policy[Any], Callable[..., Any]], Any]] = {
    "execute": lambda policy, fn: policy.execute(fn),
    "call": lambda policy, fn: policy.call(fn, "argument"),
    "capture": lambda policy, fn: policy.capture(fn),
    "decorator": lambda policy, fn: policy(fn)("argument"),
    "proxy": lambda policy, fn: policy.proxy(Holder(fn), "method").method("argument"),
}


class Holder:
    """A client whose method is the given function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def method(self, *args: object) -> Any:
        return self._fn(*args)


@pytest.mark.parametrize("way", WAYS)
def test_an_awaitable_in_a_blocking_execution_is_refused_and_not_handled(greedy: Policy[Any], way: str) -> None:
    """The error names the function and the remedy; the coroutine is closed, and the function is called once.

    The same at the second call, when the policy has composed its chain.
    """
    calls: list[object] = []

    def returns_a_coroutine(*args: object) -> Any:
        calls.append(1)
        return coroutine()

    expected = "Holder.method" if way == "proxy" else "returns_a_coroutine"
    for _ in range(2):
        with nothing_is_left_unawaited(), pytest.raises(TypeError) as caught:
            WAYS[way](greedy, returns_a_coroutine)
        assert expected in str(caught.value)
        assert "aexecute" in str(caught.value)
        assert "acall" in str(caught.value)
    assert calls == [1, 1]


async def test_a_plain_result_in_an_asynchronous_execution_is_not_handled(
    tasks_world: World, greedy: Policy[Any]
) -> None:
    """Nor if the function is marked as one that returns an awaitable."""
    calls: list[object] = []

    def returns_a_number(*args: object) -> Any:
        calls.append(1)
        return 5

    marked = marked_as_asynchronous(lambda *args: returns_a_number())
    for misuse in (
        lambda: greedy.aexecute(returns_a_number),
        lambda: greedy.acall(returns_a_number, 1),
        lambda: greedy.acapture(returns_a_number),
        lambda: greedy.aproxy(Holder(returns_a_number), "method").method(),
        lambda: greedy.call(marked, 1),
        lambda: greedy.acall(marked, 1),
        lambda: greedy(marked)(1),
    ):
        with pytest.raises(TypeError, match=r"int, which cannot be awaited") as caught:
            await misuse()
        assert any(name in str(caught.value) for name in ("returns_a_number", "Holder.method", "<lambda>"))
        assert "execute" in str(caught.value)
    assert len(calls) == 7


def marked_as_asynchronous(fn: Any) -> Any:
    """Mark a function as the standard library does, so that it counts as a coroutine function."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(fn)
    fn._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return fn


async def test_a_misuse_inside_the_function_is_no_outcome_of_the_outer_policies(
    world: World, greedy: Policy[Any]
) -> None:
    """They neither retry, count nor answer it."""
    calls: list[int] = []

    async def fn(ctx: Context) -> Any:
        calls.append(1)
        return Retry().execute(lambda ctx: coroutine())

    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="aexecute"):
        await world.execute(greedy, fn)
    assert calls == [1]


BLOCKS: dict[str, Callable[[], Any]] = {
    "guard": lambda: CircuitBreaker(1).guard(),
    "slot": lambda: Bulkhead(2).slot(),
    "deadline": lambda: deadline(5.0),
    "detached": detached,
    "attempt": lambda: next(Retry().attempts()),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_entering_a_block_twice_is_no_outcome(kind: str, threads: World) -> None:
    """A block that has ended may be entered again, except that of an attempt."""
    block, breaker, calls = BLOCKS[kind](), CircuitBreaker(1), []

    def work() -> None:
        calls.append(1)
        with block, block:
            pass

    with pytest.raises(RuntimeError, match="entered before" if kind == "attempt" else f"this {kind} is in use"):
        Policy.wrap(Fallback(None), Retry(on=Exception, backoff=[0]), breaker).call(work)
    assert (calls, breaker.state) == ([1], CircuitState.CLOSED)
    if kind != "attempt":
        with block:
            pass


async def test_a_misuse_releases_the_slot_of_a_probe(world: World, clock: FakeClock) -> None:
    """The half-open circuit learns nothing from it: the next call is the probe."""
    breaker = CircuitBreaker(1, open_for=10.0, on=always)

    async def misuse(ctx: Context) -> Any:
        return Retry().execute(lambda ctx: coroutine())

    await world.attempt(breaker, Script(Boom()).function())
    clock.advance(10.0)
    with pytest.raises(TypeError):
        await world.execute(breaker, misuse)
    assert (breaker.state, breaker.stats().probes) == (CircuitState.HALF_OPEN, 0)
    assert await world.execute(breaker, Script("fine").function()) == "fine"
    assert breaker.state is CircuitState.CLOSED


def test_an_asynchronous_handler_in_blocking_code_is_a_misuse() -> None:
    """A coroutine is not taken for an answer."""
    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="coroutine"):
        Fallback(handler=coroutine).execute(lambda ctx: 1 / 0)


# --- errors of this library ---


def test_each_error_of_this_library_is_a_new_object(threads: World) -> None:
    """A shared exception would collect the tracebacks of all callers."""
    breaker, bulkhead = CircuitBreaker(1), Bulkhead(1)
    breaker.capture(lambda ctx: 1 / 0)
    ways: list[Callable[[], Any]] = [
        lambda: breaker.capture(lambda ctx: None),
        lambda: bulkhead.capture(lambda ctx: None),
        lambda: Timeout(1e-9).capture(lambda ctx: None),
        lambda: Retry().capture(lambda ctx: None, Context(timeout=0)),
        lambda: Retry(1, on=Boom, wrap=True).capture(threads.native(Script(Boom("no")).function())),
    ]
    with bulkhead.slot():
        for way in ways:
            first, second = way().error, way().error
            assert isinstance(first, ResilienceError)
            assert type(first) is type(second)
            assert first is not second


# --- interrupts ---


async def test_no_policy_handles_an_interrupt(world: World, greedy: Policy[Any]) -> None:
    """It is not retried, counted, answered, captured or suppressed, and nothing stays held."""
    ways: Any = (greedy.execute, greedy.capture) if world.blocking else (greedy.aexecute, greedy.acapture)
    interrupts = (KeyboardInterrupt("now"), SystemExit(3), GeneratorExit(), asyncio.CancelledError())
    for interrupt, way in itertools.product(interrupts, ways):
        script = Script(interrupt)
        with pytest.raises(type(interrupt)) as caught:
            await world.result(way(world.native(script.function())))
        assert caught.value is interrupt
        assert script.calls == 1


# --- StopIteration -----------------------------------------------------------------------------


CHAINS: dict[str, Callable[[], Policy[Any]]] = {
    "Retry": quick,
    "Fallback": lambda: Fallback("x", on=Boom),
    "CircuitBreaker": lambda: CircuitBreaker(99),
    "Bulkhead": lambda: Bulkhead(1),
    "cooperative Timeout": lambda: Timeout(5.0, cooperative=True),
    "Timeout": lambda: Timeout(5.0),
    "custom": Driven,
    "pipeline": lambda: Policy.wrap(
        Fallback("x", on=Boom), quick(), Driven(), CircuitBreaker(99), Bulkhead(1), Timeout(5.0), Driven()
    ),
    "observed": lambda: Policy.wrap(Driven(), quick(), listeners=[lambda event: None]),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_stop_iteration_comes_out_of_blocking_code_as_itself(chain: str) -> None:
    """The same exception object, through any chain of policies."""
    policy = CHAINS[chain]()
    stop = StopIteration("last")
    fn = raising(stop)
    for way in (policy.execute, policy.call, policy(fn), policy.proxy(Holder(fn), "method").method):
        with pytest.raises(StopIteration) as caught:
            way(fn)
        assert caught.value is stop
    assert policy.capture(fn) == Failure(stop)
    with pytest.raises(StopIteration):
        policy.call(next, iter(()))


def test_a_stop_iteration_can_be_retried_counted_and_answered() -> None:
    steps = iter([StopIteration(), StopIteration(), "third"])

    def fn(ctx: Context) -> str:
        step = next(steps)
        if isinstance(step, StopIteration):
            raise step
        return step

    breaker = CircuitBreaker(2)
    assert quick(on=StopIteration).wrap(Driven()).execute(fn) == "third"
    assert Fallback("end", on=StopIteration).wrap(Driven()).call(next, iter(())) == "end"
    for _ in range(2):
        breaker.wrap(Driven()).capture(lambda ctx: next(iter(())))
    assert breaker.state is CircuitState.OPEN
    assert breaker.stats().last_failure == "StopIteration: "


def test_predicates_handlers_events_and_reports_see_a_stop_iteration_as_itself() -> None:
    """Not the exception that carries it through a coroutine."""
    seen: list[Any] = []
    stop = StopIteration("last")

    def predicate(error: Exception) -> bool:
        seen.append(error)
        return True

    ctx = Context()
    pipeline = Policy.wrap(
        Fallback(handler=lambda failure, ctx: seen.append(failure.error), on=predicate),  # type: ignore[union-attr]
        Driven(),
        Retry(1, on=predicate, on_retry=lambda event: seen.append(event.outcome.error), backoff=[0]),
        Driven(),
        CircuitBreaker(on=predicate),
        Driven(),
        listeners=[lambda event: seen.append(event.outcome.error) if event.outcome != Success(None) else None],
    )
    pipeline.execute(raising(stop), ctx)
    assert len(seen) >= 5
    assert all(error is stop for error in seen)
    assert [failed.type for failed in ctx.failures] == ["StopIteration"]


def test_a_wrapping_retry_has_the_stop_iteration_as_its_cause() -> None:
    stop = StopIteration("last")
    with pytest.raises(RetriesExhausted) as caught:
        quick(2, on=StopIteration, wrap=True).wrap(Driven()).execute(raising(stop))
    assert caught.value.last == Failure(stop)
    assert caught.value.__cause__ is stop


def test_a_stop_iteration_raised_by_a_handler_comes_out() -> None:
    stop = StopIteration("handler")
    handler = raising(stop)
    for policy in (Fallback(handler=handler), Driven().wrap(Fallback(handler=handler), Driven())):
        with pytest.raises(StopIteration) as caught:
            policy.execute(lambda ctx: 1 / 0)
        assert caught.value is stop


async def test_in_asynchronous_code_a_stop_iteration_becomes_a_runtime_error(tasks_world: World) -> None:
    """As in any coroutine. It is an ordinary failure."""

    async def fn(ctx: Context) -> None:
        raise StopIteration("last")

    error = await tasks_world.attempt(quick().wrap(Driven()), fn)
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, StopIteration)
    assert await Fallback("x", on=RuntimeError).aexecute(fn) == "x"


async def test_a_stop_async_iteration_comes_out_in_every_world(world: World) -> None:
    """So `async for` over a protected `__anext__` ends."""
    assert isinstance(
        await world.attempt(quick().wrap(Driven(), Timeout(5.0)), Script(StopAsyncIteration("end")).function()),
        StopAsyncIteration,
    )
