"""The ambient context: what a function finds without a parameter, and where it is inherited."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from resilience import Context, Policy, Retry, Timeout, current_context, deadline
from tests.conftest import Boom, FakeClock, Script, World
from tests.custom import INF, PASSING


def test_outside_an_execution_the_ambient_context_is_new_and_unlimited() -> None:
    """Code that reads it need not know whether a policy protects it."""
    first, second = current_context(), current_context()
    assert first is not second
    assert first.deadline == INF
    assert first.timeout() is None
    assert (first.operation, first.attempt, first.attempts) == (None, 1, 0)


@pytest.mark.parametrize("run", ["call", "execute"])
@pytest.mark.parametrize("inside", [PASSING, Timeout(60.0)])
async def test_a_callback_finds_the_context_of_the_call_around_it(world: World, inside: Policy, run: str) -> None:
    found: list[str | None] = []

    async def fails(ctx: Any = None) -> None:
        raise Boom

    retry = Retry(2, on=Boom, backoff=[0], on_retry=lambda event: found.append(current_context().operation))
    with pytest.raises(Boom):
        await getattr(world, run)(retry.wrap(inside), fails)
    assert found[0] is not None
    assert found[0].endswith("fails")


def test_a_callback_finds_the_context_of_its_call_where_the_context_of_a_block_was_left(threads: World) -> None:
    """A block that is closed in other context variables leaves its context in those in which it began."""

    def block() -> Iterator[None]:
        with deadline(60.0):
            yield

    def fails() -> None:
        raise Boom

    found: list[str | None] = []
    retry = Retry(2, on=Boom, backoff=[0], on_retry=lambda event: found.append(current_context().operation))
    elsewhere, begun = contextvars.copy_context(), block()
    elsewhere.run(next, begun)
    begun.close()
    with pytest.raises(Boom):
        elsewhere.run(retry.call, fails)
    assert found[0] is not None
    assert found[0].endswith("fails")


@pytest.mark.parametrize("timeout_is_last_elsewhere", [False, True])
async def test_only_the_function_finds_the_context_of_a_timeout(world: World, timeout_is_last_elsewhere: bool) -> None:
    """Not the inner policies, nor their predicates and listeners, in any world."""
    seen: dict[str, set[float]] = {}

    def look(where: str) -> None:
        seen.setdefault(where, set()).add(current_context().deadline)

    class Looking(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            look("policy")
            try:
                return await call(ctx)
            finally:
                look("policy")

    timeout = Timeout(60.0)
    retry = Retry(
        2,
        on=lambda error: look("on") is None,
        on_result=lambda result: look("on_result") is not None,
        on_retry=lambda event: look("on_retry"),
        backoff=[0],
    )
    if timeout_is_last_elsewhere:
        await world.execute(Retry().wrap(timeout), Script("fine").function())
    script = Script(Boom(), "fine")

    async def fn(ctx: Context) -> Any:
        look("function")
        return await script.function()(ctx)

    for _ in range(2):
        await world.attempt(timeout.wrap(Looking(), retry), fn)
    assert all(deadline < INF for deadline in seen.pop("function"))
    assert seen == {"policy": {INF}, "on": {INF}, "on_result": {INF}, "on_retry": {INF}}


async def test_inside_a_function_the_ambient_context_is_its_own(world: World, clock: FakeClock) -> None:
    """The one that it gets as its argument, in each attempt; it ends with the call."""
    same: list[bool] = []
    fn = Script(Boom(), doing=lambda ctx: same.append(current_context() is ctx)).function()
    await world.attempt(Retry(2, on=Boom, backoff=[0]).wrap(Timeout(5.0)), fn)
    assert current_context().deadline == INF
    assert same == [True, True]


def test_a_function_that_gets_its_context_passes_it_on_to_threads() -> None:
    """With the other context variables, also if it is the context of a first attempt without a deadline."""

    def fn(ctx: Context) -> bool:
        with ThreadPoolExecutor() as threads:
            return threads.submit(contextvars.copy_context().run, current_context).result() is ctx

    assert Retry().execute(fn)


@pytest.mark.parametrize(("ambient", "given", "left"), [(5.0, 9.0, 5.0), (9.0, 5.0, 5.0), (5.0, None, 5.0)])
async def test_of_an_explicit_and_the_ambient_context_the_earlier_deadline_holds(
    world: World, clock: FakeClock, ambient: float, given: float | None, left: float
) -> None:
    """Deadlines can only be shortened."""
    seen: list[Context] = []
    own = Context(timeout=given, operation="own")
    with deadline(ambient):
        await world.execute(PASSING, Script(None, doing=lambda ctx: seen.append(ctx)).function(), own)
    assert seen[0].remaining() == left
    assert seen[0].operation == "own"
    assert own.remaining() == (INF if given is None else given), "the caller's own context is not changed"


async def test_concurrent_tasks_have_separate_ambient_contexts(tasks_world: World) -> None:
    wrong: list[object] = []

    async def fn(ctx: Context) -> None:
        for _ in range(5):
            await anyio.sleep(0)
            if current_context() is not ctx:
                wrong.append(ctx)

    async def call(number: int) -> None:
        await Retry().wrap(Timeout(5.0)).aexecute(fn, Context(operation=str(number)))
        if current_context().operation is not None:
            wrong.append(number)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(call, number)
    assert wrong == []


async def test_the_ambient_context_is_inherited_through_anyio_to_thread_and_back(tasks_world: World) -> None:
    seen: list[tuple[str, str | None, float]] = []

    def record(where: str) -> None:
        ctx = current_context()
        seen.append((where, ctx.operation, ctx.deadline))

    async def in_the_loop_again() -> None:
        record("loop")

    def in_the_thread() -> None:
        record("thread")
        Retry().execute(lambda ctx: record("nested"))
        anyio.from_thread.run(in_the_loop_again)

    async def fn(ctx: Context) -> float:
        await anyio.to_thread.run_sync(in_the_thread)
        return ctx.deadline

    limit = float(await PASSING.aexecute(fn, Context(timeout=5.0, operation="op")))
    assert seen == [("thread", "op", limit), ("nested", "op", limit), ("loop", "op", limit)]


def test_workers_run_in_a_copy_of_the_callers_context_variables(threads: World) -> None:
    """So the ambient context is inherited, and changes on the worker have no effect on the caller."""
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    tenant.set("acme")
    here = threading.get_ident()

    def fn(ctx: Context) -> tuple[bool, str, bool]:
        found = tenant.get()
        tenant.set("changed on the worker")
        nested = Retry().execute(lambda inner: inner.deadline)
        return current_context() is ctx and nested == ctx.deadline, found, threading.get_ident() != here

    assert Timeout(5.0).execute(fn, Context(timeout=8.0)) == (True, "acme", True)
    assert tenant.get() == "acme"
    assert current_context().deadline == INF


async def test_the_remaining_time_is_right_in_tasks(tasks_world: World, clock: FakeClock) -> None:
    """Event loops do not use the process clock, which is fake here."""
    script = Script("fine")
    with deadline(3600.0):
        clock.advance(600.0)
        await Timeout(7200.0).aexecute(script.function())
    assert script.contexts[0].remaining() == 3000.0
