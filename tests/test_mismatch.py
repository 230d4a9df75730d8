"""A function that cannot take its arguments was never entered: that is a misuse, and no outcome."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from resilience import CircuitBreaker, Fallback, Hedge, Pipeline, Policy, Retry, Timeout
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
    """A pipeline whose retries and circuit can be checked."""

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


async def test_execute_of_a_function_without_a_context_parameter_is_a_misuse(world: World) -> None:
    counted = Counted()
    with pytest.raises(TypeError, match=r"takes_nothing cannot be called with the context: .*`acall`, or pass `lambda"):
        await world.execute(counted.pipeline, blocking_name(world, takes_nothing))
    assert counted.retries == []
    assert counted.breaker.state is CLOSED


def blocking_name(world: World, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function with the same parameters: `World.native` would make one that takes any arguments."""
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
async def test_a_call_with_wrong_arguments_is_misuse(
    world: World, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    counted, fn = Counted(), blocking_name(world, takes_one)
    with pytest.raises(TypeError, match="takes_one cannot be called with these arguments") as caught:
        await world.call(counted.pipeline, fn, *args, **kwargs)
    assert isinstance(caught.value, Misuse)
    assert caught.value.__cause__ is None
    assert counted.retries == []
    assert counted.breaker.state is CLOSED


async def test_calling_a_function_of_the_context_without_arguments_is_a_misuse(world: World) -> None:
    """The error suggests `execute`; not so if there are arguments."""
    fn, hint = blocking_name(world, takes_one), "use `execute` or `aexecute` for a function of the context"
    with pytest.raises(Misuse, match=hint):
        await world.call(Retry(), fn)
    keywords: list[dict[str, int]] = [{}, {"other": 3}]
    for args, kwargs in zip([(1, 2), ()], keywords, strict=True):
        with pytest.raises(Misuse) as caught:
            await world.call(Retry(), fn, *args, **kwargs)
        assert hint not in str(caught.value)


async def test_a_partial_called_with_wrong_arguments_is_a_misuse(world: World) -> None:
    counted, fn = Counted(), functools.partial(blocking_name(world, takes_one), 1)
    with pytest.raises(Misuse, match="takes_one cannot be called with these arguments"):
        await world.call(counted.pipeline, fn, 2)


async def test_a_method_or_class_called_with_wrong_arguments_is_a_misuse(threads: World) -> None:
    class Client:
        def __init__(self, url: str) -> None:
            self.url = url

        def get(self, path: str) -> str:
            return self.url + path

    counted = Counted()
    with pytest.raises(Misuse, match=r"Client cannot be called with these arguments"):
        counted.pipeline.call(Client)
    with pytest.raises(Misuse, match=r"Client\.get cannot be called with these arguments"):
        counted.pipeline.call(Client("/").get)
    assert counted.pipeline.call(Client("/").get, "users") == "/users"


@pytest.mark.parametrize("policy", [Timeout(5.0), Hedge(5.0)], ids=["Timeout", "Hedge"])
async def test_wrong_arguments_under_a_timeout_or_hedge_are_a_misuse(world: World, policy: Policy) -> None:
    """The function is then called from other places of the library, such as a worker."""
    fn = blocking_name(world, takes_nothing)
    with pytest.raises(Misuse, match="takes_nothing cannot be called with the context"):
        await world.execute(Pipeline(Fallback("instead"), policy), fn)
    with pytest.raises(Misuse, match="takes_nothing cannot be called with these arguments"):
        await world.call(Pipeline(Fallback("instead"), policy), fn, 1)


@pytest.mark.parametrize("fn", [raises_type_error, calls_wrongly, calls_a_builtin_wrongly])
@pytest.mark.parametrize("limit", [[], [Timeout(5.0)]], ids=["bare", "limited"])
async def test_a_type_error_raised_inside_the_function_is_an_outcome(world: World, fn: Any, limit: list[Any]) -> None:
    """It is retried, counted and answered as any other failure."""
    for run in (world.execute, world.call):
        counted = Counted()
        result = await run(Pipeline(counted.pipeline, *limit), fn)
        assert result == "instead"
        assert counted.breaker.state is OPEN


async def test_wrong_arguments_behind_a_decorator_are_an_outcome(world: World) -> None:
    """The wrapper takes any arguments, and was entered."""
    counted = Counted()
    assert await world.call(counted.pipeline, wrapped(blocking_name(world, takes_one), world), 1, 2) == "instead"
    assert counted.breaker.state is OPEN
    assert await world.call(Retry(1), wrapped(blocking_name(world, takes_one), world), 1) == "entered with 1"


def test_a_type_error_of_code_without_the_name_of_a_module_is_raised() -> None:
    """As that of a sandbox, which may set `__name__` to None."""
    namespace: dict[str, Any] = {"__name__": None}
    exec("def fails(): raise TypeError('mine')", namespace)
    with pytest.raises(TypeError, match="mine"):
        Retry(1).call(namespace["fails"])


def test_a_type_error_of_a_builtin_with_a_suitable_signature_is_an_outcome() -> None:
    """It takes one argument, but not of this type."""
    counted = Counted()
    assert counted.pipeline.call(len, 5) == "instead"
    assert counted.breaker.state is OPEN


def test_a_type_error_of_a_function_without_a_signature_is_no_misuse() -> None:
    anything: Any = Retry(1)
    with pytest.raises(TypeError) as caught:
        anything.call(min)
    assert not isinstance(caught.value, Misuse)


@pytest.mark.parametrize("fn", [time.time, functools.partial(time.time), min, int])
def test_a_builtin_that_does_not_take_the_context_is_a_misuse(fn: Any) -> None:
    """Many have no signature, and none is made for a context."""
    counted = Counted()
    with pytest.raises(Misuse, match=r"cannot be called with the context: .*use `call`"):
        counted.pipeline.execute(fn)
    assert counted.breaker.state is CLOSED


async def test_a_type_error_of_a_function_with_an_invalid_signature_is_an_outcome(world: World) -> None:
    fn = functools.partial(len, 5)  # type: ignore[arg-type]
    fn.__signature__ = "no such thing"  # type: ignore[attr-defined]
    counted = Counted()
    assert await world.call(counted.pipeline, fn) == "instead"
    assert counted.breaker.state is OPEN
