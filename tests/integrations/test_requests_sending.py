"""What requests sends again under a policy, and which responses are closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from typing_extensions import override

from resilience import Context, Policy, Retry
from resilience.integrations.http import NotRepeatable
from resilience.integrations.http.bodies import Body
from resilience.integrations.requests import ResilienceAdapter
from resilience.runtimes.driving import drive
from tests.integrations.requests_sessions import QUICK, Make, Recorder
from tests.integrations.servers import PATIENCE, Answer, FlakyServer, notes_of, unused_url
from tests.integrations.upload_bodies import SlowFile

# --- what may be sent again -------------------------------------------------------------------


def test_a_post_is_tried_again_if_there_was_no_connection_to_the_proxy(session: Make) -> None:
    """Its generator is unread."""
    body = (it for it in [b"order"])
    with pytest.raises(requests.ConnectionError) as caught:
        session().post(unused_url(), data=body, proxies={"http": unused_url()})
    assert "3 attempts" in notes_of(caught.value)
    assert list(body) == [b"order"]


@pytest.mark.parametrize("fault", ["reset", "close"])
def test_a_post_that_a_proxy_has_received_is_sent_once(server: FlakyServer, session: Make, fault: Any) -> None:
    """urllib3 reports that it could not connect to the proxy, also if that closed the connection after the request."""
    url = "http://nowhere.invalid/"
    server.script(url, Answer(fault=fault))
    with pytest.raises(requests.exceptions.ProxyError) as caught:
        session().post(url, data=(it for it in [b"order"]), proxies={"http": server.url})
    assert "its body can be sent only once" in notes_of(caught.value)
    assert [it.body for it in server.requests] == [b"order"]


def test_a_connect_timeout_of_the_users_adapter_says_that_nothing_was_sent(session: Make) -> None:

    class Unreachable(Recorder):
        @override
        def send(self, *args: Any, **options: Any) -> Any:
            raise requests.ConnectTimeout("no route")

    with pytest.raises(requests.ConnectTimeout) as caught:
        session(QUICK, adapter=Unreachable()).post("http://nowhere")
    assert "3 attempts" in notes_of(caught.value)


def test_an_invalid_certificate_is_not_retried(server: FlakyServer, session: Make) -> None:
    client = session()
    client.mount("https://", ResilienceAdapter(QUICK))
    with pytest.raises(requests.exceptions.SSLError) as caught:
        client.get(server.url.replace("http", "https"))
    assert not hasattr(caught.value, "__notes__") or "attempts" not in notes_of(caught.value)


def test_the_body_of_a_response_is_sent_once(server: FlakyServer, session: Make) -> None:
    """A streamed response can be read once, although it has a position."""
    source = session().get(server.script("/source", Answer(body=b"once")), stream=True)
    assert session().put(server.script("/", 503, 200), data=source.raw).status_code == 503
    assert [it.body for it in server.requests_to("/")] == [b"once"]


def test_an_error_of_the_users_body_is_raised_and_not_retried(server: FlakyServer, session: Make) -> None:
    """Only errors of the network are."""

    def body() -> Iterator[bytes]:
        yield b"one"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session(Retry(3, on=Exception, backoff=[0])).put(server.url, data=body())


class FirstAttemptWaits:
    """Delays the first attempt that is about to read a body."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.resume = threading.Event()

    def begin(self, body: Body) -> None:
        if not self.waits.is_set():
            self.waits.set()
            assert self.resume.wait(PATIENCE)
        REALLY_BEGIN(body)


REALLY_BEGIN = Body.begin


class AtTheSameTime(Policy):
    """Makes two attempts at the same time, the first of them in a thread."""

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
    """Also if both were allowed to begin: the other one is refused, and has not rewound it."""
    file = SlowFile(b"order")
    client = session()
    request = client.prepare_request(requests.Request("POST", server.url, {"Idempotency-Key": "4711"}, data=file))
    first = FirstAttemptWaits()
    monkeypatch.setattr(Body, "begin", lambda body: first.begin(body))
    hedge = AtTheSameTime(first.waits)
    client.mount("http://", ResilienceAdapter(hedge))

    def let_the_first_wait() -> None:
        assert file.is_read.wait(PATIENCE)
        first.resume.set()
        hedge.thread.join(PATIENCE)
        file.may_continue.set()

    conductor = threading.Thread(target=let_the_first_wait)
    conductor.start()
    assert client.send(request).status_code == 200
    conductor.join(PATIENCE)
    (refused,) = hedge.failures
    assert isinstance(refused, NotRepeatable)
    assert "still being read by an earlier attempt" in str(refused)
    assert [it.body for it in server.requests] == [b"order"]
