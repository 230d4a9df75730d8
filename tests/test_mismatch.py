"""A function that cannot take what it is called with was never entered: a usage error, and no outcome."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from resilience import CircuitBreaker, Fallback, Pipeline, Policy, Retry, Timeout
from resilience.errors import Misuse
from tests.conftest import World
from tests.policies.breakers import CLOSED, OPEN


async def takes_nothing() -> str:
    return "entered"


async def takes_one(value: object) -> str:
    return f"entered with {value}"


async def raises_type_error(ctx: Any = None) -> str:
    raise TypeError("mine() takes 0 positional arguments but 1 was given")


async def calls_wrongly(ctx: Any = None) -> str:
    return await takes_nothing(1)  # type: ignore[call-arg]


async def calls_a_builtin_wrongly(ctx: Any = None) -> Any:
    return len(5)  # type: ignore[arg-type]


class Counted:
    """A policy that counts what goes through it."""

    def __init__(self) -> None:
        self.retries: list[Any] = []
        self.breaker = CircuitBreaker(1)
        retry = Retry(3, on=Exception, backoff=[0], on_retry=self.retries.append)
        self.pipeline: Any = Pipeline(Fallback("instead"), retry, self.breaker)


def wrapped(fn: Callable[..., Any], world: World) -> Callable[..., Any]:
    """Decorate a function as users do."""
    inner = world.native(fn)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return wrapper


async def call(world: World, policy: Policy[Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if world.blocking:
        return policy.call(world.native(fn), *args, **kwargs)
    return await policy.acall(fn, *args, **kwargs)


async def test_execute_of_a_function_that_takes_no_context(world: World) -> None:
    """It answered the fallback for ever, and the function was never entered."""
    it = Counted()
    with pytest.raises(TypeError, match=r"takes_nothing cannot be called with the context: .*; use `call` or `acall`"):
        await world.execute(it.pipeline, blocking_name(world, takes_nothing))
    assert it.retries == []
    assert it.breaker.state is CLOSED


def blocking_name(world: World, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function of the same shape: the tests' own way to make one takes any arguments."""
    if not world.blocking:
        return fn

    def takes_nothing() -> str:
        return "entered"

    def takes_one(value: object) -> str:
        return f"entered with {value}"

    functions: dict[str, Callable[..., Any]] = {"takes_nothing": takes_nothing, "takes_one": takes_one}
    return functions[fn.__name__]


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2), {}), ((), {"other": 1}), ((1,), {"value": 1})], ids=repr
)
async def test_a_call_with_wrong_arguments(world: World, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    it, fn = Counted(), blocking_name(world, takes_one)
    with pytest.raises(TypeError, match="takes_one cannot be called with these arguments") as caught:
        await call(world, it.pipeline, fn, *args, **kwargs)
    assert isinstance(caught.value, Misuse)
    assert caught.value.__cause__ is None
    assert it.retries == []
    assert it.breaker.state is CLOSED


async def test_a_function_of_the_context_is_for_execute(world: World) -> None:
    """As the opposite mistake, it is answered with what to write instead; a call with arguments means `call`."""
    fn, hint = blocking_name(world, takes_one), "use `execute` or `aexecute` for a function of the context"
    with pytest.raises(Misuse, match=hint):
        await call(world, Retry(), fn)
    with pytest.raises(Misuse) as caught:
        await call(world, Retry(), fn, 1, 2)
    assert hint not in str(caught.value)


async def test_a_partial_with_wrong_arguments(world: World) -> None:
    it, fn = Counted(), functools.partial(blocking_name(world, takes_one), 1)
    with pytest.raises(Misuse, match="takes_one cannot be called with these arguments"):
        await call(world, it.pipeline, fn, 2)


async def test_a_method_and_a_class_with_wrong_arguments(threads: World) -> None:
    class Client:
        def __init__(self, url: str) -> None:
            self.url = url

        def get(self, path: str) -> str:
            return self.url + path

    it = Counted()
    with pytest.raises(Misuse, match=r"Client cannot be called with these arguments"):
        it.pipeline.call(Client)
    with pytest.raises(Misuse, match=r"Client\.get cannot be called with these arguments"):
        it.pipeline.call(Client("/").get)
    assert it.pipeline.call(Client("/").get, "users") == "/users"


async def test_on_a_worker_and_in_a_context_as_well(world: World) -> None:
    """Under a Timeout, and with an ambient context, the function is called from other places of the library."""
    fn = blocking_name(world, takes_nothing)
    with pytest.raises(Misuse, match="takes_nothing cannot be called with the context"):
        await world.execute(Pipeline(Fallback("instead"), Timeout(5.0)), fn)
    with pytest.raises(Misuse, match="takes_nothing cannot be called with these arguments"):
        await call(world, Pipeline(Fallback("instead"), Timeout(5.0)), fn, 1)


@pytest.mark.parametrize("fn", [raises_type_error, calls_wrongly, calls_a_builtin_wrongly])
@pytest.mark.parametrize("limit", [[], [Timeout(5.0)]], ids=["bare", "limited"])
async def test_a_type_error_of_the_body_is_an_outcome(world: World, fn: Any, limit: list[Any]) -> None:
    """The function was entered: it is repeated, counted and answered as any other failure."""
    for run in (world.execute, functools.partial(call, world)):
        it = Counted()
        result = await run(Pipeline(it.pipeline, *limit), fn)
        assert result == "instead"
        assert it.breaker.state is OPEN


async def test_a_decorated_function_was_entered(world: World) -> None:
    """The wrapper takes anything; what it calls then is its own failure."""
    it = Counted()
    assert await call(world, it.pipeline, wrapped(blocking_name(world, takes_one), world), 1, 2) == "instead"
    assert it.breaker.state is OPEN
    assert await call(world, Retry(1), wrapped(blocking_name(world, takes_one), world), 1) == "entered with 1"


def test_a_builtin_that_refuses_its_argument_was_called() -> None:
    """It takes one, but not this one: nothing says that the caller has misused the library."""
    it = Counted()
    assert it.pipeline.call(len, 5) == "instead"
    assert it.breaker.state is OPEN


def test_a_function_without_a_signature_is_left_alone() -> None:
    """Nothing can be said about what it takes."""
    anything: Any = Retry(1)
    with pytest.raises(TypeError) as caught:
        anything.call(min)
    assert not isinstance(caught.value, Misuse)


async def test_a_broken_signature_says_nothing(world: World) -> None:
    """A `TypeError` of a callable whose signature cannot be read is one of its own."""
    fn = functools.partial(len, 5)  # type: ignore[arg-type]
    fn.__signature__ = "no such thing"  # type: ignore[attr-defined]
    it = Counted()
    assert (it.pipeline.call(fn) if world.blocking else await it.pipeline.acall(fn)) == "instead"
    assert it.breaker.state is OPEN
