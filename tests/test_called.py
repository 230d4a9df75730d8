"""The called function: policies, handlers and events see it, and it is the default name of the operation."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from resilience import (
    CircuitBreaker,
    Context,
    Fallback,
    Pipeline,
    Policy,
    Retry,
    Timeout,
    current_context,
    deadline,
    events,
)
from resilience.events import Called
from tests.conftest import Boom, FakeClock, Virtual, World
from tests.custom import Doing, Recording
from tests.functions import quick
from tests.listening import ASKED_FOR, KINDS, every_kind, fails


async def plain(*args: Any) -> Any:
    return args


def client_of(world: World) -> type[Any]:
    """Return a class of clients as a user of this world would have written it."""

    class Client:
        async def fetch(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    Client.fetch = world.native(Client.fetch)  # type: ignore[method-assign]
    Client.plain = staticmethod(world.native(plain))  # type: ignore[attr-defined]
    return Client


async def fetch(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


# --- in a policy -------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Policy[Any], Any], Callable[..., Any]]] = {
    "call": lambda policy, fn: functools.partial(policy.call, fn),
    "acall": lambda policy, fn: functools.partial(policy.acall, fn),
    "decorator": lambda policy, fn: policy(fn),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_policy_sees_the_function_its_arguments_and_keywords(world: World, way: str) -> None:
    """At any place, in every attempt, as the caller passed them."""
    outside, inside = Recording(), Recording()
    pipeline = Pipeline(outside, quick(2), Timeout(60.0), inside)
    function = world.native(fetch)
    if way == "acall" and world.blocking:
        way = "call"
    arguments = (1, [2])
    assert await world.result(WAYS[way](pipeline, function)(*arguments, key="x")) == (arguments, {"key": "x"})
    for called in (*outside.called, *inside.called):
        assert isinstance(called, Called)
        assert called.function is function
        assert all(seen is passed for seen, passed in zip(called.arguments, arguments, strict=True))
        assert called.keywords == {"key": "x"}


@pytest.mark.parametrize("way", WAYS)
async def test_the_function_sees_its_own_call_in_the_ambient_context(world: World, way: str) -> None:
    """In every attempt, on a worker, and if nothing but the call is in that context; code around the call does not."""
    seen: list[Called | None] = []
    operations: list[str | None] = []

    async def fn(*args: Any, key: str) -> None:
        ctx = current_context()
        seen.append(ctx.called)
        operations.append(ctx.operation)
        if len(seen) % 2:
            raise Boom

    function = world.native(fn)
    if way == "acall" and world.blocking:
        way = "call"
    for inner in (CircuitBreaker(), Timeout(60.0)):
        await world.result(WAYS[way](Pipeline(quick(2), inner), function)(1, key="x"))
    assert seen == [(function, (1,), {"key": "x"})] * 4
    assert operations == [function.__qualname__] * 4
    assert current_context().called is None


@pytest.mark.parametrize("way", ["execute", "aexecute", "capture"])
async def test_under_execute_the_only_argument_is_the_context_itself(world: World, way: str, clock: FakeClock) -> None:
    """Each policy sees its own context as the argument, and so does the function."""
    outside, inside = Recording(), Recording()
    pipeline = Pipeline(outside, quick(2), Timeout(60.0), inside)
    given: list[Context] = []

    async def fn(ctx: Context) -> None:
        given.append(ctx)
        assert ctx.called == (function, (ctx,), {})
        raise Boom

    function = world.native(fn)
    if way == "capture":
        outcome = await world.result((pipeline.capture if world.blocking else pipeline.acapture)(function))
        assert isinstance(outcome.error, Boom)
    else:
        with pytest.raises(Boom):
            await world.result((pipeline.execute if world.blocking else getattr(pipeline, way))(function))
    assert (len(outside.seen), len(inside.seen), len(given)) == (1, 2, 2)
    for ctx in (*outside.seen, *inside.seen, *given):
        assert ctx.called is not None
        assert ctx.called.arguments[0] is ctx
        assert ctx.child().called != ctx.called


async def test_the_first_argument_of_a_decorated_method_is_the_instance(world: World) -> None:
    """The function in the class is decorated; a class method gets the class."""
    recording, kind = Recording(), client_of(world)
    kind.get = recording(kind.fetch)
    users = kind()
    await world.result(users.get(4711))
    assert [called and called.arguments for called in recording.called] == [(users, 4711)]
    assert recording.operations == [kind.fetch.__qualname__]


async def test_under_a_proxy_the_called_function_is_the_clients_bound_method(world: World) -> None:
    """So the client is not among the arguments."""
    recording, client = Recording(), client_of(world)()
    await world.result(recording.proxy(client).fetch(1, key="x"))
    await world.result(recording.proxy(client, "plain").plain(2))
    assert recording.called == [(client.fetch, (1,), {"key": "x"}), (client.plain, (2,), {})]
    assert recording.operations == [client.fetch.__qualname__, "plain"]


async def test_under_aproxy_the_called_function_is_the_clients_method(tasks_world: World) -> None:
    recording = Recording()

    class Session:
        @asynccontextmanager
        async def get(self, url: str, *, params: object = None) -> Any:
            yield url

        def later(self, url: str) -> Awaitable[Any]:
            return fetch(url)

    session = recording.aproxy(Session())
    async with session.get("u", params=1) as response:
        assert response == "u"
    await session.later("v")
    assert recording.operations == [Session.get.__qualname__, Session.later.__qualname__]
    assert [called and called[1:] for called in recording.called] == [(("u",), {"params": 1}), (("v",), {})]


async def test_in_a_simulation_the_called_function_is_the_modelled_one(in_simulation: Virtual) -> None:
    recording = Recording()

    async def model(ctx: Context) -> bool:
        return ctx.called == (model, (ctx,), {})

    assert await in_simulation.execute(Pipeline(Retry(), recording), model)
    assert [called and called.function for called in recording.called] == [model]
    assert recording.operations == [model.__qualname__]


# --- in the function, handlers and listeners -----------------------------------------------------


async def test_a_fallback_handler_sees_the_failed_call(world: World) -> None:
    """In the context it gets, which is also ambient."""

    def handler(failure: object, ctx: Context) -> Any:
        assert current_context() is ctx
        return ctx.called, ctx.operation

    async def fails(*args: Any, **kwargs: Any) -> None:
        raise Boom

    function = world.native(fails)
    fallback = Fallback(handler=handler).wrap(quick(2), Timeout(60.0))
    called, operation = await world.result(fallback.call(function, 1, key="x"))
    assert called == (function, (1,), {"key": "x"})
    assert operation == function.__qualname__


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind is not events.StreamOpened), ASKED_FOR])
def test_each_kind_of_event_contains_the_call(kind: type[events.Event]) -> None:
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append, kind)
    for policy in every_kind():
        with suppress(Exception):
            policy.call(fails, 1, 2)
    for policy in every_kind():
        policy.capture(fails)
    unsubscribe()
    assert {type(event) for event in seen} == {kind}
    assert {event.operation for event in seen} == {"fails"}
    assert {event.called.function for event in seen} == {fails}
    assert (1, 2) in [event.called.arguments for event in seen]
    [argument_type] = {type(event.called.arguments[0]) for event in seen if event.called.arguments != (1, 2)}
    assert issubclass(argument_type, Context)


# --- without a call ---


def test_outside_an_execution_there_is_no_call() -> None:
    """Nor in the caller's own context, which an execution never changes."""
    ctx = Context()
    assert Retry().execute(lambda inner: inner.called is not None, ctx) is True
    assert (ctx.called, ctx.operation) == (None, None)
    assert current_context().called is None


def test_a_block_is_no_call() -> None:
    """Also inside a call: its events have the operation of an outer context, or none."""
    seen: list[Any] = []

    def fn(ctx: Context) -> None:
        with CircuitBreaker(1, on_transition=seen.append).guard():
            raise Boom

    Retry().capture(fn)
    Retry().capture(fn, Context(operation="op"))
    assert [(event.operation, event.called) for event in seen] == [(None, None), ("op", None)]


# --- the operation -----------------------------------------------------------------------------


class Named:
    """A callable whose attributes are no names, as those of a mock."""

    def __init__(self) -> None:
        self.__qualname__ = 42

    def __call__(self, *args: Any) -> None: ...


def module_level(*args: Any) -> None: ...


class Methods:
    def method(self, *args: Any) -> None: ...

    @classmethod
    def of_class(cls, *args: Any) -> None: ...

    @staticmethod
    def static(*args: Any) -> None: ...

    __call__ = method


NAMES: list[tuple[Any, str]] = [
    (module_level, "module_level"),
    (Methods().method, "Methods.method"),
    (Methods.of_class, "Methods.of_class"),
    (Methods.static, "Methods.static"),
    (functools.partial(module_level, 1), "module_level"),
    (functools.partial(functools.partial(Methods().method, 1), 2), "Methods.method"),
    (functools.partial(Methods(), 1), "Methods"),
    (Methods(), "Methods"),
    (Named(), "Named"),
    (lambda *args: None, "<lambda>"),
    (Retry()(module_level), "module_level"),
    (len, "len"),
    ([].append, "list.append"),
    (dict, "dict"),
]


@pytest.mark.parametrize(("function", "name"), NAMES, ids=[f"{type(fn).__name__} {name}" for fn, name in NAMES])
def test_the_operation_defaults_to_the_qualified_name_of_the_called_function(function: Any, name: str) -> None:
    """For a partial, that of its function; for a callable object, its class."""
    recording = Recording()
    with deadline(60.0):
        recording.call(function, [])
    assert recording.operations == [name]


async def test_an_operation_named_by_the_caller_is_kept(world: World) -> None:
    """In every policy, attempt and event; also an empty one."""
    for given in ("get-user", ""):
        recording = Recording()
        seen: list[events.Event] = []
        pipeline = Pipeline(quick(2), recording, listeners=[seen.append])

        async def fn(ctx: Context) -> None:
            raise Boom

        assert isinstance(await world.attempt(pipeline, fn, Context(operation=given)), Boom)
        assert recording.operations == [given] * 2
        assert {event.operation for event in seen} == {given}


async def test_a_nested_execution_inherits_an_operation_only_if_the_caller_named_it(world: World) -> None:
    """The default name of the outer execution says nothing about the inner call."""
    outer, inner = Recording(), Recording()

    async def inner_function(ctx: Context) -> None: ...

    async def outer_function(ctx: Context) -> None:
        await world.execute(Retry().wrap(inner), inner_function)

    function = world.native(outer_function)
    await world.execute(outer, function)
    await world.execute(outer, function, Context(operation="given"))
    with deadline(5.0):
        await world.execute(outer, function)
    assert outer.operations == [outer_function.__qualname__, "given", outer_function.__qualname__]
    assert inner.operations == [inner_function.__qualname__, "given", inner_function.__qualname__]
    functions = [called and called.function for called in outer.called]
    assert functions == [function] * 3
    assert {called and called.function for called in inner.called}.isdisjoint(functions)


def test_the_repr_of_contexts_and_events_shows_no_arguments() -> None:
    """An argument may be a secret."""
    shown: list[str] = []

    showing = Doing(lambda ctx: shown.append(repr(ctx)))
    Pipeline(showing, listeners=[lambda event: shown.append(repr(event))]).call(module_level, "secret")
    assert shown[0] == "<Context operation='module_level' attempt=1>"
    assert len(shown) == 2
    assert "secret" not in "".join(shown)
