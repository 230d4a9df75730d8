"""The page on migrating, from backoff."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import backoff
import pytest

from resilience import Keyed, Retry, Success, events
from resilience import backoff as backoffs
from resilience.testing import recording
from tests.docs.migrating.rows import ANSWERS, FAILS, Asks, Check, cases, predicate, row, written
from tests.docs.side_by_side import code_in, ours, same, theirs

#: The library calls it; it is deprecated from Python 3.14 on.
pytestmark = pytest.mark.filterwarnings("ignore:'asyncio.iscoroutinefunction' is deprecated:DeprecationWarning")

BACKOFF = {"backoff": backoff, "predicate": predicate}
CONSTANT = "constant, OSError, interval=2, jitter=None"


def on_exception(arguments: str, generator: str = CONSTANT, **names: Any) -> Callable[..., Any]:
    """Return their decorator with these arguments, which may use these names."""
    code = f"backoff.on_exception(backoff.{generator}, {arguments})"
    decorator: Callable[..., Any] = written(code, {**BACKOFF, **names})
    return decorator


@row("backoff", "`@backoff.on_exception(", "`@backoff.on_predicate(")
def _(left: str, right: str) -> None:
    steps = FAILS if "exception" in left else [None] * 4 + ["fine"]
    same(written(code_in(left)[1:], BACKOFF), written(code_in(right)[1:]), *steps)


@row("backoff", "`max_time=60`")
def _(left: str, right: str) -> None:
    for wait in (7, 20):
        their = theirs(on_exception(code_in(left), f"constant, OSError, interval={wait}, jitter=None"), *FAILS)
        our = ours(written(f"Retry(None, on=OSError, backoff=[{wait}], {code_in(right)})"), *FAILS)
        assert their.at == [*our.at, 60]  # the last wait is shortened
        assert all(instant < 60 for instant in our.at)


GENERATORS = {
    "`backoff.expo`": "expo, OSError, factor=0.5, base=3, max_value=60, max_tries=9",
    "`backoff.constant`": "constant, OSError, interval=2, max_tries=9",
}


@row("backoff", *GENERATORS)
def _(left: str, right: str) -> None:
    generator = GENERATORS[f"`{code_in(left)}`"]
    assert all(name.strip(" `") in generator for name in left.split(",")[1:])
    same(on_exception("", generator), written(f"Retry(9, on=OSError, backoff={code_in(right)})"), *FAILS)


@row("backoff", "`backoff.fibo`")
def _(left: str, right: str) -> None:
    def fibonacci() -> Any:
        a, b = 1, 1
        while True:
            yield a
            a, b = b, a + b

    same(on_exception("OSError, jitter=None, max_tries=9", "fibo"), Retry(9, on=OSError, backoff=fibonacci), *FAILS)


@row("backoff", "`jitter=backoff.full_jitter`")
def _(left: str, right: str) -> None:
    their = on_exception(f"OSError, max_tries=5, {code_in(left)}", "expo")
    same(their, Retry(5, on=OSError, backoff=backoffs.Exponential(1)), *FAILS)
    their = on_exception(f"OSError, interval=2, max_tries=5, {code_in(left)}", "constant")
    same(their, written(f"Retry(5, on=OSError, backoff=Constant(2, {right.split('`')[3]}))"), *FAILS)


@row("backoff", "`jitter=None`")
def _(left: str, right: str) -> None:
    their = on_exception(f"OSError, max_tries=5, {code_in(left)}", "expo")
    same(their, written(f"Retry(5, on=OSError, backoff=Exponential(1, {code_in(right)}))"), *FAILS)


@row("backoff", "`giveup=predicate`")
def _(left: str, right: str) -> None:
    our = written(f"Retry(5, on=OSError, backoff=[2], {code_in(right)})")
    for steps in ANSWERS[:2]:
        same(on_exception(f"max_tries=5, {code_in(left)}"), our, *steps)


@row("backoff", "`on_backoff=handler`")
def _(left: str, right: str) -> None:
    their, our = list[float](), list[float]()
    theirs(on_exception("max_tries=3, on_backoff=note", note=lambda details: their.append(details["wait"])), *FAILS)
    ours(Retry(3, on=OSError, backoff=[2], on_retry=lambda event: our.append(event.delay)), *FAILS)
    assert their == our == [2, 2]


@row("backoff", "`on_giveup=handler`")
def _(left: str, right: str) -> None:
    their: list[int] = []
    decorator = on_exception("max_tries=3, on_giveup=note", note=lambda details: their.append(details["tries"]))
    theirs(decorator, *FAILS)
    with recording(events.RetryGaveUp) as recorder:
        ours(Retry(3, on=OSError, backoff=[2]), *FAILS)
    assert [event.attempts for event in recorder.of(events.RetryGaveUp)] == their == [3]
    recorder.clear()
    arguments = "max_tries=3, giveup=predicate, on_giveup=note"
    theirs(on_exception(arguments, note=lambda details: their.append(details["tries"])), *FAILS)
    with recording(events.RetryGaveUp) as recorder:
        ours(Retry(3, on=OSError, ignore=predicate, backoff=[2]), *FAILS)
    assert their == [3, 1]
    assert recorder.events == []


@row("backoff", "`on_success=handler`")
def _(left: str, right: str) -> None:
    for steps, succeeded in ((FAILS, 0), ((OSError(), "fine"), 1)):
        their: list[object] = []
        theirs(on_exception("max_tries=3, on_success=note", note=their.append), *steps)
        with recording(events.ExecutionFinished) as recorder:
            ours(Retry(3, on=OSError, backoff=[2]), *steps)
        our = [event for event in recorder.of(events.ExecutionFinished) if isinstance(event.outcome, Success)]
        assert len(their) == len(our) == succeeded


@row("backoff", "`raise_on_giveup=False`")
def _(left: str, right: str) -> None:
    their = on_exception(f"max_tries=3, {code_in(left)}")
    our = written(code_in(right)).wrap(Retry(3, on=OSError, backoff=[2]))
    for steps in (FAILS, [OSError(), "fine"], [ValueError(), ...], [OSError(), ValueError()]):
        same(their, our, *steps)


@row("backoff", "`details[")
def _(left: str, right: str) -> None:
    first, *others = re.findall("`(.*?)`", left)
    their_codes = [first, *(f"details{code}" for code in others)]
    first, *others = re.findall("`(.*?)`", right)
    our_codes = [first, *(f"event{code}" for code in others)]
    their, our = list[list[Any]](), list[list[Any]]()
    theirs(
        on_exception("max_tries=3, on_backoff=note", note=lambda it: their.append(read(their_codes, details=it))),
        *FAILS,
    )
    ours(Retry(3, on=OSError, backoff=[2], on_retry=lambda it: our.append(read(our_codes, event=it))), *FAILS)
    assert [[*it[:2], repr(it[2]), it[3].__name__, it[4]] for it in their] == [
        [*it[:2], repr(it[2]), it[3].__name__, it[4]] for it in our
    ]
    assert [it[:2] for it in our] == [[1, 2], [2, 2]]


def read(codes: list[str], **names: Any) -> list[Any]:
    return [eval(code, names) for code in codes]  # the page is trusted


@row("backoff", "two decorators")
def _(left: str, right: str) -> None:
    outer, inner = (f"on_exception({code.split('...')[1][2:]}" for code in re.findall("`@backoff.(.*?)`", left))
    numbers = {"OSError)": "OSError, interval=5, max_tries=3", "KeyError)": "KeyError, interval=1, max_tries=2"}
    stack = [on_exception(f"{numbers[it.split('(')[1]]}, jitter=None", "constant") for it in (outer, inner)]
    ours_with = code_in(right.replace("[", ""))[1:]
    our = written(
        ours_with.replace("on=OSError", "3, on=OSError, backoff=[5]").replace(
            "on=KeyError", "2, on=KeyError, backoff=[1]"
        )
    )
    for steps in (
        FAILS,
        [KeyError(), OSError(), KeyError(), "fine"],
        [KeyError(), KeyError()],
        [OSError(), KeyError(), OSError(), OSError()],
    ):
        same(lambda function: stack[0](stack[1](function)), our, *steps)


@row("backoff", "`max_tries=lambda: settings.tries`")
def _(left: str, right: str) -> None:
    settings = SimpleNamespace(tries=3)
    their = on_exception(f"OSError, interval=2, jitter=None, {code_in(left)}", "constant", settings=settings)
    assert code_in(right) == "Keyed"
    our = Keyed(lambda tries: Retry(tries, on=OSError, backoff=[2]), key=lambda: settings.tries, max_keys=1)
    for settings.tries in (3, 5):
        assert len(same(their, our, *FAILS)[0].at) == settings.tries


@row("backoff", "`backoff.runtime`")
def _(left: str, right: str) -> None:
    arguments = left.split("`")[3]
    their = on_exception(f"max_tries=3, {arguments}", "runtime, Exception")
    same(their, written(f"Retry(3, on=Exception, {code_in(right)})"), Asks(), ...)


@pytest.mark.parametrize(("left", "right", "check"), cases("backoff"))
def test_both_sides_of_a_row_behave_the_same(left: str, right: str, check: Check) -> None:
    check(left, right)
