"""The page on migrating, from tenacity."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import tenacity

from resilience import Context, RetriesExhausted, Retry, Success, events
from resilience.backoff import Exponential
from resilience.integrations.logging import log_events
from resilience.testing import no_sleeping, recording, script, virtual_time
from tests.docs.migrating.rows import ANSWERS, CAUSED, FAILS, NAMES, ROWS, Asks, Check, cases, predicate, row, written
from tests.docs.side_by_side import code_in, in_async_blocks, in_blocks, ours, same, theirs

#: Under these names both have something else.
THEIRS = {**NAMES, "retry": tenacity.retry, "RetryError": tenacity.RetryError}


def tenacity_with(arguments: str, **names: Any) -> Callable[..., Any]:
    """Return their decorator with these arguments, which may use these names."""
    decorator: Callable[..., Any] = written(f"retry({arguments})", {**THEIRS, **names})
    return decorator


@row("tenacity", "`@retry(stop=stop_after_attempt(5))`")
def _(left: str, right: str) -> None:
    same(tenacity_with("stop=stop_after_attempt(5), reraise=True"), written(code_in(right)[1:]), ValueError(), ...)
    assert isinstance(theirs(written(code_in(left)[1:], THEIRS), *FAILS).end, tenacity.RetryError)


STOPS = ("`stop_after_attempt(5)`", "`stop_before_delay(30)`", "`stop_after_attempt(5) | stop_before_delay(30)`")


@row("tenacity", *STOPS)
def _(left: str, right: str) -> None:
    arguments = code_in(right).removeprefix("Retry(").removesuffix(")")
    for wait in (4, 7, 10):
        their = tenacity_with(f"stop={code_in(left)}, wait=wait_fixed({wait}), reraise=True")
        same(their, written(f"Retry({arguments}, backoff=[{wait}], on=OSError)"), *FAILS)


@row("tenacity", "`stop_after_delay(30)`")
def _(left: str, right: str) -> None:
    their = theirs(tenacity_with(f"stop={code_in(left)}, wait=wait_fixed(7), reraise=True"), *FAILS)
    our = ours(Retry(None, max_elapsed=30, on=OSError, backoff=[7]), *FAILS)
    assert code_in(right) == "Retry(None, max_elapsed=30)"
    assert their.at == [0, 7, 14, 21, 28, 35]
    assert our.at == their.at[:-1]


@row("tenacity", "`stop_never`")
def _(left: str, right: str) -> None:
    steps = [*[OSError()] * 40, "fine"]
    same(tenacity_with(f"stop={code_in(left)}"), written(f"{code_in(right)[:-1]}, on=OSError, backoff=[0])"), *steps)


@row("tenacity", *(left for left in ROWS["tenacity"] if left.startswith("`wait_") and "exception" not in left))
def _(left: str, right: str) -> None:
    their = tenacity_with(f"stop=stop_after_attempt(11), wait={code_in(left)}, reraise=True")
    listed = [f"backoff={code}" for code in right.split("`") if code.startswith("[")]
    for backoff in {code_in(right), *listed}:
        runs = same(their, written(f"Retry(11, on=OSError, {backoff})"), *FAILS)
        assert len(runs[0].at) == 11


@row("tenacity", "`stop_when_event_set(event)`")
def _(left: str, right: str) -> None:
    for stopped_at in (1, 4):
        event, calls = threading.Event(), list[int]()

        def noted(function: Callable[..., Any], event: Any = event, calls: Any = calls, at: int = stopped_at) -> Any:
            def counted() -> Any:
                calls.append(1)
                event.set() if len(calls) == at else event.clear()
                return function()

            return counted

        their = tenacity_with(f"stop={code_in(left)}, wait=wait_fixed(2), reraise=True", event=event)
        our = written(f"Retry(None, {code_in(right)}, backoff=[2])", {**NAMES, "event": event})
        first = theirs(lambda function, their=their: their(noted(function)), *FAILS)
        calls.clear()
        assert first.comparable == ours(lambda function, our=our: our(noted(function)), *FAILS).comparable
        assert len(first.at) == stopped_at


@row("tenacity", "`wait=function`, of the state")
def _(left: str, right: str) -> None:
    def wait(state: Any) -> float:
        error = state.outcome.exception()
        return max(tenacity.wait_exponential(max=60)(state), error.seconds if isinstance(error, Asks) else 0)

    assert {"`retry_after=`", "`backoff=`"} <= set(re.findall("`.*?`", right))
    asked = {"retry_after": lambda failure: getattr(failure.error, "seconds", None)}
    our = Retry(6, on=Exception, backoff=Exponential(1, cap=60, jitter="none"), **asked)
    their = tenacity_with("stop=stop_after_attempt(6), wait=wait, reraise=True", wait=wait)
    runs = same(their, our, Asks(), OSError(), Asks(), Asks(), Asks(), "fine")
    assert runs[0].waits == [7, 2, 7, 8, 16]


@row("tenacity", "`wait=function`, `stop=function`")
def _(left: str, right: str) -> None:
    def asks(state: Any) -> bool:
        return isinstance(state.outcome.exception(), Asks)

    their = tenacity_with(
        "stop=stop, wait=wait, reraise=True",
        stop=lambda state: not asks(state) and state.attempt_number >= 3,
        wait=lambda state: 30 if asks(state) else 2,
    )
    first, second = "None, on=Asks, backoff=[30]", "3, on=OSError, backoff=[2]"
    our = written(code_in(right).replace("...", first, 1).replace("...", second, 1), {**NAMES, "Asks": Asks})
    for steps in ([Asks(), OSError(), "fine"], [OSError(), OSError(), OSError()], [Asks(), Asks(), "fine"]):
        same(their, our, *steps)
    mixed = Asks(), Asks(), OSError(), "fine"
    assert (theirs(their, *mixed).at, ours(our, *mixed).at) == ([0, 30, 60], [0, 30, 60, 62])  # a count for each


@row("tenacity", "`wait_exception(")
def _(left: str, right: str) -> None:
    our = written(f"Retry(3, on=Exception, {code_in(right)})")
    runs = same(tenacity_with(f"stop=stop_after_attempt(3), wait={code_in(left)}, reraise=True"), our, Asks(), ...)
    assert runs[0].waits == [7, 7]


PREFIXES = ("`retry_if_", "`retry_any", "`retry_all")
CONDITIONS = [it for it in ROWS["tenacity"] if it.startswith(PREFIXES) and "result(" not in it]


@row("tenacity", *CONDITIONS, "`retry_any(")
@row("tenacity", *(left for left in ROWS["tenacity"] if left.startswith(("`retry_if_result", "`retry_if_not_result"))))
def _(left: str, right: str) -> None:
    condition = code_in(right)
    for steps in ANSWERS:
        their = tenacity_with(f"stop=stop_after_attempt(3), wait=wait_fixed(2), retry={code_in(left)}, reraise=True")
        our = written(f"Retry(3, {condition}, backoff=[2])")
        if "not_result" in left:
            steps = ["fine" if step in ("bad", None) else None if step == "fine" else step for step in steps]
        same(their, our, *steps)


def test_tenacity_also_looks_at_the_cause_of_a_cause() -> None:
    their = tenacity_with("stop=stop_after_attempt(2), retry=retry_if_exception_cause_type(KeyError), reraise=True")
    right = next(right for left, right in ROWS["tenacity"].items() if "cause_type" in left)
    outer = ValueError()
    outer.__cause__ = CAUSED
    runs = [(theirs(their, it, ...), ours(written(f"Retry(2, {code_in(right)})"), it, ...)) for it in (CAUSED, outer)]
    assert [(len(first.at), len(second.at)) for first, second in runs] == [(2, 2), (2, 1)]


def test_a_result_that_stays_bad_is_raised_by_tenacity_and_returned_here() -> None:
    """tenacity raises even with `reraise=True`; here only `wrap=True` raises."""
    for more in ("", ", reraise=True"):
        their = tenacity_with(f"stop=stop_after_attempt(3), retry=retry_if_result(predicate){more}")
        assert isinstance(theirs(their, "bad", ...).end, tenacity.RetryError)
    assert ours(Retry(3, on_result=predicate, backoff=[0]), "bad", ...).end == "bad"
    error = ours(Retry(3, on_result=predicate, backoff=[0], wrap=True), "bad", ...).end
    assert isinstance(error, RetriesExhausted)
    assert error.last == Success("bad")


def test_interrupts_are_retried_by_tenacity_only() -> None:
    """Under `retry_if_not_exception_type`, it retries even after Ctrl-C."""
    their = script(KeyboardInterrupt(), "fine")
    tenacity.retry(retry=tenacity.retry_if_not_exception_type(ValueError))(their)()
    assert len(their.calls) == 2
    our = script(KeyboardInterrupt(), "fine")
    with pytest.raises(KeyboardInterrupt):
        Retry(on=Exception, ignore=ValueError).call(our)
    assert len(our.calls) == 1


@row("tenacity", "`raise TryAgain`")
def _(left: str, right: str) -> None:
    class Again(Exception): ...

    their = theirs(tenacity_with("stop=stop_after_attempt(3), wait=wait_fixed(1)"), tenacity.TryAgain(), "fine")
    our = ours(Retry(3, on=Again, backoff=[1]), Again(), "fine")
    assert their.comparable == our.comparable == ([0, 1], "fine")


@row("tenacity", "`before=callback`")
def _(left: str, right: str) -> None:
    before, numbers = list[int](), list[int]()
    steps = script(OSError(), OSError(), 1)
    theirs(tenacity.retry(before=lambda state: before.append(state.attempt_number)), OSError(), OSError(), 1)
    attempt = right.split("`")[1]
    Retry(on=OSError, backoff=[0]).call(lambda: (numbers.append(written(attempt)), steps())[1])
    assert "current_context().attempt" in right
    assert numbers == before == [1, 2, 3]


@row("tenacity", "`before_sleep=callback`")
def _(left: str, right: str) -> None:
    their, our = list[tuple[int, float]](), list[tuple[int, float]]()
    attempt = tenacity_with(
        "stop=stop_after_attempt(3), wait=wait_fixed(2), reraise=True, before_sleep=note",
        note=lambda state: their.append((state.attempt_number, state.upcoming_sleep)),
    )
    same(attempt, Retry(on=OSError, backoff=[2], on_retry=lambda it: our.append((it.attempt, it.delay))), *FAILS)
    assert their == our
    assert our[:2] == [(1, 2), (2, 2)]


@row("tenacity", "`state.attempt_number`")
def _(left: str, right: str) -> None:
    def read(cell: str, of: str) -> Callable[[Any], None]:
        first, *others = re.findall("`(.*?)`", cell)
        codes = [first, *(f"{of}{code}" for code in others)]
        return lambda it: found.append([repr(eval(code, {of: it})) for code in codes])  # the page is trusted

    found: list[list[str]] = []
    arguments = "stop=stop_after_attempt(3), wait=wait_fixed(2.5), reraise=True, before_sleep=note"
    theirs(tenacity_with(arguments, note=read(left, "state")), OSError("busy"), OSError("busy"), "fine")
    their, found = found, []
    ours(Retry(on=OSError, backoff=[2.5], on_retry=read(right, "event")), OSError("busy"), OSError("busy"), "fine")
    for lines in (their, found):  # the recording functions of the two runs
        for line in lines:
            line[3] = line[3].partition(" at ")[0].rpartition(".")[2]
    assert their == found
    assert [line[:3] for line in found] == [["1", "2.5", "OSError('busy')"], ["2", "2.5", "OSError('busy')"]]


@row("tenacity", "`after=callback`")
def _(left: str, right: str) -> None:
    after: list[int] = []
    note = {"note": lambda state: after.append(state.attempt_number)}
    their = tenacity_with("stop=stop_after_attempt(3), after=note, reraise=True", **note)
    for steps in (FAILS, (OSError(), "fine")):
        after.clear()
        theirs(their, *steps)
        with recording(written(f"events.{code_in(right.split('for ')[1])}", {"events": events})) as recorder:
            ours(Retry(3, on=OSError, backoff=[0]), *steps)
        assert [event.attempt for event in recorder.events] == after  # type: ignore[attr-defined]
        assert after


@row("tenacity", "`before_log`")
def _(left: str, right: str) -> None:
    assert "log_events()" in right
    records: list[logging.LogRecord] = []
    logger, handler = logging.Logger("of this test", logging.DEBUG), logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    before_sleep = tenacity.before_sleep_log(logger, logging.WARNING)
    theirs(tenacity.retry(stop=tenacity.stop_after_attempt(2), before_sleep=before_sleep), *FAILS)
    assert len(records) == 1
    records.clear()
    stop = log_events(logger)
    ours(Retry(2, on=OSError, backoff=[0]), *FAILS)
    stop()
    assert len(records) >= 1


@row("tenacity", "`retry_error_callback=callback`")
def _(left: str, right: str) -> None:
    conditions = "retry=retry_if_exception_type(OSError) | retry_if_result(predicate)"
    their = tenacity_with(f"stop=stop_after_attempt(5), {conditions}, retry_error_callback=lambda state: 'answer'")
    _, outer, _, inner, *_ = right.split("`")
    names = {**NAMES, "callback": lambda outcome, ctx: "answer"}
    our = written(outer, names).wrap(written(f"{inner[:-1]}, on=OSError, on_result=predicate, backoff=[0])", names))
    for steps in ([*FAILS], ["bad", ...], [OSError(), "fine"], [ValueError(), ...], [OSError(), ValueError()]):
        same(their, our, *steps)
    assert ours(our, ValueError(), ...).comparable == ([0], "ValueError")  # a plain Fallback answers this, too


@row("tenacity", "`retry_error_callback=lambda state: None`")
def _(left: str, right: str) -> None:
    their = tenacity_with(f"stop=stop_after_attempt(5), retry=retry_if_exception_type(OSError), {code_in(left)}")
    _, outer, _, inner, *_ = right.split("`")
    our = written(outer).wrap(written(f"{inner[:-1]}, on=OSError, backoff=[0])"))
    for steps in ([*FAILS], [OSError(), "fine"], [ValueError(), ...], [OSError(), ValueError()]):
        same(their, our, *steps)


@row("tenacity", "`retry_error_callback=lambda state: state.outcome.result()`")
def _(left: str, right: str) -> None:
    assert right.startswith("the default")
    conditions = "retry=retry_if_exception_type(OSError) | retry_if_result(predicate)"
    their = tenacity_with(f"stop=stop_after_attempt(3), {conditions}, {code_in(left)}")
    for steps in ([*FAILS], ["bad", ...], [OSError(), "fine"], [OSError(), "bad", "bad"]):
        same(their, Retry(3, on=OSError, on_result=predicate, backoff=[0]), *steps)


@row("tenacity", "`reraise=True`")
def _(left: str, right: str) -> None:
    same(tenacity_with(f"stop=stop_after_attempt(3), {code_in(left)}"), Retry(3, on=OSError, backoff=[0]), *FAILS)


@row("tenacity", "`reraise=False`")
def _(left: str, right: str) -> None:
    their = theirs(tenacity_with(f"stop=stop_after_attempt(3), {code_in(left)}"), *FAILS)
    our = ours(written(f"Retry(3, on=OSError, backoff=[0], {code_in(right)})"), *FAILS)
    assert their.at == our.at
    assert isinstance(their.end, tenacity.RetryError)
    assert isinstance(our.end, RetriesExhausted)
    assert isinstance(our.end.__cause__, OSError)


@row("tenacity", "`error.last_attempt.exception()`")
def _(left: str, right: str) -> None:
    their = theirs(tenacity_with("stop=stop_after_attempt(3)"), *FAILS).end
    our = ours(Retry(3, on=OSError, backoff=[0], wrap=True), *FAILS).end
    assert isinstance(eval(code_in(left), {"error": their}), OSError)  # the page is trusted
    assert isinstance(eval(code_in(right), {"error": our}), OSError)
    assert (their.last_attempt.attempt_number, our.attempts) == (3, 3)


@row("tenacity", "`attempt.retry_state.attempt_number`")
def _(left: str, right: str) -> None:
    found: list[int] = []

    def read(cell: str) -> Callable[[Any], object]:
        return lambda attempt: found.append(eval(code_in(cell), {"attempt": attempt}))  # the page is trusted

    their = in_blocks(lambda: tenacity.Retrying(stop=tenacity.stop_after_attempt(3)), read(left))
    same(their, in_blocks(Retry(3, on=OSError, backoff=[0]).attempts, read(right)), OSError(), OSError(), "fine")
    assert found == [1, 2, 3] * 6


@row("tenacity", "`for attempt in Retrying(...): with attempt:`")
def _(left: str, right: str) -> None:
    wait, stop = tenacity.wait_fixed(2), tenacity.stop_after_attempt(3)
    their = in_blocks(lambda: tenacity.Retrying(stop=stop, wait=wait, reraise=True))
    our = in_blocks(Retry(3, on=OSError, backoff=[2]).attempts)
    same(their, our, *FAILS)
    same(their, our, OSError(), "fine")


@row("tenacity", "`Retrying(...)(function, *args)`")
def _(left: str, right: str) -> None:
    retrying = tenacity.Retrying(stop=tenacity.stop_after_attempt(3), reraise=True)
    retry = Retry(3, on=OSError, backoff=[0])
    for steps in (FAILS, (OSError(), "fine")):
        same(lambda function: lambda: retrying(function, 1), lambda function: lambda: retry.call(function, 1), *steps)


@row("tenacity", "`AsyncRetrying(...)`")
def _(left: str, right: str) -> None:
    retry = Retry(3, on=OSError, backoff=[0])
    their = in_async_blocks(lambda: tenacity.AsyncRetrying(stop=tenacity.stop_after_attempt(3), reraise=True))
    for steps in (FAILS, (OSError(), "fine")):
        same(their, in_async_blocks(retry.attempts), *steps)


@row("tenacity", "`function.retry_with(")
def _(left: str, right: str) -> None:
    def their(function: Callable[..., Any]) -> Callable[[], Any]:
        return tenacity.retry(stop=tenacity.stop_after_attempt(3))(function).retry_with(  # type: ignore[attr-defined, no-any-return]
            stop=tenacity.stop_after_attempt(5), reraise=True
        )

    def our(function: Callable[..., Any]) -> Callable[[], Any]:
        function, args = Retry(3)(function), ()
        code = code_in(right).replace("Retry(...)", "Retry(5, on=OSError, backoff=[0])")
        return lambda: written(code, {**NAMES, "function": function, "args": args})

    same(their, our, *FAILS)


@row("tenacity", "`retrying.copy(")
def _(left: str, right: str) -> None:
    retrying = tenacity.Retrying(stop=tenacity.stop_after_attempt(3), reraise=True)
    copied = written(code_in(left).replace("...", "stop_after_attempt(5)"), {**THEIRS, "retrying": retrying})
    same(lambda function: lambda: copied(function), Retry(5, on=OSError, backoff=[0]), *FAILS)


@row("tenacity", "`sleep=`")
def _(left: str, right: str) -> None:
    began = time.monotonic()
    function: Any = tenacity.retry(wait=tenacity.wait_fixed(60))(script(OSError(), OSError(), "fine"))
    function.retry.wait = tenacity.wait_none()
    function()
    function = tenacity.retry(wait=tenacity.wait_fixed(60))(script(OSError(), OSError(), "fine"))
    with mock.patch("tenacity.nap.time"):
        function()
    assert time.monotonic() - began < 30
    slept: list[float] = []
    tenacity.retry(wait=tenacity.wait_fixed(60), sleep=slept.append)(script(OSError(), "fine"))()
    with virtual_time() as clock:
        Retry(on=OSError, backoff=[60]).call(script(OSError(), "fine"))
    with no_sleeping():
        Retry(on=OSError, backoff=[60]).call(script(OSError(), "fine"))
    assert slept == clock.sleeps == [60]


@row("tenacity", "`function.statistics[")
def _(left: str, right: str) -> None:
    inside, after, *_ = (code for code in right.split("`")[1::2])
    their, our = list[int](), list[int]()
    steps, same_steps = script(OSError(), "fine"), script(OSError(), "fine")

    @tenacity.retry
    def function() -> Any:
        their.append(eval(code_in(left), {"function": function}))  # the page is trusted
        return steps()

    def noted(ctx: Context) -> Any:
        our.append(written(inside))
        return same_steps()

    function()
    their.append(eval(code_in(left), {"function": function}))  # the page is trusted
    ctx = Context()
    Retry(on=OSError, backoff=[0]).execute(noted, ctx)
    our.append(eval(after, {"ctx": ctx}))  # the page is trusted
    assert their == our == [1, 2, 2]


@pytest.mark.parametrize(("left", "right", "check"), cases("tenacity"))
def test_both_sides_of_a_row_behave_the_same(left: str, right: str, check: Check) -> None:
    check(left, right)
