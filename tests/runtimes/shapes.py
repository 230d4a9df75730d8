"""Policies as source text, and what one sees of a call under them: lowered, driven and in a task of asyncio."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import itertools
import linecache
import re
import textwrap
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from resilience import Context, Policy, events
from resilience.runtimes import lowering

WAYS = ("lowered", "driven", "asyncio")

#: What the generated policies stand on. A shape is the body of `around`, or the whole class.
MODULE = '''\
import logging
from contextlib import contextmanager
from functools import wraps
from typing_extensions import override
import resilience.outcome as outcomes
from resilience import Policy, Timeout
from tests.runtimes.shapes import Lost, Oops, run_as

logger = logging.getLogger("shapes")
LOG = []
word = "global"
around = "a global of its name"

class Done:
    """An awaitable that has nothing to wait for, and is no coroutine."""
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

SHAPE = """
class Shape(Base):
    def __init__(self):
        super().__init__()
        self.__secret = "secret"
    async def around(self, call, ctx):
"""

_numbers = itertools.count()


class Oops(ValueError):
    """Can be referred to weakly, as all exceptions here."""


class Lost(KeyError):
    """Another one."""


class Stopped(StopIteration):
    """What a function may raise in blocking code only."""


class Interrupted(BaseException):
    """No outcome."""


def load(shape: str) -> types.ModuleType:
    """Make a module that holds the policy; its source is known as that of an interactive session is."""
    text = shape if "class Shape" in shape else SHAPE + textwrap.indent(textwrap.dedent(shape), " " * 8)
    module = types.ModuleType(f"shape_{next(_numbers)}")
    module.__file__ = f"<{module.__name__}>"
    source = MODULE + textwrap.dedent(text)
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    exec(compile(source, module.__file__, "exec", dont_inherit=True), vars(module))
    return module


@contextmanager
def run_as(way: str) -> Iterator[None]:
    """Lower what is composed from now on, or do not."""
    before, lowering.enabled = lowering.enabled, way == "lowered"
    try:
        yield
    finally:
        lowering.enabled = before


def is_lowered(policy: Policy[Any]) -> bool:
    with run_as("lowered"):
        return lowering.lower(policy) is not None


class Seen(NamedTuple):
    """What came of a call."""

    value: Any
    errors: list[tuple[Any, ...]]
    frames: list[tuple[str, int | None]]
    log: list[Any]
    heard: list[tuple[Any, ...]]
    calls: int


class Observer:
    """Executes a function under policies, and says what one sees of it. Holds an event loop: one takes a millisecond."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()

    def look(
        self,
        module: Any,
        way: str,
        steps: Sequence[Any],
        compose: Callable[[Policy[Any]], Policy[Any]] = lambda policy: policy,
        listening: bool = False,
    ) -> Seen:
        """Let the function take these steps, the last one for ever, under what is composed of the module's policy."""
        script, heard = Script(steps), list[Any]()
        fn = script.later if way == "asyncio" else script.now
        module.LOG.clear()
        unsubscribe = events.subscribe(lambda it: heard.append(_facts(it)), *_KINDS) if listening else str
        gc.disable()
        try:
            with run_as(way):
                seen = self._outcome(module, lambda: compose(module.Shape()).execute(fn))
            assert script.alive() == [], "nothing is left to the cyclic collector"
        finally:
            gc.enable()
            unsubscribe()
        return Seen(*seen, list(module.LOG), heard, script.calls)

    def _outcome(self, module: Any, execute: Callable[[], Any]) -> tuple[Any, list[Any], list[Any]]:
        try:
            result = execute()
            return self.runner.run(_caught(module, result)) if inspect.iscoroutine(result) else (result, [], [])
        except BaseException as error:
            return _described(module, error)


async def _caught(module: Any, coroutine: Any) -> tuple[Any, list[Any], list[Any]]:
    try:
        return await coroutine, [], []
    except BaseException as error:  # here, as asyncio keeps it in a cycle
        return _described(module, error)


def _described(module: Any, error: BaseException) -> tuple[Any, list[Any], list[Any]]:
    return None, list(_chain(error)), _frames(error, module)


class Script:
    """What the function does: it returns a step, or raises one, and knows which of its errors are still alive."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self.calls = 0
        self._steps = steps
        self._raised: list[weakref.ref[Any]] = []

    def now(self, ctx: Context) -> Any:
        step = self._steps[min(self.calls, len(self._steps) - 1)]
        self.calls += 1
        if not isinstance(step, type):
            return step
        error = step("no")
        self._raised.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    async def later(self, ctx: Context) -> Any:
        return self.now(ctx)

    later.__qualname__ = now.__qualname__  # it is the operation

    def alive(self) -> list[Any]:
        return [type(ref()) for ref in self._raised if ref() is not None]


_KINDS = (events.AttemptFailed, events.RetryGaveUp, events.CallFinished, events.ExecutionFinished, events.FallbackUsed)
_TIMES = {"time", "elapsed", "remaining", "outcome"}


def _facts(event: Any) -> tuple[Any, ...]:
    facts = {it.name: getattr(event, it.name) for it in dataclasses.fields(event)}
    return type(event), repr(facts["outcome"]), {name: facts[name] for name in facts.keys() - _TIMES}


def _chain(error: BaseException | None) -> Iterator[tuple[Any, ...]]:
    while error is not None:
        notes = [re.sub(r"[\d.e-]+ s", "some s", note) for note in getattr(error, "__notes__", ())]
        arguments = [it if isinstance(it, (str, int)) else type(it) for it in error.args]
        yield type(error), arguments, notes, error.__suppress_context__, type(error.__cause__)
        error = error.__cause__ or error.__context__


def _frames(error: BaseException, module: Any) -> list[tuple[str, int | None]]:
    """Those of the module. What left a method as RuntimeError, by PEP 479, has left no trace in a coroutine."""
    frames = [it for it in traceback.extract_tb(error.__traceback__) if it.filename == module.__file__]
    return [(it.name, it.lineno) for it in frames if not (it.line or "").startswith("async def")]
