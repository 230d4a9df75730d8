"""What requests sends again under a policy, and what becomes of the responses."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from typing_extensions import override

from resilience import (
    Context,
    Policy,
    Retry,
)
from resilience.integrations.http import NotRepeatable
from resilience.integrations.http.bodies import Body
from resilience.integrations.requests import ResilienceAdapter
from resilience.runtimes.driving import drive
from tests.integrations.requests_sessions import QUICK, Make, Recorder, attempt, note
from tests.integrations.servers import PATIENCE, Answer, FlakyServer, unused_url
from tests.integrations.upload_bodies import SlowFile

# --- what may be sent again -------------------------------------------------------------------


@pytest.mark.parametrize("proxies", [{}, {"http": unused_url()}])
def test_a_post_that_was_never_sent_is_tried_again(session: Make, proxies: dict[str, str]) -> None:
    """Where no connection could be made, any method is repeated, and its generator is untouched."""
    body = (it for it in [b"order"])
    with pytest.raises(requests.ConnectionError) as caught:
        session().post(unused_url(), data=body, proxies=proxies)
    assert "3 attempts" in note(caught.value)
    assert list(body) == [b"order"]


@pytest.mark.parametrize("fault", ["reset", "close"])
def test_a_post_that_a_proxy_has_received_is_sent_once(server: FlakyServer, session: Make, fault: Any) -> None:
    """urllib3 says that it was unable to connect to the proxy, also where that hung up when it had the request."""
    url = "http://nowhere.invalid/"
    server.script(url, Answer(fault=fault))
    with pytest.raises(requests.exceptions.ProxyError) as caught:
        session().post(url, data=(it for it in [b"order"]), proxies={"http": server.url})
    assert "its body can be sent only once" in note(caught.value)
    assert [it.body for it in server.requests] == [b"order"]


def test_an_adapter_of_the_users_that_cannot_connect(session: Make) -> None:
    """What it raises says that nothing was sent, however it came to know."""

    class Unreachable(Recorder):
        @override
        def send(self, *args: Any, **options: Any) -> Any:
            raise requests.ConnectTimeout("no route")

    with pytest.raises(requests.ConnectTimeout) as caught:
        session(QUICK, adapter=Unreachable()).post("http://nowhere")
    assert "3 attempts" in note(caught.value)


def test_a_certificate_that_is_wrong_stays_wrong(server: FlakyServer, session: Make) -> None:
    """An SSL error is not retried."""
    one = session()
    one.mount("https://", ResilienceAdapter(QUICK))
    with pytest.raises(requests.exceptions.SSLError) as caught:
        one.get(server.url.replace("http", "https"))
    assert not hasattr(caught.value, "__notes__") or "attempts" not in note(caught.value)


class Again:
    """Can be iterated as often as one likes."""

    def __iter__(self) -> Iterator[bytes]:
        yield from (b"in ", b"pieces")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"data": b"bytes"}, b"bytes"),
        ({"data": "text"}, b"text"),
        ({"data": {"a": "1"}}, b"a=1"),
        ({"json": [1]}, b"[1]"),
        ({"data": bytearray(b"array")}, b"array"),
        ({"data": io.BytesIO(b"file")}, b"file"),
        ({"data": Again()}, b"in pieces"),
    ],
    ids=lambda it: "" if isinstance(it, bytes) else " ".join(it or ()),
)
def test_bodies_that_are_sent_again_whole(server: FlakyServer, session: Make, options: Any, expected: bytes) -> None:
    """What can be produced a second time arrives whole at each attempt."""
    response = session().put(server.script("/", 503, Answer(fault="reset"), 200), **options)
    assert response.status_code == 200
    assert [it.body for it in server.requests] == [expected] * 3


def test_an_upload_is_sent_again_whole(server: FlakyServer, session: Make) -> None:
    """A multipart form is text in memory by the time it is sent."""
    response = session().put(server.script("/", 503, 200), files={"f": ("name", io.BytesIO(b"content"))})
    assert response.status_code == 200
    first, second = server.requests
    assert b"content" in first.body
    assert first.body == second.body


class OnlyRead:
    """What `requests_toolbelt`'s encoder is: a length, and `read`."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)
        self.len = len(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(size)


class Seekable(OnlyRead):
    """It can be moved, but nobody knows where it stood."""

    def seek(self, position: int) -> None:
        self._data.seek(position)


@pytest.mark.parametrize("answer", [503, Answer(fault="reset")])
@pytest.mark.parametrize(
    "make",
    [lambda: iter([b"on", b"ce"]), lambda: OnlyRead(b"once"), lambda: Seekable(b"once")],
    ids=["generator", "reader", "reader from nowhere"],
)
def test_bodies_that_are_sent_once(server: FlakyServer, session: Make, answer: Any, make: Any) -> None:
    """A body that is used up is never sent again, which would be as an empty one, whatever the method."""
    url = server.script("/", answer, 200)
    outcome = attempt(lambda: session().put(url, data=make()))
    if isinstance(outcome, requests.ConnectionError):
        assert "its body can be sent only once" in note(outcome)
    else:
        assert outcome.status_code == 503
    assert [it.body for it in server.requests] == [b"once"]


def test_the_body_of_a_response_is_sent_once(server: FlakyServer, session: Make) -> None:
    """Passed on as it comes, it can be read but once, although it tells where it stands."""
    source = session().get(server.script("/source", Answer(body=b"once")), stream=True)
    assert session().put(server.script("/", 503, 200), data=source.raw).status_code == 503
    assert [it.body for it in server.requests_to("/")] == [b"once"]


def test_a_body_that_fails_is_not_the_networks_fault(server: FlakyServer, session: Make) -> None:
    """An exception of the user's own generator comes through, and nothing is repeated."""

    def body() -> Iterator[bytes]:
        yield b"one"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session(Retry(3, on=Exception, backoff=[0])).put(server.url, data=body())


class Hesitating:
    """Holds up the first attempt that is about to read a body."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.go_on = threading.Event()

    def begin(self, body: Body) -> None:
        if not self.waits.is_set():
            self.waits.set()
            assert self.go_on.wait(PATIENCE)
        BEGIN(body)


BEGIN = Body.begin


class Twice(Policy):
    """Hedges: makes two attempts at the same time, the first one of them in a thread."""

    def __init__(self, ready: threading.Event) -> None:
        self.ready = ready
        self.failures: list[Exception] = []

    @override
    async def around(self, call: Any, ctx: Context) -> Any:
        def first() -> None:
            try:
                drive(call(ctx))
            except Exception as error:
                self.failures.append(error)

        self.thread = threading.Thread(target=first)
        self.thread.start()
        assert self.ready.wait(PATIENCE)
        return await call(ctx)


def test_of_two_attempts_at_the_same_time_one_reads_the_body(
    server: FlakyServer, session: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both had been found to be allowed: the other one is refused, and has not wound it back."""
    file = SlowFile(b"order")
    one = session()
    request = one.prepare_request(requests.Request("POST", server.url, {"Idempotency-Key": "4711"}, data=file))
    first = Hesitating()
    monkeypatch.setattr(Body, "begin", lambda body: first.begin(body))
    hedge = Twice(first.waits)
    one.mount("http://", ResilienceAdapter(hedge))

    def conduct() -> None:
        assert file.is_read.wait(PATIENCE)
        first.go_on.set()
        hedge.thread.join(PATIENCE)
        file.let_go.set()

    conductor = threading.Thread(target=conduct)
    conductor.start()
    assert one.send(request).status_code == 200
    conductor.join(PATIENCE)
    (refused,) = hedge.failures
    assert isinstance(refused, NotRepeatable)
    assert "still being read by an earlier attempt" in str(refused)
    assert [it.body for it in server.requests] == [b"order"]
