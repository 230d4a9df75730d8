"""What the HTTP clients share: `Retry-After`, transient statuses, and which requests may be sent again."""

from __future__ import annotations

import io
import pickle
import time
import weakref
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from resilience import Context, DeadlineExceeded, Policy, Retry, transient
from resilience.callables import maybe_await
from resilience.integrations.http import (
    IDEMPOTENT_METHODS,
    TRANSIENT_STATUSES,
    NotRepeatable,
    Rules,
    TransientStatus,
    retry_after,
)
from resilience.integrations.http.bodies import Body, OneShot, body_of
from resilience.integrations.http.exchange import Exchange
from resilience.integrations.http.settings import Settings
from tests.conftest import Frozen, Virtual, World
from tests.custom import Sleeping, Twice
from tests.functions import raising
from tests.integrations.upload_bodies import ONCE, OnlyRead, OnlySeek, Reader, SeekableStream, pieces, pipe


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
        *((it, None) for it in "|soon|nan|inf|-inf|Infinity|1e3|1_000|0x10|1,5|1, 2|٣|12s|--1|1.2.3".split("|")),
        *((it, None) for it in ("Wed, 99 Foo 2015 07:28:00 GMT", "Mon, 01 Jan 99999 00:00:00 GMT")),
        *((it, None) for it in ("9" * 400, "9" * 5000)),
    ],
)
def test_retry_after_is_parsed_in_all_its_forms(text: str, seconds: float | None) -> None:
    """Digits, decimals and dates; a negative number or a past date is 0."""
    assert retry_after({"Retry-After": text}) == seconds


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone of a process cannot be set there")
@pytest.mark.parametrize("form", ["%a, %d %b %Y %H:%M:%S GMT", "%a, %d %b %Y %H:%M:%S", "%A, %d-%b-%y %H:%M:%S GMT"])
def test_a_date_is_in_utc_unless_it_has_another_zone(form: str, in_tokyo: None) -> None:
    """Independently of this machine's zone. HTTP allows only GMT, but a server that writes another zone means it."""
    later = datetime.now(UTC) + timedelta(hours=1)
    for text in (later.strftime(form), format_datetime(later.astimezone(timezone(timedelta(hours=-5))))):
        assert retry_after({"Retry-After": text}) == pytest.approx(3600, abs=30)


def test_an_instant_is_on_the_clock_of_the_server() -> None:
    """Unless its `Date`, which has no fractions of seconds, can be explained without another clock."""
    now = datetime.now(UTC)
    for minutes in (-60, 60):
        there = now + timedelta(minutes=minutes)
        headers = {"Retry-After": format_datetime(there + timedelta(seconds=30), usegmt=True)}
        assert retry_after({**headers, "Date": format_datetime(there, usegmt=True)}) == 30
        assert retry_after({**headers, "date": format_datetime(there, usegmt=True), "AGE": "10"}) == 20
        assert retry_after({**headers, "Date": "today"}) == pytest.approx(3630 if minutes > 0 else 0, abs=30)
    now = datetime.now(UTC)
    headers = {"Retry-After": now + timedelta(seconds=30), "Date": now}
    waited = retry_after({name: format_datetime(it, usegmt=True) for name, it in headers.items()})
    assert waited is not None
    assert waited < 30


def test_retry_after_ms_comes_first() -> None:
    """It is the more exact one; if it is invalid, the other one holds. Case is ignored, and so is what is no text."""
    assert retry_after({"retry-after-ms": "250", "Retry-After": "7"}) == 0.25
    assert retry_after({"Retry-After-Ms": "-1", "Retry-After": "7"}) == 0.0
    assert retry_after({"retry-after-ms": "soon", "RETRY-AFTER": "7"}) == retry_after({"retry-after": "7"}) == 7.0
    mappings = [{"Retry-After": 3}, {"retry-after-ms": 250}, {"Retry-After": None}, {"Retry-After": b"3"}, {}]
    assert [retry_after(it) for it in mappings] == [3.0, 0.25, None, None, None]


def test_the_statuses_of_the_rules_are_transient() -> None:
    """By default those that mean "not now"; 500 can be added."""
    assert sorted(TRANSIENT_STATUSES) == [408, 425, 429, 502, 503, 504]
    for rules in (Rules(), *(Rules(statuses=it) for it in (TRANSIENT_STATUSES | {500}, (), range(100, 600)))):
        for status in range(100, 600):
            assert rules.is_transient(status) == (status in rules.statuses)
            assert rules.is_transient(status) == (rules.failure_of(status, {}, None) is not None)
    assert Rules(statuses=()).failure_of(503, {}, None) is None


def test_a_transient_status_carries_the_response() -> None:
    """And its status, and how long the server asks to wait."""
    response = object()
    error = Rules().failure_of(503, {"Retry-After": "2"}, response)
    assert error is not None
    assert (error.status, error.response, error.retry_after, error.policy) == (503, response, 2.0, None)
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
    assert Rules().why_not_again(method, {}, sent=True) is None
    assert Rules().why_not_again(method.lower(), {}, sent=True) is None


@pytest.mark.parametrize("method", ["POST", "PATCH", "CONNECT", "BREW"])
def test_other_requests_may_be_sent_again_only_if_that_is_safe(method: str) -> None:
    """If it was never sent, has an idempotency key, or its method is named by the user."""
    reason = f"{method} may have been carried out, and carries no Idempotency-Key"
    assert Rules().why_not_again(method, {}, sent=True) == reason
    assert Rules().why_not_again(method, {"Idempotency-Key": " "}, sent=True) == reason
    assert Rules().why_not_again(method, {}, sent=False, replayable=False) is None
    assert Rules().why_not_again(method, {"idempotency-key": "4711"}, sent=True) is None
    assert Rules(idempotency_header="X-Key").why_not_again(method, {"x-key": "1"}, sent=True) is None
    assert Rules(methods={method.lower()}).why_not_again(method, {}, sent=True) is None


class Response:
    """A response that counts how often it is closed. It cannot be hashed, as those of some clients."""

    __hash__: Any = None

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.headers: dict[str, str] = {}
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Scripted(Exchange):
    """An exchange with a server that gives these answers."""

    response_type = (Response, str)

    def __init__(self, policy: Policy[Any], *answers: Any, method: str = "GET", in_tasks: bool = False) -> None:
        super().__init__(Settings(policy), method, "http://example.org/", {})
        self.in_tasks = in_tasks
        self.answers = iter(answers)
        self.sent = 0

    async def send(self, *_: Any) -> Any:
        self.sent += 1
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("stuck", [False, True])
async def test_a_cancelled_exchange_closes_all_its_responses(virtual_tasks: Virtual, stuck: bool) -> None:
    """Each completely: the wait in one close is neither cut off nor a reason to leave out the next one.

    A close that hangs ends after a grace period, and does not keep a cancelled caller.
    """
    closed: list[int] = []

    class Slow(Response):
        async def aclose(self) -> None:
            await anyio.sleep(60 if stuck and self.status == 201 else 0.01)
            closed.append(self.status)

    with anyio.move_on_after(0.05) as scope:
        await Scripted(Sleeping(after=60).wrap(Twice()), Slow(200), Slow(201), in_tasks=True).run()
    assert scope.cancelled_caught
    assert closed == ([200] if stuck else [201, 200])
    assert virtual_tasks.now() < 10


def test_an_exchange_that_has_ended_sends_nothing_more() -> None:
    """It still exists, in each context of its execution."""
    response = Response()
    exchange = Scripted(Retry(1), response)
    assert exchange.run() is response
    with pytest.raises(NotRepeatable, match="its caller has left"):
        exchange(Context())
    assert exchange.sent == 1


async def test_the_request_is_released_at_the_end_unless_an_abandoned_thread_may_send_it(world: World) -> None:
    exchange = Scripted(Retry(1), Response(), in_tasks=not world.blocking)
    exchange._request = request = Response()
    exchange._body = Body(body := io.BytesIO(b"ab"))
    kept, kept_body = weakref.ref(request), weakref.ref(body)
    del request, body
    assert type(await maybe_await(exchange.run())) is Response
    assert (kept() is not None) is world.blocking
    assert kept_body() is None


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_response_that_arrives_while_its_exchange_ends_is_closed_once(is_kept: bool) -> None:
    """In another thread: by the end of the exchange, if the response is kept before that, or else by its attempt."""
    discarded: list[Any] = []

    class Responses(dict[int, Any]):
        def __setitem__(self, number: int, entry: Any) -> None:
            for step in ("keep", "end") if is_kept else ("end", "keep"):
                if step == "keep":
                    super().__setitem__(number, entry)
                else:
                    discarded.extend(exchange._end(None))

    response = Response()
    exchange = Scripted(Retry(1), response)
    exchange._open = Responses()
    if is_kept:
        exchange(Context())
    else:
        with pytest.raises(DeadlineExceeded, match="after its time"):
            exchange(Context())
    assert (discarded, response.closed) == (([response], 0) if is_kept else ([], 1))


def test_the_error_of_another_exchange_is_raised_as_an_error() -> None:
    """Its response is not one to this request, and is not returned."""
    with pytest.raises(TransientStatus):
        Scripted(Retry(1), TransientStatus("busy", status=503, response=Response(503))).run()


def test_a_request_is_not_repeated_if_its_error_accepts_no_attribute() -> None:
    """The exchange has the attribute `repeatable` too, which a Retry checks."""
    for method, sent in (("POST", 1), ("GET", 3)):
        exchange = Scripted(Retry(3, on=Frozen, backoff=[0]), *[Frozen(4711)] * 3, method=method)
        with pytest.raises(Frozen, match="4711"):
            exchange.run()
        assert exchange.sent == sent


# --- bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", [io.BytesIO(ONCE), io.BufferedReader(io.BytesIO(ONCE)), SeekableStream()], ids=lambda it: type(it).__name__
)
def test_a_body_that_can_be_rewound_can_be_sent_again(file: Any) -> None:
    """From its position, or from the one that the client names. In a body in memory there is nothing to rewind."""
    for plain in (None, ONCE, "once", bytearray(ONCE), [b"on", b"ce"], ()):
        assert (body_of(plain).can_be_sent_again, body_of(plain).start) == (True, None)
    file.read(1)
    for start, rest in ((None, ONCE[1:]), (2, ONCE[2:])):
        body = body_of(file, start)
        assert body.can_be_sent_again
        assert file.tell() == 1  # a request that is refused leaves its file as it was
        for _ in range(2):
            body.begin()
            assert file.read() == rest
            body.end()
        file.seek(1)


@pytest.mark.parametrize("make", [lambda: iter([b"on", b"ce"]), OnlyRead, OnlySeek, Reader, pipe, pieces])
def test_other_bodies_are_sent_once(make: Any) -> None:
    """By one attempt, in one request: the next one would send nothing, and is refused."""
    source = make()
    assert not body_of(source).can_be_sent_again
    once = OneShot.of(source)
    assert OneShot.of(once) is once
    assert not body_of(once).can_be_sent_again
    iterator = iter(once)
    body_of(once)  # nothing was read
    if make is not pieces:
        assert b"".join(iterator) == ONCE
        with pytest.raises(NotRepeatable, match="used up before"):
            body_of(once)
        with pytest.raises(NotRepeatable, match="can be sent only once"):
            next(iter(once))


async def test_a_file_without_a_readable_position_is_sent_once(tmp_path: Path) -> None:
    """Or whose methods have to be awaited."""

    class Unknown(io.BytesIO):
        tell = raising(OSError("no idea"))

    async with await anyio.open_file(tmp_path / "file", "wb+") as file:
        assert not body_of(file).can_be_sent_again
    assert not body_of(Unknown(ONCE)).can_be_sent_again


def test_a_file_is_rewound_when_no_attempt_reads_it() -> None:
    """Also after it was read to its end: an attempt that waits for the response does not read."""
    file = io.BytesIO(ONCE)
    body = body_of(file)
    body.begin()
    assert body.why_not_now  # it may be about to
    file.read(1)
    with pytest.raises(NotRepeatable, match="still being read by an earlier attempt"):
        body.begin()
    assert file.tell() == 1
    file.read()
    assert body.why_not_now is None
    body.begin()
    assert file.tell() == 0
    body.end()
    body.end()
    body.begin()
    file.close()
    assert body.why_not_now  # a closed file has no position, so that this is not known
