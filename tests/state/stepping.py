"""Running code one bytecode instruction at a time, to put something else between any two of them.

Two things can come in between. Another *thread*, wherever the interpreter switches: `interleave` runs
several functions in threads of which one moves at a time, and hands over exactly where it is told to.
And the same thread, wherever it collects garbage or handles a signal: `interrupted` calls a function
at the n-th place where that can happen.

Nothing here waits for time to pass: the same orders come out on every run.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any

RLOCKS = (type(threading.RLock()), threading._PyRLock, type(threading.Lock()))  # type: ignore[attr-defined]

#: After one of these CPython looks whether there is a signal to handle or garbage to collect. Before 3.12
#: it collects where memory is asked for: inside of calls, and in BUILD_*.
_BREAKS = ("CALL", "JUMP_BACKWARD", "BUILD")

#: A step ends before one of these. The others touch nothing but the frame's own variables: whether another
#: thread comes before or after them makes no difference.
_SHARED = ("LOAD_ATTR", "STORE_ATTR", "DELETE_ATTR", "LOAD_METHOD", "CALL", "CONTAINS", "BINARY_SUBSCR", "BEFORE_WITH")

#: Seconds after which a thread that does not come back is said to hang.
PATIENCE = 30.0

#: `sys.settrace` with opcodes in two threads at once ends in a segmentation fault of the interpreter there (seen on
#: 3.12.1, in `_start_tracing`); 3.11 and 3.13 do not, and step through the same code.
TRACING_CRASHES = sys.version_info[:2] == (3, 12)

#: More steps than anything here makes.
TO_THE_END = 1 << 30

_names: dict[CodeType, dict[int, str]] = {}


def _name_at(code: CodeType, offset: int) -> str:
    names = _names.get(code)
    if names is None:
        names = _names[code] = {it.offset: it.opname for it in dis.get_instructions(code)}
    return names.get(offset, "")


def _start_tracing(files: frozenset[str], at_instruction: Callable[[FrameType], None]) -> None:
    sys._getframe().f_trace_opcodes = True  # CPython 3.12 looks for one such frame when tracing starts
    sys.settrace(_trace(files, at_instruction))


def _trace(files: frozenset[str], at_instruction: Callable[[FrameType], None]) -> Callable[..., Any]:
    def local(frame: FrameType, kind: str, argument: object) -> Callable[..., Any]:
        if kind == "opcode":
            at_instruction(frame)
        return local

    def begin(frame: FrameType, kind: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace = local  # before the next line, or CPython 3.13 forgets it
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return local

    return begin


# --- other threads ---------------------------------------------------------------------------


class Deadlock(AssertionError):
    """Everybody waits for a lock that somebody else holds."""


class SteppedLock:
    """A reentrant lock that tells the stage when an actor has to wait for it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.owner: Actor | None = None
        self._depth = 0

    def acquire(self) -> bool:
        actor = self._stage.on
        while self.owner is not None and self.owner is not actor:
            assert actor is not None, "the test itself uses what an actor has locked"
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
    """A function in a thread, which moves only while it is told to."""

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
        """Make so many steps, or as many as there are before the end or a lock."""
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
    """Where the actors are: one is on, the others stand still."""

    def __init__(self, *modules: ModuleType) -> None:
        self.files = frozenset(str(module.__file__) for module in modules)
        self.on: Actor | None = None

    def give_locks(self, thing: object) -> None:
        """Replace every lock that `thing` has by one that the stage knows of."""
        attributes = [*getattr(thing, "__slots__", ()), *getattr(thing, "__dict__", {})]
        for name in attributes:
            if isinstance(getattr(thing, name, None), RLOCKS):
                setattr(thing, name, SteppedLock(self))

    def interleave(self, functions: Sequence[Callable[[], object]], cuts: Sequence[int]) -> list[int]:
        """Let each function make as many steps as its cut says, in turn; then let all of them come to their end.

        Returns how many steps each of them made in all.
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
    """Calls `function` at the n-th place, from 0, where the thread may be interrupted; once."""

    def __init__(self, modules: Sequence[ModuleType], place: int, function: Callable[[], object]) -> None:
        self._files = frozenset(str(module.__file__) for module in modules)
        self._place = place
        self._function = function
        self._seen = 0
        self._last: tuple[FrameType, str] | None = None
        self.happened = False

    def around(self, function: Callable[[], object]) -> None:
        """Run `function` in a thread of its own (the tracer of the test's thread stays), and interrupt it."""
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
        begins = _name_at(frame.f_code, frame.f_lasti - 2) == "RESUME"
        if not begins and not (last is not None and last[0] is frame and last[1].startswith(_BREAKS)):
            return
        if self._seen == self._place and not self.happened:
            self.happened = True
            self._function()  # not traced: the interpreter traces no tracer
        self._seen += 1
