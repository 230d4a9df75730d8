"""Lowering: in blocking code, a policy's coroutine function as a plain function does the same, or is not lowered."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import linecache
import random
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Policy, Retry, Timeout
from tests.functions import raising
from tests.runtimes.observer import WAYS, Interrupted, Lost, Observer, Oops, Stopped, is_lowered, run_as
from tests.runtimes.shapes import DRIVEN, LOWERED, load

#: Python 3.14 warns of such statements; a policy may contain them.
pytestmark = pytest.mark.filterwarnings("ignore:.* in a 'finally' block:SyntaxWarning")


@pytest.fixture(scope="module")
def observer() -> Iterator[Observer]:
    observer = Observer()
    with observer.runner:
        yield observer


# --- policies of many shapes ------------------------------------------------------------------

STEPS: list[list[Any]] = [[1, 2, 3], [Oops], [Lost, 4], [Interrupted]]

AROUND: dict[str, Callable[[Policy[Any]], Policy[Any]]] = {
    "alone": lambda policy: policy,
    "inside": lambda policy: Policy.wrap(
        Fallback("instead", on=Lost), Retry(2, on=Oops, backoff=[0]), Bulkhead(1), policy
    ),
    "outside": lambda policy: policy.wrap(
        Timeout(60, cooperative=True), CircuitBreaker(9), Retry(2, on=Oops, backoff=[0])
    ),
    "between": lambda policy: Retry(2, on=Lost, backoff=[0]).wrap(
        policy.wrap(Bulkhead(1), listeners=[repr]), Timeout(60)
    ),
}


@pytest.mark.parametrize("name", [*LOWERED, *DRIVEN])
def test_a_shape_does_the_same_lowered_driven_and_in_a_task(name: str, observer: Observer) -> None:
    """Results, errors with their lines and contents, events, and memory."""
    module = load({**LOWERED, **DRIVEN}[name])
    assert is_lowered(module.Shape()) is (name in LOWERED)
    for number, (where, steps) in enumerate(itertools.product(AROUND, STEPS)):
        listening = number % 3 == 0
        lowered, driven, task = (observer.look(module, way, steps, AROUND[where], listening) for way in WAYS)
        assert lowered == driven == task, (where, steps)


# --- at random --------------------------------------------------------------------------------

ERRORS = ["Oops", "Lost", "ValueError", "KeyError", "LookupError", "StopIteration", "RuntimeError", "Exception"]


class Body:
    """The lines of a random method, from a seed: strategies for statements take ten times as long.

    :param size: the largest number of statements, which hypothesis can shrink.
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
        """Return the lines of some statements; `kind` contains an l inside a loop, and an e inside an `except`."""
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
    ways = WAYS[:2] if Stopped in steps else WAYS  # a coroutine cannot raise `StopIteration`
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


@settings(max_examples=100, deadline=None)
@CASES
def test_a_random_policy_does_the_same_lowered_driven_and_in_a_task(observer: Observer, **case: Any) -> None:
    """Of any statements, in pipelines with the built-in policies."""
    compare(observer, **case)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@CASES
def test_many_random_policies_do_the_same_lowered_driven_and_in_a_task(observer: Observer, **case: Any) -> None:
    compare(observer, **case)


# --- StopIteration of the function ---


@pytest.mark.parametrize("way", ["lowered", "driven"])
def test_a_stop_iteration_passes_policies_as_an_error_and_reaches_the_caller_as_itself(way: str) -> None:
    """`except StopIteration` around a call does not catch it, as in a task."""
    body = """
        try:
            return await call(ctx)
        except StopIteration:
            return "caught"
        except Exception as error:
            LOG.append(type(error).__name__)
            raise
    """
    module, stop = load(body), StopIteration("last")
    fn = raising(stop)
    with run_as(way), pytest.raises(StopIteration) as caught:
        Policy.wrap(module.Shape(), Bulkhead(1), module.Shape()).execute(fn)
    assert caught.value is stop
    assert stop.__context__ is None
    assert len(module.LOG) == 2
    with run_as(way):
        assert Fallback("instead", on=StopIteration).wrap(module.Shape()).execute(fn) == "instead"


# --- composed once, at the first call ---


@pytest.mark.parametrize("way", ["lowered", "driven"])
def test_a_method_can_be_patched_before_the_first_call_only(way: str) -> None:
    """A pipeline is composed by its first call."""
    module = load("return await call(ctx)")
    pipeline = module.Shape().wrap(Bulkhead(1))
    with run_as(way):
        with mock.patch.object(module.Shape, "around", return_value="patched"):
            assert module.Shape().wrap(Bulkhead(1)).call(str) == "patched"
            assert module.Shape().call(str) == "patched"
        assert pipeline.call(str) == ""
        with mock.patch.object(module.Shape, "around", return_value="patched"):
            assert pipeline.call(str) == ""
            assert module.Shape().call(str) == "patched"


def test_globals_are_looked_up_when_they_are_used() -> None:
    """In the module itself, where they can be patched."""
    module = load("return word, await call(ctx)")
    assert is_lowered(module.Shape())
    pipeline = module.Shape().wrap(Bulkhead(1))
    with run_as("lowered"):
        assert pipeline.call(str) == ("global", "")
        module.word = "patched"
        assert pipeline.call(str) == ("patched", "")


def test_lowering_keeps_no_class_alive() -> None:
    """The lowered method is an attribute of the method."""
    module = load("return await call(ctx)")
    assert is_lowered(module.Shape())
    alive = weakref.ref(module.Shape)
    del module
    gc.collect()
    assert alive() is None


def test_the_first_call_may_come_from_many_threads_at_once() -> None:
    for _ in range(10):
        pipeline = Policy.wrap(load("return await call(ctx)").Shape(), Retry(), CircuitBreaker(), Bulkhead(16))
        together = threading.Barrier(16)

        def call(number: int, pipeline: Policy[Any] = pipeline, together: threading.Barrier = together) -> int:
            together.wait(10)
            return pipeline.call(lambda: number)

        with run_as("lowered"), ThreadPoolExecutor(16) as threads:
            assert list(threads.map(call, range(16))) == list(range(16))


# --- the source must be the code that runs ---

SOURCE = """\
class Saying(Policy):
    async def around(self, call, ctx):
        return ["before", await call(ctx), 7]
"""


def imported(path: Path, source: str = SOURCE) -> Any:
    """Import a file in which `Policy` is a builtin, so that the class begins in the first line."""
    path.write_text(source, encoding="utf-8")
    module = types.ModuleType(path.stem)
    vars(module).update(Policy=Policy)
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    return module


EDITS = {
    "a constant": SOURCE.replace("7", "8"),
    "the type of a constant": SOURCE.replace("7", "7.0"),
    "the order": SOURCE.replace('"before", await call(ctx)', 'await call(ctx), "before"'),
    "a line more": "\n" + SOURCE,
    "a parameter": SOURCE.replace("call,", "rest,"),
    "no Python": "this is (no Python",
    "empty": "",
    "deleted": None,
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_that_was_edited_after_its_import_is_not_lowered(tmp_path: Path, edit: str) -> None:
    """The imported code runs, whatever the file contains now."""
    path, text = tmp_path / "edited.py", EDITS[edit]
    assert is_lowered(imported(path).Saying())
    policy = imported(path).Saying()
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="utf-8")
    linecache.checkcache(str(path))
    assert not is_lowered(policy)
    with run_as("lowered"):
        assert policy.call(str) == ["before", "", 7]


def test_two_classes_of_the_same_name_are_told_apart_by_their_lines(tmp_path: Path) -> None:
    """Annotations are not evaluated again."""
    second = SOURCE.replace("7", "8").replace("ctx)", "ctx: Unknown)", 1)
    module = imported(tmp_path / "two.py", f"from __future__ import annotations\n{SOURCE}First = Saying\n{second}")
    for kind, last in ((module.First, 7), (module.Saying, 8)):
        assert is_lowered(kind())
        with run_as("lowered"):
            assert kind().call(str) == ["before", "", last]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are new in Python 3.12")
def test_a_method_with_type_parameters_works(tmp_path: Path) -> None:
    """`async def around[T](...)` works lowered and driven."""
    source = SOURCE.replace("around(self, call, ctx)", "around[T](self, call: T, ctx: T) -> list[T]")
    with run_as("lowered"):
        assert imported(tmp_path / "generic.py", source).Saying().call(str) == ["before", "", 7]


def test_a_policy_without_a_source_is_driven() -> None:
    """As one that was made by `exec`."""
    module = load("return await call(ctx)")
    del linecache.cache[module.__file__ or ""]
    assert not is_lowered(module.Shape())
    with run_as("lowered"):
        assert module.Shape().call(str) == ""


# --- debuggers ---


@pytest.mark.parametrize("way", ["lowered", "driven"])
def test_a_frame_shows_its_source_and_its_variables(way: str) -> None:
    module = load(LOWERED["a decorator that changes nothing"].replace("await call(ctx)", "self and await call(ctx)"))
    with run_as(way), pytest.raises(ZeroDivisionError) as caught:
        module.Shape().execute(lambda ctx: 1 / 0)
    (frame,) = [frame for frame, _ in traceback.walk_tb(caught.tb) if frame.f_code.co_filename == module.__file__]
    assert inspect.getsource(frame).endswith("return self and await call(ctx)\n")
    assert isinstance(frame.f_locals["self"], module.Shape)
    assert isinstance(frame.f_locals["ctx"], Context)


@pytest.mark.parametrize("name", LOWERED)
def test_the_same_lines_are_traced_as_in_a_coroutine(name: str) -> None:
    """Except the line of the definition, which has run before."""
    module = load(LOWERED[name])
    text = linecache.getlines(module.__file__ or "")

    def lines(way: str, fn: Callable[..., Any]) -> set[int]:
        seen: set[int] = set()

        def look(frame: types.FrameType, event: str, argument: object) -> Any:
            if event == "line" and frame.f_code.co_filename == module.__file__:
                seen.add(frame.f_lineno)
            return look

        with run_as(way):
            before = sys.gettrace()
            sys.settrace(look)
            try:
                module.Shape().capture(fn)
            finally:
                sys.settrace(before)
        return {line for line in seen if "async def" not in text[line - 1]}

    for fn in (lambda ctx: 4, lambda ctx: 1 / 0):
        assert lines("lowered", fn) == lines("driven", fn) != set()
