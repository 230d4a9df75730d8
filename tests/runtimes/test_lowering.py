"""Lowering: in blocking code a policy's coroutine as a plain function does the same as the coroutine, or is not made."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import linecache
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Policy, Retry, Timeout
from tests.conftest import Boom, World
from tests.runtimes.shapes import WAYS, Interrupted, Lost, Observer, Oops, Stopped, is_lowered, load, run_as


@pytest.fixture(scope="module")
def observer() -> Iterator[Observer]:
    it = Observer()
    with it.runner:
        yield it


# --- policies of many shapes ------------------------------------------------------------------

LOWERED = {
    "passes on": "return await call(ctx)",
    "has a docstring": """
        '''Do nothing else.'''
        return await call(ctx)
    """,
    "other names": """
        class Shape(Base):
            async def around(this, the_rest, context):
                return await the_rest(context)
    """,
    "try, else and finally": """
        try:
            LOG.append(await call(ctx))
        except ValueError as error:
            LOG.append(f"caught {error}")
        except KeyError:
            raise RuntimeError("chained") from None
        else:
            LOG.append("else")
        finally:
            LOG.append("finally")
        return LOG[-1]
    """,
    "returns in finally": """
        try:
            await call(ctx)
        finally:
            return "whatever came"
    """,
    "raises again": """
        try:
            return await call(ctx)
        except Exception as error:
            error.add_note("seen")
            raise
    """,
    "with": """
        with self.block() as held:
            return held, await call(ctx)
    """,
    "loops": """
        for attempt in range(1, 4):
            if attempt == 2:
                continue
            LOG.append(await call(ctx.child(attempt=attempt)))
        while True:
            LOG.append(await call(ctx))
            if len(LOG) == 4:
                break
        else:
            LOG.append("never")
        return len(LOG)
    """,
    "expressions": """
        first = (await call(ctx)) if (await self.helper(1)) == 1 else "never"
        if (again := await call(ctx.child(attempt=await self.helper(3)))) != first:
            return f"{first} {again} {await self.helper(5)!r}"
        return [(await call(ctx)), (await call(ctx))], not await self.helper(0), await Done(7)
    """,
    "match": """
        match await call(ctx):
            case int(number) if number:
                return "a number", number
            case _:
                return None
    """,
    "functions inside": """
        def inner(value, text=await self.helper("default")):
            return text, value, self.name
        return inner(await call(ctx)), (lambda text=await self.helper(1): text)(), [n for n in (1, 2)]
    """,
    "waits": """
        await ctx.sleep(0)
        await ctx.runtime.sleep(0, None)
        return await call(ctx)
    """,
    "a private name": "return await call(ctx), self.__secret",
    "methods of imported names": """
        logger.info("%s", outcomes.Success(1))
        return await call(ctx), outcomes.Success(2), Timeout.abandoned()
    """,
    "binds its context": """
        ctx = ctx.child(attempt=7)
        return await call(ctx), ctx.attempt
    """,
    "does not call": "return 'skipped'",
    "calls twice": """
        await call(ctx)
        return await call(ctx)
    """,
    "raises": """
        await call(ctx)
        raise Lost("after it")
    """,
    "stops": """
        await call(ctx)
        raise StopIteration(7)
    """,
    "stops, and knows it": """
        try:
            next(iter(()))
        except StopIteration:
            return await call(ctx)
    """,
    "many lines": """
        LOG.append(await (
            call(
                ctx.child(
                    attempt=2,
                )
            )
        ))
        return (
            await self.helper(
                1
            ),
            await call(ctx),
        )
    """,
    "a signature of many lines": """
        class Shape(Base):
            async def around(
                self,
                call,
                ctx,
            ):
                return await call(ctx)
    """,
    "positional-only parameters": """
        class Shape(Base):
            async def around(self, call, ctx, /):
                return await call(ctx), self.name
    """,
    "more parameters": """
        class Shape(Base):
            async def around(self, call, ctx, *args: int, **kwargs: str):
                return await call(ctx), args, kwargs
    """,
    "a decorator that changes nothing": """
        class Shape(Base):
            @override
            @same
            async def around(self, call, ctx):
                return await call(ctx)
    """,
    "annotations that only the class can see": """
        class Shape(Base):
            Answer = int
            async def around(self, call, ctx: Answer) -> Answer:
                answer: Answer = await call(ctx)
                return answer
    """,
    "under another name": """
        class Shape(Base):
            async def __flow(self, call, ctx):
                return "flow", await call(ctx)
            around = __flow
    """,
    "in a class of a strange name": """
        class factory(Base):
            async def around(self, call, ctx):
                return await call(ctx)
        class Shape(factory):
            pass
    """,
    "inherited": """
        class Parent(Base):
            async def around(self, call, ctx):
                return "parent", await call(ctx)
        class Shape(Parent):
            pass
    """,
    "made in a function": """
        def make():
            class Shape(Base):
                async def around(self, call, ctx):
                    return word, await call(ctx)
            return Shape
        Shape = make()
    """,
}

DRIVEN = {
    "locals": "return sorted(locals()), await call(ctx)",
    "eval": "return eval('self.name'), await call(ctx)",
    "super": """
        class Shape(Base):
            async def around(self, call, ctx):
                return await super().around(call, ctx)
    """,
    "its class": "return __class__.__name__, await call(ctx)",
    "a closure": """
        def make(word):
            class Shape(Base):
                async def around(self, call, ctx):
                    return word, await call(ctx)
            return Shape
        Shape = make("closed over")
    """,
    "a global of its own name": "return await call(ctx), around",
    "hands its call on": "return await self.hand_on(call, ctx)",
    "hands its call to a policy": "return await (Base() if ctx.attempt == 1 else Timeout(5)).around(call, ctx)",
    "keeps its call": """
        rest = call
        return await rest(ctx)
    """,
    "awaits its call later": """
        pending = call(ctx)
        return await pending
    """,
    "calls inside": """
        async def inner():
            return await call(ctx)
        return await inner()
    """,
    "calls in a lambda": "return await (lambda: call(ctx))()",
    "binds call": """
        first = await call(ctx)
        call = self.hand_on
        return first, call.__name__
    """,
    "binds call as an error": """
        try:
            return await call(ctx)
        except ValueError as call:
            return "caught"
    """,
    "binds call by an import": """
        result = await call(ctx)
        import os as call
        return result
    """,
    "binds call by a pattern": """
        match await call(ctx):
            case call:
                return "matched"
    """,
    "binds call by a definition": """
        result = await call(ctx)
        def call():
            pass
        return result
    """,
    "binds self": """
        self = Base()
        return type(self).__name__, await call(ctx)
    """,
    "binds self as an error": """
        name = self.name
        try:
            return await call(ctx), name
        except ValueError as self:
            return name
    """,
    "binds self inside": """
        def inner():
            nonlocal self
            self = None
        inner()
        return await call(ctx), self
    """,
    "async with": """
        async with Manager() as entered:
            return entered, await call(ctx)
    """,
    "async for": """
        async for number in self.numbers():
            LOG.append(number)
        return await call(ctx)
    """,
    "an async comprehension": "return [number async for number in self.numbers()], await call(ctx)",
    "awaits in comprehensions": """
        listed = [await call(ctx.child(attempt=n)) for n in (1, 2)]
        return listed, {n: await call(ctx) for n in "ab"}, {await call(ctx) for n in "ab"}
    """,
    "stops in a comprehension": """
        try:
            return [next(iter(())) for n in "ab" if await call(ctx)]
        except StopIteration:
            return "as it is from Python 3.12 on"
    """,
    "awaits in a generator": """
        each = (await call(ctx.child(attempt=n)) for n in (1, 2))
        return [it async for it in each]
    """,
    "a decorator": """
        class Shape(Base):
            @noting
            async def around(self, call, ctx):
                return await call(ctx)
    """,
    "a wrapper of a method that was lowered": """
        with run_as("lowered"):
            Base().execute(str)
        class Shape(Base):
            around = noting(Base.around)
    """,
    "a class method": """
        class Shape(Base):
            @classmethod
            async def around(cls, call, ctx):
                return cls.__name__, await call(ctx)
    """,
    "a static method": """
        class Shape(Base):
            @staticmethod
            async def around(call, ctx):
                return await call(ctx)
    """,
    "of the instance": """
        class Shape(Base):
            def __init__(self):
                self.around = Base().around
    """,
    "a function of its own": """
        class Shape(Base):
            def __init__(self):
                async def around(call, ctx):
                    return "on the object", await call(ctx)
                self.around = around
    """,
    "no coroutine function": """
        class Shape(Base):
            def around(self, call, ctx):
                return call(ctx)
    """,
    "a function of the module": """
        class Shape(Base):
            around = borrowed
    """,
    "a default": """
        class Shape(Base):
            async def around(self, call, ctx=None, text="default"):
                return text, await call(ctx)
    """,
}

STEPS: list[list[Any]] = [[1, 2, 3], [Oops], [Lost, 4], [Interrupted]]

AROUND: dict[str, Callable[[Policy[Any]], Policy[Any]]] = {
    "alone": lambda it: it,
    "inside": lambda it: Policy.wrap(Fallback("instead", on=Lost), Retry(2, on=Oops, backoff=[0]), Bulkhead(1), it),
    "outside": lambda it: it.wrap(Timeout(60, cooperative=True), CircuitBreaker(9), Retry(2, on=Oops, backoff=[0])),
    "between": lambda it: Retry(2, on=Lost, backoff=[0]).wrap(it.wrap(Bulkhead(1), listeners=[repr]), Timeout(60)),
}


@pytest.mark.parametrize("name", LOWERED)
def test_these_shapes_are_lowered(name: str) -> None:
    """Whatever a method does around its call."""
    assert is_lowered(load(LOWERED[name]).Shape())


@pytest.mark.parametrize("name", DRIVEN)
def test_these_shapes_are_driven(name: str) -> None:
    """Where a plain function might not be the same."""
    assert not is_lowered(load(DRIVEN[name]).Shape())


@pytest.mark.parametrize("name", [*LOWERED, *DRIVEN])
def test_a_shape_does_the_same_in_every_way(name: str, observer: Observer) -> None:
    """Results, errors, their lines and what is in them, events, memory: lowered, driven and in a task."""
    module = load({**LOWERED, **DRIVEN}[name])
    for where, steps in ((where, steps) for where in AROUND for steps in STEPS):
        for listening in (False, True):
            lowered, driven, task = (observer.look(module, way, steps, AROUND[where], listening) for way in WAYS)
            assert lowered == driven == task, (where, steps)


# --- at random --------------------------------------------------------------------------------

ERRORS = ["Oops", "Lost", "ValueError", "KeyError", "LookupError", "StopIteration", "RuntimeError", "Exception"]


class Body:
    """The lines of a random method. Of a seed, not of strategies, which take ten times as long as what they are for.

    :param size: how many statements there are at most, so that there is something to shrink.
    """

    def __init__(self, seed: int, size: int) -> None:
        self.random = random.Random(seed)
        self.left = size

    def value(self, may_await: bool = True, depth: int = 0) -> str:
        leaves = ["1", "None", "a", "b", "'text'", "ctx.attempt", "self.name", "next(iter(()))", "{}[a]", "word"]
        calls = ["await call(ctx)"] * 4 + ["await call(ctx.child(attempt=2))", "f'{await call(ctx)} {b}'"]
        waits = ["await ctx.sleep(0)", "await Done(b)", "[n async for n in self.numbers()]"]
        if depth == 2 or self.random.random() < 0.6:
            return self.random.choice(leaves + (calls * 2 + waits) * may_await)
        forms = ["({}, {})", "({} if {} else b)", "({} and {})", "[{} for n in (a, b)]", "{{n: {} for n in 'xy'}}"]
        forms += ["(lambda: a)()", "(c := {})", "list(n for n in (a, b))", "(not {})", "str(({}, *[{}]))"]
        forms += ["(await self.helper({}))", "(lambda n={}: n)()"] * may_await
        parts = [self.value(may_await, depth + 1) for _ in range(2)]
        return self.random.choice(forms).format(*parts)

    def block(self, kind: str = "", depth: int = 0) -> list[str]:
        """Lines of some statements; `kind` has an l inside of a loop, and an e inside of an `except`."""
        lines = self.statement(kind, depth)
        while self.left > 0 and self.random.random() < 0.6:
            lines += self.statement(kind, depth)
        return ["    " * bool(depth) + line for line in lines]

    def statement(self, kind: str, depth: int) -> list[str]:
        self.left -= 1
        choose, value = self.random.choice, self.value()
        if self.left <= 0 or depth == 4 or self.random.random() < 0.4:
            simple = [f"LOG.append({value})"] * 6 + [f"a = {value}", f"return {value}", f"b = [{value}, a]", value]
            simple += [f"raise {choose(ERRORS)}(7)", f"raise Lost({value}) from None", "await ctx.sleep(0)"]
            return [choose(simple + ["break", "continue"] * ("l" in kind) + ["raise"] * 3 * ("e" in kind))]
        block = functools.partial(self.block, kind, depth + 1)
        in_loop = functools.partial(self.block, kind + "l", depth + 1)
        named = choose(["", " as error"])
        handler = [f"except {choose(ERRORS)}{named}:", *self.block(kind + "e", depth + 1)]
        finish = ["finally:", *self.block(kind.replace("l", ""), depth + 1)]
        forms: list[Callable[[], list[str]]] = [
            lambda: [f"if {value}:", *block(), "else:", *block()],
            lambda: ["for b in range(2):", *in_loop(), "else:", *block()],
            lambda: [f"w{depth} = iter('xy')", f"while next(w{depth}, None):", *in_loop()],
            lambda: ["with self.block() as b:", *block()],
            lambda: [f"match {value}:", "  case int(a) | (a, _):", *block(), "  case [*b]:", *block()],
            lambda: [f"def inner(a, b={value}):", f"    return {self.value(False)}", "LOG.append(inner(a))"],
            lambda: ["try:", *block(), *handler, "else:", *block()],
            lambda: ["try:", *block(), *handler, *finish],
            lambda: ["try:", *block(), *finish],
        ]
        return choose(forms + forms[-3:])()


def compare(observer: Observer, seed: int, size: int, steps: list[Any], where: str, listening: bool) -> None:
    lines = ["a = b = 0", *Body(seed, size).block(), "return await call(ctx), a, b"]
    module = load("\n".join(lines))
    ways = WAYS[:2] if Stopped in steps else WAYS  # a coroutine can't raise it
    seen = [observer.look(module, way, steps, AROUND[where], listening) for way in ways]
    assert seen == [seen[0]] * len(ways), "\n".join(lines)
    del linecache.cache[module.__file__ or ""]


CASES: Any = given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 15),
    steps=st.lists(st.sampled_from([1, 2, (3, 4), Oops, Lost, Interrupted, Stopped]), min_size=1, max_size=3),
    where=st.sampled_from(sorted(AROUND)),
    listening=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@CASES
def test_a_random_policy_does_the_same_in_every_way(observer: Observer, **case: Any) -> None:
    """Bodies of any statements, in pipelines with our own policies."""
    compare(observer, **case)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@CASES
def test_many_random_policies_do_the_same_in_every_way(observer: Observer, **case: Any) -> None:
    """The same for longer."""
    compare(observer, **case)
