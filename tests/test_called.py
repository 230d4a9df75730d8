"""What is called: each policy, handler and event sees it, and it names the operation where no other name is given."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from resilience import (
    AdaptiveLimit,
    Bulkhead,
    Cache,
    Chaos,
    CircuitBreaker,
    Context,
    Fallback,
    Hedge,
    Pipeline,
    Policy,
    Retry,
    Timeout,
    current_context,
    deadline,
    events,
)
from resilience.events import Called
from resilience.testing import Simulation
from tests.conftest import Boom, FakeClock, World
from tests.functions import quick
from tests.listening import ASKED_FOR, KINDS, retry_without_budget


class Seeing(Policy):
    """Notes what is called, and for what, as often as it is asked to run it."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []
        self.called: list[Called | None] = []
        self.operations: list[str | None] = []

    async def around(self, call: Any, ctx: Context) -> Any:
        self.contexts.append(ctx)
        self.called.append(ctx.called)
        self.operations.append(ctx.operation)
        return await call(ctx)


class Client:
    """What a proxy wraps, and methods of every kind."""

    async def fetch(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    @classmethod
    async def made(cls, *args: Any) -> Any:
        return args

    @staticmethod
    async def plain(*args: Any) -> Any:
        return args


class BlockingClient:
    """The same without waiting."""

    def fetch(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    @classmethod
    def made(cls, *args: Any) -> Any:
        return args

    @staticmethod
    def plain(*args: Any) -> Any:
        return args


async def fetch(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


async def finished(result: Any) -> Any:
    """What a call returned, whatever the world."""
    return await result if isinstance(result, Awaitable) else result


# --- in a policy -------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Policy[Any], Any], Callable[..., Any]]] = {
    "call": lambda policy, fn: functools.partial(policy.call, fn),
    "acall": lambda policy, fn: functools.partial(policy.acall, fn),
    "decorator": lambda policy, fn: policy(fn),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_policy_sees_function_arguments_and_keywords(world: World, way: str) -> None:
    """Wherever it stands, in every attempt, and as the caller gave them."""
    outside, inside = Seeing(), Seeing()
    pipeline = Pipeline(outside, quick(2), Timeout(60.0), inside)
    function = world.native(fetch)
    if way == "acall" and world.blocking:
        way = "call"
    arguments = (1, [2])

    assert await finished(WAYS[way](pipeline, function)(*arguments, key="x")) == (arguments, {"key": "x"})
    for called in (*outside.called, *inside.called):
        assert isinstance(called, Called)
        assert called.function is function
        assert all(one is other for one, other in zip(called.arguments, arguments, strict=True))
        assert called.keywords == {"key": "x"}


@pytest.mark.parametrize("way", ["execute", "aexecute", "capture"])
async def test_under_execute_the_one_argument_is_that_very_context(world: World, way: str, clock: FakeClock) -> None:
    """Of each context that is handed inwards, itself; and what the function gets is that, too."""
    outside, inside = Seeing(), Seeing()
    pipeline = Pipeline(outside, quick(2), Timeout(60.0), inside)
    given: list[Context] = []

    async def fn(ctx: Context) -> None:
        given.append(ctx)
        assert ctx.called == (function, (ctx,), {})
        raise Boom

    function = world.native(fn)
    if way == "capture":
        outcome = await finished((pipeline.capture if world.blocking else pipeline.acapture)(function))
        assert isinstance(outcome.error, Boom)
    else:
        with pytest.raises(Boom):
            await finished((pipeline.execute if world.blocking else getattr(pipeline, way))(function))
    assert (len(outside.contexts), len(inside.contexts), len(given)) == (1, 2, 2)
    for ctx in (*outside.contexts, *inside.contexts, *given):
        assert ctx.called is not None
        assert ctx.called.arguments[0] is ctx
        assert ctx.child().called != ctx.called


async def test_of_a_decorated_method_the_object_is_the_first_argument(world: World) -> None:
    """It is the function in the class that is decorated; a class method gets the class."""
    seeing = Seeing()

    class Users(BlockingClient if world.blocking else Client):  # type: ignore[misc]
        get = seeing(BlockingClient.fetch if world.blocking else Client.fetch)

    users: Any = Users()
    await finished(users.get(4711))
    assert [called and called.arguments for called in seeing.called] == [(users, 4711)]
    assert seeing.operations == ["BlockingClient.fetch" if world.blocking else "Client.fetch"]


async def test_a_proxy_shows_the_clients_own_methods(world: World) -> None:
    """Bound, so without the client among the arguments."""
    seeing = Seeing()
    client: Any = BlockingClient() if world.blocking else Client()

    await finished(seeing.proxy(client).fetch(1, key="x"))
    await finished(seeing.proxy(client, "plain").plain(2))
    assert seeing.called == [(client.fetch, (1,), {"key": "x"}), (client.plain, (2,), {})]
    name = type(client).__qualname__
    assert seeing.operations == [f"{name}.fetch", f"{name}.plain"]


async def test_what_a_proxy_of_an_asynchronous_client_enters_is_called_by_the_clients_method(
    tasks_world: World,
) -> None:
    """`async with session.get(url)` as well as `await session.get(url)`, with the same arguments."""
    seeing = Seeing()

    class Session:
        @asynccontextmanager
        async def get(self, url: str, *, params: object = None) -> Any:
            yield url

        def later(self, url: str) -> Awaitable[Any]:
            return fetch(url)

    session = seeing.aproxy(Session())
    async with session.get("u", params=1) as response:
        assert response == "u"
    await session.later("v")
    assert seeing.operations == [Session.get.__qualname__, Session.later.__qualname__]
    assert [called and called[1:] for called in seeing.called] == [(("u",), {"params": 1}), (("v",), {})]


def test_in_a_simulation_it_is_the_modelled_function() -> None:
    """And its one argument the context."""
    seeing = Seeing()
    seen: list[bool] = []

    async def model(ctx: Context) -> None:
        await simulation.sleep(1.0)
        seen.append(ctx.called == (model, (ctx,), {}))

    async def client() -> None:
        await simulation.execute(Pipeline(Retry(), seeing), model)

    with Simulation(seed=1) as simulation:
        simulation.start(client())
        simulation.run()
    assert seen == [True]
    assert [called and called.function for called in seeing.called] == [model]
    assert seeing.operations == [model.__qualname__]


# --- in the function, handlers and listeners -----------------------------------------------------


async def test_a_function_finds_it_in_the_ambient_context(world: World) -> None:
    """On a worker too; with what the caller passed, where a context is set at all."""

    async def fn(word: str) -> Any:
        return current_context().called

    function = world.native(fn)
    with deadline(60.0):
        assert await finished(Timeout(5.0).call(function, "hello")) == (function, ("hello",), {})


async def test_a_fallbacks_handler_sees_what_failed(world: World) -> None:
    """Through the context that it is handed, and as the ambient one."""

    def handler(failure: object, ctx: Context) -> Any:
        assert current_context() is ctx
        return ctx.called, ctx.operation

    async def fails(*args: Any, **kwargs: Any) -> None:
        raise Boom

    function = world.native(fails)
    fallback = Fallback(handler=handler).wrap(quick(2), Timeout(60.0))
    called, operation = await finished(fallback.call(function, 1, key="x"))
    assert called == (function, (1,), {"key": "x"})
    assert operation == function.__qualname__


def fails(*args: Any) -> None:
    raise Boom


def every_kind(call: Callable[[Policy[Any]], object], full: Bulkhead) -> None:
    """Make an event of each kind, whatever the policy raises."""
    call(Fallback("x").wrap(quick(2)))
    call(CircuitBreaker(1))
    with full.slot():
        call(full)
    with deadline(0.0):
        call(Timeout(5.0))
    call(retry_without_budget())
    chaos = Chaos(result=None)
    with chaos.injecting(rate=1.0):
        call(chaos)
    call(Hedge(5, on=Boom, eager=True))
    call(AdaptiveLimit(60, initial=20, min_samples=1, on=Boom))
    cache = Cache(60, key=lambda *_: "same", keep_errors=Boom)
    call(cache)
    call(cache)


@pytest.mark.parametrize("kind", [*(it for it in KINDS if it is not events.StreamOpened), ASKED_FOR])
def test_each_event_says_what_was_called(kind: type[events.Event]) -> None:
    """Of every kind."""
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append, kind)

    def call(policy: Policy[Any]) -> None:
        with suppress(Exception):
            policy.call(fails, 1, 2)

    every_kind(call, Bulkhead(1))
    every_kind(lambda policy: policy.capture(fails), Bulkhead(1))
    unsubscribe()
    assert {type(event) for event in seen} == {kind}
    assert {event.operation for event in seen} == {"fails"}
    assert {event.called.function for event in seen} == {fails}
    assert (1, 2) in [event.called.arguments for event in seen]
    [handed] = {type(event.called.arguments[0]) for event in seen if event.called.arguments != (1, 2)}
    assert issubclass(handed, Context)


async def test_a_pipelines_listener_and_a_policys_callback_see_it_too(world: World, clock: FakeClock) -> None:
    """The same event."""
    seen: list[tuple[str, Any]] = []
    retry = quick(2, on_retry=lambda event: seen.append(("callback", event.called)))
    pipeline = Pipeline(retry, listeners=[lambda event: seen.append(("listener", event.called))])

    async def fn(word: str) -> None:
        raise Boom

    function = world.native(fn)
    with pytest.raises(Boom):
        await finished(pipeline.call(function, "hello"))
    assert {who for who, called in seen if called == (function, ("hello",), {})} == {"callback", "listener"}
    assert {called for who, called in seen if not isinstance(called, Called)} == set()


# --- where nothing is called -----------------------------------------------------------------------


def test_outside_an_execution_nothing_is_called() -> None:
    """Nor for the caller's own context, which an execution derives from and never changes."""
    ctx = Context()
    assert Retry().execute(lambda inner: inner.called is not None, ctx) is True
    assert (ctx.called, ctx.operation) == (None, None)
    assert current_context().called is None


def test_a_block_is_no_call() -> None:
    """Also inside of one: its events have the operation that a context around was given, or none."""
    seen: list[Any] = []

    def fn(ctx: Context) -> None:
        with CircuitBreaker(1, on_transition=seen.append).guard():
            raise Boom

    Retry().capture(fn)
    Retry().capture(fn, Context(operation="op"))
    assert [(event.operation, event.called) for event in seen] == [(None, None), ("op", None)]


# --- the operation -----------------------------------------------------------------------------


class Callable_:
    def __call__(self, *args: Any) -> Any:
        return current_operation()


class Named:
    """Whose attributes are no names, as those of a mock."""

    def __init__(self) -> None:
        self.__qualname__ = 42

    def __call__(self, *args: Any) -> Any:
        return current_operation()


def current_operation() -> str | None:
    return current_context().operation


def module_level(*args: Any) -> str | None:
    return current_operation()


class Methods:
    def method(self, *args: Any) -> Any:
        return current_operation()

    @classmethod
    def of_class(cls, *args: Any) -> Any:
        return current_operation()

    @staticmethod
    def static(*args: Any) -> Any:
        return current_operation()


NAMES: list[tuple[Any, str]] = [
    (module_level, "module_level"),
    (Methods().method, "Methods.method"),
    (Methods.of_class, "Methods.of_class"),
    (Methods.static, "Methods.static"),
    (functools.partial(module_level, 1), "module_level"),
    (functools.partial(functools.partial(Methods().method, 1), 2), "Methods.method"),
    (functools.partial(Callable_(), 1), "Callable_"),
    (Callable_(), "Callable_"),
    (Named(), "Named"),
    (lambda *args: current_operation(), "<lambda>"),
    (Retry()(module_level), "module_level"),
    (len, "len"),
    ([].append, "list.append"),
    (dict, "dict"),
]


@pytest.mark.parametrize(("function", "name"), NAMES, ids=[f"{type(it).__name__} {name}" for it, name in NAMES])
def test_the_operation_is_by_default_the_qualified_name_of_what_is_called(function: Any, name: str) -> None:
    """Of a partial, that of its function; of an object that can be called, its class."""
    seeing = Seeing()
    arguments = ([],) if name in ("len", "list.append", "dict") else (1,)
    with deadline(60.0):
        found = seeing.call(function, *arguments)
    assert seeing.operations == [name]
    assert found == name or isinstance(function, type) or type(function) is type(len)


async def test_an_operation_that_the_caller_names_stands(world: World) -> None:
    """In every policy, attempt and event; also an empty one."""
    for given in ("get-user", ""):
        seeing = Seeing()
        seen: list[events.Event] = []
        pipeline = Pipeline(quick(2), seeing, listeners=[seen.append])

        async def fn(ctx: Context) -> None:
            raise Boom

        assert isinstance(await world.attempt(pipeline, fn, Context(operation=given)), Boom)
        assert seeing.operations == [given] * 2
        assert {event.operation for event in seen} == {given}


async def test_a_nested_execution_has_its_own_name_and_inherits_only_a_given_one(world: World) -> None:
    """What the one around is called by default says nothing about what is called inside of it."""
    outer, inner = Seeing(), Seeing()

    async def inside(ctx: Context) -> None: ...

    async def outside(ctx: Context) -> None:
        await world.execute(Retry().wrap(inner), inside)

    function = world.native(outside)
    await world.execute(outer, function)
    await world.execute(outer, function, Context(operation="given"))
    with deadline(5.0):
        await world.execute(outer, function)
    assert outer.operations == [outside.__qualname__, "given", outside.__qualname__]
    assert inner.operations == [inside.__qualname__, "given", inside.__qualname__]
    functions = [called and called.function for called in outer.called]
    assert functions == [function] * 3
    assert {called and called.function for called in inner.called}.isdisjoint(functions)


def test_a_context_shows_its_operation_and_no_argument() -> None:
    """An argument may be a secret: it is neither in the `repr` of a context nor in that of an event."""
    shown: list[str] = []

    class Showing(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            shown.append(repr(ctx))
            return await call(ctx)

    Pipeline(Showing(), listeners=[lambda event: shown.append(repr(event))]).call(module_level, "secret")
    assert shown[0] == "<Context operation='module_level' attempt=1>"
    assert len(shown) == 2
    assert "secret" not in "".join(shown)
