"""Policies: every way to execute under one, what is no outcome, and policies of the user's own."""

from __future__ import annotations

import abc
import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import anyio
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
    RetriesExhausted,
    Retry,
    Success,
    Timeout,
    current_context,
    events,
)
from tests.conftest import Boom, FakeClock, Script, World, nothing_is_left_unawaited, shown


def quick(attempts: int = 3, on: Any = Boom, **settings: Any) -> Retry:
    return Retry(attempts, on=on, backoff=[0], **settings)


class Later:
    """An awaitable that is no coroutine."""

    def __await__(self) -> Generator[Any, Any, str]:
        yield from anyio.sleep(0).__await__()
        return "later"


# --- execute ---------------------------------------------------------------------------------


def test_a_plain_function_runs_here_and_its_result_is_returned() -> None:
    """In this thread, with the context as its one argument."""
    here = threading.get_ident()
    assert quick().execute(lambda ctx: (threading.get_ident(), isinstance(ctx, Context), ctx.attempt)) == (
        here,
        True,
        1,
    )


async def test_a_coroutine_function_gives_an_awaitable(tasks_world: World) -> None:
    """An `async def`, a partial of one, a method, an object whose `__call__` is one, a mock of one."""

    async def fn(ctx: Context, extra: str = "function") -> str:
        await anyio.sleep(0)
        return extra

    class Client:
        async def method(self, ctx: Context) -> str:
            return "method"

        async def __call__(self, ctx: Context) -> str:
            return "called"

    functions: list[Callable[..., Any]] = [
        fn,
        functools.partial(fn, extra="partial"),
        Client().method,
        Client(),
        AsyncMock(return_value="mock"),
    ]

    results = []
    for function in functions:
        awaitable = quick().execute(function)
        assert inspect.isawaitable(awaitable)
        results.append(await awaitable)
    assert results == ["function", "partial", "method", "called", "mock"]


def test_an_execution_of_a_coroutine_function_begins_when_it_is_awaited(tasks_world: World) -> None:
    """As calling the function itself would; it may be handed to `create_task`, or gathered."""
    calls: list[int] = []

    async def fn(ctx: Context) -> int:
        calls.append(1)
        return len(calls)

    async def main() -> int:
        awaitable = quick().execute(fn)
        await anyio.sleep(0)
        assert calls == []
        return int(await awaitable)

    assert tasks_world.run(main) == 1

    async def gathered() -> list[int]:
        return await asyncio.gather(*(quick().execute(fn) for _ in range(3)))

    assert asyncio.run(gathered()) == [2, 3, 4]


@pytest.mark.parametrize("policy", [Bulkhead(1), CircuitBreaker(1), Fallback("answer")], ids=repr)
def test_it_is_a_misuse_at_any_call(policy: Policy[Any]) -> None:
    """Also once the policy knows its way, and calls the function without a context of its own."""
    assert policy.call(len, "four") == 4
    for _ in range(2):
        with nothing_is_left_unawaited(), pytest.raises(TypeError, match="aexecute"):
            policy.call(lambda: coroutine())
    assert policy.call(len, "four") == 4


@pytest.mark.parametrize("through", ["call", "decorator", "proxy"])
def test_a_blocking_call_that_returns_an_awaitable_is_a_misuse_and_no_outcome(through: str) -> None:
    """Nobody retries, counts or answers it, and what it returned is closed."""

    async def fetch() -> str:
        return "never"

    returned: list[Any] = []

    def begin() -> Any:
        returned.append(fetch())
        return returned[-1]

    breaker = CircuitBreaker(1)
    policy = Policy.wrap(Fallback("answer"), Retry(3, on=Exception, backoff=[0]), breaker)
    run = {
        "call": lambda: policy.call(begin),
        "decorator": policy(begin),
        "proxy": lambda: policy.proxy(SimpleNamespace(begin=begin), "begin").begin(),
    }[through]
    with pytest.raises(TypeError, match="begin returned an awaitable"):
        run()
    assert len(returned) == 1
    assert returned[0].cr_frame is None  # closed
    assert breaker.state is CircuitState.CLOSED


async def test_aexecute_takes_whatever_returns_an_awaitable(tasks_world: World) -> None:
    """Clients are full of plain methods that return one; each attempt calls them anew."""
    calls: list[int] = []

    async def fetch(ctx: Context) -> str:
        calls.append(ctx.attempt)
        if len(calls) < 3:
            raise Boom
        return "fetched"

    assert [
        await quick().aexecute(fetch),
        await quick().aexecute(lambda ctx: fetch(ctx)),
        await quick().aexecute(lambda ctx: Later()),
        await quick().aexecute(functools.partial(lambda ctx: Later())),
        await quick().aexecute(AsyncMock(return_value="mock")),
        await quick().aexecute(Mock(return_value=Later())),
    ] == ["fetched", "fetched", "later", "later", "mock", "later"]
    assert calls[:3] == [1, 2, 3]


def test_a_future_and_a_task_can_be_awaited_too() -> None:
    """Of asyncio's own; they are what some clients return."""

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon(future.set_result, "future")
        return [
            await quick().aexecute(lambda ctx: future),
            await quick().aexecute(lambda ctx: loop.create_task(asyncio.sleep(0, "task"))),
        ]

    assert asyncio.run(main()) == ["future", "task"]


async def test_a_context_may_be_passed_by_position_and_by_name(world: World) -> None:
    """`execute(fn, ctx=None)`, and so for its siblings."""

    def fn(ctx: Context) -> str | None:
        return ctx.operation

    async def afn(ctx: Context) -> str | None:
        return ctx.operation

    async def main() -> list[Any]:
        ctx = Context(operation="op")
        if world.blocking:
            return [
                quick().execute(fn, ctx),
                quick().execute(fn, ctx=ctx),
                quick().capture(fn, ctx).unwrap(),
                quick().capture(fn, ctx=ctx).unwrap(),
            ]
        return [
            await quick().execute(afn, ctx),
            await quick().aexecute(afn, ctx=ctx),
            (await quick().acapture(afn, ctx)).unwrap(),
            (await quick().acapture(afn, ctx=ctx)).unwrap(),
        ]

    assert await main() == ["op"] * 4


async def test_results_of_every_kind_come_out_as_they_are(world: World) -> None:
    """Nothing is taken for "no result": falsy values, exceptions and outcomes as values."""
    pipeline = Fallback("x").wrap(quick(), CircuitBreaker(), Bulkhead(1), Timeout(5.0))
    for value in (None, 0, "", (), NotImplemented, Boom("a value"), StopIteration(1), Failure(Boom()), Success(1)):
        script = Script("placeholder")

        async def fn(ctx: Context, value: Any = value) -> Any:
            return value

        async def main(fn: Any = fn) -> Any:
            return await world.execute(pipeline, fn)

        assert await main() is value, script


async def test_an_error_comes_out_as_itself(world: World, clock: FakeClock) -> None:
    """Not wrapped, not chained to one of ours, with its own cause."""
    cause = ValueError("why")
    boom = Boom("no")
    boom.__cause__ = cause
    pipeline = quick().wrap(CircuitBreaker(), Bulkhead(1), Timeout(5.0))

    error = await world.attempt(pipeline, Script(boom).function())
    assert error is boom
    assert error.__cause__ is cause
    assert error.__context__ is None


# --- call ------------------------------------------------------------------------------------


async def test_call_hands_over_every_argument_whatever_its_name(world: World) -> None:
    """Its own parameters are positional only."""

    async def fn(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    async def main() -> list[Any]:
        if world.blocking:
            return [quick().call(world.native(fn), 1, 2, fn=3, self=4, ctx=5, policy=6)]
        return [
            await quick().call(fn, 1, 2, fn=3, self=4, ctx=5, policy=6),
            await quick().acall(fn, 1, 2, fn=3, self=4, ctx=5, policy=6),
        ]

    for got in await main():
        assert got == ((1, 2), {"fn": 3, "self": 4, "ctx": 5, "policy": 6})


async def test_call_hands_over_no_context(world: World) -> None:
    """A callable without parameters stays one; inside, the context can be found."""
    seen: list[int] = []

    async def fn() -> None:
        seen.append(current_context().attempt)
        raise Boom

    with pytest.raises(Boom):
        if world.blocking:
            quick().call(world.native(fn))
        else:
            await quick().acall(fn)
    assert seen == [1, 2, 3]


async def test_the_same_arguments_are_handed_over_in_every_attempt(world: World, clock: FakeClock) -> None:
    """The very objects, although keyword arguments make a fresh dictionary for each call."""
    payload = {"a": 1}
    seen: list[Any] = []

    async def fn(*args: Any, **kwargs: Any) -> None:
        seen.append((args[0] is payload, kwargs.pop("b") is payload))
        raise Boom

    with pytest.raises(Boom):
        if world.blocking:
            quick().call(world.native(fn), payload, b=payload)
        else:
            await quick().acall(fn, payload, b=payload)
    assert seen == [(True, True)] * 3


async def test_acall_takes_a_plain_method_that_returns_an_awaitable(tasks_world: World) -> None:
    """Of redis.asyncio, of aiohttp, of grpc.aio."""

    class Client:
        def get(self, key: str) -> Any:
            return self._get(key)

        async def _get(self, key: str) -> str:
            await anyio.sleep(0)
            return f"value of {key}"

    assert await quick().acall(Client().get, "a") == "value of a"


# --- capture ---------------------------------------------------------------------------------


async def captured(world: World, policy: Policy[Any], fn: Callable[..., Any], ctx: Context | None = None) -> Any:
    if world.blocking:
        return policy.capture(world.native(fn), ctx)
    return await policy.acapture(fn, ctx)


async def test_capture_gives_the_outcome_as_a_value(world: World, clock: FakeClock) -> None:
    """`Success` or `Failure`, after all that the policy does."""
    boom = Boom("no")
    ctx = Context()

    assert [
        await captured(world, quick(), Script(Boom(), "fine").function()),
        await captured(world, quick(), Script(None).function()),
        await captured(world, quick(), Script(boom).function(), ctx),
        await captured(world, Fallback("x"), Script(boom).function()),
    ] == [Success("fine"), Success(None), Failure(boom), Success("x")]
    assert ctx.attempts == 3


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_capture_raises_what_is_no_exception(world: World, kind: type[BaseException]) -> None:
    """An interrupt is no outcome of the call."""

    with pytest.raises(kind):
        await captured(world, quick(), Script(kind()).function())


async def test_capture_raises_a_cancellation(tasks_world: World) -> None:
    """The caller is leaving: there is nobody to hand a value to."""
    reached: list[str] = []

    with anyio.move_on_after(0.01) as scope:
        await quick().acapture(lambda ctx: anyio.sleep(4))
        reached.append("captured")
    assert scope.cancelled_caught
    assert reached == []


def test_capture_raises_a_misuse() -> None:
    """It is no outcome: a `Failure` of it would be filed with those of the dependency."""

    async def coroutine(ctx: Context) -> None: ...

    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="aexecute"):
        quick().capture(lambda ctx: coroutine(ctx))
    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="await"):
        quick().capture(coroutine)


# --- the decorator ---------------------------------------------------------------------------


def test_the_decorator_keeps_name_docs_and_signature() -> None:
    """And the module, own attributes, and the way back to the function itself."""

    def fetch(url: str, *, limit: int = 3) -> list[str]:
        """Fetch the url."""
        return [url] * limit

    fetch.route = "/fetch"  # type: ignore[attr-defined]

    async def afetch(url: str, *, limit: int = 3) -> list[str]:
        """Fetch the url."""
        return [url] * limit

    for function in (fetch, afetch):
        wrapped = quick()(function)
        assert wrapped.__name__ == function.__name__
        assert wrapped.__qualname__ == function.__qualname__
        assert wrapped.__module__ == __name__
        assert wrapped.__doc__ == "Fetch the url."
        assert inspect.signature(wrapped) == inspect.signature(function)
        assert wrapped.__annotations__ == function.__annotations__
        assert wrapped.__wrapped__ is function  # type: ignore[union-attr]
    assert quick()(fetch).route == "/fetch"  # type: ignore[attr-defined]


async def test_a_decorated_function_runs_under_the_policy(world: World, clock: FakeClock) -> None:
    """Each call of it is an execution of its own."""
    script = Script(Boom(), "one", Boom(), Boom(), "two")

    async def fetch(word: str) -> str:
        return word + await script.function()()

    decorated = quick()(world.native(fetch))

    async def main() -> list[str]:
        if world.blocking:
            return [decorated(">"), decorated(word=">")]
        return [await decorated(">"), await decorated(word=">")]

    assert await main() == [">one", ">two"]
    assert script.calls == 5


async def test_a_decorated_coroutine_function_is_one(tasks_world: World) -> None:
    """Frameworks ask `iscoroutinefunction`. It is decided once, when it is decorated."""

    @quick()
    async def fetch() -> str:
        return "fetched"

    @quick()
    def plain() -> str:
        return "plain"

    assert inspect.iscoroutinefunction(fetch)
    assert not inspect.iscoroutinefunction(plain)
    assert plain() == "plain"
    assert await fetch() == "fetched"


def test_a_decorated_function_takes_arguments_of_any_name() -> None:
    """The wrapper's own names are in nobody's way."""

    @quick()
    def fn(self: int, fn: int, ctx: int, policy: int, *, call: int, args: int, kwargs: int) -> tuple[int, ...]:
        return self, fn, ctx, policy, call, args, kwargs

    assert fn(self=1, fn=2, ctx=3, policy=4, call=5, args=6, kwargs=7) == (1, 2, 3, 4, 5, 6, 7)


async def test_the_decorator_works_on_methods_of_every_kind(tasks_world: World, clock: FakeClock) -> None:
    """Above and below `staticmethod` and `classmethod`, synchronous or not, on the class and on an object."""

    class Service:
        calls = 0

        @quick()
        def method(self, x: int) -> Any:
            Service.calls += 1
            if Service.calls == 1:
                raise Boom
            return self, x

        @quick()
        async def amethod(self, x: int) -> Any:
            return self, x

        @classmethod
        @quick()
        def below_class(cls, x: int) -> Any:
            return cls, x

        @quick()
        @classmethod
        def above_class(cls, x: int) -> Any:
            return cls, x

        @quick()
        @classmethod
        async def above_aclass(cls, x: int) -> Any:
            return cls, x

        @staticmethod
        @quick()
        def below_static(x: int) -> Any:
            return x

        @quick()
        @staticmethod
        def above_static(x: int) -> Any:
            return x

        @quick()
        @staticmethod
        async def above_astatic(x: int) -> Any:
            return x

    service = Service()
    assert service.method(1) == (service, 1)
    assert Service.calls == 2
    assert Service.method(service, 2) == (service, 2)
    for one in (Service, service):
        assert one.below_class(3) == one.above_class(3) == (Service, 3)
        assert one.below_static(4) == one.above_static(4) == 4
    assert isinstance(vars(Service)["above_class"], classmethod)
    assert isinstance(vars(Service)["above_static"], staticmethod)

    assert [await service.amethod(5), await Service.above_aclass(6), await service.above_astatic(7)] == [
        (service, 5),
        (Service, 6),
        7,
    ]


def test_a_decorated_abstract_method_stays_abstract() -> None:
    """The mark is an attribute of the function, and is kept."""

    class Client(abc.ABC):
        @quick()
        @abc.abstractmethod
        def get(self) -> str: ...

    with pytest.raises(TypeError, match="abstract"):
        Client()  # type: ignore[abstract]


async def test_the_decorator_works_on_callables_without_a_name(tasks_world: World) -> None:
    """Objects, partials, built-in functions, classes, mocks."""

    class Adder:
        def __call__(self, x: int) -> int:
            return x + 1

    class LaterAdder:
        async def __call__(self, x: int) -> int:
            return x + 1

    async def add(x: int, y: int) -> int:
        return x + y

    assert quick()(Adder())(1) == 2
    assert quick()(functools.partial(max, 3))(1) == 3
    assert quick()(len)("four") == 4
    assert quick()(dict)(a=1) == {"a": 1}
    assert quick()(Mock(return_value="mocked"))() == "mocked"

    two, three, _ = [
        await quick()(LaterAdder())(1),
        await quick()(functools.partial(add, 1))(2),
        await quick()(AsyncMock())(),
    ]
    assert (two, three) == (2, 3)
    assert inspect.iscoroutinefunction(quick()(LaterAdder()))


def test_policies_decorate_on_top_of_one_another(clock: FakeClock) -> None:
    """Two decorators are two nested executions: the inner one makes its attempts within each of the outer's."""
    calls: list[int] = []

    @quick(2)
    @quick(3)
    def fn() -> None:
        calls.append(current_context().attempt)
        raise Boom

    with pytest.raises(Boom):
        fn()
    assert calls == [1, 2, 3, 1, 2, 3]


def generator(*args: Any) -> Iterator[int]:
    yield 1


async def async_generator(*args: Any) -> AsyncIterator[int]:
    yield 1


class Generates:
    def __call__(self) -> Iterator[int]:
        yield 1

    def method(self) -> Iterator[int]:
        yield 1

    async def amethod(self) -> AsyncIterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (generator, "generator"),
        (async_generator, "async_generator"),
        (functools.partial(generator, 1), "generator"),
        (functools.partial(async_generator, 1), "async_generator"),
        (Generates(), "Generates"),
        (Generates().method, "Generates.method"),
        (Generates().amethod, "Generates.amethod"),
        (staticmethod(generator), "generator"),
        (classmethod(generator), "generator"),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_a_generator_function_is_refused_when_it_is_decorated(fn: Any, name: str) -> None:
    """Calling it does none of its work, so nothing would be protected: the error says so, and names it."""
    with pytest.raises(TypeError, match=rf"^{name} is a generator function"):
        quick()(fn)


@pytest.mark.parametrize("fn", [42, None, "fetch", [len], property(len)], ids=shown)
def test_what_is_not_callable_is_refused_when_it_is_decorated(fn: Any) -> None:
    """At once, not at the first call."""
    with pytest.raises(TypeError, match="decorates callables"):
        quick()(fn)


# --- usage errors are no outcomes ------------------------------------------------------------


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


async def coroutine(*args: object) -> str:
    return "never awaited"


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
    """A `TypeError` that names the function and the way out; the coroutine is closed; it is called once."""
    seen: list[Any] = []
    calls: list[object] = []
    policy = GREEDY[name](seen)

    def returns_a_coroutine(*args: object) -> Any:
        calls.append(1)
        return coroutine()

    expected = "Holder.method" if way == "proxy" else "returns_a_coroutine"
    with nothing_is_left_unawaited(), pytest.raises(TypeError) as caught:
        WAYS[way](policy, returns_a_coroutine)
    assert expected in str(caught.value)
    assert "aexecute" in str(caught.value)
    assert "acall" in str(caught.value)
    assert calls == [1]
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


def test_a_task_or_future_is_refused_and_left_alone() -> None:
    """It is somebody's running work."""

    async def main() -> list[Any]:
        task = asyncio.create_task(asyncio.sleep(0, "done"))
        future = asyncio.get_running_loop().create_future()
        for it in (task, future):
            with pytest.raises(TypeError, match="acall"):
                quick().call(lambda it=it: it)
        assert not future.done()
        return [await task]

    assert asyncio.run(main()) == ["done"]


def test_an_object_that_is_awaitable_but_no_coroutine_is_refused() -> None:
    """Its result would be lost as well."""
    with pytest.raises(TypeError, match="aexecute"):
        quick().execute(lambda ctx: Later())


def test_a_handler_that_is_asynchronous_in_blocking_code_is_a_misuse() -> None:
    """Nobody there can await it, and a coroutine is not taken for an answer."""
    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="coroutine"):
        Fallback(handler=coroutine).execute(lambda ctx: 1 / 0)


# --- what is no outcome at all ---------------------------------------------------------------


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


@each_greedy
async def test_a_cancellation_is_neutral_to_every_policy(tasks_world: World, name: str) -> None:
    """As the interrupts are."""
    seen: list[Any] = []
    calls: list[int] = []
    policy = GREEDY[name](seen)

    async def fn(ctx: Context) -> None:
        calls.append(1)
        await anyio.sleep(4)

    with anyio.move_on_after(0.05) as scope:
        await policy.aexecute(fn)
    assert scope.cancelled_caught
    assert calls == [1]
    assert seen == []
    assert released(policy)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_an_interrupted_probe_gives_its_slot_back(
    world: World, clock: FakeClock, kind: type[BaseException]
) -> None:
    """The half-open circuit has learnt nothing."""
    breaker = CircuitBreaker(1, open_for=10.0)

    await world.attempt(breaker, Script(Boom()).function())
    clock.advance(10.0)
    with pytest.raises(kind):
        await world.execute(breaker, Script(kind()).function())
    assert (breaker.state, breaker.stats().probes) == (CircuitState.HALF_OPEN, 0)


# --- StopIteration ---------------------------------------------------------------------------


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


def test_a_protected_next_still_ends_a_loop() -> None:
    """The everyday form of the rule."""

    class Pages:
        def __init__(self) -> None:
            self.left = [1, 2, 3]

        def __iter__(self) -> Pages:
            return self

        @Timeout(5.0).wrap(quick())
        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    assert list(Pages()) == [1, 2, 3]


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


# --- the user's own policies -----------------------------------------------------------------


class Twice(Policy):
    """Runs all that is inside twice."""

    async def around(self, call: Any, ctx: Context) -> Any:
        await call(ctx.child(attempt=1))
        return await call(ctx.child(attempt=2))


class Answering(Policy[str]):
    """Answers what failed, and never makes the call for "cached"."""

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            self.name = name
        self.held = 0

    async def around(self, call: Any, ctx: Context) -> Any:
        if ctx.operation == "cached":
            return "from the cache"
        self.held += 1
        try:
            return await call(ctx)
        except Boom as error:
            return f"answered {error}"
        finally:
            self.held -= 1


class Rated(Policy):
    """Waits before the call and after it, through what it is given."""

    async def around(self, call: Any, ctx: Context) -> Any:
        await ctx.sleep(1.0)
        result = await call(ctx)
        await ctx.runtime.sleep(2.0, ctx)
        return result


class Hurried(Policy):
    """Gives less time to what is inside, and sees to its end with a timer."""

    async def around(self, call: Any, ctx: Context) -> Any:
        from resilience.clock import clock

        limit = clock.now() + 0.02
        with ctx.runtime.timer(self, limit) as timer:
            return await call(ctx.child(deadline=limit, timer=timer))
        return "cut off" if timer.fired else "impossible"


class Tagged:
    """Somebody else's class, which makes its instances itself, out of arguments."""

    tag: str

    def __new__(cls, tag: str) -> Tagged:
        self = super().__new__(cls)
        self.tag = tag
        return self


class TaggedPolicy(Policy, Tagged):
    """Both."""

    async def around(self, call: Any, ctx: Context) -> Any:
        return self.tag, await call(ctx)


def test_a_policy_may_be_of_another_class_too_that_makes_its_instances_itself() -> None:
    """What the policy is made with reaches that one."""
    assert TaggedPolicy("blue").call(str.upper, "fine") == ("blue", "FINE")


async def test_a_policy_of_ones_own_runs_in_every_world(world: World, clock: FakeClock) -> None:
    """The same code: calling twice, answering, skipping the call, waiting, giving back what it holds."""
    script = Script("once", "twice")
    answering = Answering()

    assert [
        await world.execute(Twice(), script.function()),
        await world.execute(answering, Script(Boom("boom")).function()),
        await world.execute(answering, Script("not called").function(), Context(operation="cached")),
        await world.execute(Rated(), Script("rated").function()),
    ] == ["twice", "answered boom", "from the cache", "rated"]
    assert [ctx.attempt for ctx in script.contexts] == [1, 2]
    assert clock.sleeps == [1.0, 2.0]

    with pytest.raises(KeyboardInterrupt):
        await world.execute(answering, Script(KeyboardInterrupt()).function())
    assert answering.held == 0


async def test_a_policy_of_ones_own_can_cut_off(world: World) -> None:
    """With the timer of its world."""

    async def hang(ctx: Context) -> None:
        assert ctx.remaining() <= 0.02
        await world.hang()

    assert await world.execute(Hurried(), hang) == "cut off"


async def test_a_policy_of_ones_own_composes_with_ours(world: World, clock: FakeClock) -> None:
    """In the middle of a pipeline, decorating, as a proxy."""
    pipeline = Retry(2, on=Boom, backoff=[0]).wrap(Twice(), CircuitBreaker(9), Timeout(5.0))
    script = Script("first", Boom("no"), "third", "fourth")

    assert await world.execute(pipeline, script.function()) == "fourth"
    assert script.calls == 4


async def test_a_policy_may_hand_the_rest_of_the_chain_to_a_helper_and_to_other_policies(
    world: World, clock: FakeClock
) -> None:
    """`call` is an ordinary coroutine function: it can be passed on, and another policy can go around it."""

    class Careful(Policy):
        retry = Retry(3, on=Boom, backoff=[0])

        async def around(self, call: Any, ctx: Context) -> Any:
            return await self.retry.around(call, ctx)

    script = Script(Boom(), Boom(), "fine")

    assert await world.execute(Timeout(5.0).wrap(Careful()), script.function()) == "fine"
    assert script.calls == 3


async def test_a_pipeline_can_go_around_a_call_inside_a_policy(world: World, clock: FakeClock) -> None:
    """A pipeline is a policy: its `around` may be used by hand."""

    class Careful(Policy):
        inner = Retry(3, on=Boom, backoff=[0]).wrap(CircuitBreaker(9), Timeout(5.0))

        async def around(self, call: Any, ctx: Context) -> Any:
            return await self.inner.around(call, ctx)

    script = Script(Boom(), Boom(), "fine")

    assert await world.execute(Careful(), script.function()) == "fine"
    assert script.calls == 3


async def test_a_policy_may_extend_another_of_the_users_own(world: World) -> None:
    """`super().around(...)` works as anywhere."""

    class Base(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            return [await call(ctx)]

    class Derived(Base):
        async def around(self, call: Any, ctx: Context) -> Any:
            return (await super().around(call, ctx), "derived")

    assert await world.execute(Derived(), Script("x").function()) == (["x"], "derived")


async def test_a_policy_made_inside_a_function_may_use_what_is_around_it(world: World) -> None:
    """Closures are closures."""
    log: list[str] = []

    def tagging(tag: str) -> Policy:
        class Tag(Policy):
            async def around(self, call: Any, ctx: Context) -> Any:
                log.append(tag)
                return await call(ctx)

        return Tag()

    assert await world.execute(tagging("a").wrap(tagging("b")), Script("x").function()) == "x"
    assert log == ["a", "b"]


def test_a_policy_without_a_flow_cannot_be_made() -> None:
    """`around` is what a policy is."""

    class Empty(Policy):
        pass

    with pytest.raises(TypeError, match="around"):
        Empty()  # type: ignore[abstract]


def test_a_policy_is_called_by_its_name_or_that_of_its_class() -> None:
    """And shows how it was made; one without settings shows its class alone."""
    assert Twice().name == "Twice"
    assert Answering("cache").name == "cache"
    assert repr(Twice()) == "Twice()"
    assert Twice().describe() == "Twice()"

    class Limited(Policy):
        def __init__(self, limit: int, *, burst: int = 3) -> None:
            self.limit, self.burst = limit, burst

        async def around(self, call: Any, ctx: Context) -> Any:
            return await call(ctx)

        def settings(self) -> dict[str, object]:
            return {"limit": self.limit, "burst": self.burst}

    assert repr(Limited(5)) == "Limited(limit=5)"
    assert repr(Limited(5, burst=4)) == "Limited(limit=5, burst=4)"


def test_an_event_of_an_execution_names_a_policy_of_ones_own() -> None:
    """By the name that it was given."""
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append, events.ExecutionFinished)
    Answering("cache").execute(lambda ctx: "x")
    unsubscribe()
    assert [event.policy for event in seen] == ["cache"]


# --- one object, every world -----------------------------------------------------------------

AT_IMPORT_TIME = Fallback("x", on=Boom).wrap(
    Retry(on=Boom, backoff=[0]), CircuitBreaker(), Bulkhead(3, queue=5), Timeout(5.0)
)


def test_a_pipeline_that_was_made_at_import_time_serves_every_loop_and_thread(world: World) -> None:
    """Nothing of it is bound to a loop: no primitive is made before it is needed, none is kept."""

    async def main() -> object:
        return await world.execute(AT_IMPORT_TIME, Script(Boom(), "fine").function())

    for _ in range(2):
        assert world.run(main) == "fine"
    in_thread: list[Any] = []
    thread = threading.Thread(target=lambda: in_thread.append(world.run(main)))
    thread.start()
    thread.join()
    assert in_thread == ["fine"]


def test_blocking_code_inside_a_running_loop_is_blocking_code() -> None:
    """`execute` of a plain function does not ask whether there is a loop: it runs here, and blocks here."""

    async def main() -> object:
        return AT_IMPORT_TIME.execute(lambda ctx: "fine")

    assert asyncio.run(main()) == "fine"
    assert anyio.run(main, backend="trio") == "fine"


async def test_executions_nest_without_end(world: World) -> None:
    """A pipeline inside itself is just another execution."""
    pipeline = quick().wrap(Timeout(5.0, cooperative=True))
    depth: list[int] = []

    async def fn(ctx: Context) -> Any:
        depth.append(1)
        return "bottom" if len(depth) == 20 else await world.execute(pipeline, fn)

    assert await world.execute(pipeline, fn) == "bottom"
