"""Lowering: a policy's coroutine as a plain function gives the same as the coroutine, or is not made."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import linecache
import os
import subprocess
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Policy, Retry, Timeout, current_context, events
from resilience.runtimes import lowering
from resilience.runtimes.blocking import _SHORTCUT, drive
from tests.conftest import Boom, World, shown


def is_lowered(policy: Policy[Any]) -> bool:
    """Whether it is, alike as the last policy before the function, where its calls are written out."""
    forms = {lowering.lower(policy.around, drive, shortcut) is not None for shortcut in (None, _SHORTCUT)}
    assert len(forms) == 1
    return forms.pop()


@pytest.fixture(params=["lowered", "driven"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of running a policy in blocking code. A test makes its policies after this has been set."""
    monkeypatch.setattr(lowering, "enabled", request.param == "lowered")
    return str(request.param)


# --- policies of many shapes -----------------------------------------------------------------


class Plain(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        return await call(ctx)


class OtherNames(Policy):
    async def around(this, the_rest: Any, context: Context) -> Any:
        return await the_rest(context)


class Guarded(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        log: list[str] = []
        try:
            log.append(await call(ctx))
        except ValueError as error:
            log.append(f"caught {error}")
        except KeyError:
            raise RuntimeError("chained") from None
        else:
            log.append("else")
        finally:
            log.append("finally")
        return log


class Managed(Policy):
    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def block(self) -> Iterator[str]:
        self.log.append("in")
        try:
            yield "held"
        finally:
            self.log.append("out")

    async def around(self, call: Any, ctx: Context) -> Any:
        with self.block() as held:
            return held, await call(ctx), self.log


class Looping(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        results = []
        for attempt in range(1, 4):
            if attempt == 2:
                continue
            results.append(await call(ctx.child(attempt=attempt)))
        while len(results) < 5:
            results.append(await call(ctx))
            if len(results) == 4:
                break
        else:
            results.append("never")
        return results


class Comprehending(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        listed = [await call(ctx.child(attempt=n)) for n in (1, 2)]
        mapped = {n: await call(ctx) for n in "ab"}
        return listed, mapped, {await call(ctx)}, [n for n in await call(ctx)]  # noqa: C416 (it is about these)


class Expressive(Policy):
    factor = 2

    async def helper(self, x: int) -> int:
        return self.factor * x

    async def around(self, call: Any, ctx: Context) -> Any:
        first = (await call(ctx)) if (await self.helper(1)) == 2 else "never"
        if (again := await call(ctx.child(attempt=await self.helper(3)))) != first:
            return f"{first} {again} {await self.helper(5)!r}"
        return (await call(ctx)) + (await call(ctx)), not await self.helper(0)


class Matching(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        match await call(ctx):
            case str(word) if word:
                return ("a word", word)
            case _:
                return None


class Functional(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        def decorated(text: Any) -> str:
            return f"<{text}>"

        class Inner:
            word = "inner"

            async def later(self) -> str:
                return self.word

        return list(map(decorated, [await call(ctx), await Inner().later(), (lambda: 3)()]))


class Waiting(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        await ctx.sleep(0)
        await ctx.runtime.sleep(0, ctx)
        result = await call(ctx)
        await ctx.sleep(0)
        return result


class Mangled(Policy):
    def __init__(self) -> None:
        self.__secret = "secret"

    async def around(self, call: Any, ctx: Context) -> Any:
        return await call(ctx), self.__secret


class Reassigning(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        ctx = ctx.child(attempt=7)
        return await call(ctx), ctx.attempt


class Twice(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        await call(ctx)
        return await call(ctx)


class Raising(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        result = await call(ctx)
        raise Boom(f"after {result}")


class Skipping(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        return "skipped"


class Documented(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        """Do nothing; a docstring is a constant of the code."""
        assert ctx is not None, "an assertion, which test tools rewrite"
        return await call(ctx)


class PositionalOnly(Policy):
    async def around(self, call: Any, ctx: Context, /) -> Any:
        return await call(ctx), type(self).__name__


class WithDefault(Policy):
    async def around(self, call: Any, ctx: Context | None = None) -> Any:
        return await call(ctx), type(self).__name__


class BindsAsException(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            return await call(ctx)
        except ValueError as call:
            return repr(call)


class BindsByImport(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        result = await call(ctx)
        import os as call

        return result, call.sep


class BindsByMatch(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        match await call(ctx):
            case [call]:
                return "a list", call
            case call:
                return "matched", call


class BindsByDefinition(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        result = await call(ctx)

        def call() -> str:
            return "defined"

        return result, call()


class BindsSelf(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        name = type(self).__name__
        try:
            return await call(ctx), name
        except ValueError as self:
            return name


class AwaitsInADefault(Policy):
    async def helper(self) -> str:
        return "helped"

    async def around(self, call: Any, ctx: Context) -> Any:
        def inner(text: str = await self.helper()) -> str:
            return text

        return await call(ctx), inner(), (lambda text=await self.helper(): text)()  # noqa: B008


class Generating(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        result = await call(ctx)
        return list(result * number for number in range(3))  # noqa: C400


class Inherited(Guarded):
    """Takes the flow of its parent."""


LOWERABLE: list[Callable[[], Policy[Any]]] = [
    Plain,
    OtherNames,
    Guarded,
    Managed,
    Looping,
    Comprehending,
    Expressive,
    Matching,
    Functional,
    Waiting,
    Mangled,
    Reassigning,
    Twice,
    Raising,
    Skipping,
    Generating,
    Inherited,
    lambda: Retry(2, on=Boom, backoff=[0]),
    lambda: Timeout(5.0),
    lambda: Timeout(5.0, cooperative=True),
    lambda: CircuitBreaker(3),
    lambda: Bulkhead(1),
    lambda: Fallback("fallback", on=Boom),
    lambda: Fallback(handler=lambda failure, ctx: f"handled {failure!r}", on=Boom),
]


def name_of(make: Callable[[], Policy[Any]]) -> str:
    return shown(make())[:60]


# --- what has to be driven -------------------------------------------------------------------


def closing_over(word: str) -> Policy[Any]:
    class Closure(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            return word, await call(ctx)

    return Closure()


class CallsSuper(Plain):
    async def around(self, call: Any, ctx: Context) -> Any:
        return "super", await super().around(call, ctx)


class HandsOn(Policy):
    async def helper(self, call: Any, ctx: Context) -> Any:
        return "handed on", await call(ctx)

    async def around(self, call: Any, ctx: Context) -> Any:
        return await self.helper(call, ctx)


class Stores(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        rest = call
        return await rest(ctx)


class Replaces(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        first = await call(ctx)
        call = HandsOn().helper
        return first, call is not None


class ReplacesSelf(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        self = Plain()
        return type(self).__name__, await call(ctx)


class CallsInside(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        async def inner() -> Any:
            return await call(ctx)

        return await inner()


class CallsInLambda(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        return await (lambda: call(ctx))()


class AwaitsLater(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        pending = call(ctx)
        return await pending


class AsyncManager:
    async def __aenter__(self) -> str:
        return "entered"

    async def __aexit__(self, *exc: object) -> None: ...


class AsyncWith(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        async with AsyncManager() as entered:
            return entered, await call(ctx)


class AsyncFor(Policy):
    async def numbers(self) -> Any:
        for number in (1, 2):
            yield number

    async def around(self, call: Any, ctx: Context) -> Any:
        total = 0
        async for number in self.numbers():
            total += number
        return total, await call(ctx)


class AsyncComprehension(AsyncFor):
    async def around(self, call: Any, ctx: Context) -> Any:
        return [number async for number in self.numbers()], await call(ctx)


class AsyncGenerator(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        generator = (await call(ctx.child(attempt=n)) for n in (1, 2))
        return [it async for it in generator]


def noting(method: Any) -> Any:
    @functools.wraps(method)
    async def around(self: Any, call: Any, ctx: Context) -> Any:
        return "noted", await method(self, call, ctx)

    return around


class Decorated(Policy):
    @noting
    async def around(self, call: Any, ctx: Context) -> Any:
        return await call(ctx)


class NoCoroutineFunction(Policy):
    def around(self, call: Any, ctx: Context) -> Any:  # type: ignore[override]
        return call(ctx)


class WithMoreParameters(Policy):
    async def around(self, call: Any, ctx: Context, extra: str = "extra", *more: Any, **settings: Any) -> Any:
        return extra, await call(ctx)


async def borrowed(self: Any, call: Any, ctx: Context) -> Any:
    return "borrowed", await call(ctx)


class NamedLikeAGlobal(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        return await call(ctx), around


around = "of the module"


class MangledParameter(Policy):
    async def around(self, __call: Any, ctx: Context) -> Any:
        return await __call(ctx)


async def elsewhere(ctx: Context) -> Any:
    return "elsewhere"


class GlobalInside(Policy):
    async def around(self, elsewhere: Any, ctx: Context) -> Any:
        async def other() -> Any:
            global elsewhere
            return await elsewhere(ctx)

        return await other()


class AwaitsInAGenerator(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        each = (await call(ctx) for _ in "abc")
        return [it async for it in each]


class AwaitsTheRestOfAGenerator(Policy):
    async def later(self) -> str:
        return "later"

    async def around(self, call: Any, ctx: Context) -> Any:
        each = (await self.later() for _ in "ab")
        try:
            return await call(ctx), type(each).__name__, await each.__anext__()
        finally:
            await each.aclose()


class Borrowing(Policy):
    around = borrowed


def on_the_object() -> Policy[Any]:
    policy = Plain()

    async def around(call: Any, ctx: Context) -> Any:
        return "on the object", await call(ctx)

    policy.around = around  # type: ignore[method-assign]
    return policy


def without_source() -> Policy[Any]:
    namespace: dict[str, Any] = {"Policy": Policy}
    code = """class Sourceless(Policy):
    async def around(self, call, ctx):
        return "no source", await call(ctx)
"""
    exec(compile(code, "<no such file>", "exec"), namespace)
    made: Policy[Any] = namespace["Sourceless"]()
    return made


#: Whether these are lowered is nobody's business, as long as they do what they say.
EITHER: list[Callable[[], Policy[Any]]] = [
    Documented,
    PositionalOnly,
    WithDefault,
    BindsAsException,
    BindsByImport,
    BindsByMatch,
    BindsByDefinition,
    BindsSelf,
    AwaitsInADefault,
]

TO_BE_DRIVEN: list[Callable[[], Policy[Any]]] = [
    functools.partial(closing_over, "closed over"),
    CallsSuper,
    HandsOn,
    Stores,
    Replaces,
    ReplacesSelf,
    CallsInside,
    CallsInLambda,
    AwaitsLater,
    AsyncWith,
    AsyncFor,
    AsyncComprehension,
    AsyncGenerator,
    Decorated,
    NoCoroutineFunction,
    WithMoreParameters,
    NamedLikeAGlobal,
    MangledParameter,
    GlobalInside,
    AwaitsInAGenerator,
    AwaitsTheRestOfAGenerator,
    Borrowing,
    on_the_object,
    without_source,
]


# --- the same, both ways and in every world --------------------------------------------------


def result(value: Any) -> Callable[[Context], Any]:
    """A function that returns the value, or raises it, and shows the attempt that it was."""

    def fn(ctx: Context) -> Any:
        if isinstance(value, BaseException):
            raise value
        return f"{value}{ctx.attempt}"

    return fn


INPUTS: dict[str, Callable[[], Any]] = {
    "a value": lambda: "value",
    "a ValueError": lambda: ValueError("no"),
    "a KeyError": lambda: KeyError("no"),
    "a Boom": lambda: Boom("no"),
    "a KeyboardInterrupt": lambda: KeyboardInterrupt("no"),
}


def told(policy: Policy[Any], fn: Callable[[Context], Any]) -> tuple[str, str]:
    """What came out, in a form that can be compared."""
    try:
        return "returned", repr(policy.execute(fn))
    except BaseException as error:
        return f"raised after {type(error.__context__).__name__}, {error.__suppress_context__}", repr(error)


@pytest.mark.parametrize("make", LOWERABLE, ids=name_of)
def test_these_shapes_are_lowered(make: Callable[[], Policy[Any]]) -> None:
    """All of the library's own policies among them: what is driven is slow."""
    assert is_lowered(make())


@pytest.mark.parametrize("make", TO_BE_DRIVEN, ids=name_of)
def test_these_shapes_are_driven(make: Callable[[], Policy[Any]]) -> None:
    """Where rewriting could change what the code means, it is not done."""
    assert not is_lowered(make())


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("make", [*LOWERABLE, *TO_BE_DRIVEN, *EITHER], ids=name_of)
def test_lowered_and_driven_give_the_same(
    make: Callable[[], Policy[Any]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result, or the error with what it is chained to, alone and in the middle of a pipeline."""
    seen = []
    for enabled in (True, False):
        monkeypatch.setattr(lowering, "enabled", enabled)
        alone = told(make(), result(INPUTS[kind]()))
        amid = told(Plain().wrap(make(), Bulkhead(1)), result(INPUTS[kind]()))
        seen.append((alone, amid))
    assert seen[0] == seen[1]
    assert seen[0][0] == seen[0][1]


@pytest.mark.parametrize("make", [*LOWERABLE, *TO_BE_DRIVEN, *EITHER], ids=name_of)
@pytest.mark.parametrize("kind", ["a value", "a ValueError"])
def test_blocking_code_gives_the_same_as_tasks(make: Callable[[], Policy[Any]], kind: str, tasks_world: World) -> None:
    """Where the coroutine is what it looks like."""
    fn = result(INPUTS[kind]())

    async def later(ctx: Context) -> Any:
        return fn(ctx)

    async def main() -> tuple[str, str]:
        try:
            return "returned", repr(await make().aexecute(later))
        except Exception as error:
            return f"raised after {type(error.__context__).__name__}, {error.__suppress_context__}", repr(error)

    assert tasks_world.run(main) == told(make(), fn)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("make", [*LOWERABLE, *TO_BE_DRIVEN, *EITHER], ids=name_of)
def test_a_decorated_function_gives_the_same(
    make: Callable[[], Policy[Any]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its policy is the entrance, where it is not, and where the entrance sends the call the long way."""
    fn = result(INPUTS[kind]())

    def decorated(policy: Policy[Any]) -> Callable[[], Any]:
        return policy(lambda: fn(current_context()))

    monkeypatch.setattr(lowering, "enabled", True)
    alone, amid = decorated(make()), decorated(make().wrap(Bulkhead(1)))
    seen = [told_outright(alone), told_outright(amid), told(Plain(), lambda ctx: decorated(make())())]
    with subscribed():
        seen.append(told_outright(decorated(make())))
    monkeypatch.setattr(lowering, "enabled", False)
    seen.append(told_outright(decorated(make())))
    assert seen == [told(make(), fn)] * 5


def told_outright(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        return "returned", repr(call())
    except BaseException as error:
        return f"raised after {type(error.__context__).__name__}, {error.__suppress_context__}", repr(error)


@contextmanager
def subscribed() -> Iterator[None]:
    unsubscribe = events.subscribe(lambda event: None, events.ExecutionFinished)
    try:
        yield
    finally:
        unsubscribe()


@pytest.mark.parametrize("kind", ["a value", "a ValueError"])
@pytest.mark.parametrize("make", [*LOWERABLE, *TO_BE_DRIVEN, *EITHER], ids=name_of)
def test_a_decorated_coroutine_function_gives_the_same(
    make: Callable[[], Policy[Any]], kind: str, tasks_world: World
) -> None:
    """The same in tasks."""
    fn = result(INPUTS[kind]())

    async def later() -> Any:
        return fn(current_context())

    async def told_later(call: Callable[[], Any]) -> tuple[str, str]:
        try:
            return "returned", repr(await call())
        except Exception as error:
            return f"raised after {type(error.__context__).__name__}, {error.__suppress_context__}", repr(error)

    async def main() -> list[tuple[str, str]]:
        seen = [await told_later(make()(later)), await told_later(make().wrap(Bulkhead(1))(later))]
        with subscribed():
            seen.append(await told_later(make()(later)))
        return seen

    assert tasks_world.run(main) == [told(make(), fn)] * 3


class Beside(Policy):
    """Starts the call in a task of its own, as a hedge does."""

    async def around(self, call: Any, ctx: Context) -> Any:
        task = asyncio.ensure_future(call(ctx))
        try:
            return await task
        except Boom:
            return "caught"


def test_a_wrapper_is_not_taken_for_the_method_that_it_wraps() -> None:
    """Though `functools.wraps` copies all that the method carries, and it has been executed before."""

    class Plain(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            return await call(ctx)

    assert Plain().execute(lambda ctx: "fine") == "fine"

    class Wrapped(Plain):
        around = noting(Plain.around)

    assert Wrapped().execute(lambda ctx: "fine") == ("noted", "fine")


def test_a_call_that_is_awaited_later_is_a_coroutine_that_has_not_begun() -> None:
    """Whatever the function is that it will call: one that raises at once raises where the call is awaited."""

    def raises(ctx: Context) -> Any:
        raise Boom

    def answers(ctx: Context) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_result("fine")
        return future

    async def main() -> list[str]:
        return [await Beside().aexecute(fn) for fn in (raises, answers)]

    assert asyncio.run(main()) == ["caught", "fine"]


class Catching(Policy):
    """Looks at what passes."""

    def __init__(self) -> None:
        self.caught: list[str] = []

    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            return await call(ctx)
        except Exception as error:
            self.caught.append(type(error).__name__)
            raise


def test_a_stop_iteration_is_carried_only_where_a_coroutine_may_not_raise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowered policy sees it as itself, a driven one its carrier; the caller gets the very exception both ways."""
    for enabled, seen in ((True, "StopIteration"), (False, "StoppedIteration")):
        monkeypatch.setattr(lowering, "enabled", enabled)
        policy, stop = Catching(), StopIteration("last")
        with pytest.raises(StopIteration) as caught:
            policy.wrap(Bulkhead(1)).execute(result(stop))
        assert caught.value is stop
        assert stop.__context__ is None
        assert policy.caught == [seen]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_policies_of_ours_handle_a_stop_iteration_as_itself(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it comes to them in its carrier."""
    monkeypatch.setattr(lowering, "enabled", enabled)
    results = iter([StopIteration("once"), "fine"])
    assert Retry(2, on=StopIteration, backoff=[0]).execute(lambda ctx: result(next(results))(ctx)) == "fine2"
    assert Fallback("answer", on=StopIteration).execute(result(StopIteration())) == "answer"
    with pytest.raises(StopIteration):
        Fallback("answer", ignore=StopIteration).execute(result(StopIteration()))


# --- what one sees of it ---------------------------------------------------------------------


def frames_of(error: BaseException) -> list[tuple[str, int, str | None]]:
    """The frames of the policies in this file."""
    summaries = traceback.extract_tb(error.__traceback__)
    return [(it.name, it.lineno or 0, it.line) for it in summaries if it.name == "around"]


def caught(policy: Policy[Any]) -> BaseException:
    with pytest.raises(Boom) as info:
        policy.execute(result(Boom("deep")))
    return info.value


def test_tracebacks_show_the_source_as_it_was_written(way: str) -> None:
    """The same file, function name, line and text, lowered or driven."""
    error = caught(Plain().wrap(Managed()))
    assert [(name, line) for name, _, line in frames_of(error)] == [
        ("around", "return await call(ctx)"),
        ("around", "return held, await call(ctx), self.log"),
    ]
    files = {it.filename for it in traceback.extract_tb(error.__traceback__) if it.name == "around"}
    assert files == {__file__}


def test_the_line_numbers_are_the_same_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every shape, for an error that passes through."""
    for make in LOWERABLE[:16]:
        seen = []
        for enabled in (True, False):
            monkeypatch.setattr(lowering, "enabled", enabled)
            try:
                make().execute(result(Boom("deep")))
            except Boom as error:
                seen.append(frames_of(error))
            else:
                seen.append([])
        assert seen[0] == seen[1], make


class OverManyLines(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        return await call(
            ctx.child(
                attempt=2,
            )
            if ctx.expired
            else ctx
        )


def test_a_debugger_comes_by_no_other_lines_than_those_that_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the end of a call of several lines, whose way in is written out."""

    def lines(enabled: bool) -> set[int]:
        seen: set[int] = set()

        def look(frame: types.FrameType, event: str, argument: object) -> Any:
            if frame.f_code.co_name == "around" and frame.f_code.co_filename == __file__ and event == "line":
                seen.add(frame.f_lineno)
            return look

        async def main() -> None:
            before = sys.gettrace()
            sys.settrace(look)
            try:
                await policy.acall(asyncio.sleep, 0)
            finally:
                sys.settrace(before)

        monkeypatch.setattr(lowering, "enabled", enabled)
        policy = Timeout(5.0).wrap(OverManyLines())
        asyncio.run(policy.acall(asyncio.sleep, 0))
        asyncio.run(main())
        return seen

    assert lines(True) == lines(False)


def test_an_error_of_the_policys_own_shows_its_own_line(way: str) -> None:
    """Not that of the call above it."""
    with pytest.raises(Boom) as info:
        Raising().execute(result("x"))
    assert frames_of(info.value)[-1][2] == 'raise Boom(f"after {result}")'


def test_nothing_stands_between_a_decorated_function_and_its_policies(tasks_world: World) -> None:
    """No frame but those of the policies."""

    def fails() -> None:
        raise Boom

    async def fails_later() -> None:
        raise Boom

    async def main() -> None:
        await Plain().wrap(Guarded())(fails_later)()

    with pytest.raises(Boom) as blocking:
        Plain().wrap(Guarded())(fails)()
    with pytest.raises(Boom) as waiting:
        tasks_world.run(main)
    names = [it.name for it in traceback.extract_tb(blocking.value.__traceback__)]
    assert names == [
        "test_nothing_stands_between_a_decorated_function_and_its_policies",
        "around",
        "around",
        "fails",
    ]
    names = [it.name for it in traceback.extract_tb(waiting.value.__traceback__) if it.filename == __file__]
    assert names[-4:] == ["main", "around", "around", "fails_later"]


def test_the_arguments_of_a_decorated_function_may_have_any_names() -> None:
    """Also those of what stands around it."""

    def fn(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    names = ("self", "call", "ctx", "policy", "function", "_resilience_function", "_resilience_arguments")
    given = dict.fromkeys(names, 1)
    assert Plain()(fn)("first", **given) == (("first",), given)


def test_a_debugger_finds_the_variables_of_the_policy(way: str) -> None:
    """By their own names."""
    error = caught(Guarded().wrap(Managed()))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "around"]
    guarded, managed = (frame.f_locals for frame in frames)
    assert isinstance(guarded["ctx"], Context)
    assert guarded["log"] == ["finally"]
    assert isinstance(managed["self"], Managed)
    assert managed["held"] == "held"


# --- the source has to be the one that runs --------------------------------------------------

SOURCE = """\
from resilience import Policy

WORDS = ["before", "after"]


class Saying(Policy):
    async def around(self, call, ctx):
        return [WORDS[0], await call(ctx), WORDS[1], 7]
"""


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "a_module_that_is_edited.py"
    path.write_text(SOURCE, encoding="utf-8")
    yield path
    linecache.checkcache(str(path))


def test_the_source_of_a_module_on_disk_is_lowered(source: Path) -> None:
    """The premise of the tests below."""
    policy = load(source).Saying()
    assert is_lowered(policy)
    assert policy.execute(result("x")) == ["before", "x1", "after", 7]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (", 7]", ", 8]"),
        (", 7]", ", 7.0]"),
        ("WORDS[", "OTHER["),
        ("WORDS[0], await", "WORDS[1], await"),
        ("await call(ctx), WORDS[1]", "WORDS[1], await call(ctx)"),
        ("await call(ctx)", "await call(ctx.child())"),
        ("class Saying", "\n\nclass Saying"),
        ("async def around(self, call, ctx)", "async def around(self, rest, ctx)"),
        ("        return", "        await call(ctx)\n        return"),
        ("return [", "return ("),
    ],
    ids=[
        "a constant",
        "its type",
        "a global",
        "an index",
        "the order",
        "an argument",
        "a line more",
        "a parameter",
        "more",
        "broken",
    ],
)
def test_a_file_that_was_edited_since_it_was_imported_is_not_believed(source: Path, old: str, new: str) -> None:
    """What was imported is what runs, whatever the file says now."""
    policy = load(source).Saying()
    edited = SOURCE.replace(old, new)
    assert edited != SOURCE
    source.write_text(edited, encoding="utf-8")
    linecache.checkcache(str(source))
    assert policy.execute(result("x")) == ["before", "x1", "after", 7]
    assert not is_lowered(policy)


@pytest.mark.parametrize("what", ["deleted", "not Python", "another encoding", "empty"])
def test_a_file_that_cannot_be_read_any_more_is_done_without(source: Path, what: str) -> None:
    """The coroutine is there all the same."""
    policy = load(source).Saying()
    if what == "deleted":
        source.unlink()
    else:
        source.write_bytes(
            {"not Python": b"this is (no Python", "another encoding": b"\xff\xfe\x00", "empty": b""}[what]
        )
    linecache.checkcache(str(source))
    assert policy.execute(result("x")) == ["before", "x1", "after", 7]


def test_two_classes_of_one_name_are_not_mixed_up(tmp_path: Path) -> None:
    """Each is found by the line where it begins."""
    path = tmp_path / "two_of_a_name.py"
    path.write_text(SOURCE + "\n\nFirst = Saying\n" + SOURCE.replace(", 7]", ", 8]"), encoding="utf-8")
    module = load(path)
    assert module.First().execute(result("x"))[-1] == 7
    assert module.Saying().execute(result("x"))[-1] == 8
    assert is_lowered(module.First())
    assert is_lowered(module.Saying())


def test_the_switches_of_the_module_are_honoured(tmp_path: Path) -> None:
    """With and without `from __future__ import annotations`: an annotation is not evaluated by us."""
    for future in ("", "from __future__ import annotations\n"):
        path = tmp_path / f"future_{bool(future)}.py"
        text = SOURCE.replace("return [", "local: list[int] = [0]\n        return [")
        path.write_text(future + text, encoding="utf-8")
        policy = load(path).Saying()
        assert is_lowered(policy)
        assert policy.execute(result("x")) == ["before", "x1", "after", 7]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are new in Python 3.12")
def test_type_parameters_are_no_hindrance(tmp_path: Path) -> None:
    """`async def around[T](...)`: lowered or not, it runs."""
    path = tmp_path / "with_type_parameters.py"
    path.write_text(
        SOURCE.replace("around(self, call, ctx)", "around[T](self, call, ctx) -> list[T]"), encoding="utf-8"
    )
    assert load(path).Saying().execute(result("x")) == ["before", "x1", "after", 7]


def test_globals_are_looked_up_when_they_are_used(source: Path) -> None:
    """In the module itself, not in a copy: what a test patches there is patched."""
    module = load(source)
    policy = module.Saying()
    policy.execute(result("x"))
    module.WORDS = ["patched", "too"]
    assert policy.execute(result("x")) == ["patched", "x1", "too", 7]


def test_a_class_that_nobody_needs_any_more_can_go(source: Path) -> None:
    """Lowering remembers functions weakly: classes that are made again and again do not pile up."""
    module = load(source)
    alive = weakref.ref(module.Saying)
    module.Saying().execute(result("x"))
    assert is_lowered(module.Saying())
    del module
    gc.collect()
    assert alive() is None


# --- the switch ------------------------------------------------------------------------------

PROGRAM = """
from resilience import Fallback, Retry
from resilience.runtimes import lowering
policy = Fallback("x").wrap(Retry(2, on=Exception, backoff=[0]))
print(lowering.enabled, policy.execute(lambda ctx: 1 / 0), policy.execute(lambda ctx: "fine"))
"""


@pytest.mark.parametrize(
    ("setting", "enabled"), [("off", False), ("OFF", False), ("0", False), ("no", False), ("on", True), (None, True)]
)
def test_it_can_be_switched_off_for_the_process(setting: str | None, enabled: bool) -> None:
    """For whoever suspects it: everything works without."""
    env = {key: value for key, value in os.environ.items() if key != "RESILIENCE_LOWERING"}
    if setting is not None:
        env["RESILIENCE_LOWERING"] = setting
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == [str(enabled), "x", "fine"], done.stderr


def test_switched_off_nothing_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what has been lowered before."""
    assert is_lowered(Plain())
    monkeypatch.setattr(lowering, "enabled", False)
    assert not is_lowered(Plain())
