"""Code that both type checkers must refuse. Read by test_types.py; not run.

Each line with an `ignore` must be an error for both, because an `ignore` that is not needed is an error.
"""

from __future__ import annotations

from typing import Never, TypeVar

from resilience import (
    Cache,
    Call,
    Chaos,
    CircuitBreaker,
    ConsecutiveFailures,
    Context,
    Fallback,
    Hedge,
    Keyed,
    Pipeline,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    Success,
    Timeout,
    deadline,
    events,
)
from resilience.backoff import Exponential
from tests.typing import streams as streamed
from tests.typing.decorate import Service, asynchronous, plain
from tests.typing.execute import Client, afetch, aget, fetch, get
from tests.typing.policies import file, number

T = TypeVar("T")


async def results() -> None:
    one: int = Retry().execute(fetch)  # type: ignore[assignment]
    two: str = Fallback(None).wrap(Retry()).execute(fetch)  # type: ignore[assignment]
    three: str = Retry().execute(afetch)  # type: ignore[assignment]
    four: int = await Retry().aexecute(afetch)  # type: ignore[arg-type]
    five: str = Fallback(handler=number).execute(fetch)  # type: ignore[assignment]
    six: int = Retry().capture(fetch).unwrap()  # type: ignore[assignment]
    await Retry().execute(fetch)  # type: ignore[misc]
    await Retry().call(get, "u")  # type: ignore[misc]
    print(one, two, three, four, five, six)


async def functions() -> None:
    Retry().execute(get)  # type: ignore[arg-type]
    Retry().execute(fetch, 5)  # type: ignore[call-overload]
    Retry().execute(42)  # type: ignore[call-overload]
    await Retry().aexecute(fetch)  # type: ignore[arg-type]
    await Retry().acall(get, "u")  # type: ignore[arg-type]


async def arguments() -> None:
    Retry().call(get, 1)  # type: ignore[call-overload]
    Retry().call(get, "u", time=1)  # type: ignore[arg-type,call-arg]
    Retry().call(get)  # type: ignore[call-overload]
    await Retry().acall(aget, 1)  # type: ignore[arg-type]
    Retry()(get)(1)  # type: ignore[arg-type]
    plain(1)  # type: ignore[arg-type]
    await asynchronous("u", 2)  # type: ignore[call-arg]
    Service().method("x")  # type: ignore[arg-type]
    Service.above_static("x")  # type: ignore[arg-type]
    Retry()(42)  # type: ignore[call-overload]


class Properties:
    @Retry()  # type: ignore[prop-decorator]
    @property
    def above(self) -> int:
        return 1


def clients() -> None:
    Retry().proxy(Client()).post("u")  # type: ignore[attr-defined]
    Retry().proxy(Client()).get(1)  # type: ignore[arg-type]
    Retry().proxy(Client(), 5)  # type: ignore[arg-type]


def pipelines() -> None:
    Retry().wrap(42)  # type: ignore[call-overload]
    Policy.wrap(Retry(), 42)  # type: ignore[call-overload]
    Policy.wrap()  # type: ignore[call-overload]
    Policy.wrap(Retry)  # type: ignore[call-overload]
    Retry().wrap(Timeout(1.0), name=5)  # type: ignore[call-overload]
    Retry().wrap(Timeout(1.0), listeners=[5])  # type: ignore[list-item]
    Pipeline(Retry(), 42)  # type: ignore[arg-type]
    Pipeline(Retry)  # type: ignore[arg-type]
    Pipeline(Retry(), name=5)  # type: ignore[arg-type]
    Pipeline(Retry(), listeners=[5])  # type: ignore[list-item]
    five: Pipeline[int] = Pipeline(Fallback(None), Retry())  # type: ignore[arg-type]
    never: Policy[Never] = Fallback(None)  # type: ignore[arg-type]
    narrow: Pipeline[int] = Fallback(None).wrap(Retry())  # type: ignore[assignment]
    print(five, never, narrow)


def settings() -> None:
    Retry(attempts="3")  # type: ignore[arg-type]
    Retry(3, OSError)  # type: ignore[call-arg]
    Retry(on=OSError("an instance"))  # type: ignore[arg-type]
    Retry(backoff=5)  # type: ignore[arg-type]
    Retry(retry_after="yes")  # type: ignore[arg-type]
    Retry(tries=3)  # type: ignore[call-arg]
    Timeout(None)  # type: ignore[arg-type]
    CircuitBreaker(ConsecutiveFailures(3) | 5)  # type: ignore[operator]
    RateLimiter(Rate(1), 5)  # type: ignore[arg-type]
    Rate(1).limit = 2  # type: ignore[misc]
    Fallback(1, handler=number)  # type: ignore[call-overload]
    Fallback(handler=5)  # type: ignore[call-overload]
    Fallback(handler=file, on_result=bool)  # type: ignore[arg-type]
    Hedge(["0.1"])  # type: ignore[list-item]
    Hedge(budget=object())  # type: ignore[arg-type]
    Chaos()  # type: ignore[call-overload]
    Chaos(error=OSError, delay=1)  # type: ignore[call-overload]
    Chaos(error=KeyboardInterrupt)  # type: ignore[arg-type]
    Exponential(1, jitter="half")  # type: ignore[arg-type]
    Context(5.0)  # type: ignore[call-arg]
    deadline("5")  # type: ignore[arg-type]
    events.subscribe(5)  # type: ignore[arg-type]
    events.subscribe(print, ValueError)  # type: ignore[arg-type]


def facts(success: Success[int], ctx: Context) -> None:
    success.value = 2  # type: ignore[misc]
    ctx.attempts = 2  # type: ignore[misc]
    ctx.properties["a"] = 1  # type: ignore[index]
    with Retry():  # type: ignore[attr-defined]
        pass


class Empty(Policy):
    pass


class Wrong(Policy):
    async def around(self, call: Call[T]) -> T:  # type: ignore[override]
        raise NotImplementedError


def own_policies() -> None:
    Empty()  # type: ignore[abstract]


async def streams() -> None:
    streaming = Retry().streaming()
    streaming(get)  # type: ignore[arg-type]
    streaming.call(get, "u")  # type: ignore[call-overload]
    streaming.call(streamed.plain, "1")  # type: ignore[call-overload]
    streaming.acall(streamed.plain, 1)  # type: ignore[arg-type]
    for _ in streamed.async_iterator(1):  # type: ignore[attr-defined]
        pass
    one: str = next(streamed.iterator(1))  # type: ignore[assignment]
    Retry().streaming(resume=["after"])  # type: ignore[arg-type]
    print(one)


def kept() -> None:
    Cache(60, key=5)  # type: ignore[arg-type]
    Cache(60, key=lambda url: [url])  # type: ignore[arg-type]
    Keyed(lambda key: str, key=len)  # type: ignore[arg-type,return-value]
    streamed.either.call(len, "u") + 1  # type: ignore[operator]
    streamed.states(streamed.either, streamed.keyed)  # type: ignore[arg-type]
    one: str = streamed.cached("u")  # type: ignore[assignment]
    streamed.cached(5)  # type: ignore[arg-type]
    print(one)
