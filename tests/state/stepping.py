"""Runs code one bytecode instruction at a time, so that other code can run between any two instructions.

Two kinds of code can run in between. First, another *thread*, wherever the interpreter switches: `interleave` runs
several functions in threads, of which only one moves at a time, and switches after a given number of steps. Second,
code in the same thread, wherever it collects garbage or handles a signal: `Interruption` calls a function at the n-th
place where that can happen.

Nothing here depends on time, so each run has the same order.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import CodeType, FrameType, ModuleType
from typing import Any

RLOCKS = (type(threading.RLock()), threading._PyRLock, type(threading.Lock()))  # type: ignore[attr-defined]

#: After one of these, CPython checks for a signal to handle or garbage to collect. Before 3.12, it collects during an
#: allocation: inside calls, and in BUILD_*.
_BREAKS = ("CALL", "JUMP_BACKWARD", "BUILD")

#: A step ends before one of these. All other instructions use only the frame's own variables, so it makes no difference
#: whether another thread runs before or after them.
_SHARED = ("LOAD_ATTR", "STORE_ATTR", "DELETE_ATTR", "LOAD_METHOD", "CALL", "CONTAINS", "BINARY_SUBSCR", "BEFORE_WITH")

#: Seconds after which a thread counts as hanging.
PATIENCE = 30.0

#: In 3.12, `sys.settrace` with opcodes in two threads at once crashes the interpreter (seen on 3.12.1, in
#: `_start_tracing`); 3.11 and 3.13 do not crash, and step through the same code.
TRACING_CRASHES = sys.version_info[:2] == (3, 12)

#: More steps than any function here makes.
TO_THE_END = 1 << 30

_names: dict[CodeType, dict[int, str]] = {}


def _name_at(code: CodeType, offset: int) -> str:
    names = _names.get(code)
    if names is None:
        names = _names[code] = {it.offset: it.opname for it in dis.get_instructions(code)}
    return names.get(offset, "")


@functools.cache
def _beginnings(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions that follow a `RESUME`."""
    return frozenset(after.offset for it, after in pairwise(dis.get_instructions(code)) if it.opname == "RESUME")


def _start_tracing(files: frozenset[str], at_instruction: Callable[[FrameType], None]) -> None:
    sys._getframe().f_trace_opcodes = True  # CPython 3.12 needs one such frame when tracing starts
    sys.settrace(_trace(files, at_instruction))


def _trace(files: frozenset[str], at_instruction: Callable[[FrameType], None]) -> Callable[..., Any]:
    def local(frame: FrameType, kind: str, argument: object) -> Callable[..., Any]:
        if kind == "opcode":
            at_instruction(frame)
        return local

    def begin(frame: FrameType, kind: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace = local  # before the next line: otherwise, CPython 3.13 ignores that line
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return local

    return begin


# --- other threads ---------------------------------------------------------------------------


class Deadlock(AssertionError):
    """All actors wait for locks that other actors hold."""


class SteppedLock:
    """A reentrant lock at which an actor hands over to the stage if it has to wait."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.owner: Actor | None = None
        self._depth = 0

    def acquire(self) -> bool:
        actor = self._stage.on
        while self.owner is not None and self.owner is not actor:
            assert actor is not None, "the test itself needs a lock that an actor holds"
            actor.wait_for(self)
        self.owner = actor
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self.owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class Actor:
    """A function in a thread, which moves only during `go`."""

    def __init__(self, stage: Stage, function: Callable[[], object]) -> None:
        self._stage = stage
        self._function = function
        self._go = threading.Lock()
        self._go.acquire()
        self._halt = threading.Lock()
        self._halt.acquire()
        self._left = 0
        self.waits_for: SteppedLock | None = None
        self.done = False
        self.steps = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go(self, steps: int) -> None:
        """Make this number of steps, or fewer up to the end or a lock that is held."""
        self._left = steps
        self.waits_for = None
        self._stage.on = self
        self._go.release()
        if not self._halt.acquire(timeout=PATIENCE):
            raise AssertionError("an actor hangs in something that is not a stepped lock")
        self._stage.on = None

    def wait_for(self, lock: SteppedLock) -> None:
        self.waits_for = lock
        self._hand_over()

    def end(self) -> None:
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        self._go.acquire()
        _start_tracing(self._stage.files, self._step)
        try:
            self._function()
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)
            self.done = True
            self._halt.release()

    def _step(self, frame: FrameType) -> None:
        if not _name_at(frame.f_code, frame.f_lasti).startswith(_SHARED):
            return
        if not self._left:
            self._hand_over()
        self._left -= 1
        self.steps += 1

    def _hand_over(self) -> None:
        self._halt.release()
        self._go.acquire()


class Stage:
    """The actors, of which one moves while the others stand still."""

    def __init__(self, *modules: ModuleType) -> None:
        self.files = frozenset(str(module.__file__) for module in modules)
        self.on: Actor | None = None

    def give_locks(self, thing: object) -> None:
        """Replace each lock of `thing` by a `SteppedLock`."""
        attributes = [*getattr(thing, "__slots__", ()), *getattr(thing, "__dict__", {})]
        for name in attributes:
            if isinstance(getattr(thing, name, None), RLOCKS):
                setattr(thing, name, SteppedLock(self))

    def interleave(self, functions: Sequence[Callable[[], object]], cuts: Sequence[int]) -> list[int]:
        """Let each function in turn make the number of steps in `cuts`; then let all of them run to their end.

        Returns the total number of steps of each function.
        """
        actors = [Actor(self, function) for function in functions]
        for actor, cut in zip(actors, cuts, strict=False):
            if cut:
                actor.go(cut)
        while waiting := [actor for actor in actors if not actor.done]:
            free = [actor for actor in waiting if actor.waits_for is None or actor.waits_for.owner is None]
            if not free:
                raise Deadlock(f"{len(waiting)} actors wait for one another")
            free[0].go(TO_THE_END)
        for actor in actors:
            actor.end()
            if actor.error is not None:
                raise actor.error
        return [actor.steps for actor in actors]


# --- the same thread -------------------------------------------------------------------------


class Interruption:
    """Calls `function` once, at the n-th place (from 0) where the thread may be interrupted."""

    def __init__(self, modules: Sequence[ModuleType], place: int, function: Callable[[], object]) -> None:
        self._files = frozenset(str(module.__file__) for module in modules)
        self._place = place
        self._function = function
        self._seen = 0
        self._last: tuple[FrameType, str] | None = None
        self.happened = False

    def around(self, function: Callable[[], object]) -> None:
        """Run `function` in a new thread, so that the tracer of the test's thread stays, and interrupt it."""
        box: list[BaseException] = []

        def run() -> None:
            _start_tracing(self._files, self._look)
            try:
                function()
            except BaseException as error:
                box.append(error)
            finally:
                sys.settrace(None)
                self._last = None

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        if thread.is_alive():
            raise Deadlock(f"the thread waits for itself, interrupted at place {self._place}")
        if box:
            raise box[0]

    def _look(self, frame: FrameType) -> None:
        name = _name_at(frame.f_code, frame.f_lasti)
        last, self._last = self._last, (frame, name)
        begins = frame.f_lasti in _beginnings(frame.f_code)
        if not begins and not (last is not None and last[0] is frame and last[1].startswith(_BREAKS)):
            return
        if self._seen == self._place and not self.happened:
            self.happened = True
            self._function()  # not traced, because the interpreter does not trace a tracer
        self._seen += 1
