"""Lines in the standard library's logging: levels, wording, repeats, and no secrets."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import anyio
import pytest

from resilience import AdaptiveLimit, CircuitBreaker, Context, Fallback, Hedge, Policy, Retry, events
from resilience.integrations.http import TransientStatus
from resilience.integrations.logging import log_events
from resilience.integrations.telemetry import DEFAULT_LEVELS, facts, kind_of
from resilience.integrations.telemetry.sentences import _RAN_OUT
from resilience.testing import script, virtual_time
from tests.conftest import Boom, FakeClock, Script, World
from tests.integrations.exporters import WithoutText, report_timeouts
from tests.listening import everything, fails, park_a_task

LOGRECORD = set(vars(logging.makeLogRecord({})))


class Log(logging.Handler):
    """A separate logger that keeps its records, and the exporters that were started with it."""

    def __init__(self) -> None:
        super().__init__()
        self.logger = logging.Logger("test", logging.INFO)
        self.logger.addHandler(self)
        self.records: list[logging.LogRecord] = []
        self.ends: list[Callable[[], None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def begin(self, **options: Any) -> Callable[[], None]:
        self.ends.append(log_events(self.logger, **options))
        return self.ends[-1]

    @property
    def lines(self) -> list[str]:
        return [f"{record.levelname} {record.getMessage()}" for record in self.records]


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    for end in log.ends:
        end()


def extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in LOGRECORD}


# --- wording and levels ----------------------------------------------------------------------


def test_a_task_that_is_given_up_is_always_written(log: Log) -> None:
    """The limit on repeats does not apply. The extra value is `task`, as `name` would be that of the logger."""
    end = log.begin(repeats=1)
    park_a_task("feed")
    park_a_task("poll\nforged")
    end()
    log.begin(messages=True)
    park_a_task()
    assert log.lines == [
        "ERROR feeds: gave feed up after 0 restarts; the last failure was Boom",
        "ERROR feeds: gave poll\\nforged up after 0 restarts; the last failure was Boom",
        "ERROR feeds: gave feed up after 0 restarts; the last failure was Boom: secret",
    ]
    facts = {"kind": "parked", "policy": "feeds", "task": "feed", "restarts": 0}
    assert extra(log.records[0]) == {**facts, "error_type": "tests.conftest.Boom"}


GET = Context(operation="get")


def test_each_kind_of_event_has_its_level_and_a_readable_line(clock: FakeClock, log: Log) -> None:
    """An opened circuit is an error; what policies do as configured is information."""
    breaker = CircuitBreaker(2, open_for=30, name="db")
    pipeline = Policy.wrap(Fallback("x", name="spare"), Retry(3, on=Boom, backoff=[1.5]), breaker, name="weather")
    log.begin()
    for _ in range(2):
        pipeline.execute(script(Boom("secret"), ...), GET)
    clock.advance(30)
    pipeline.execute(script("fine"), GET)
    breaker.isolate()
    assert log.lines == [
        "INFO weather (get): attempt 1 failed with Boom, the next one is in 1.5 s",
        "ERROR circuit db: closed -> open for 30 s: failures 2 of 2; the last failure was Boom",
        "WARNING weather (get): Retry gave up after 2 attempts in 1.5 s, as a circuit inside is open; "
        "the last failure was Boom",
        "INFO weather (get): spare answered instead of Boom",
        "WARNING weather (get): db refused a call with CircuitOpen; it may be worth a try in 30 s",
        "INFO weather (get): spare answered instead of CircuitOpen",
        "INFO circuit db: open -> half_open: the 30 s of the open period have passed",
        "INFO circuit db: half_open -> closed: probes succeeded, 1 of 1",
        "WARNING circuit db: closed -> isolated: it was isolated manually",
    ]


def test_the_line_of_a_timeout_says_what_timed_out(log: Log) -> None:
    log.begin()
    report_timeouts()
    lines = [re.sub(r"[\d.]+ s (after|in)", r"1 s \1", it) for it in log.lines if "gave up" not in it]
    assert lines == [
        "WARNING p (get): an attempt took longer than the 0.01 s of each",
        "WARNING p (get): the execution took longer than the 0.01 s of whole",
        "WARNING alone (get): the execution took longer than 0.01 s",
        "WARNING budget (get): the deadline of the caller passed, 1 s after it began",
        "WARNING pool (get): refused a call with BulkheadFull after 1 s in the queue",
        "WARNING pool (get): refused a call with DeadlineExceeded after 1 s in the queue",
    ]


TOO_LONG = "the server asks for a longer wait than max_retry_after"


class FailureWithAdvice(Boom):
    """A failure that says whether, or when, the call may be made again."""

    def __init__(self, **advice: object) -> None:
        super().__init__()
        vars(self).update(advice)


@pytest.mark.parametrize(
    ("retry", "failure", "why"),
    [
        (Retry(1, on=Boom), Boom(), "no attempt is left"),
        (Retry(9, on=Boom, backoff=[5.0], max_elapsed=4.0), Boom(), "max_elapsed leaves no time for another"),
        (Retry(9, on=Boom, backoff=[20.0]), Boom(), "the deadline leaves no time for another"),
        (Retry(9, on=Boom), FailureWithAdvice(repeatable=False), "it must not be repeated"),
        (Retry(9, on=Boom, max_retry_after=5.0), FailureWithAdvice(retry_after=6.0), TOO_LONG),
    ],
)
def test_the_line_of_a_give_up_says_why(clock: FakeClock, log: Log, retry: Retry, failure: Boom, why: str) -> None:
    log.begin()
    retry.capture(script(failure), Context(timeout=10, operation="get"))
    what = type(failure).__name__
    assert log.lines == [f"WARNING Retry (get): gave up after 1 attempt in 0 s, as {why}; the last failure was {what}"]


def test_each_reason_to_give_up_has_its_wording() -> None:
    """An event whose reason has no wording would have no line."""
    assert set(_RAN_OUT) == set(get_args(get_type_hints(events.RetryGaveUp)["reason"]))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TransientStatus("busy", status=429), "failed with TransientStatus 429, the next one is in 1 s: busy"),
        (WithoutText(), "failed with WithoutText, the next one is in 1 s: <no message: its __str__ raised>"),
    ],
)
def test_the_line_of_an_error_has_its_status_and_text(clock: FakeClock, log: Log, error: Exception, line: str) -> None:
    log.begin(messages=True)
    Retry(2, on=type(error), backoff=[1]).execute(script(error, "fine"), GET)
    assert log.lines == [f"INFO Retry (get): attempt 1 {line}"]


def test_a_rejected_result_is_not_written(clock: FakeClock, log: Log) -> None:
    """Results may be confidential, also if `messages` is set."""
    log.begin(messages=True)
    Retry(2, on_result=lambda result: result == "secret", backoff=[1]).capture(script("secret", ...))
    assert "attempt 1 failed with a result that was not good enough" in log.lines[0]
    assert "secret" not in str([vars(record) for record in log.records])


async def test_the_ends_of_executions_are_debug_lines(tasks_world: World, log: Log) -> None:
    """A cancellation is no error, and has no failure."""
    log.logger.setLevel(logging.DEBUG)
    log.begin()
    await Retry().aexecute(Script("fine").function(), Context(operation="get"))
    await tasks_world.attempt(Retry(), Script(Boom()).function(), Context(operation="get"))
    with anyio.move_on_after(0.01):
        await Retry().aexecute(lambda ctx: anyio.sleep(10), Context(operation="get"))
    assert [line.partition(" s")[0].rpartition(" in ")[0] for line in log.lines] == [
        "DEBUG Retry (get): done after 1 attempt",
        "DEBUG Retry (get): failed after 1 attempt",
        "DEBUG Retry (get): cancelled by its caller, after 1 attempt",
    ]
    assert log.lines[1].endswith(" s with Boom")


def test_the_page_lists_the_fields_of_each_kind(heard: list[Any]) -> None:
    everything()
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "logging.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    for event in (it for it in heard if type(it) in DEFAULT_LEVELS):
        listed = {*re.findall(r"`(\w+)`", rows[kind_of(event)]), "pipeline", "policy", "operation"}
        assert facts(event).keys() <= listed


def test_messages_of_errors_are_written_on_request(clock: FakeClock, log: Log) -> None:
    """Escaped and cut to one line; the arguments of the call stay out."""
    log.begin(messages=True)
    pipeline = Policy.wrap(Retry(2, on=Boom, backoff=[1]), CircuitBreaker(1, open_for=0.5, name="db"))
    pipeline.capture(script(Boom(f"no\nINFO forged {'x' * 500}"), ...), GET)
    opened, retried, *_ = log.lines
    assert "failures 1 of 1; the last failure was Boom, after Boom: no" in opened
    assert "attempt 1 failed with Boom, the next one is in 1 s: no\\nINFO forged" in retried
    assert extra(log.records[1])["error"].startswith("no\\nINFO forged")
    assert all("\n" not in line and len(line) < 400 for line in log.lines)


@pytest.mark.parametrize(
    "hostile", ["a\nWARNING forged", "\x1b[2Jgone", "\x00", "\x85", "a\u2028b", "\u202egnp.exe", "\x9b2J"]
)
def test_control_characters_are_escaped(log: Log, hostile: str) -> None:
    """In names and in messages: a line stays one line, and a terminal shows it without obeying it."""
    log.begin(messages=True)
    retry = Retry(2, on=Boom, backoff=[0], name=f"policy {hostile}")
    retry.capture(script(Boom(hostile), ...), Context(operation=hostile))
    assert len(log.lines) == 2
    for record in log.records:
        assert record.getMessage().isprintable()
        assert all(text.isprintable() for text in extra(record).values() if isinstance(text, str))
        assert ascii(hostile)[1:-1] in record.getMessage()


# --- repeats ---------------------------------------------------------------------------------


def isolated(name: str = "db", *, observe_only: bool = False) -> CircuitBreaker:
    breaker = CircuitBreaker(name=name, observe_only=observe_only)
    breaker.isolate()
    return breaker


def refuse(breaker: CircuitBreaker, operation: str = "get", times: int = 1) -> None:
    for _ in range(times):
        breaker.capture(lambda ctx: "never", Context(operation=operation))


def refusals(log: Log) -> list[str]:
    return [line.removeprefix("WARNING ") for line in log.lines if "refused" in line]


def test_repeated_lines_are_counted_after_the_first_few(clock: FakeClock, log: Log) -> None:
    """The count is written once, with the first event after the interval, of any policy."""
    breaker = isolated()
    log.begin(repeats=3, interval=10)
    for _ in range(60):
        refuse(breaker)
        clock.advance(0.1)
    assert refusals(log) == ["db (get): refused a call with CircuitIsolated"] * 3
    clock.advance(5)
    assert len(log.records) == 3
    Retry().execute(lambda ctx: "of another policy, and fine")
    assert refusals(log)[3:] == ["db (get): refused a call with CircuitIsolated (and 56 more in 11 s)"]
    assert (extra(log.records[-1])["left_out"], extra(log.records[-1])["seconds"]) == (57, 11.0)
    refuse(breaker)
    assert refusals(log)[4:] == ["db (get): refused a call with CircuitIsolated"]


def test_the_count_of_repeats_is_in_the_line_of_the_latest(clock: FakeClock, log: Log) -> None:
    log.begin(repeats=1, interval=10)
    Retry(4, on=Boom, backoff=[1, 2, 3]).capture(fails)
    clock.advance(10)
    Retry().execute(lambda ctx: "fine")
    assert "attempt 3 failed with Boom, the next one is in 3 s (and 1 more in 16 s)" in log.lines[-1]


class Interrupting(str):
    """A name whose hashing is interrupted: a finalizer may run at this point, and report an event."""

    act: Callable[[], object] | None = None

    def __hash__(self) -> int:
        act, self.act = self.act, None
        if act is not None:
            act()
        return super().__hash__()


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="a tuple keeps its hash, so nothing is interrupted at this point"
)
def test_a_count_is_written_once_if_an_event_interrupts_the_writing(clock: FakeClock, log: Log) -> None:
    """The interrupting event writes the count, the interrupted one does not write it again."""
    breaker, other, operation = isolated(), isolated("other"), Interrupting("get")
    log.begin(repeats=1, interval=10)
    refuse(breaker, operation, times=3)
    clock.advance(11)
    operation.act = lambda: refuse(other)
    Retry().execute(lambda ctx: "fine")
    assert operation.act is None
    assert refusals(log) == [
        "db (get): refused a call with CircuitIsolated",
        "db (get): refused a call with CircuitIsolated (and 1 more in 11 s)",
        "other (get): refused a call with CircuitIsolated",
    ]


def test_no_event_is_created_for_an_unlogged_end(clock: FakeClock, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of executions are listened to only if they are logged, or if a count is still to be written."""
    created: list[str] = []

    def record(event: events.Event) -> None:
        if event.policy == "mine":
            created.append(type(event).__name__)

    monkeypatch.setattr(events.Event, "__del__", record, raising=False)
    retry = Retry(name="mine")
    log.begin(interval=10)
    retry.call(int)
    assert created == []
    Fallback(None, name="mine").execute(lambda ctx: 1 / 0)
    assert created == ["FallbackUsed"]
    clock.advance(11)
    retry.call(int)
    retry.call(int)
    assert created == ["FallbackUsed", "ExecutionFinished"]
    detailed = Log()
    detailed.logger.setLevel(logging.DEBUG)
    end = detailed.begin()
    retry.call(int)
    end()
    assert created[2:] == ["ExecutionFinished"]


def test_ending_the_export_writes_the_counts(clock: FakeClock, log: Log) -> None:
    """Nothing is lost at a shutdown; a second end writes nothing."""
    end = log.begin(repeats=1)
    refuse(isolated(), times=4)
    end()
    end()
    assert refusals(log)[1:] == ["db (get): refused a call with CircuitIsolated (and 2 more)"]


def test_an_interval_of_another_virtual_time_is_over(log: Log) -> None:
    log.begin(repeats=1)
    for began in (1000, 0):
        with virtual_time() as virtual:
            virtual.advance(began)
            for _ in range(2):
                Fallback("answer").call(script(Boom()))
    assert log.lines == ["INFO Fallback (Script): answered instead of Boom"] * 3


def test_changes_of_circuits_are_always_written(clock: FakeClock, log: Log) -> None:
    """They are rare and important, so that the limit on repeats does not apply."""
    breaker = CircuitBreaker(name="db")
    log.begin(repeats=1)
    for act in (breaker.isolate, breaker.close) * 5:
        act()
    assert len(log.lines) == 10


def test_the_number_of_counted_operations_is_bounded(clock: FakeClock, log: Log) -> None:
    """The oldest of many different lines are forgotten, and their counts written."""
    breaker = isolated()
    end = log.begin(repeats=1)
    for number in range(1100):
        refuse(breaker, f"get-{number}", times=2)
    written = len(log.records)
    assert 1100 < written < 1250
    end()
    assert len(log.records) == 2200


# --- options ---------------------------------------------------------------------------------


def test_levels_can_be_set_for_each_kind_of_event(clock: FakeClock, log: Log, caplog: pytest.LogCaptureFixture) -> None:
    """None leaves a kind out, without an error of the listener."""
    kinds = events.RetryGaveUp, events.CircuitChanged, events.CallRejected, events.ExecutionFinished
    log.begin(levels={events.RetryScheduled: logging.CRITICAL, **dict.fromkeys(kinds)})
    Retry(2, on=Boom, backoff=[1]).capture(fails)
    refuse(isolated(observe_only=True))
    assert [record.levelname for record in log.records] == ["CRITICAL"]
    assert caplog.records == []


def test_lines_go_to_the_default_logger_or_to_an_adapter(caplog: pytest.LogCaptureFixture) -> None:
    """The default logger has a name, by which it can be silenced."""
    usual = logging.getLogger("resilience.events")
    with caplog.at_level(logging.INFO, logger=usual.name):
        for logger in (None, logging.LoggerAdapter(usual, None)):
            end = log_events(logger)
            isolated()
            end()
    assert [record.name for record in caplog.records] == [usual.name] * 2


def test_adapters_add_to_the_values_of_a_line(log: Log) -> None:
    """By default an adapter's own values would replace ours, and those of an adapter around it."""
    service = logging.LoggerAdapter(log.logger, {"service": "shop"})
    log.ends.append(log_events(logging.LoggerAdapter(service, {"host": "a"})))
    Retry(backoff=[0]).call(script(ConnectionError(), "fine"))
    [record] = log.records
    assert extra(record).items() >= {"kind": "retry_scheduled", "service": "shop", "host": "a"}.items()


def test_events_of_healthy_calls_are_debug_lines(log: Log) -> None:
    log.logger.setLevel(logging.DEBUG)
    log.begin()
    everything()
    AdaptiveLimit(60, initial=1, min_samples=1).call(int)
    AdaptiveLimit(1e-9, initial=2, min_samples=1).call(int)
    flaky = script(Boom(), "fine")
    Hedge(5, on=Boom, eager=True).execute(lambda ctx: flaky(), Context(operation="get"))
    lines = [re.sub(r"(in|after) \S+ s\b", r"\1 1 s", it) for it in log.lines]
    for line in (
        "DEBUG Hedge (fails): began attempt 1 beside the first, after 1 s",
        "DEBUG Hedge (fails): made 2 attempts at once in 1 s: none was good",
        "DEBUG Hedge (get): made 2 attempts at once in 1 s: attempt 1 was the first good one",
        "INFO Retry (fails): made no retry, as the budget is spent",
        "DEBUG AdaptiveLimit (int): lets 2 calls run at once, not 1: room",
        "DEBUG AdaptiveLimit (int): lets 1 call run at once, not 2: slow",
        "WARNING Chaos (fails): injected a result",
        "DEBUG Cache (fails): answered with a value that it keeps",
        "DEBUG Retry (iter): the first item came in attempt 1, after 1 s",
        "DEBUG Retry (iter): done after 1 attempt and 1 item in 1 s",
    ):
        assert line in lines
