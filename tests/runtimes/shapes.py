"""Policies of many shapes, as source text."""

from __future__ import annotations

import itertools
import linecache
import textwrap
import types

#: The beginning of each generated module.
MODULE = '''\
import logging
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing_extensions import override
import resilience.outcome as outcomes
from resilience import Policy, Timeout
from tests.runtimes.observer import Lost, Oops, run_as

logger = logging.getLogger("shapes")
LOG = []
word = "global"
around = "a global of its name"

class Done:
    """An awaitable that never suspends, and is not a coroutine."""
    def __init__(self, value):
        self.value = value
    def __await__(self):
        return self.value
        yield

class Manager:
    async def __aenter__(self):
        return "entered"
    async def __aexit__(self, *exc):
        LOG.append("left")

def same(method):
    return method

def noting(method):
    @wraps(method)
    async def around(self, call, ctx):
        return "noted", await method(self, call, ctx)
    return around

async def borrowed(self, call, ctx):
    return "borrowed", await call(ctx)

class Base(Policy):
    def __init__(self):
        self.__secret = "base"
    async def helper(self, value=None):
        return value
    async def hand_on(self, call, ctx):
        return "handed on", await call(ctx)
    async def numbers(self):
        yield 1
        yield 2
    @contextmanager
    def block(self):
        LOG.append("in")
        try:
            yield "held"
        finally:
            LOG.append("out")
    async def around(self, call, ctx):
        return "base", await call(ctx)
'''

CLASS = """
class Shape(Base):
    def __init__(self):
        super().__init__()
        self.__secret = "secret"
"""

METHOD = "    async def around(self, call, ctx):\n"

_numbers = itertools.count()


def load(shape: str) -> types.ModuleType:
    """Make a module with the policy. Its source is in `linecache`, like that of an interactive session.

    :param shape: the last lines of the module, of the class, or of its `around`.
    """
    text = textwrap.dedent(shape)
    if "class Shape" not in text:
        in_class = "def around(" in text or "around = " in text
        text = CLASS + (textwrap.indent(text, " " * 4) if in_class else METHOD + textwrap.indent(text, " " * 8))
    module = types.ModuleType(f"shape_{next(_numbers)}")
    module.__file__ = f"<{module.__name__}>"
    source = MODULE + text
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    exec(compile(source, module.__file__, "exec", dont_inherit=True), vars(module))
    return module


#: Shapes that are lowered, because a plain function does the same.
LOWERED = {
    "passes on": "return await call(ctx)",
    "statements of many kinds": """
        '''Do all that one can.'''
        for attempt in range(1, 4):
            if attempt == 2:
                continue
            with self.block() as held:
                LOG.append((held, await call(ctx.child(attempt=attempt))))
        while True:
            try:
                LOG.append(await call(ctx))
                if (again := await call(ctx.child(attempt=await self.helper(3)))) and len(LOG) > 3:
                    break
            except ValueError as error:
                error.add_note("seen")
                raise
            except KeyError:
                raise RuntimeError("chained") from None
            else:
                ctx = ctx.child(attempt=7)
            finally:
                await ctx.sleep(0)
        def inner(value, text=await self.helper("default")):
            return text, value, self.name
        match await call(ctx):
            case int(number) if number:
                LOG.append([n for n in inner(number)])
        return f"{await call(ctx)} {again}", (lambda text=await Done(1): text)(), not await call(ctx), ctx.attempt
    """,
    "a private name": "return await call(ctx), self.__secret",
    "an attribute of its result": "return (await call(ctx)).real",
    "methods of imported names": """
        logger.info("%s", outcomes.Success(1))
        return await call(ctx), outcomes.Success(2), Timeout.abandoned()
    """,
    "returns in finally": """
        try:
            await call(ctx)
        finally:
            return "whatever came"
    """,
    "raises": """
        await call(ctx)
        raise Lost("after it")
    """,
    "stops": """
        await call(ctx)
        raise StopIteration(7)
    """,
    "many lines": """
        LOG.append(await (
            call(
                ctx.child(attempt=2)
            )
        ))
        return (
            await self.helper(
                await call(ctx)
            )
        )
    """,
    "ends with a bracket": """
        LOG[:] = [ctx.attempt, (
            await call(ctx)
        )]
        LOG[0] = (
            "a statement whose code ends before it"
        )
    """,
    "other names": """
        async def around(this, the_rest, context):
            return await the_rest(context)
    """,
    "a signature of many lines": """
        async def around(
            self,
            call,
            ctx,
        ):
            return await call(ctx)
    """,
    "positional-only parameters": """
        async def around(self, call, ctx, /):
            return await call(ctx), self.name
    """,
    "more parameters": """
        async def around(self, call, ctx, *args: int, **kwargs: str):
            return await call(ctx), args, kwargs
    """,
    "a decorator that changes nothing": """
        @override
        @same
        async def around(self, call, ctx):
            return await call(ctx)
    """,
    "a decorator with a function": """
        @(lambda text: same)(lambda: "other code before that of the method")
        async def around(self, call, ctx):
            return await call(ctx)
    """,
    "annotations that only the class can see": """
        Answer = int
        async def around(self, call, ctx: Answer) -> Answer:
            answer: Answer = await call(ctx)
            return answer
    """,
    "under another name": """
        async def __flow(self, call, ctx):
            return "flow", await call(ctx)
        around = __flow
    """,
    "inherited from a class of a strange name": """
        class factory(Base):
            async def around(self, call, ctx):
                return await call(ctx)
        class Shape(factory):
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

#: Shapes that are driven, because a plain function might not do the same.
DRIVEN = {
    "locals": "return sorted(locals()), await call(ctx)",
    "eval": "return eval('self.name'), await call(ctx)",
    "super": "return await super().around(call, ctx)",
    "its class": "return __class__.__name__, await call(ctx)",
    "a global of its own name": "return await call(ctx), around",
    "looks at its call": "return await call(ctx), call.__class__ is None",
    "hands its call on": "return await self.hand_on(call, ctx)",
    "hands its call to a policy": "return await (Base() if ctx.attempt == 1 else Timeout(5)).around(call, ctx)",
    "calls in a lambda": "return await (lambda: call(ctx))()",
    "a closure": """
        def make(word):
            class Shape(Base):
                async def around(self, call, ctx):
                    return word, await call(ctx)
            return Shape
        Shape = make("closed over")
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
    "binds call by a pattern": """
        match await call(ctx):
            case call:
                return "matched"
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
            return (lambda: self.args)()
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
        return await call(ctx), [number async for number in self.numbers()]
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
        @classmethod
        async def around(cls, call, ctx):
            return cls.__name__, await call(ctx)
    """,
    "of another instance": """
        def __init__(self):
            self.around = Base().around
    """,
    "a method that is no function": """
        def __init__(self):
            async def around(self, call, ctx):
                return await call(ctx)
            self.around = MethodType(partial(around), self)
    """,
    "a function on the instance": """
        def __init__(self):
            async def around(call, ctx):
                return "on the object", await call(ctx)
            self.around = around
    """,
    "no coroutine function": """
        def around(self, call, ctx):
            return call(ctx)
    """,
    "no coroutine function, and without a call": """
        def around(self, call, ctx):
            return Done("instead")
    """,
    "a function of the module": "around = borrowed",
    "a default": """
        async def around(self, call, ctx=None, text="default"):
            return text, await call(ctx)
    """,
    "a default that only the class can see": """
        nothing = None
        async def around(self, call, ctx=nothing):
            return await call(ctx)
    """,
}
