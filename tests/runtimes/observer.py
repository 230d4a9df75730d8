"""The observable results of a call under a policy: lowered, driven, and in an asyncio task."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import re
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from resilience import Context, Policy, events
from resilience.runtimes import lowering

WAYS = ("lowered", "driven", "asyncio")


class Oops(ValueError):
    """An exception class in Python, so that weak references to it are possible, as to all exceptions here."""


class Lost(KeyError):
    """Another exception."""


class Stopped(StopIteration):
    """An exception that a function may raise only in blocking code."""


class Interrupted(BaseException):
    """An exception that is not an outcome."""


@contextmanager
def run_as(way: str) -> Iterator[None]:
    """Switch lowering on or off for chains that are composed in this block."""
    before, lowering.enabled = lowering.enabled, way == "lowered"
    try:
        yield
    finally:
        lowering.enabled = before


def is_lowered(policy: Policy[Any]) -> bool:
    with run_as("lowered"):
        return lowering.lower(policy) is not None


class Seen(NamedTuple):
    """The observable results of a call."""

    value: Any
    errors: list[tuple[Any, ...]]
    frames: list[tuple[str, int | None]]
    log: list[Any]
    heard: list[tuple[Any, ...]]
    calls: int


class Observer:
    """Executes functions under policies, and returns the observable results. It has one event loop for all calls."""

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
        """Execute a function with these steps, the last one repeated, under policies around the module's policy."""
        script, heard = Script(steps), list[Any]()
        fn = script.later if way == "asyncio" else script.now
        module.LOG.clear()
        unsubscribe = events.subscribe(lambda it: heard.append(_facts(it)), *_KINDS) if listening else str
        gc.disable()
        try:
            with run_as(way):
                seen = self._outcome(module, lambda: compose(module.Shape()).execute(fn))
            assert script.alive() == [], "an error is in a reference cycle"
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
    except BaseException as error:  # here, because asyncio keeps it in a reference cycle
        return _described(module, error)


def _described(module: Any, error: BaseException) -> tuple[Any, list[Any], list[Any]]:
    return None, list(_chain(error)), _frames(error, module)


class Script:
    """The steps of the function, which returns or raises one per call. It tracks which errors are still alive."""

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

    later.__qualname__ = now.__qualname__  # the operation

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
    """Return the frames of the module, except those at `async def`: only a lowered method has one, for PEP 479."""
    frames = [it for it in traceback.extract_tb(error.__traceback__) if it.filename == module.__file__]
    return [(it.name, it.lineno) for it in frames if not (it.line or "").startswith("async def")]
