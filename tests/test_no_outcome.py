"""What is no outcome, whatever a policy is told: misuse, interrupts, cancellation; and StopIteration, which is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
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
)
from tests.conftest import Boom, FakeClock, Script, World, nothing_is_left_unawaited
from tests.functions import coroutine, quick

# --- usage errors are no outcomes --------------------------------------------------------------


def everything_counts(error: object) -> bool:
    return True


#: The five policies, each told to take whatever there is for its own; and what shows that it did not.
GREEDY: dict[str, Callable[[list[Any]], Policy[Any]]] = {
    "Retry": lambda seen: Retry(3, on=everything_counts, backoff=[0], on_retry=seen.append),
    "Timeout": lambda seen: Timeout(5.0, on_timeout=seen.append),
    "cooperative Timeout": lambda seen: Timeout(5.0, cooperative=True, on_timeout=seen.append),
    "CircuitBreaker": lambda seen: CircuitBreaker(1, on=everything_counts, on_transition=seen.append),
    "Bulkhead": lambda seen: Bulkhead(1),
    "Fallback": lambda seen: Fallback("answered", on=everything_counts, on_fallback=seen.append),
    "all of them": lambda seen: Policy.wrap(*(make(seen) for name, make in GREEDY.items() if name != "all of them")),
}

each_greedy = pytest.mark.parametrize("name", GREEDY)


def released(policy: Policy[Any]) -> bool:
    """Whether nothing is held any more, and no circuit has counted anything."""
    policies = policy.policies if isinstance(policy, Pipeline) else (policy,)
    return all(
        (not isinstance(it, Bulkhead) or it.stats().in_flight == 0)
        and (not isinstance(it, CircuitBreaker) or (it.state is CircuitState.CLOSED and it.stats().opened == 0))
        for it in policies
    )


WAYS: dict[str, Callable[[Policy[Any], Callable[..., Any]], Any]] = {
    "execute": lambda policy, fn: policy.execute(fn),
    "call": lambda policy, fn: policy.call(fn, "argument"),
    "capture": lambda policy, fn: policy.capture(fn),
    "decorator": lambda policy, fn: policy(fn)("argument"),
    "proxy": lambda policy, fn: policy.proxy(Holder(fn), "method").method("argument"),
}


class Holder:
    """A client whose method is a given function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def method(self, *args: object) -> Any:
        return self._fn(*args)


@each_greedy
@pytest.mark.parametrize("way", WAYS)
def test_an_awaitable_in_a_blocking_execution_is_refused_and_no_policy_takes_it_for_an_outcome(
    name: str, way: str
) -> None:
    """A `TypeError` that names the function and the way out; the coroutine is closed; it is called once.

    The same at a second call, when the policy knows its way.
    """
    seen: list[Any] = []
    calls: list[object] = []
    policy = GREEDY[name](seen)

    def returns_a_coroutine(*args: object) -> Any:
        calls.append(1)
        return coroutine()

    expected = "Holder.method" if way == "proxy" else "returns_a_coroutine"
    for _ in range(2):
        with nothing_is_left_unawaited(), pytest.raises(TypeError) as caught:
            WAYS[way](policy, returns_a_coroutine)
        assert expected in str(caught.value)
        assert "aexecute" in str(caught.value)
        assert "acall" in str(caught.value)
    assert calls == [1, 1]
    assert seen == []
    assert released(policy)


@each_greedy
async def test_a_plain_result_in_an_asynchronous_execution_is_refused_likewise(tasks_world: World, name: str) -> None:
    """The other way round: there is nothing to await."""
    seen: list[Any] = []
    calls: list[object] = []
    policy = GREEDY[name](seen)

    def returns_a_number(*args: object) -> Any:
        calls.append(1)
        return 5

    for misuse in (
        lambda: policy.aexecute(returns_a_number),
        lambda: policy.acall(returns_a_number, 1),
        lambda: policy.acapture(returns_a_number),
        lambda: policy.aproxy(Holder(returns_a_number), "method").method(),
    ):
        with pytest.raises(TypeError, match=r"int, which cannot be awaited") as caught:
            await misuse()
        assert "returns_a_number" in str(caught.value) or "Holder.method" in str(caught.value)
        assert "execute" in str(caught.value)
    assert len(calls) == 4
    assert seen == []
    assert released(policy)


@each_greedy
async def test_a_misuse_inside_the_function_is_no_outcome_of_the_policies_around_it(world: World, name: str) -> None:
    """The mistake is the same wherever it is made: the outer policy neither retries, counts nor answers it."""
    seen: list[Any] = []
    calls: list[int] = []
    policy = GREEDY[name](seen)

    async def fn(ctx: Context) -> Any:
        calls.append(1)
        return Retry().execute(lambda ctx: coroutine())

    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="aexecute"):
        await world.execute(policy, fn)
    assert calls == [1]
    assert seen == []
    assert released(policy)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CircuitBreaker(1).guard(),
        lambda: Bulkhead(2).slot(),
        lambda: deadline(5.0),
        lambda: next(Retry().attempts()),
    ],
    ids=["guard", "slot", "deadline", "attempt"],
)
def test_a_block_that_is_entered_twice_is_no_outcome(make: Callable[[], Any], threads: World) -> None:
    breaker, calls = CircuitBreaker(1), []

    def work() -> None:
        calls.append(1)
        block = make()
        with block, block:
            pass

    with pytest.raises(RuntimeError, match=r"in use|entered before"):
        Policy.wrap(Fallback(None), Retry(on=Exception, backoff=[0]), breaker).call(work)
    assert (calls, breaker.state) == ([1], CircuitState.CLOSED)


async def test_a_misuse_gives_the_slot_of_a_probe_back(world: World, clock: FakeClock) -> None:
    """A half-open circuit has learnt nothing from it: the next call is the probe."""
    breaker = CircuitBreaker(1, open_for=10.0, on=everything_counts)

    async def misuse(ctx: Context) -> Any:
        return Retry().execute(lambda ctx: coroutine())

    await world.attempt(breaker, Script(Boom()).function())
    clock.advance(10.0)
    with pytest.raises(TypeError):
        await world.execute(breaker, misuse)
    assert (breaker.state, breaker.stats().probes) == (CircuitState.HALF_OPEN, 0)
    assert await world.execute(breaker, Script("fine").function()) == "fine"
    assert breaker.state is CircuitState.CLOSED


def test_a_coroutine_like_object_is_closed_by_duck_type() -> None:
    """aiohttp's requests are no coroutines, and report themselves all the same when they are dropped."""

    class Request:
        closed = 0

        def __await__(self) -> Generator[Any, Any, None]:
            yield

        def send(self, value: object) -> None: ...

        def throw(self, *args: object) -> None: ...

        def close(self) -> None:
            self.closed += 1

    request = Request()
    with pytest.raises(TypeError, match="aexecute"):
        quick().execute(lambda ctx: request)
    assert request.closed == 1


async def test_a_task_or_future_is_refused_and_left_alone(in_asyncio: World) -> None:
    """It is somebody's running work."""
    task = asyncio.create_task(asyncio.sleep(0, "done"))
    future = asyncio.get_running_loop().create_future()
    for it in (task, future):
        with pytest.raises(TypeError, match="acall"):
            quick().call(lambda it=it: it)
    assert not future.done()
    assert await task == "done"


def test_a_handler_that_is_asynchronous_in_blocking_code_is_a_misuse() -> None:
    """Nobody there can await it, and a coroutine is not taken for an answer."""
    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="coroutine"):
        Fallback(handler=coroutine).execute(lambda ctx: 1 / 0)


# --- our own errors ----------------------------------------------------------------------------


def test_each_error_of_ours_is_a_fresh_one(threads: World) -> None:
    """One shared exception would collect the tracebacks of all callers."""
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


# --- what is no outcome at all -----------------------------------------------------------------


@each_greedy
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_interrupts_are_neutral_to_every_policy(world: World, name: str, kind: type[BaseException]) -> None:
    """Not retried, not counted, not answered, not swallowed, whatever the predicates say; nothing stays held."""
    seen: list[Any] = []
    policy = GREEDY[name](seen)
    interrupt = kind("now")
    script = Script(interrupt)

    with pytest.raises(kind) as caught:
        await world.execute(policy, script.function())
    assert caught.value is interrupt
    assert script.calls == 1
    assert seen == []
    assert released(policy)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_interrupts_are_neutral_where_on_names_every_base_exception(
    world: World, clock: FakeClock, kind: type[BaseException]
) -> None:
    """`on=BaseException`, or the very type: only an `Exception` is an outcome."""
    breaker = CircuitBreaker(1, on=(BaseException, kind))
    pipeline = Fallback("x", on=BaseException).wrap(Retry(3, on=kind, backoff=[0]), breaker)
    script = Script(kind())

    with pytest.raises(kind):
        await world.execute(pipeline, script.function())
    assert script.calls == 1
    assert breaker.state is CircuitState.CLOSED


# --- StopIteration -----------------------------------------------------------------------------


class Driven(Policy):
    """A policy whose coroutine really is one in blocking code: `call` is handed on."""

    async def around(self, call: Any, ctx: Context) -> Any:
        return await self.handed_on(call, ctx)

    async def handed_on(self, call: Any, ctx: Context) -> Any:
        return await call(ctx)


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
    """The very exception, with its value, whatever it had to travel through."""
    policy = CHAINS[chain]()
    stop = StopIteration("last")

    def fn(*args: object) -> None:
        raise stop

    for way in (policy.execute, policy.call, policy(fn), policy.proxy(Holder(fn), "method").method):
        with pytest.raises(StopIteration) as caught:
            way(fn)
        assert caught.value is stop
    assert policy.capture(fn) == Failure(stop)
    with pytest.raises(StopIteration):
        policy.call(next, iter(()))


def test_a_stop_iteration_is_an_exception_like_others() -> None:
    """It can be retried, counted and answered."""
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
    """Never the carrier in which it travels through a coroutine."""
    seen: list[Any] = []
    stop = StopIteration("last")

    def fn(ctx: Context) -> None:
        raise stop

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
    pipeline.execute(fn, ctx)
    assert len(seen) >= 5
    assert all(it is stop for it in seen)
    assert [failed.type for failed in ctx.failures] == ["StopIteration"]


def test_a_retry_that_wraps_shows_the_stop_iteration_itself() -> None:
    """As the last outcome, and as the cause."""
    stop = StopIteration("last")

    def fn(ctx: Context) -> None:
        raise stop

    with pytest.raises(RetriesExhausted) as caught:
        quick(2, on=StopIteration, wrap=True).wrap(Driven()).execute(fn)
    assert caught.value.last == Failure(stop)
    assert caught.value.__cause__ is stop


def test_what_a_handler_raises_comes_out_also_where_it_is_a_stop_iteration() -> None:
    """A handler is a plain function in blocking code."""
    stop = StopIteration("handler")

    def handler(failure: object, ctx: Context) -> None:
        raise stop

    for policy in (Fallback(handler=handler), Driven().wrap(Fallback(handler=handler), Driven())):
        with pytest.raises(StopIteration) as caught:
            policy.execute(lambda ctx: 1 / 0)
        assert caught.value is stop


async def test_in_asynchronous_code_a_stop_iteration_is_what_python_makes_of_it(tasks_world: World) -> None:
    """A coroutine may not raise one: it becomes a `RuntimeError`, which is a failure like others."""

    async def fn(ctx: Context) -> None:
        raise StopIteration("last")

    error, answer = [
        await tasks_world.attempt(quick().wrap(Driven()), fn),
        await Fallback("x", on=RuntimeError).aexecute(fn),
    ]
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, StopIteration)
    assert answer == "x"


async def test_a_stop_async_iteration_passes_in_every_world(world: World) -> None:
    """It needs no carrier: `async for` over a protected `__anext__` ends."""
    assert isinstance(
        await world.attempt(quick().wrap(Driven(), Timeout(5.0)), Script(StopAsyncIteration("end")).function()),
        StopAsyncIteration,
    )
