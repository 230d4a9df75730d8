"""The ambient context: what a function finds without having been handed it, and where it follows."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from resilience import Bulkhead, Context, Fallback, Policy, Retry, Timeout, current_context, deadline
from tests.conftest import Boom, FakeClock, Script, World
from tests.contexts import INF, PASSING


def test_without_an_execution_the_ambient_context_is_a_fresh_unlimited_one() -> None:
    """Code that asks for it need not know whether anybody protects it."""
    one, two = current_context(), current_context()
    assert one is not two
    assert one.deadline == INF
    assert one.timeout() is None
    assert (one.operation, one.attempt, one.attempts) == (None, 1, 0)


async def test_who_listens_to_an_execution_does_not_hear_those_inside_of_it(world: World) -> None:
    """Nor does its context count their attempts: also where the inner pipeline has been called before.

    A call that inherits nothing makes no context ambient for its first attempt.
    """
    heard: list[str] = []
    inner = Retry(2, on=Boom, backoff=[0], name="inner").wrap(Bulkhead(1))
    outer = Retry(name="outer").wrap(Bulkhead(1), listeners=[lambda event: heard.append(event.policy)])
    ctx = Context(operation="both")
    operations: list[str | None] = []

    async def innermost() -> str:
        operations.append(current_context().operation)
        if len(operations) % 2:
            raise Boom
        return "fine"

    async def fn(ctx: Context) -> object:
        return inner.call(function) if world.blocking else await inner.acall(function)

    function = world.native(innermost)
    await fn(ctx)
    assert await world.execute(outer, fn, ctx) == "fine"
    assert (ctx.attempts, ctx.failures) == (1, ())
    assert heard == [outer.name]
    assert operations == [None, function.__qualname__, "both", "both"]


@pytest.mark.parametrize("timeout_is_last_elsewhere", [False, True])
async def test_only_the_function_finds_the_context_of_a_timeout(world: World, timeout_is_last_elsewhere: bool) -> None:
    """Not the policies inside of it, nor what they call: that is the same in every world, whoever sets the variable."""
    seen: dict[str, set[float]] = {}

    def look(who: str) -> None:
        seen.setdefault(who, set()).add(current_context().deadline)

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
    """The one that was passed to it, attempt by attempt; afterwards it is gone."""
    same: list[bool] = []

    async def fn(ctx: Context) -> None:
        same.append(current_context() is ctx)
        raise Boom

    await world.attempt(Retry(2, on=Boom, backoff=[0]).wrap(Timeout(5.0)), fn)
    assert current_context().deadline == INF
    assert same == [True, True]


async def test_a_nested_execution_inherits_deadline_operation_and_properties(world: World, clock: FakeClock) -> None:
    """Without a word in between: somebody else's library, called inside, obeys the same budget."""
    seen: list[Context] = []

    async def inner(ctx: Context) -> None:
        seen.append(ctx)

    async def outer(ctx: Context) -> None:
        clock.advance(2.0)
        await world.execute(PASSING, inner)

    await world.execute(PASSING, outer, Context(timeout=8.0, operation="op", properties={"a": 1}))
    [ctx] = seen
    assert (ctx.remaining(), ctx.operation, dict(ctx.properties)) == (6.0, "op", {"a": 1})
    assert ctx.attempt == 1


@pytest.mark.parametrize(("ambient", "given", "left"), [(5.0, 9.0, 5.0), (9.0, 5.0, 5.0), (5.0, None, 5.0)])
async def test_an_explicit_context_inside_a_budget_holds_as_long_as_the_earlier_of_the_two(
    world: World, clock: FakeClock, ambient: float, given: float | None, left: float
) -> None:
    """Budgets only shorten, also where somebody brings his own."""
    seen: list[Context] = []

    async def fn(ctx: Context) -> None:
        seen.append(ctx)

    own = Context(timeout=given, operation="own")

    with deadline(ambient):
        await world.execute(PASSING, fn, own)
    assert seen[0].remaining() == left
    assert seen[0].operation == "own"
    assert own.remaining() == (INF if given is None else given), "the caller's own context is not changed"


async def test_the_ambient_context_follows_into_tasks(tasks_world: World) -> None:
    """A task is started with a copy of its parent's variables; what it does there is its own."""
    seen: list[tuple[str | None, float]] = []

    async def child() -> None:
        ctx = current_context()
        seen.append((ctx.operation, ctx.deadline))
        with deadline(0.5):
            await anyio.sleep(0)

    async def fn(ctx: Context) -> float:
        async with anyio.create_task_group() as group:
            group.start_soon(child)
            group.start_soon(child)
        assert current_context() is ctx, "a child's own block changes nothing here"
        return ctx.deadline

    limit = float(await PASSING.aexecute(fn, Context(timeout=5.0, operation="op")))
    assert seen == [("op", limit)] * 2


async def test_tasks_side_by_side_have_their_own_ambient_contexts(tasks_world: World) -> None:
    """They wait in the middle of each other's functions, and nobody sees another's context."""
    wrong: list[object] = []

    async def fn(ctx: Context) -> None:
        for _ in range(5):
            await anyio.sleep(0)
            if current_context() is not ctx:
                wrong.append(ctx)

    async def one(number: int) -> None:
        await Retry().wrap(Timeout(5.0)).aexecute(fn, Context(operation=str(number)))
        if current_context().operation is not None:
            wrong.append(number)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(one, number)
    assert wrong == []


async def test_the_ambient_context_follows_through_anyio_to_thread_and_back(tasks_world: World) -> None:
    """What a worker thread executes there is a nested execution, and so is what it sends back to the loop."""
    seen: list[tuple[str, str | None, float]] = []

    def note(where: str) -> None:
        ctx = current_context()
        seen.append((where, ctx.operation, ctx.deadline))

    async def in_the_loop_again() -> None:
        note("loop")

    def in_the_thread() -> None:
        note("thread")
        Retry().execute(lambda ctx: note("nested"))
        anyio.from_thread.run(in_the_loop_again)

    async def fn(ctx: Context) -> float:
        await anyio.to_thread.run_sync(in_the_thread)
        return ctx.deadline

    limit = float(await PASSING.aexecute(fn, Context(timeout=5.0, operation="op")))
    assert seen == [("thread", "op", limit), ("nested", "op", limit), ("loop", "op", limit)]


def test_the_workers_of_a_timeout_see_the_callers_context(threads: World) -> None:
    """And its other context variables: they run in a copy of them."""
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


def test_a_plain_thread_begins_without_a_context(threads: World) -> None:
    """`threading.Thread` copies no context variables: there it is a fresh one, and no error."""
    found: list[float] = []

    def fn(ctx: Context) -> None:
        thread = threading.Thread(target=lambda: found.append(current_context().deadline))
        thread.start()
        thread.join()

    Retry().execute(fn, Context(timeout=5.0))
    assert found == [INF]


async def test_the_ambient_context_is_put_back_whatever_happens(world: World) -> None:
    """After a failure, and after an interrupt."""
    for error in (Boom(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            await world.execute(PASSING, Script(error).function(), Context(timeout=5.0))
        assert current_context().deadline == INF


class Waiting:
    """Suspends whoever awaits it, and notes when that is over."""

    def __init__(self) -> None:
        self.is_closed = False

    def __await__(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.is_closed = True


def test_a_handler_that_is_closed_from_elsewhere_ends_in_peace() -> None:
    """The same while a fallback's handler waits: in other variables there is no context to restore."""
    waiting = Waiting()

    async def handler(failure: object, ctx: Context) -> None:
        await waiting

    coroutine = Fallback(handler=handler).aexecute(Script(Boom()).function(), Context(timeout=60.0))
    elsewhere = contextvars.copy_context()
    elsewhere.run(coroutine.send, None)
    assert elsewhere.run(current_context).deadline < INF
    coroutine.close()
    assert waiting.is_closed
    assert current_context().deadline == INF


def test_remaining_seconds_cross_from_one_world_to_another(clock: FakeClock) -> None:
    """Neither event loop has the process clock: under a fake one the budget is still so many seconds."""
    for name in ("asyncio", "trio"):

        async def main() -> float:
            with deadline(3600.0):
                clock.advance(600.0)
                return float(await Timeout(7200.0).aexecute(remaining))

        async def remaining(ctx: Context) -> float:
            await anyio.sleep(0)
            return ctx.remaining()

        assert World(name).run(main) == 3000.0
