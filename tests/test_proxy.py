"""Proxies: which methods of a client run through the policy; everything else is passed on to the client."""

from __future__ import annotations

import functools
import inspect
import types
import xmlrpc.client
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import anyio
import pytest

from resilience import CircuitBreaker
from resilience.errors import CircuitOpen
from tests.clients import Client
from tests.conftest import Boom, FakeClock, World
from tests.functions import quick
from tests.policies.blocks import entered

# --- which methods -----------------------------------------------------------------------------


def test_only_the_named_methods_run_through_the_policy() -> None:
    client = Client(failures=2)
    proxy = quick().proxy(client, "get")
    assert proxy.get("a", params="?b") == "get a?b"
    client.failures = 1
    with pytest.raises(Boom):
        proxy._hidden("x")
    assert client.calls == [*[("get", "a?b")] * 3, ("hidden", "x")]


def test_without_names_every_public_method_runs_through_the_policy() -> None:
    """Also inherited, class, static and partial methods, and functions set on the object."""

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
    """Return the names that the proxy itself defines."""
    return {name for name in dir(type(client)) + list(vars(client)) if name in vars(proxy)}


def test_without_names_private_methods_properties_classes_and_generators_are_not_protected() -> None:
    client = Client()
    names = {*"get get_twice fetch later of_class static partial on_request".split()}
    assert protected(quick().proxy(client), client) == protected(quick().aproxy(client), client) == names


@pytest.mark.parametrize("name", "close aclose connect disconnect shutdown start stop".split())
def test_without_names_lifecycle_methods_are_not_protected(name: str) -> None:
    """An open circuit must not prevent the closing of a client. Such a method is protected only if it is named."""
    calls: list[int] = []

    def method(self: Any) -> None:
        calls.append(1)
        raise Boom

    client = type("Client", (), {name: method, "get": method})()
    with pytest.raises(Boom):
        getattr(quick().proxy(client), name)()
    assert calls == [1]
    with pytest.raises(Boom):
        getattr(quick().proxy(client, name), name)()
    assert len(calls) == 4


def test_making_a_proxy_evaluates_no_property() -> None:
    """It may open a connection, or raise; so may a `cached_property`, such as a namespace of openai's client."""
    client = Client()
    proxy = quick().proxy(client)
    quick().aproxy(client)
    assert client.touched == []
    assert proxy.state == "connected"
    assert proxy.connection() == "connected"
    assert proxy.connection is client.connection
    assert client.touched == ["state", "connection"]


def test_a_client_with_slots_can_be_wrapped() -> None:
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
def test_unknown_names_are_refused_when_the_proxy_is_made(how: str) -> None:
    """A misspelt name must not leave a method unprotected."""
    make = getattr(quick(), how)
    for names in (["gte"], ["get", "gte"], ["get.it"], ["nothing.at.all"], [""], [".get"], ["get."]):
        with pytest.raises(AttributeError):
            make(Client(), *names)


@pytest.mark.parametrize("how", ["proxy", "aproxy"])
def test_a_proxy_that_would_protect_nothing_is_refused(how: str) -> None:
    """Of a function or a class, for example, or of a client whose methods are found by `__getattr__`."""
    make = getattr(quick(), how)
    for client in (len, quick, xmlrpc.client.ServerProxy("http://127.0.0.1:1")):
        with pytest.raises(TypeError, match=r"has no public methods to protect: name some, or decorate a function"):
            make(client)
    with pytest.raises(TypeError, match="Client is a class: proxy an instance of it, or name its class methods"):
        make(Client)


@pytest.mark.parametrize(("kind", "name"), [(Client, "get"), (dict, "get")])
def test_a_method_of_the_instances_of_a_class_is_refused(kind: type, name: str) -> None:
    """The proxy of the class would make instances that are not protected."""
    with pytest.raises(TypeError, match=f"{kind.__name__} is a class, and get a method of its instances"):
        quick().proxy(kind, name)


def test_named_class_methods_of_a_class_are_protected() -> None:
    class Order:
        tries = 0

        @classmethod
        def find(cls, number: int) -> int:
            cls.tries += 1
            if cls.tries < 3:
                raise Boom
            return number

    assert quick().proxy(Order, "find").find(7) == 7
    assert Order.tries == 3


def test_named_methods_of_a_metaclass_and_static_methods_of_a_class_are_protected() -> None:
    class Kind(type):
        def get(cls) -> str:
            return cls.__name__

    class Order(metaclass=Kind):
        @staticmethod
        def post() -> int:
            return 1

    order = quick().proxy(Order, "get", "post")
    assert (order.get(), order.post()) == ("Order", 1)


def test_a_callable_object_in_an_attribute_is_not_a_method() -> None:
    """Such as a callback or a namespace of the client: it is protected only if it is named."""

    class Callback:
        def __call__(self) -> None: ...

    client = types.SimpleNamespace(callback=Callback(), fetch=lambda: None)
    assert quick().proxy(client).callback is client.callback
    assert quick().proxy(client).fetch is not client.fetch


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("calls", r"only methods.*\[\]"),
        ("pages", r"Client\.pages is a generator function"),
        ("apages", r"Client\.apages is a generator function"),
        (5, "named by a string, not 5"),
        (["get", "fetch"], "named by a string"),
    ],
)
def test_attributes_that_are_no_plain_methods_cannot_be_named(name: Any, message: str) -> None:
    """Other attributes, generator functions, and names that are no strings are refused."""
    for make in (quick().proxy, quick().aproxy):
        with pytest.raises(TypeError, match=message):
            make(Client(), name)


def test_a_method_that_is_named_twice_is_protected_once() -> None:
    client = Client(failures=99)
    with pytest.raises(Boom):
        quick(2).proxy(client, "get", "get").get("a")
    assert len(client.calls) == 2


@pytest.mark.parametrize("names", [["get"], ["get", "get.__call__"], ["get.__call__", "get"], ["get", "get.func"]])
def test_a_callable_attribute_can_be_named_also_with_a_method_of_its_own(names: list[str]) -> None:
    """As in the stubs of grpc. In either order: what is named is protected."""
    stub = types.SimpleNamespace(get=functools.partial(Client(failures=2).get))
    assert quick().proxy(stub, *names).get("a") == "get a"


def test_a_module_can_be_wrapped() -> None:
    """As for `requests.get`."""
    module = types.ModuleType("fake_requests")
    failing = Client(failures=2)
    module.get = lambda url: failing.get(url)  # type: ignore[attr-defined]
    assert quick().proxy(module, "get").get("a") == "get a"  # type: ignore[attr-defined]
    assert quick().proxy(module).get("b") == "get b"  # type: ignore[attr-defined]


# --- dotted names ------------------------------------------------------------------------------


class Namespace:
    """A resource, in openai's terms."""

    def __init__(self, client: Client, **children: Any) -> None:
        self._client = client
        self.__dict__.update(children)

    def create(self, x: str) -> str:
        return self._client._note("create", x)

    def parse(self, x: str) -> str:
        return self._client._note("parse", x)

    def __len__(self) -> int:
        return 7


def nested(failures: int = 0) -> tuple[Any, Client]:
    client: Any = Client(failures)
    client.chat = Namespace(client, completions=Namespace(client), beta=Namespace(client))
    client.models = Namespace(client)
    return client, client


def test_dotted_names_reach_into_namespaces() -> None:
    """Two in one namespace, one in another, and one of the client itself."""
    client, log = nested()
    proxy = quick().proxy(client, "chat.completions.create", "chat.completions.parse", "models.create", "get")
    for call in (proxy.chat.completions.create, proxy.chat.completions.parse, proxy.models.create, proxy.get):
        log.calls.clear()
        log.failures = 2
        call("x")
        assert len(log.calls) == 3


def test_unnamed_parts_of_a_namespace_are_those_of_the_client() -> None:
    """Other methods and namespaces, special methods, and the class."""
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
    assert client.chat.completions is not proxy.chat.completions, "the client itself was changed"
    log.failures = 1
    with pytest.raises(Boom):
        client.chat.completions.create("x")


# --- the wrapped client ---


def test_attributes_are_read_set_and_deleted_on_the_client() -> None:
    client = Client()
    proxy = quick().proxy(client, "get")
    assert proxy.calls is client.calls
    proxy.retries = 9  # type: ignore[misc]
    assert client.retries == 9
    proxy.new = "new"  # type: ignore[attr-defined]
    assert client.new == "new"  # type: ignore[attr-defined]
    del proxy.new  # type: ignore[attr-defined]
    assert not hasattr(client, "new")
    assert not hasattr(proxy, "missing")


def test_a_mock_replaces_a_protected_method_on_the_proxy_only() -> None:
    """The client is unchanged, and never has a protected method."""
    client = Client()
    before = dict(vars(client))
    proxy = quick().proxy(client, "get")
    with mock.patch.object(proxy, "get", return_value="mocked"):
        assert proxy.get("x") == "mocked"
        assert client.get("x") == "get x"
    assert proxy.get("x") == "get x"
    assert vars(client) == before


def test_calls_of_the_client_to_its_own_methods_do_not_run_through_the_policy() -> None:
    """Otherwise a protected method that calls another one would retry within its retry."""
    client = Client(failures=99)
    with pytest.raises(Boom):
        quick(3).proxy(client).get_twice("a")
    assert len(client.calls) == 3


def test_a_protected_method_keeps_its_name_docstring_and_signature() -> None:
    client = Client()
    proxy = quick().proxy(client)
    assert proxy.get.__name__ == "get"
    assert proxy.get.__doc__ == "Get one thing."
    assert inspect.signature(proxy.get) == inspect.signature(client.get)
    assert inspect.iscoroutinefunction(proxy.fetch)
    assert not inspect.iscoroutinefunction(proxy.get)
    assert inspect.iscoroutinefunction(quick().aproxy(client).fetch)


def test_a_proxy_is_an_instance_of_its_clients_class() -> None:
    """Also for `isinstance`, `dir` and its documentation; but its `repr` says that it is a proxy."""
    client = Client()
    proxy = quick(2).proxy(client, "get")
    assert isinstance(proxy, Client)
    assert dir(proxy) == dir(client)
    assert "calls" in dir(proxy)
    assert proxy.__doc__ == Client.__doc__
    assert repr(proxy) == f"<{client!r} through {quick(2)!r}>"


def test_a_proxy_of_a_proxy_applies_both_policies() -> None:
    client = Client(failures=99)
    proxy = quick(2).proxy(quick(3).proxy(client, "get"), "get")
    with pytest.raises(Boom):
        proxy.get("a")
    assert len(client.calls) == 6
    assert isinstance(proxy, Client)


def test_all_proxies_and_methods_share_the_state_of_the_policy(clock: FakeClock) -> None:
    """Failures of one method open the circuit for the other."""
    breaker = CircuitBreaker(2)
    client = Client(failures=2)
    first, second = breaker.proxy(client, "get"), breaker.proxy(client)
    for call in (first.get, second.partial):
        with pytest.raises(Boom):
            call("a")
    for refused in (first.get, second.get):
        with pytest.raises(CircuitOpen):
            refused("a")


def test_a_sync_proxy_refuses_a_plain_method_that_returns_an_awaitable() -> None:
    """The error names the method, and `aproxy` as the remedy."""
    with pytest.raises(TypeError, match=r"Client\.later.*aproxy"):
        quick().proxy(Client()).later("a")


# --- entering, iterating, indexing -------------------------------------------------------------


class Entered(Client):
    """A client that is a context manager, and returns something else on entry."""

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


async def test_entering_the_proxy_enters_the_client_and_returns_the_proxy(world: World) -> None:
    """So calls inside the block stay protected."""
    for make in (quick().proxy, quick().aproxy):
        client = Entered()
        proxy = make(client)
        async with entered(world, proxy) as inside:
            assert inside is proxy
        assert client.calls == ["enter", ("exit", None)]


async def test_the_client_gets_the_exception_of_its_block_and_may_suppress_it(world: World) -> None:
    client = Entered()
    proxy = quick().proxy(client)
    async with entered(world, proxy):
        raise KeyError
    with pytest.raises(ValueError, match="not swallowed"):
        async with entered(world, proxy):
            raise ValueError("not swallowed")
    assert client.calls == ["enter", ("exit", KeyError), "enter", ("exit", ValueError)]


def test_a_proxy_has_no_special_methods_that_its_client_lacks() -> None:
    proxy = quick().proxy(Client())
    with pytest.raises(TypeError), proxy:  # type: ignore[attr-defined]
        pass
    with pytest.raises(TypeError):
        len(proxy)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        iter(proxy)  # type: ignore[call-overload]
    assert not callable(proxy)


class Store(dict[str, int]):
    """A client that is a container, an iterator, a function and comparable."""

    def __bool__(self) -> bool:
        return "b" in self

    def __call__(self, key: str, *, sign: int = -1) -> int:
        return sign * self[key]

    def __eq__(self, other: object) -> bool:
        return other == "the store"

    def __hash__(self) -> int:  # type: ignore[override]
        return 4711

    def __str__(self) -> str:
        return "the store"

    async def __aiter__(self) -> AsyncIterator[str]:
        for key in self:
            yield key


async def test_iteration_length_and_indexing_reach_the_client(tasks_world: World) -> None:
    """Python looks special methods up on the class."""
    store = Store(a=1, b=2)
    proxy = quick().proxy(store)
    assert list(proxy) == ["a", "b"]
    assert list(reversed(proxy)) == ["b", "a"]
    assert len(proxy) == 2
    assert "a" in proxy
    assert proxy["b"] == 2
    proxy["c"] = 3
    del proxy["a"]
    assert dict(store) == {"b": 2, "c": 3}
    assert (proxy("c"), proxy("c", sign=1)) == (-3, 3)
    assert proxy == "the store"
    assert hash(proxy) == 4711
    assert str(proxy) == "the store"
    assert proxy
    del store["b"]
    assert not proxy
    assert [key async for key in proxy] == ["c"]


def test_a_proxy_compares_as_its_client_and_is_as_unhashable() -> None:
    class Valued:
        def __eq__(self, other: object) -> bool:
            return True

    proxy = quick().proxy(Valued(), "__eq__")
    assert proxy == 5
    with pytest.raises(TypeError):
        hash(proxy)
