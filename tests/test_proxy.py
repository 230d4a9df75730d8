"""Proxies: a client that one has already, with some of its methods run through a policy."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import inspect
import pickle
import types
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar
from unittest import mock

import anyio
import httpx2
import pytest
import requests

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Policy, Retry, Timeout, current_context, deadline
from resilience.errors import BulkheadFull, CircuitOpen
from tests.conftest import Boom, FakeClock, World


def quick(attempts: int = 3, **settings: Any) -> Retry:
    return Retry(attempts, on=Boom, backoff=[0], **settings)


class Client:
    """Somebody's client: fails `failures` times, and notes what reaches it."""

    retries: ClassVar[int] = 0

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls: list[Any] = []
        self.touched: list[str] = []
        self.on_request = lambda url: self._note("on_request", url)

    def _note(self, name: str, argument: Any) -> str:
        self.calls.append((name, argument))
        if self.failures > 0:
            self.failures -= 1
            raise Boom(name)
        return f"{name} {argument}"

    def get(self, url: str, *, params: str = "") -> str:
        """Get one thing."""
        return self._note("get", url + params)

    def get_twice(self, url: str) -> list[str]:
        return [self.get(url), self.get(url)]

    async def fetch(self, url: str) -> str:
        """Get it later."""
        await anyio.sleep(0)
        return self._note("fetch", url)

    def later(self, url: str) -> Awaitable[str]:
        """A plain method that returns an awaitable."""
        return self.fetch(url)

    def _hidden(self, url: str) -> str:
        return self._note("hidden", url)

    def pages(self, url: str) -> Iterator[str]:
        yield self._note("pages", url)

    async def apages(self, url: str) -> AsyncIterator[str]:
        yield self._note("apages", url)

    @classmethod
    def of_class(cls, x: int) -> tuple[type, int]:
        return cls, x

    @staticmethod
    def static(x: int) -> int:
        return 2 * x

    partial = functools.partialmethod(get, params="?partial")

    class Options:
        """A class inside a class is no method."""

    @property
    def state(self) -> str:
        self.touched.append("state")
        return "connected"

    @property
    def broken(self) -> str:
        raise AssertionError("nobody may look at this")

    @functools.cached_property
    def connection(self) -> Callable[[], str]:
        self.touched.append("connection")
        return lambda: "connected"


def tried(client: Client, name: str) -> int:
    """How often a method of the client was entered."""
    return [called for called, _ in client.calls].count(name)


# --- which methods ---------------------------------------------------------------------------


def test_the_named_methods_run_through_the_policy_and_the_others_do_not() -> None:
    """Everything else is the client's own."""
    client = Client(failures=2)
    proxy = quick().proxy(client, "get")
    assert proxy.get("a", params="?b") == "get a?b"
    assert client.calls == [("get", "a?b")] * 3
    client.failures = 1
    with pytest.raises(Boom):
        proxy._hidden("x")
    assert tried(client, "hidden") == 1


def test_without_names_every_public_method_runs_through_the_policy() -> None:
    """Inherited, of the class, static, partial ones, and functions that were put on the object."""

    class Derived(Client):
        def post(self, url: str) -> str:
            return self._note("post", url)

    client = Derived()
    proxy = quick().proxy(client)
    calls: list[Callable[[], Any]] = [
        lambda: proxy.get("a"),
        lambda: proxy.post("a"),
        lambda: proxy.partial("a"),
        lambda: proxy.on_request("a"),
    ]
    for call in calls:
        client.calls.clear()
        client.failures = 2
        call()
        assert len(client.calls) == 3
    assert proxy.of_class(3) == (Derived, 3)
    assert proxy.static(4) == 8


def protected(proxy: Any, client: Any) -> set[str]:
    """The names under which a proxy has something of its own."""
    return {name for name in dir(type(client)) + list(vars(client)) if name in vars(proxy)}


def test_without_names_what_is_no_work_is_left_alone() -> None:
    """Private methods, properties, classes, generator functions."""
    client = Client()
    assert protected(quick().proxy(client), client) == {
        "get",
        "get_twice",
        "fetch",
        "later",
        "of_class",
        "static",
        "partial",
        "on_request",
    }
    assert protected(quick().aproxy(client), client) == protected(quick().proxy(client), client)


LIFECYCLE = "close aclose connect disconnect shutdown start stop"


@pytest.mark.parametrize("name", LIFECYCLE.split())
def test_without_names_the_clients_own_life_is_left_alone(name: str) -> None:
    """A circuit that is open must not keep a client from being closed. Who names such a method means it."""
    calls: list[int] = []

    def method(self: Any) -> None:
        calls.append(1)
        raise Boom

    client = type("Client", (), {name: method})()
    with pytest.raises(Boom):
        getattr(quick().proxy(client), name)()
    assert calls == [1]
    with pytest.raises(Boom):
        getattr(quick().proxy(client, name), name)()
    assert len(calls) == 4


def test_making_a_proxy_runs_no_property() -> None:
    """It may open a connection, or raise; a `cached_property` is one as well."""
    client = Client()
    proxy = quick().proxy(client)
    quick().aproxy(client)
    assert client.touched == []
    assert proxy.state == "connected"
    assert proxy.connection() == "connected"
    assert proxy.connection is client.connection
    assert client.touched == ["state", "connection"]


def test_a_client_whose_namespaces_are_cached_properties_can_be_wrapped_whole() -> None:
    """As those of openai and anthropic are: their namespaces are no methods."""

    class Completions:
        def create(self) -> str:
            return "created"

    class OpenAI:
        @functools.cached_property
        def chat(self) -> Completions:
            return Completions()

        def post(self) -> str:
            return "posted"

    proxy = quick().proxy(OpenAI())
    assert proxy.post() == "posted"
    assert proxy.chat.create() == "created"


def test_slots_are_no_methods() -> None:
    """A client without a dictionary is wrapped like another."""

    class Slotted:
        __slots__ = ("failures", "handler")

        def __init__(self) -> None:
            self.failures = 2
            self.handler = print

        def get(self) -> str:
            self.failures -= 1
            if self.failures >= 0:
                raise Boom
            return "got"

    proxy = quick().proxy(Slotted())
    assert proxy.get() == "got"
    assert proxy.handler is print


@pytest.mark.parametrize("how", ["proxy", "aproxy"])
def test_names_are_checked_when_the_proxy_is_made(how: str) -> None:
    """A misspelt name must not leave a method silently unprotected."""
    make = getattr(quick(), how)
    for names in (["gte"], ["get", "gte"], ["get.it"], ["nothing.at.all"], [""], [".get"]):
        with pytest.raises(AttributeError):
            make(Client(), *names)


@pytest.mark.parametrize("how", ["proxy", "aproxy"])
def test_what_cannot_be_protected_is_refused(how: str) -> None:
    """What is no method, a generator function, and what is no name."""
    make = getattr(quick(), how)
    with pytest.raises(TypeError, match=r"only methods.*\[\]"):
        make(Client(), "calls")
    with pytest.raises(TypeError, match=r"Client\.pages is a generator function"):
        make(Client(), "pages")
    with pytest.raises(TypeError, match=r"Client\.apages is a generator function"):
        make(Client(), "apages")
    with pytest.raises(TypeError, match="named by a string, not 5"):
        make(Client(), 5)
    with pytest.raises(TypeError, match="named by a string"):
        make(Client(), ["get", "fetch"])


def test_a_method_that_is_named_twice_is_protected_once() -> None:
    """Not one policy inside another."""
    client = Client(failures=99)
    with pytest.raises(Boom):
        quick(2).proxy(client, "get", "get").get("a")
    assert len(client.calls) == 2


def test_a_callable_object_can_be_named() -> None:
    """As the stubs of grpc have them: attributes that are called."""

    class Multicallable:
        failures = 2

        def __call__(self, request: str) -> str:
            self.failures -= 1
            if self.failures >= 0:
                raise Boom
            return f"answer to {request}"

    class Stub:
        def __init__(self) -> None:
            self.SayHello = Multicallable()

    assert quick().proxy(Stub(), "SayHello").SayHello("me") == "answer to me"


def test_a_module_can_be_wrapped() -> None:
    """`requests.get` is a function of a module, which is a client of sorts."""
    module = types.ModuleType("fake_requests")
    failing = Client(failures=2)
    module.get = lambda url: failing.get(url)  # type: ignore[attr-defined]
    assert quick().proxy(module, "get").get("a") == "get a"  # type: ignore[attr-defined]
    assert quick().proxy(module).get("b") == "get b"  # type: ignore[attr-defined]


# --- dotted names ----------------------------------------------------------------------------


class Namespace:
    """What openai calls a resource."""

    def __init__(self, client: Client, **children: Any) -> None:
        self._client = client
        self.__dict__.update(children)

    def create(self, x: str) -> str:
        return self._client._note("create", x)

    def parse(self, x: str) -> str:
        return self._client._note("parse", x)

    async def acreate(self, x: str) -> str:
        return self._client._note("acreate", x)

    def __len__(self) -> int:
        return 7


def nested(failures: int = 0) -> tuple[Any, Client]:
    client: Any = Client(failures)
    client.chat = Namespace(client, completions=Namespace(client), beta=Namespace(client))
    client.models = Namespace(client)
    return client, client


def test_dotted_names_reach_into_namespaces() -> None:
    """Two in the same one, one in another, one on the client itself."""
    client, log = nested()
    proxy = quick().proxy(client, "chat.completions.create", "chat.completions.parse", "models.create", "get")
    for call in (proxy.chat.completions.create, proxy.chat.completions.parse, proxy.models.create, proxy.get):
        log.calls.clear()
        log.failures = 2
        call("x")
        assert len(log.calls) == 3


def test_the_rest_of_a_namespace_is_the_clients_own() -> None:
    """Its other methods and namespaces, its attributes, its special methods, its class."""
    client, log = nested()
    proxy = quick().proxy(client, "chat.completions.create")
    assert proxy.chat.beta is client.chat.beta
    assert proxy.models is client.models
    assert len(proxy.chat) == len(proxy.chat.completions) == 7
    assert isinstance(proxy.chat.completions, Namespace)
    for call in (proxy.chat.completions.parse, proxy.chat.create):
        log.failures = 1
        with pytest.raises(Boom):
            call("x")
    assert client.chat.completions is not proxy.chat.completions, "and the client itself is as it was"
    log.failures = 1
    with pytest.raises(Boom):
        client.chat.completions.create("x")


async def test_dotted_names_reach_asynchronous_methods(tasks_world: World) -> None:
    """With `proxy` and with `aproxy`."""
    client, log = nested(failures=2)

    one = await quick().proxy(client, "chat.completions.acreate").chat.completions.acreate("x")
    log.failures = 2
    assert [one, await quick().aproxy(client, "chat.completions.acreate").chat.completions.acreate("y")] == [
        "acreate x",
        "acreate y",
    ]


# --- the client behind it --------------------------------------------------------------------


def test_attributes_are_read_set_and_deleted_on_the_client() -> None:
    """The proxy has none of its own."""
    client = Client()
    proxy = quick().proxy(client, "get")
    assert proxy.calls is client.calls
    proxy.retries = 9  # type: ignore[misc]
    assert client.retries == 9
    proxy.new = "new"  # type: ignore[attr-defined]
    assert client.new == "new"  # type: ignore[attr-defined]
    del proxy.new  # type: ignore[attr-defined]
    assert not hasattr(client, "new")
    assert not hasattr(proxy, "nothing_of_that_name")


def test_a_protected_method_is_replaced_on_the_proxy() -> None:
    """A test's mock takes its place there, and the client never has a method that is protected."""
    client = Client()
    proxy = quick().proxy(client, "get")
    with mock.patch.object(proxy, "get", return_value="mocked"):
        assert proxy.get("x") == "mocked"
        assert client.get("x") == "get x"
    assert proxy.get("x") == "get x"
    assert "get" not in vars(client)


def test_the_client_is_left_as_it_was() -> None:
    """The proxy stands beside it."""
    client = Client()
    before = dict(vars(client))
    quick().proxy(client).get("a")
    assert vars(client) == before
    client.failures = 1
    with pytest.raises(Boom):
        client.get("b")


def test_what_the_client_does_with_its_own_methods_is_its_own_affair() -> None:
    """A protected method that calls another one inside does not retry within its retry."""
    client = Client(failures=99)
    with pytest.raises(Boom):
        quick(3).proxy(client).get_twice("a")
    assert len(client.calls) == 3


def test_a_protected_method_is_known_by_its_name_docs_and_signature() -> None:
    """And whether it is asynchronous."""
    client = Client()
    proxy = quick().proxy(client)
    assert proxy.get.__name__ == "get"
    assert proxy.get.__doc__ == "Get one thing."
    assert inspect.signature(proxy.get) == inspect.signature(client.get)
    assert inspect.iscoroutinefunction(proxy.fetch)
    assert not inspect.iscoroutinefunction(proxy.get)
    assert inspect.iscoroutinefunction(quick().aproxy(client).fetch)


def test_a_proxy_is_an_instance_of_its_clients_class() -> None:
    """For whoever asks `isinstance`, and lists its attributes; but it says what it is."""
    client = Client()
    proxy = quick(2).proxy(client, "get")
    assert isinstance(proxy, Client)
    assert {"get", "fetch", "state"} <= set(dir(proxy))
    assert repr(proxy) == f"<{client!r} through {quick(2)!r}>"


def test_a_proxy_is_not_copied_or_pickled() -> None:
    """Its policy is the shared state of this process: a copy would count for itself."""
    proxy = quick().proxy(Client(), "get")
    for again in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="proxy"):
            again(proxy)


def test_proxies_stack() -> None:
    """One policy around the get of another."""
    client = Client(failures=99)
    proxy = quick(2).proxy(quick(3).proxy(client, "get"), "get")
    with pytest.raises(Boom):
        proxy.get("a")
    assert len(client.calls) == 6
    assert isinstance(proxy, Client)


def test_two_proxies_of_one_client_have_their_own_policies() -> None:
    """As many views as one likes."""
    client = Client(failures=99)
    for attempts in (1, 4):
        client.calls.clear()
        with pytest.raises(Boom):
            quick(attempts).proxy(client, "get").get("a")
        assert len(client.calls) == attempts


def test_the_state_of_the_policy_is_shared_by_all_its_proxies_and_methods(clock: FakeClock) -> None:
    """What fails through one method is refused through the other."""
    breaker = CircuitBreaker(2)
    client = Client(failures=2)
    one, two = breaker.proxy(client, "get"), breaker.proxy(client)
    for call in (one.get, two.partial):
        with pytest.raises(Boom):
            call("a")
    for refused in (one.get, two.get):
        with pytest.raises(CircuitOpen):
            refused("a")


def test_a_protected_method_finds_its_context_and_obeys_the_budget_around(clock: FakeClock) -> None:
    """As every `call` does."""

    class Asking:
        def get(self) -> tuple[int, float]:
            ctx = current_context()
            return ctx.attempt, ctx.remaining()

    with deadline(5.0):
        assert quick().proxy(Asking()).get() == (1, 5.0)


def test_a_sync_proxy_refuses_a_plain_method_that_returns_an_awaitable() -> None:
    """The error names the method and the way out: `aproxy`."""
    with pytest.raises(TypeError, match=r"Client\.later.*aproxy"):
        quick().proxy(Client()).later("a")


async def test_an_async_method_is_awaited(tasks_world: World) -> None:
    """`proxy` is enough for an `async def`."""
    client = Client(failures=2)

    assert await quick().proxy(client).fetch("a") == "fetch a"
    assert tried(client, "fetch") == 3


# --- entering, iterating, indexing -----------------------------------------------------------


class Entered(Client):
    """A client that is a context manager, and answers its entry with something else."""

    def __enter__(self) -> str:
        self.calls.append("enter")
        return "not the client"

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        self.calls.append(("exit", kind))
        return kind is KeyError

    async def __aenter__(self) -> str:
        await anyio.sleep(0)
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        await anyio.sleep(0)
        return self.__exit__(kind, *rest)


def test_entering_the_proxy_enters_the_client_and_hands_out_the_proxy() -> None:
    """What is done inside the block stays protected."""
    client = Entered()
    proxy = quick().proxy(client)
    with proxy as inside:
        assert inside is proxy  # type: ignore[comparison-overlap]
        client.failures = 2
        assert proxy.get("a") == "get a"
    assert (client.calls[0], client.calls[-1]) == ("enter", ("exit", None))
    assert tried_of(client) == 3


def tried_of(client: Client) -> int:
    return sum(call == ("get", "a") for call in client.calls)


async def test_entering_the_proxy_asynchronously_does_the_same(tasks_world: World) -> None:
    """For `proxy` and `aproxy`."""

    for make in (quick().proxy, quick().aproxy):
        client = Entered()
        proxy = make(client, "get")
        async with proxy as inside:
            assert inside is proxy  # type: ignore[comparison-overlap]
        assert client.calls == ["enter", ("exit", None)]


async def test_the_client_hears_how_its_block_ended_and_may_swallow_it(tasks_world: World) -> None:
    """Its `__exit__` is its own."""
    client = Entered()
    proxy = quick().proxy(client)
    with proxy:
        raise KeyError
    with pytest.raises(ValueError, match="not swallowed"), proxy:
        raise ValueError("not swallowed")

    async with proxy:
        raise KeyError
    with pytest.raises(ValueError, match="not swallowed"):
        async with proxy:
            raise ValueError("not swallowed")
    kinds = [call[1] for call in client.calls if call[0] == "exit"]
    assert kinds == [KeyError, ValueError, KeyError, ValueError]


def test_a_client_that_cannot_be_entered_gives_a_proxy_that_cannot() -> None:
    """A proxy has the special methods of its client, and no others."""
    proxy = quick().proxy(Client())
    with pytest.raises(TypeError), proxy:  # type: ignore[attr-defined]
        pass
    with pytest.raises(TypeError):
        len(proxy)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        iter(proxy)  # type: ignore[call-overload]
    assert not callable(proxy)


class Store:
    """A client that is a container, an iterator, a function and comparable."""

    def __init__(self) -> None:
        self.items = {"a": 1, "b": 2}

    def get(self, key: str) -> int:
        return self.items[key]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[str]:
        return iter(self.items)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self.items)

    def __contains__(self, key: str) -> bool:
        return key in self.items

    def __getitem__(self, key: str) -> int:
        return self.items[key]

    def __setitem__(self, key: str, value: int) -> None:
        self.items[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items[key]

    def __bool__(self) -> bool:
        return bool(self.items)

    def __call__(self, key: str, *, sign: int = -1) -> int:
        return sign * self.items[key]

    def __eq__(self, other: object) -> bool:
        return other == "the store"

    def __hash__(self) -> int:
        return 4711

    def __str__(self) -> str:
        return "the store"

    async def __aiter__(self) -> AsyncIterator[str]:
        for key in self.items:
            yield key


async def test_iteration_length_and_indexing_reach_the_client(tasks_world: World) -> None:
    """Python looks special methods up on the class, where a simple proxy would not have them."""
    store = Store()
    proxy = quick().proxy(store)
    assert list(proxy) == ["a", "b"]
    assert list(reversed(proxy)) == ["b", "a"]
    assert len(proxy) == 2
    assert "a" in proxy
    assert proxy["b"] == 2
    proxy["c"] = 3
    del proxy["a"]
    assert store.items == {"b": 2, "c": 3}
    assert (proxy("c"), proxy("c", sign=1)) == (-3, 3)
    assert proxy == "the store"
    assert hash(proxy) == 4711
    assert str(proxy) == "the store"
    store.items.clear()
    assert not proxy

    store.items["z"] = 26
    assert [key async for key in proxy] == ["z"]


def test_a_proxy_of_an_iterator_can_be_stepped() -> None:
    """`next` reaches the client; naming `__next__` is how one protects it."""

    class Pages:
        def __init__(self) -> None:
            self.left = [1, 2]

        def __iter__(self) -> Pages:
            return self

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

        def reset(self) -> None:
            self.left = [1, 2]

    proxy = quick().proxy(Pages())
    assert next(proxy) == 1
    assert list(proxy) == [2]


def test_a_client_that_is_equal_by_value_and_not_hashable_gives_such_a_proxy() -> None:
    """Neither more nor less."""

    class Valued:
        def __eq__(self, other: object) -> bool:
            return True

    proxy = quick().proxy(Valued())
    assert proxy == 5
    with pytest.raises(TypeError):
        hash(proxy)


# --- aproxy ----------------------------------------------------------------------------------


@contextmanager
def no_warnings() -> Iterator[None]:
    """A coroutine that is dropped without having been awaited or closed fails the test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(it.message) for it in caught] == []


async def test_aproxy_takes_plain_methods_that_return_awaitables(tasks_world: World) -> None:
    """Each attempt calls the method anew."""
    client = Client()

    proxy = quick().aproxy(client, "later", "fetch")
    results = []
    for method in (proxy.later, proxy.fetch):
        client.failures = 2
        results.append(await method("a"))
    assert results == ["fetch a"] * 2
    assert len(client.calls) == 6


def test_what_aproxy_returns_is_a_coroutine_for_whoever_asks() -> None:
    """`create_task`, `gather`, `wait_for` and `ensure_future` take it."""
    client = Client()
    proxy = quick().aproxy(client, "later")

    async def main() -> list[str]:
        pending: Any = proxy.later("a")
        assert inspect.isawaitable(pending)
        assert asyncio.iscoroutine(pending)
        return [
            await asyncio.create_task(pending),
            *await asyncio.gather(proxy.later("b"), proxy.later("c")),
            await asyncio.wait_for(proxy.later("d"), 5.0),
            await asyncio.ensure_future(proxy.later("e")),
        ]

    assert asyncio.run(main()) == [f"fetch {x}" for x in "abcde"]


def test_a_task_of_what_aproxy_returns_can_be_cancelled() -> None:
    """The cancellation arrives in the client's method, which cleans up; no policy answers it."""
    log: list[str] = []

    class Hanging:
        def get(self) -> Awaitable[None]:
            return self._get()

        async def _get(self) -> None:
            try:
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(0)
                log.append("cleaned up")

    async def main() -> None:
        pending: Any = Fallback("instead").aproxy(Hanging(), "get").get()
        assert not isinstance(pending, types.CoroutineType)
        task = asyncio.create_task(pending)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert log == ["cleaned up"]


def test_what_aproxy_returns_may_be_awaited_in_a_task_of_trios() -> None:
    """There only functions are started."""
    client = Client(failures=2)
    got: list[str] = []

    async def child(proxy: Client) -> None:
        got.append(await proxy.later("a"))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(child, quick().aproxy(client, "later"))

    anyio.run(main, backend="trio")
    assert got == ["fetch a"]


def test_a_forgotten_await_is_reported_as_any_other() -> None:
    """Python's own warning."""
    client = Client()
    pending: Any = quick().aproxy(client, "later").later("a")
    with pytest.warns(RuntimeWarning, match="never awaited"):
        del pending
    assert client.calls == []


def test_what_was_not_begun_can_be_closed() -> None:
    """As a coroutine can."""
    pending: Any = quick().aproxy(Client(), "later").later("a")
    with no_warnings():
        pending.close()
        del pending


async def test_aproxy_refuses_a_method_that_returns_nothing_to_await(tasks_world: World) -> None:
    """The error names it."""

    proxy: Any = quick().aproxy(Client())
    with pytest.raises(TypeError, match=r"Client\.get.*str"):
        await proxy.get("a")


# --- awaitables that are async context managers ----------------------------------------------


class Response:
    """What aiohttp answers with: entered, it is itself; left, it is released."""

    def __init__(self, session: Session, status: int) -> None:
        self.session = session
        self.status = status
        session.open.append(self)

    async def text(self) -> str:
        await anyio.sleep(0)
        return f"status {self.status}"

    def release(self) -> None:
        if self in self.session.open:
            self.session.open.remove(self)

    close = release

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await anyio.sleep(0)
        self.session.left.append(kind)
        self.release()


class RequestContextManager(Coroutine[Any, Any, Response]):
    """In the manner of aiohttp: to be awaited for a response, or entered for one that is released afterwards."""

    def __init__(self, coroutine: Coroutine[Any, Any, Response]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any, /) -> Any:
        return self._coroutine.send(value)

    def throw(self, *args: Any) -> Any:
        return self._coroutine.throw(*args)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Response]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> Response:
        self._response = await self._coroutine
        return await self._response.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:
        await self._response.__aexit__(*exc)


class Session:
    """In the manner of aiohttp's: answers its requests with the given statuses, one after another."""

    def __init__(self, *statuses: int | Exception) -> None:
        self.statuses = list(statuses)
        self.requests = 0
        self.open: list[Response] = []
        self.left: list[type[BaseException] | None] = []

    def get(self, url: str) -> RequestContextManager:
        return RequestContextManager(self._request(url))

    async def _request(self, url: str) -> Response:
        self.requests += 1
        await anyio.sleep(0)
        status = self.statuses.pop(0)
        if isinstance(status, Exception):
            raise status
        return Response(self, status)


class Connection:
    async def execute(self, sql: str) -> str:
        await anyio.sleep(0)
        return f"did {sql}"


class AcquireContext:
    """In the manner of asyncpg's `pool.acquire()`: no coroutine; awaited or entered, and once only."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._connection: Connection | None = None
        self._done = False

    async def __aenter__(self) -> Connection:
        if self._connection is not None or self._done:
            raise RuntimeError("a connection is already acquired")
        self._connection = await self._pool._acquire()
        return self._connection

    async def __aexit__(self, *exc: object) -> None:
        self._done = True
        connection, self._connection = self._connection, None
        assert connection is not None
        await self._pool.release(connection)

    def __await__(self) -> Generator[Any, Any, Connection]:
        self._done = True
        return self._pool._acquire().__await__()


class Pool:
    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.attempts = 0
        self.out: list[Connection] = []

    def acquire(self) -> AcquireContext:
        return AcquireContext(self)

    async def _acquire(self) -> Connection:
        self.attempts += 1
        await anyio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise Boom("no connection")
        connection = Connection()
        self.out.append(connection)
        return connection

    async def release(self, connection: Connection) -> None:
        await anyio.sleep(0)
        self.out.remove(connection)


async def test_a_request_in_the_manner_of_aiohttp_is_awaited_and_entered(tasks_world: World) -> None:
    """`await session.get(url)` and `async with session.get(url) as response` both keep working, with retries."""
    session = Session(Boom(), Boom(), 200, Boom(), 201)
    proxy = quick().aproxy(session, "get")

    with no_warnings():
        response = await proxy.get("a")
        assert response.status == 200
        response.release()
        async with proxy.get("b") as response:
            assert await response.text() == "status 201"
            assert session.open == [response]
        assert session.open == []
    assert session.requests == 5
    assert session.left == [None]


async def test_a_connection_in_the_manner_of_asyncpg_is_awaited_and_entered(tasks_world: World) -> None:
    """And given back when the block ends, however it ends."""
    pool = Pool(failures=2)
    proxy = quick().aproxy(pool, "acquire")

    with no_warnings():
        connection = await proxy.acquire()
        assert pool.out == [connection]
        await proxy.release(connection)
        pool.failures = 2
        with pytest.raises(ValueError, match="in the block"):
            async with proxy.acquire() as connection:
                assert await connection.execute("select 1") == "did select 1"
                raise ValueError("in the block")
    assert pool.attempts == 6
    assert pool.out == []


async def test_the_whole_client_is_wrapped_without_naming_its_methods(tasks_world: World) -> None:
    """`get` of the session and `acquire` of the pool are found."""

    async with quick().aproxy(Session(Boom(), 200)).get("a") as response:
        assert response.status == 200
    async with quick().aproxy(Pool(failures=1)).acquire() as connection:
        assert await connection.execute("x") == "did x"


async def test_what_a_block_raises_is_not_the_policys_affair(tasks_world: World) -> None:
    """Entering is the call; the block itself is not repeated, and its error reaches the client's `__aexit__`."""
    session = Session(200, 200)
    proxy = Fallback("answered").wrap(quick()).aproxy(session, "get")

    with pytest.raises(Boom):
        async with proxy.get("a"):
            raise Boom("in the block")
    assert session.requests == 1
    assert session.left == [Boom]
    assert session.open == []


async def test_a_managers_own_exit_may_swallow_an_error(tasks_world: World) -> None:
    """As it would without a policy."""

    class Forgiving:
        @asynccontextmanager
        async def transaction(self) -> AsyncIterator[str]:
            try:
                yield "in it"
            except KeyError:
                pass

    async with quick().aproxy(Forgiving()).transaction() as value:
        assert value == "in it"
        raise KeyError


async def test_an_entry_that_fails_for_good_raises_its_own_error(tasks_world: World) -> None:
    """After all attempts; nothing is left open."""
    pool = Pool(failures=99)
    last = quick(2).aproxy(pool)

    with no_warnings(), pytest.raises(Boom, match="no connection"):
        async with last.acquire():
            raise AssertionError("never entered")
    assert pool.attempts == 2
    assert pool.out == []


async def test_a_result_that_is_not_good_enough_is_left_before_the_next_attempt(tasks_world: World) -> None:
    """`on_result` looks at what was entered: the response of a 503 is given back, and a new one is asked for."""
    session = Session(503, 503, 200)
    retry = Retry(3, on_result=lambda response: response.status >= 500, backoff=[0])
    most: list[int] = []

    async with retry.aproxy(session, "get").get("a") as response:
        most.append(len(session.open))
        assert response.status == 200
    assert session.requests == 3
    assert most == [1]
    assert session.open == []


async def test_a_fallback_answers_an_entry_that_failed(tasks_world: World) -> None:
    """The block gets the answer, and nothing has to be left."""
    pool = Pool(failures=99)
    proxy = Fallback("answered").wrap(quick(2)).aproxy(pool)

    async with proxy.acquire() as connection:
        assert connection == "answered"
    assert pool.attempts == 2


async def test_a_fallback_that_answers_a_result_leaves_what_was_entered(tasks_world: World) -> None:
    """Nobody else would."""
    session = Session(503)
    proxy = Fallback("answered", on_result=lambda response: response.status >= 500).aproxy(session)
    open_inside: list[int] = []

    async with proxy.get("a") as answer:
        open_inside.append(len(session.open))
        assert answer == "answered"
    assert open_inside == [0]
    assert session.open == []


async def test_a_rejected_entry_enters_nothing(tasks_world: World) -> None:
    """The bulkhead is held while entering, and not for the block: that is what `slot()` is for."""
    pool = Pool()
    gate = Bulkhead(1)
    breaker = CircuitBreaker()

    with no_warnings():
        async with gate.aproxy(pool).acquire():
            assert gate.stats().in_flight == 0
        async with gate.slot():
            with pytest.raises(BulkheadFull):
                async with gate.aproxy(pool).acquire():
                    pass
        breaker.isolate()
        with pytest.raises(CircuitOpen):
            async with breaker.aproxy(pool).acquire():
                pass
    assert pool.attempts == 1


async def test_an_entry_that_is_cut_off_leaves_nothing_behind(tasks_world: World) -> None:
    """The Timeout is over the entry; the block may take longer."""

    class Slow:
        def __init__(self) -> None:
            self.log: list[str] = []
            self.delay = 4.0

        @asynccontextmanager
        async def acquire(self) -> AsyncIterator[str]:
            self.log.append("in")
            try:
                await anyio.sleep(self.delay)
                yield "acquired"
            finally:
                self.log.append("out")

    slow = Slow()
    proxy = Timeout(0.1).aproxy(slow)

    with pytest.raises(TimeoutError):
        async with proxy.acquire():
            raise AssertionError("never entered")
    assert slow.log == ["in", "out"]
    slow.delay = 0.0
    async with proxy.acquire() as value:
        await anyio.sleep(0.12)
        assert value == "acquired"
    assert slow.log == ["in", "out"] * 2


async def test_a_cancelled_entry_leaves_nothing_behind(tasks_world: World) -> None:
    """It is not taken for an outcome either."""
    pool = Pool()
    answered: list[Any] = []
    proxy = Fallback("x", on_fallback=answered.append).wrap(quick()).aproxy(pool)

    with no_warnings():
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with proxy.acquire():
                raise AssertionError("never entered")
        assert scope.cancelled_caught
    assert pool.out == []
    assert answered == []


async def test_entering_what_is_no_context_manager_is_a_misuse(tasks_world: World) -> None:
    """It names what it is, says what to do, and no policy takes it for an outcome."""
    client = Client()
    seen: list[Any] = []
    proxy: Any = (
        Fallback("answered", on_fallback=seen.append)
        .wrap(Retry(3, on=Exception, backoff=[0], on_retry=seen.append), CircuitBreaker(1, on_transition=seen.append))
        .aproxy(client, "later")
    )

    with no_warnings(), pytest.raises(TypeError, match="await"):
        async with proxy.later("a"):
            raise AssertionError("never entered")
    assert seen == []
    assert client.calls == []


async def test_each_entry_is_an_execution_of_its_own(tasks_world: World) -> None:
    """Many at once through one proxy do not meet."""
    pool = Pool(failures=5)
    proxy = quick(9).aproxy(pool)
    most: list[int] = []

    async def one() -> None:
        async with proxy.acquire():
            await anyio.sleep(0.005)
            most.append(len(pool.out))

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(one)
    assert max(most) == 10
    assert pool.out == []
    assert pool.attempts == 15


# --- real clients ----------------------------------------------------------------------------


def test_a_real_session_of_requests_can_be_wrapped() -> None:
    """Without names; entering it hands out the proxy, and closing it is its own affair."""
    calls: list[str] = []

    class Adapter(requests.adapters.BaseAdapter):
        def send(self, request: Any, **settings: Any) -> requests.Response:
            calls.append(request.url)
            if len(calls) < 3:
                raise requests.ConnectionError("reset")
            response = requests.Response()
            response.status_code = 200
            response.url = request.url
            return response

        def close(self) -> None:
            calls.append("closed")

    session = requests.Session()
    session.mount("fake://", Adapter())
    with Retry(backoff=[0]).proxy(session) as proxy:
        assert proxy.get("fake://host/").status_code == 200
        proxy.headers["x"] = "y"
    assert session.headers["x"] == "y"
    assert calls == ["fake://host/"] * 3 + ["closed"]


@pytest.mark.parametrize("how", ["proxy", "aproxy"])
async def test_a_real_client_of_httpx2_can_be_wrapped(tasks_world: World, how: str) -> None:
    """Requests, `stream`, and the block around it."""
    calls: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        calls.append(request.method)
        if len(calls) % 3:
            raise httpx2.ConnectError("refused", request=request)
        return httpx2.Response(200, text="fine")

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    async with getattr(Retry(backoff=[0]), how)(client) as proxy:
        texts = [(await proxy.get("http://host/")).text]
        if how == "aproxy":  # entering a stream is what fails, and only aproxy enters it under the policy
            async with proxy.stream("GET", "http://host/") as response:
                texts.append((await response.aread()).decode())
    assert client.is_closed
    assert texts == ["fine"] * (2 if how == "aproxy" else 1)
    assert len(calls) == 3 * len(texts)


def test_a_policy_of_ones_own_makes_proxies_as_well() -> None:
    """They are the affair of every policy."""

    class Shout(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            return (await call(ctx)).upper()

    assert Shout().proxy(Client()).get("a") == "GET A"
