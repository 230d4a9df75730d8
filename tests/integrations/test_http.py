"""What the HTTP clients share: `Retry-After`, what is transient, and what may be sent again."""

from __future__ import annotations

import gzip
import os
import pickle
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import anyio
import pytest

from resilience import Context, DeadlineExceeded, Fallback, Policy, Retry, transient
from resilience.integrations.http import (
    IDEMPOTENT_METHODS,
    TRANSIENT_STATUSES,
    Exchange,
    Rules,
    TransientStatus,
    is_used_up,
    retry_after,
)
from resilience.integrations.http.bodies import forget_sent, note_sent
from tests.conftest import World
from tests.integrations.upload_bodies import FILES, ITERATORS, ONCE, Asynchronous, SeekableStream, SilentStream, pipe


@pytest.mark.parametrize("text", [False, True])
def test_a_file_at_its_end_is_used_up(tmp_path: Path, text: bool) -> None:
    """Nothing would come out of it; out of an empty one neither, but that one is what its user has."""
    path = tmp_path / "file"
    path.write_bytes(b"payload")
    with path.open("r" if text else "rb") as file:
        assert not is_used_up(file)
        file.read(3)
        assert not is_used_up(file)
        file.read()
        assert is_used_up(file)
        file.seek(0)
        assert not is_used_up(file)
    assert not is_used_up(file)  # closed: its client says so
    path.write_bytes(b"")
    with path.open("rb") as empty:
        assert not is_used_up(empty)


def test_other_bodies_that_are_used_up() -> None:
    """Generators that are over. What cannot tell is not used up."""
    generator = (it for it in [b"a", b"b"])
    assert not is_used_up(generator)
    next(generator)
    assert not is_used_up(generator)
    list(generator)
    assert is_used_up(generator)
    for memory in (BytesIO(b"payload"), StringIO("payload")):
        assert not is_used_up(memory)
        memory.read()
        assert is_used_up(memory)
        assert not is_used_up(memory, 0)  # its client winds it back
        assert is_used_up(memory, 7)
    reader, writer = os.pipe()
    os.close(writer)
    with open(reader, "rb") as pipe:
        pipe.read()
        assert not any(is_used_up(it) for it in [pipe, None, b"", "", [], iter([])])


@pytest.mark.parametrize("make", [*FILES.values(), SilentStream])
def test_files_of_any_kind_are_used_up_at_their_end(make: Any) -> None:
    """In memory, in a wrapper, on a disk when they have grown, or of a class that nobody knows."""
    file = make()
    assert not is_used_up(file)
    file.read(2)
    assert not is_used_up(file)
    file.read()
    assert is_used_up(file)
    assert file.read() == b""  # looking has not moved it
    file.seek(0)
    assert not is_used_up(file)
    assert file.read() == ONCE


def test_a_packed_file_is_used_up_at_the_end_of_what_it_holds(tmp_path: Path) -> None:
    """How large it is on the disk says nothing about that."""
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"payload" * 1000))
    with gzip.open(path) as file:
        file.read(6000)
        assert not is_used_up(file)
        assert len(file.read()) == 1000
        assert is_used_up(file)


def test_the_file_inside_of_an_asynchronous_one_tells(tmp_path: Path) -> None:
    """anyio's has one; of a kind that has not, nobody can tell."""
    path = tmp_path / "file"
    path.write_bytes(ONCE)

    class Unknown:
        async def seekable(self) -> bool:
            return True

        async def tell(self) -> int:
            return 4

    async def main() -> None:
        async with await anyio.open_file(path, "rb") as file:
            assert not is_used_up(file)
            await file.read()
            assert is_used_up(file)

    anyio.run(main)
    assert not is_used_up(Unknown())


@pytest.mark.parametrize("make", [*ITERATORS.values(), Asynchronous, pipe])
def test_what_does_not_show_it_is_known_by_having_been_sent(make: Any) -> None:
    """By its identity, for as long as it lives; unless it turns out that nothing was sent."""
    body, other = make(), make()
    note_sent(body)
    assert is_used_up(body)
    assert not is_used_up(other)
    forget_sent(body)
    assert not is_used_up(body)
    for it in (body, other):
        if hasattr(it, "close"):
            it.close()


def test_a_generator_that_was_sent_is_used_up_once_it_has_begun() -> None:
    """A call that was cut off while it was connecting has taken nothing out of it."""
    generator = (it for it in [b"on", b"ce"])
    note_sent(generator)
    assert not is_used_up(generator)
    next(generator)
    assert is_used_up(generator)


def test_an_asynchronous_generator_that_was_sent_is_used_up_once_it_has_begun() -> None:
    """Python 3.11 cannot tell whether it has."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"on"
        yield b"ce"

    async def main() -> None:
        generator = pieces()
        note_sent(generator)
        assert is_used_up(generator) is (sys.version_info < (3, 12))
        await anext(generator)
        assert is_used_up(generator)
        await generator.aclose()

    anyio.run(main)


def test_what_can_be_produced_again_is_not_remembered() -> None:
    """A file is wound back by its user, a list is iterated again, and nothing is the body of many requests."""
    for body in (BytesIO(ONCE), SeekableStream(), [b"on", b"ce"], ONCE, "once", None):
        note_sent(body)
        assert not is_used_up(body)


def test_of_iterators_that_would_have_to_be_kept_only_the_last_are() -> None:
    """A bound, so that no process grows with what it has sent."""
    bodies = [iter([ONCE]) for _ in range(100)]
    for body in bodies:
        note_sent(body)
    assert [is_used_up(it) for it in bodies] == [False] * 36 + [True] * 64
    forget_sent(bodies[-1])
    assert not is_used_up(bodies[-1])


def in_seconds(seconds: float, form: str = "%a, %d %b %Y %H:%M:%S") -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime(form)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("99999999999", 99999999999.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00", 0.0),
    ],
)
def test_retry_after_is_read_in_all_its_forms(text: str, seconds: float) -> None:
    """Digits, decimals and dates; what is negative or in the past is "now"."""
    assert retry_after({"Retry-After": text}) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *"|soon|nan|inf|-inf|Infinity|1e3|1_000|0x10|1,5|1, 2|٣|12s|--1|1.2.3|Wed, 99 Foo 2015 07:28:00 GMT".split("|"),
        *["9" * 400, "9" * 5000, "Mon, 01 Jan 99999 00:00:00 GMT"],
    ],
)
def test_rubbish_in_retry_after_is_no_delay(text: str) -> None:
    """A header that cannot be understood asks for nothing."""
    assert retry_after({"Retry-After": text}) is None


@pytest.mark.parametrize("form", ["%a, %d %b %Y %H:%M:%S GMT", "%a, %d %b %Y %H:%M:%S", "%A, %d-%b-%y %H:%M:%S GMT"])
def test_a_date_is_the_time_until_then_and_utc_where_it_names_no_zone(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the zone of this machine."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert retry_after({"Retry-After": in_seconds(3600, form)}) == pytest.approx(3600, abs=30)


def test_a_date_with_another_zone_is_understood() -> None:
    """HTTP knows only GMT; who writes another one means it."""
    date = datetime.now(UTC).astimezone() + timedelta(hours=1)
    assert retry_after({"Retry-After": format_datetime(date)}) == pytest.approx(3600, abs=30)


def test_milliseconds_come_first() -> None:
    """`retry-after-ms` is the more exact of the two; rubbish in it leaves the other one."""
    assert retry_after({"retry-after-ms": "250", "Retry-After": "7"}) == 0.25
    assert retry_after({"Retry-After-Ms": "-1", "Retry-After": "7"}) == 0.0
    assert retry_after({"retry-after-ms": "soon", "Retry-After": "7"}) == 7.0
    assert retry_after({}) is None


@pytest.mark.parametrize("name", ["Retry-After", "retry-after", "RETRY-AFTER"])
def test_the_name_of_a_header_has_no_case(name: str) -> None:
    """Also where the headers are a plain dictionary."""
    assert retry_after({name: "5"}) == 5.0


def test_which_statuses_are_transient() -> None:
    """Those that say "not now". 500 is one where it is added."""
    assert sorted(TRANSIENT_STATUSES) == [408, 425, 429, 502, 503, 504]
    for rules in (Rules(), Rules(statuses=TRANSIENT_STATUSES | {500}), Rules(statuses=())):
        for status in range(100, 600):
            assert rules.is_transient(status) == (status in rules.statuses)
            assert rules.is_transient(status) == (rules.failure_of(status, {}, None) is not None)
    assert Rules(statuses=()).failure_of(503, {}, None) is None


def test_a_transient_status_says_what_it_was() -> None:
    """It carries the response, its status, and how long the server asks to wait."""
    response = object()
    error = Rules().failure_of(503, {"Retry-After": "2"}, response)
    assert error is not None
    assert (error.status, error.response, error.retry_after) == (503, response, 2.0)
    assert str(error) == "the server answered 503 (service unavailable)"
    assert str(Rules(statuses={599}).failure_of(599, {}, None)) == "the server answered 599"
    assert transient(error)


def test_a_transient_status_pickles_without_its_response() -> None:
    """A response holds a connection."""
    error = Rules().failure_of(429, {"Retry-After": "2"}, lambda: None)
    assert error is not None
    error.repeatable = False
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (TransientStatus, str(error))
    assert (copy.status, copy.retry_after, copy.response, copy.repeatable) == (429, 2.0, None, False)


@pytest.mark.parametrize("method", sorted(IDEMPOTENT_METHODS))
def test_an_idempotent_request_may_be_sent_again(method: str) -> None:
    """Two of them have the effect of one."""
    assert Rules().why_not_again(method, {}, sent=True) is None
    assert Rules().why_not_again(method.lower(), {}, sent=True) is None


@pytest.mark.parametrize("method", ["POST", "PATCH", "CONNECT", "BREW"])
def test_another_request_may_be_sent_again_only_where_that_does_no_harm(method: str) -> None:
    """Never sent, or known to the server by its key, or named by the user."""
    reason = f"{method} may have been carried out, and carries no Idempotency-Key"
    assert Rules().why_not_again(method, {}, sent=True) == reason
    assert Rules().why_not_again(method, {"Idempotency-Key": " "}, sent=True) == reason
    assert Rules().why_not_again(method, {}, sent=False) is None
    assert Rules().why_not_again(method, {"idempotency-key": "4711"}, sent=True) is None
    assert Rules(idempotency_header="X-Key").why_not_again(method, {"x-key": "1"}, sent=True) is None
    assert Rules(methods={method.lower()}).why_not_again(method, {}, sent=True) is None


def test_a_body_that_is_used_up_is_not_sent_again() -> None:
    """Whatever the method and the key; but where nothing was sent, it is still there."""
    rules, headers = Rules(), {"Idempotency-Key": "4711"}
    assert rules.why_not_again("PUT", headers, sent=True, replayable=False) == "its body can be sent only once"
    assert rules.why_not_again("PUT", headers, sent=False, replayable=False) is None


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ({"statuses": {"503"}}, TypeError, "statuses must be whole numbers, not '503'"),
        ({"statuses": {True}}, TypeError, "statuses must be whole numbers, not True"),
        ({"statuses": {99}}, ValueError, "statuses must lie between 100 and 599, not 99"),
        ({"statuses": 500}, TypeError, "statuses must be a collection of whole numbers, not 500"),
        ({"methods": None}, TypeError, "methods must be a collection of names, not None"),
        ({"methods": "POST"}, TypeError, "methods must be a collection of names, not 'POST'"),
        ({"methods": [1]}, TypeError, "methods must be names, not 1"),
        ({"idempotency_header": ""}, ValueError, "idempotency_header must not be empty"),
        ({"idempotency_header": None}, TypeError, "idempotency_header must be a string, not None"),
    ],
)
def test_wrong_rules_are_refused(words: dict[str, Any], kind: type[Exception], message: str) -> None:
    """Where they are written, with the value."""
    with pytest.raises(kind, match=message):
        Rules(**words)


class Response:
    """A response that counts how often it is closed."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Answered(Exchange[Response]):
    """An exchange with a server that gives these answers."""

    def __init__(self, *answers: Response, method: str = "GET") -> None:
        super().__init__(Rules(), method, {}, replayable=True, host="example.org")
        self.answers = iter(answers)

    def __call__(self, ctx: Context) -> Response:
        self.begin()
        response = next(self.answers)
        return self.received(response, response.status, {}, ctx)


def test_an_exchange_closes_all_responses_but_the_one_that_it_returns() -> None:
    """Those that a retry discards, and those that nobody would close."""
    responses = [Response(503), Response(503), Response(503)]
    assert Answered(*responses).run(Retry(3, backoff=[0])) is responses[-1]
    assert [it.closed > 0 for it in responses] == [True, True, False]
    lost = Response(503)
    assert Answered(lost).run(Fallback("cached")) == "cached"
    assert lost.closed == 1


class Collecting(Policy[Any]):
    """Asks twice, keeps both responses to itself, and goes on for ever."""

    async def around(self, call: Any, ctx: Context) -> Any:
        for _ in range(2):
            await call(ctx)
        await ctx.sleep(60)


def test_a_cancelled_exchange_closes_all_its_responses(tasks_world: World) -> None:
    """Each of them to its end: the wait in one close is neither cut off nor the reason to leave out the next one."""
    closed: list[int] = []

    class Slow(Response):
        async def aclose(self) -> None:
            await anyio.sleep(0.01)
            closed.append(self.status)

    class Asked(Answered):
        async def __call__(self, ctx: Context) -> Response:  # type: ignore[override]
            return Answered.__call__(self, ctx)

    async def main() -> None:
        with anyio.move_on_after(0.05) as scope:
            await Asked(Slow(200), Slow(201)).arun(Collecting())
        assert scope.cancelled_caught

    tasks_world.run(main)
    assert closed == [201, 200]


def test_a_close_that_hangs_does_not_keep_a_cancelled_caller(
    tasks_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its time; the others have theirs."""
    closed: list[int] = []
    monkeypatch.setattr("resilience.integrations.http.exchange.CLOSING_GRACE", 0.02)

    class Stuck(Response):
        async def aclose(self) -> None:
            await anyio.sleep(60 if self.status == 201 else 0)
            closed.append(self.status)

    class Asked(Answered):
        async def __call__(self, ctx: Context) -> Response:  # type: ignore[override]
            return Answered.__call__(self, ctx)

    async def main() -> None:
        with anyio.fail_after(10), anyio.move_on_after(0.05):
            await Asked(Stuck(200), Stuck(201)).arun(Collecting())

    tasks_world.run(main)
    assert closed == [200]


def test_a_response_that_comes_when_the_exchange_is_over_is_closed() -> None:
    """Whoever waited for it has left, for whatever reason: Ctrl-C is one."""
    late, exchange = Response(), Answered(Response())
    exchange.run(Retry())
    with pytest.raises(DeadlineExceeded, match="the response came after its time"):
        exchange.received(late, 200, {}, Context())
    assert late.closed == 1


def test_an_answer_of_another_exchange_is_an_error_like_others() -> None:
    """What is no response to this request is not returned as one."""
    other = TransientStatus("busy", status=503, response=Response(503))

    class Failing(Answered):
        def __call__(self, ctx: Context) -> Response:
            raise other

    with pytest.raises(TransientStatus):
        Failing().run(Retry(1))


class Sealed(Exception):
    """An error that takes neither attribute nor note."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


def test_an_error_that_cannot_be_marked_is_obeyed_all_the_same() -> None:
    """The exchange itself tells a Retry that the request must not be sent again."""
    tried: list[str] = []

    class Failing(Answered):
        def __call__(self, ctx: Context) -> Response:
            self.begin()
            tried.append("sent")
            error = Sealed("the client's own")
            self.failed(error, sent=True)
            raise error

    with pytest.raises(Sealed, match="the client's own"):
        Failing(method="POST").run(Retry(3, on=Sealed, backoff=[0]))
    assert tried == ["sent"]
    with pytest.raises(Sealed):
        Failing(method="GET").run(Retry(3, on=Sealed, backoff=[0]))
    assert tried == ["sent"] * 4


def test_a_retry_obeys_a_transient_status() -> None:
    """By default, its delay included; and it does not repeat what must not be repeated."""
    waits: list[float] = []
    once = TransientStatus("busy", status=429, retry_after=0.05)
    answers = iter([once, "fine"])

    def send(ctx: object) -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert Retry(backoff=[0], on_retry=lambda event: waits.append(event.delay)).execute(send) == "fine"
    assert waits == [0.05]
