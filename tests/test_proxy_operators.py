"""Operators of a proxied client: named ones run through the policy or are refused, others are the client's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest

from resilience import CircuitBreaker, Fallback, Policy, Retry, Timeout
from tests.conftest import Boom, World
from tests.functions import quick


class Vector:
    """A client with operators: fails `failures` times, and counts its calls."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls = 0

    def _work(self, *args: object) -> Any:
        self.calls += 1
        if self.calls <= self.failures:
            raise Boom
        return 4711

    __call__ = __getitem__ = __delitem__ = __contains__ = __add__ = __rsub__ = __lt__ = __neg__ = __next__ = _work
    __len__ = __int__ = __index__ = __ne__ = norm = _work

    def __iadd__(self, other: object) -> Vector:
        self._work()
        return self

    def __iter__(self) -> Vector:
        return self

    def __enter__(self) -> Vector:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __format__(self, spec: str) -> str:
        return f"vector {spec}"

    async def __anext__(self) -> Any:
        return self._work()

    def __aiter__(self) -> Vector:
        return self


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "__call__": lambda vector: vector("a"),
    "__getitem__": lambda vector: vector["a"],
    "__contains__": lambda vector: "a" in vector,
    "__add__": lambda vector: vector + 1,
    "__rsub__": lambda vector: 1 - vector,
    "__lt__": lambda vector: vector < 1,
    "__ne__": lambda vector: vector != 1,
    "__neg__": lambda vector: -vector,
    "__next__": lambda vector: next(iter(vector)),
    "__len__": len,
    "__int__": int,
    "__index__": lambda vector: [*range(4712)][vector],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_only_named_operators_run_through_the_policy(name: str) -> None:
    client = Vector(failures=2)
    assert OPERATIONS[name](quick().proxy(client, name)) in (4711, True)
    assert client.calls == 3
    client = Vector(failures=2)
    with pytest.raises(Boom):
        OPERATIONS[name](quick().proxy(client))
    assert client.calls == 1


async def test_a_named_asynchronous_operator_runs_through_the_policy(tasks_world: World) -> None:
    """`async for` over a proxy that names `__anext__`."""
    client = Vector(failures=2)
    async for value in quick().proxy(client, "__anext__"):  # type: ignore[attr-defined]
        assert value == 4711
        break
    assert client.calls == 3


@pytest.mark.parametrize(
    "name", ["__iter__", "__enter__", "__exit__", "__init__", "__class__", "__format__", "__aiter__"]
)
def test_operators_that_do_no_work_cannot_be_named(name: str) -> None:
    """They would protect nothing."""
    with pytest.raises(TypeError, match=f"{name} cannot be protected.*name the methods"):
        quick().proxy(Vector(), name)


def test_an_operator_that_returns_the_client_returns_the_proxy() -> None:
    """So further calls stay protected."""
    client = Vector(failures=2)
    proxy: Any = quick().proxy(client, "__iadd__")
    before = proxy
    proxy += 1
    assert proxy is before
    assert client.calls == 3
    assert iter(proxy) is proxy


def test_operators_that_are_not_named_are_those_of_the_client() -> None:
    """Neither missing nor those of `object`."""
    proxy: Any = quick().proxy(Vector(), "__call__")
    assert (f"{proxy:x}", 1 - proxy, -proxy, int(proxy)) == ("vector x", 4711, 4711, 4711)
    with pytest.raises(TypeError):
        proxy * 2


# --- blocks that hold a nursery ----------------------------------------------------------------


class Sockets:
    """A client whose block keeps a task group, a cancel scope or nothing open."""

    def __init__(self) -> None:
        self.left: list[str] = []

    @asynccontextmanager
    async def group(self) -> AsyncIterator[str]:
        async with anyio.create_task_group():
            yield "group"
        self.left.append("group")

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[str]:
        with anyio.move_on_after(60):
            yield "scope"
        self.left.append("scope")

    @asynccontextmanager
    async def neither(self) -> AsyncIterator[str]:
        await anyio.sleep(0)
        yield "neither"
        self.left.append("neither")


async def entered(client: Sockets, policy: Policy[Any], name: str) -> str:
    opened: AbstractAsyncContextManager[str] = getattr(policy.aproxy(client, name), name)()
    async with opened as value:
        await anyio.sleep(0)
        return value


@pytest.mark.parametrize("name", ["group", "scope"])
@pytest.mark.parametrize(
    "policy", [Timeout(60), quick().wrap(Timeout(60)), Fallback("no").wrap(Timeout(60), CircuitBreaker())]
)
def test_under_trio_a_block_with_an_open_nursery_is_refused_inside_a_timeout(name: str, policy: Policy[Any]) -> None:
    """The nursery would outlive the scope of the Timeout, which trio does not allow. The block is exited."""
    client = Sockets()
    with pytest.raises(RuntimeError, match=rf"Sockets\.{name} leaves a nursery or a cancel scope open.*deadline\("):
        World("trio").run(lambda: entered(client, policy, name))
    assert client.left == [name]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("neither", Timeout(60)),
        ("group", Retry()),
        ("scope", CircuitBreaker()),
        ("group", Timeout(60, cooperative=True)),
    ],
)
async def test_other_blocks_are_entered(tasks_world: World, name: str, policy: Policy[Any]) -> None:
    """Without a Timeout, or without a nursery or scope that stays open."""
    client = Sockets()
    assert await entered(client, policy, name) == name
    assert client.left == [name]
