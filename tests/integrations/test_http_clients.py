"""The rules that all HTTP clients share, for each of them: what is retried, sent again, closed, and when."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from resilience import (
    CircuitBreaker,
    CircuitOpen,
    Context,
    DeadlineExceeded,
    Fallback,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    context,
    deadline,
    events,
)
from resilience.integrations.http import TRANSIENT_STATUSES, NotRepeatable, Rules, TransientStatus, standard
from resilience.integrations.wire import ENVOY_EXPECTED_TIMEOUT, Propagation
from resilience.runtimes.driving import drive
from resilience.work import IdempotencyKey
from tests.conftest import FakeClock
from tests.contention.beside import until
from tests.integrations.http_clients import BLOCKING, CLIENTS, QUICK, HTTPClient, process_clock_ahead
from tests.integrations.servers import PATIENCE, Answer, FlakyServer, unused_url
from tests.integrations.upload_bodies import SlowFile


@pytest.fixture(params=CLIENTS, ids=repr)
def client(request: pytest.FixtureRequest) -> HTTPClient:
    """Every client."""
    it: HTTPClient = request.param
    return it


@pytest.fixture(params=BLOCKING, ids=repr)
def blocking_client(request: pytest.FixtureRequest) -> HTTPClient:
    """Every client of blocking code."""
    it: HTTPClient = request.param
    return it


async def attempt(request: Any) -> Any:
    """What came out: the reply, or the exception as a value."""
    try:
        return await request
    except Exception as error:
        return error


def note(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


# --- statuses ---------------------------------------------------------------------------------


async def test_a_status_that_says_not_now_is_retried(server: FlakyServer, client: HTTPClient) -> None:
    """By a plain Retry, with no configuration."""
    async with client.open() as send:
        for status in sorted(TRANSIENT_STATUSES):
            reply = await send("GET", server.script(f"/{status}", status, status, Answer(body=b"fine")))
            assert (reply.status, reply.body) == (200, b"fine")
    assert len(server.requests) == 3 * len(TRANSIENT_STATUSES)


async def test_other_statuses_are_answers(server: FlakyServer, client: HTTPClient) -> None:
    """What is not transient is returned at once; 500 is as often a bug as an overload."""
    statuses = [200, 204, 304, 400, 404, 409, 500, 501]
    async with client.open() as send:
        for status in statuses:
            assert (await send("GET", server.script(f"/{status}", status, 200))).status == status
    assert len(server.requests) == len(statuses)


async def test_500_on_request(server: FlakyServer, client: HTTPClient) -> None:
    """Rules can name more statuses."""
    async with client.open(rules=Rules(statuses=TRANSIENT_STATUSES | {500})) as send:
        assert (await send("GET", server.script("/", 500, 200))).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_the_last_response_is_returned_as_it_is(server: FlakyServer, client: HTTPClient, stream: bool) -> None:
    """Out of attempts, the client's user gets the response, with its body and headers."""
    url = server.script("/", 503, 503, Answer(503, {"X-Why": "busy"}, b"the third"), 200)
    async with client.open() as send:
        reply = await send("GET", url, stream=stream)
        assert (reply.status, reply.headers["X-Why"], await reply.read()) == (503, "busy", b"the third")
    assert len(server.requests) == 3


async def test_a_retry_waits_as_long_as_the_server_asks(
    server: FlakyServer, client: HTTPClient, clock: FakeClock
) -> None:
    """Where that is longer than the backoff."""
    asked = [("retry-after-ms", "2500", 2.5), *(("Retry-After", *it) for it in (("2", 2.0), ("-5", 0), ("soon", 0)))]
    async with client.open() as send:
        for header, value, delay in asked:
            clock.sleeps.clear()
            assert (await send("GET", server.script("/", Answer(429, {header: value}), 200))).status == 200
            assert sum(clock.sleeps) == delay


async def test_a_wait_that_does_not_fit_is_not_begun(server: FlakyServer, client: HTTPClient) -> None:
    """The response that asked for it comes out at once."""
    async with client.open() as send:
        with deadline(PATIENCE):
            reply = await send("GET", server.script("/", Answer(503, {"Retry-After": "3600"}), 200))
        assert reply.status == 503
    assert len(server.requests) == 1


async def test_a_breaker_counts_them(server: FlakyServer, client: HTTPClient) -> None:
    """As the exception `TransientStatus`; then an open circuit sends nothing."""
    url = server.script("/", 503)
    async with client.open(CircuitBreaker(2, on=TransientStatus)) as send:
        assert [(await send("GET", url)).status for _ in range(2)] == [503, 503]
        assert isinstance(await attempt(send("GET", url)), CircuitOpen)
    assert len(server.requests) == 2


async def test_the_standard_pipeline_has_a_breaker_for_each_host(server: FlakyServer, client: HTTPClient) -> None:
    """One host that is down does not keep requests from another."""
    url = server.script("/down", 503)
    async with client.open(standard(attempts=1, min_calls=2, failure_ratio=1.0)) as send:
        assert [(await send("GET", url)).status for _ in range(2)] == [503, 503]
        assert isinstance(await attempt(send("GET", url)), CircuitOpen)
        assert (await send("GET", url.replace("127.0.0.1", "localhost"))).status == 503


async def test_a_fallback_answers_with_a_response(server: FlakyServer, client: HTTPClient) -> None:
    """The client could not go on with anything else; the response that lost is closed."""
    lost: list[Any] = []

    def cached(failure: Any, ctx: Context) -> str:
        lost.append(failure.error.response)
        return "cached"

    async with client.open(Fallback(handler=cached)) as send:
        for _ in range(2):  # with one connection
            error = await attempt(send("GET", server.script("/", Answer(503, body=b"x" * 99_999)), stream=True))
            assert isinstance(error, TypeError)
            assert "answered with 'cached'" in str(error)
    assert len(lost) == 2


# --- what may be sent again -------------------------------------------------------------------


async def test_methods_that_do_no_harm_twice_are_sent_again(server: FlakyServer, client: HTTPClient) -> None:
    """Whatever came of the first time."""
    async with client.open() as send:
        for method, headers in (("PUT", {}), ("DELETE", {}), ("POST", {"idempotency-key": "4711"})):
            for failure in (503, Answer(fault="reset"), Answer(fault="close")):
                server.requests.clear()
                reply = await send(method, server.script("/", failure, 200), headers=headers, data=b"order")
                assert (reply.status, [it.body for it in server.requests]) == (200, [b"order"] * 2)


async def test_other_methods_are_sent_once(server: FlakyServer, client: HTTPClient) -> None:
    """They may have been carried out; and the failure says so."""
    async with client.open() as send:
        for method, headers in (("POST", {}), ("PATCH", {}), ("POST", {"Idempotency-Key": ""})):
            server.requests.clear()
            reply = await send(method, server.script("/", 503, 200), headers=headers, data=b"order")
            assert reply.status == 503
            for fault in ("reset", "close"):
                url = server.script("/", Answer(fault=fault), 200)  # type: ignore[arg-type]
                error = await attempt(send(method, url, headers=headers, data=b"order"))
                assert isinstance(error, client.error)
                assert error.repeatable is False  # type: ignore[attr-defined]
                assert f"{method} may have been carried out, and carries no Idempotency-Key" in note(error)
            assert [it.body for it in server.requests] == [b"order"] * 3


async def test_the_rules_may_name_more_methods(server: FlakyServer, client: HTTPClient) -> None:
    """Where the user knows that a POST does no harm twice."""
    async with client.open(rules=Rules(methods={"GET", "POST"})) as send:
        assert (await send("POST", server.script("/", 503, 200))).status == 200


async def test_what_was_never_sent_is_tried_again(server: FlakyServer, client: HTTPClient) -> None:
    """No connection could be made: any method is repeated, and its body is untouched."""
    body = client.generator(b"on", b"ce")
    async with client.open() as send:
        error = await attempt(send("POST", unused_url(), data=body))
        assert isinstance(error, client.error)
        assert "3 attempts" in note(error)
        assert (await send("POST", server.url, data=body)).status == 200
    assert [it.body for it in server.requests] == [b"once"]


@pytest.mark.parametrize(("status", "attempts"), [(503, 3), (407, 1)])
async def test_a_proxy_that_does_not_connect(
    server: FlakyServer, client: HTTPClient, status: int, attempts: int
) -> None:
    """Nothing was sent, so any method may be repeated; but a proxy that asks for a login will ask again."""
    server.script("nowhere.invalid:443", status)
    async with client.open(Retry(3, on=Exception, backoff=[0]), proxy=server.url) as send:
        error = await attempt(send("POST", "https://nowhere.invalid/", data=client.generator(b"order")))
        assert isinstance(error, client.error)
        assert ("the request is not sent again: the proxy asks for a login" in note(error)) is (status == 407)
    assert [it.method for it in server.requests] == ["CONNECT"] * attempts


async def test_a_policy_is_told_what_must_not_be_repeated(server: FlakyServer, client: HTTPClient) -> None:
    """On the failure itself, for a listener that looks at it."""
    seen: list[Any] = []
    async with client.open(Policy.wrap(QUICK, listeners=[seen.append])) as send:
        await send("POST", server.script("/", 503, 503, 200))
        await send("GET", server.url)
    failures = [it.outcome.error for it in seen if isinstance(it, events.AttemptFailed)]
    assert [it.repeatable for it in failures] == [False, True]
    assert "POST may have been carried out" in note(failures[0])


class Stubborn(Policy[Any]):
    """Calls twice, whatever the exchange says."""

    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            return await call(ctx)
        except TransientStatus as failure:
            await ctx.runtime.close(failure.response)
        except TimeoutExceeded:
            pass
        return await call(ctx)


async def test_a_policy_that_does_not_ask_cannot_repeat_it_either(server: FlakyServer, client: HTTPClient) -> None:
    """A second call for a request that must not be sent twice sends nothing."""
    async with client.open(Stubborn()) as send:
        assert (await send("GET", server.script("/", 503, 200))).status == 200
        error = await attempt(send("POST", server.script("/", 503, 200)))
        assert isinstance(error, NotRepeatable)
        assert "POST may have been carried out" in str(error)
    assert [it.method for it in server.requests] == ["GET", "GET", "POST"]


async def test_a_timeout_does_not_have_a_post_sent_again(server: FlakyServer, client: HTTPClient) -> None:
    """A call that was cut off leaves no failure of its own, and yet a Retry around it knows."""
    url = server.script("/", Answer(hold=threading.Event()))
    async with client.open(QUICK.wrap(Timeout(0.3))) as send:
        error = await attempt(send("POST", url, data=b"order"))
        assert isinstance(error, TimeoutExceeded)
        assert error.repeatable is False  # type: ignore[attr-defined]
    server.wait_until(lambda: server.requests)
    assert len(server.requests) == 1


async def test_a_client_that_is_closed_in_a_wait_sends_nothing_more(server: FlakyServer, client: HTTPClient) -> None:
    """However many attempts there are, and whatever is retried."""
    url = server.script("/", 503)

    class Closing(Policy[Any]):
        """Closes the client between two attempts."""

        async def around(self, call: Any, ctx: Context) -> Any:
            with contextlib.suppress(TransientStatus):
                await call(ctx)
            result = end()
            if not client.world.blocking:
                await result
            return await Retry(5, on=Exception, backoff=[0]).around(call, ctx)

    end: Any = None
    async with client.open(Closing()) as send:
        end = send.end
        error = await attempt(send("GET", url))
        assert isinstance(error, (NotRepeatable, RuntimeError))
        assert "closed" in str(error)
    assert len(server.requests) == 1


# --- bodies of requests -----------------------------------------------------------------------


async def test_a_body_that_can_be_produced_again_is_sent_again(
    server: FlakyServer, client: HTTPClient, tmp_path: Path
) -> None:
    """It arrives whole at each attempt: what is in memory, and a file from where it stood."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file:
        bodies: list[Any] = [b"content", "content"]
        if not client.takes_no_file:
            bodies += [io.BytesIO(b"content"), file]
        async with client.open() as send:
            for body in bodies:
                url = server.script("/", 503, Answer(fault="reset"), 200)
                assert (await send("PUT", url, data=body)).status == 200
    assert [it.body for it in server.requests] == [b"content"] * 3 * len(bodies)


@pytest.mark.parametrize("answer", [503, Answer(fault="reset")], ids=["503", "reset"])
async def test_what_can_be_sent_only_once_is_sent_once(server: FlakyServer, client: HTTPClient, answer: Any) -> None:
    """An empty body would arrive, and be answered with 200; an Idempotency-Key changes nothing in that."""
    async with client.open() as send:
        body = client.generator(b"on", b"ce")
        url = server.script("/", answer, 200)
        outcome = await attempt(send("PUT", url, data=body, headers={"Idempotency-Key": "4711"}))
        if isinstance(outcome, Exception):
            assert "its body can be sent only once" in note(outcome)
        else:
            assert outcome.status == 503
    assert [it.body for it in server.requests] == [b"once"]


async def test_a_redirect_does_not_send_it_either(server: FlakyServer, client: HTTPClient) -> None:
    """The client itself would send what is left of it in the next hop, nothing."""
    server.script("/from", Answer(307, {"Location": "/to"}))
    async with client.open() as send:
        error = await attempt(send("PUT", f"{server.url}/from", data=client.generator(b"on", b"ce")))
        assert isinstance(error, client.used_up)
    assert [(it.path, it.body) for it in server.requests] == [("/from", b"once")]


async def test_each_hop_of_a_redirect_has_attempts_of_its_own(server: FlakyServer, client: HTTPClient) -> None:
    """A file is rewound for each of them (where the client itself does so), and the headers stay."""
    server.script("/from", 503, Answer(307, {"Location": "/to"}))
    server.script("/to", 503, Answer(body=b"there"))
    data = b"body" if "httpx" in repr(client) else io.BytesIO(b"body")
    async with client.open() as send:
        reply = await send("PUT", f"{server.url}/from", data=data, headers={"X-A": "1"})
        assert (reply.status, reply.body) == (200, b"there")
    assert [(it.path, it.body) for it in server.requests] == [(it, b"body") for it in ("/from", "/from", "/to", "/to")]
    assert {it.headers["X-A"] for it in server.requests} == {"1"}


@pytest.mark.parametrize("policy", [QUICK, Stubborn()], ids=["retry", "stubborn"])
async def test_a_file_that_is_still_being_read_is_not_sent_again(
    server: FlakyServer, blocking_client: HTTPClient, policy: Policy[Any]
) -> None:
    """An attempt that was walked away from goes on reading; rewinding its file would mix up both bodies."""
    file = SlowFile(b"x" * 10)
    async with blocking_client.open(policy.wrap(Timeout(0.2))) as send:
        error = await attempt(send("PUT", server.url, data=file))
        assert isinstance(error, TimeoutExceeded if policy is QUICK else NotRepeatable)
        assert file.is_read.is_set()
        file.let_go.set()
        server.wait_until(lambda: Timeout.abandoned() == 0)
    assert [it.body for it in server.requests] in ([b"x" * 10], [])  # httpx does not begin to send after its time


# --- responses --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_connections_go_back_to_the_pool(server: FlakyServer, client: HTTPClient, stream: bool) -> None:
    """With one connection for all, discarded responses keep no request waiting."""
    discarded = Answer(503, body=b"x" * 1_000_000)
    async with client.open() as send:
        for _ in range(3):
            reply = await send("GET", server.script("/", discarded, discarded, 200), stream=stream)
            assert await reply.read() == b"ok"


async def test_a_stream_is_open_when_it_is_returned(server: FlakyServer, client: HTTPClient) -> None:
    """Its body is read by whoever asked for it; left early, it gives its connection back."""
    rest = threading.Event()
    url = server.script("/", 503, Answer(body=[b"first", b"rest"], drip=rest, chunked=True))
    async with client.open(QUICK.wrap(Timeout(PATIENCE))) as send:
        reply = await send("GET", url, stream=True)
        rest.set()
        assert await reply.read() == b"firstrest"
        rest.clear()
        reply = await send("GET", url, stream=True)
        await reply.close()
        assert (await send("GET", f"{server.url}/other")).body == b"ok"


async def test_a_body_that_breaks_off(server: FlakyServer, client: HTTPClient) -> None:
    """Where it is read in the attempt, that is a failure like any other; else it comes out, and is not retried."""
    cut = Answer(body=[b"first", b"rest"], fault="cut")
    in_attempt = client.reads_in_attempt
    options = {} if in_attempt else {"read_body": True}
    async with client.open(**options) as send:
        reply = await send("GET", server.script("/", cut, cut, Answer(body=b"whole")))
        assert reply.body == b"whole"
    async with client.open() as send:
        url = server.script("/once", cut, 200)
        reply = await attempt(send("GET", url, stream=True))
        assert isinstance(await attempt(reply.read()), client.error)
    assert len(server.requests_to("/once")) == 1


@pytest.mark.parametrize("retried", [False, True])
async def test_a_response_that_comes_too_late_is_closed(
    server: FlakyServer, blocking_client: HTTPClient, retried: bool
) -> None:
    """Its caller has walked away from the attempt: its connection is free for the next one, or closed at the end."""
    late = threading.Event()
    url = server.script("/", Answer(body=b"x" * 999_999, hold=late), Answer(body=b"in time"))
    again = Retry(9, backoff=[0.1], on_retry=lambda event: late.set())
    async with blocking_client.open(again.wrap(Timeout(0.5)) if retried else Timeout(0.2)) as send:
        outcome = await attempt(send("GET", url, stream=True))
        if retried:
            assert await outcome.read() == b"in time"
        else:
            assert isinstance(outcome, TimeoutExceeded)
        late.set()
        server.wait_until(lambda: Timeout.abandoned() == 0)
        assert (await send("GET", f"{server.url}/other")).body == b"ok"  # there is one connection to be had


class Leaving(Policy[Any]):
    """Leaves its call behind in a thread or task, once the server has the request, and keeps what becomes of it."""

    def __init__(self, server: FlakyServer, group: Any) -> None:
        self.server = server
        self.group = group
        self.outcomes: list[object] = []

    async def around(self, call: Any, ctx: Context) -> Any:
        async def left_behind() -> None:
            self.outcomes.append(await attempt(call(ctx)))

        if self.group is None:
            threading.Thread(target=lambda: drive(left_behind())).start()
            self.server.wait_until(lambda: self.server.requests)
        else:
            self.group.start_soon(left_behind)
            await anyio.to_thread.run_sync(self.server.wait_until, lambda: self.server.requests)
        raise LookupError("not waiting for it")


async def test_a_response_that_comes_when_the_exchange_is_over_is_closed(
    server: FlakyServer, client: HTTPClient
) -> None:
    """Whoever waited for it has left, for whatever reason: Ctrl-C is one. And what begins then sends nothing."""
    late = threading.Event()
    url = server.script("/", Answer(body=b"x" * 999_999, hold=late))
    async with contextlib.AsyncExitStack() as stack:
        blocking = client.world.blocking
        leaving = Leaving(server, None if blocking else await stack.enter_async_context(anyio.create_task_group()))
        send = await stack.enter_async_context(client.open(leaving))
        assert isinstance(await attempt(send("GET", url, stream=True)), LookupError)
        late.set()
        while not leaving.outcomes:
            await client.world.sleep(0.01)
        (outcome,) = leaving.outcomes
        assert isinstance(outcome, DeadlineExceeded)
        assert "the response came after its time" in str(outcome)
        await until(client.world, lambda: server.open_connections == 0)
    assert len(server.requests) == 1


# --- time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [QUICK, Timeout(PATIENCE), Timeout(PATIENCE, cooperative=True)], ids=repr)
async def test_a_server_that_hangs_is_left_at_the_deadline(
    server: FlakyServer, client: HTTPClient, policy: Policy[Any]
) -> None:
    """A deadline that by itself cuts nothing off does so here; its connection is free again."""
    url = server.script("/", Answer(hold=threading.Event()))
    async with client.open(policy) as send:
        began = time.monotonic()
        with deadline(0.1):
            assert type(await attempt(send("GET", url))) is DeadlineExceeded
        assert 0.09 <= time.monotonic() - began < PATIENCE / 2
        assert (await send("GET", f"{server.url}/other")).status == 200


async def test_nothing_is_sent_after_the_deadline(server: FlakyServer, client: HTTPClient) -> None:
    """Not a byte."""
    async with client.open(CircuitBreaker(5)) as send:
        with deadline(0):
            assert type(await attempt(send("GET", server.url))) is DeadlineExceeded
    assert server.connections == 0


@pytest.mark.parametrize("cooperative", [True, False])
async def test_the_timeout_whose_limit_it_was_is_named(
    server: FlakyServer, client: HTTPClient, cooperative: bool
) -> None:
    """An attempt's timeout is no deadline of the whole, and the attempt is repeated."""
    url = server.script("/", Answer(hold=threading.Event()))
    async with client.open(Retry(2, backoff=[0]).wrap(Timeout(0.1, cooperative=cooperative))) as send:
        error = await attempt(send("GET", url))
        assert type(error) is TimeoutExceeded
        assert "no result within 0.1 s" in str(error)
        assert "2 attempts" in note(error)


async def test_a_timeout_of_the_users_own_is_a_failure_like_others(server: FlakyServer, client: HTTPClient) -> None:
    """One that is shorter than what is left stays the client's, and is retried."""
    url = server.script("/", Answer(hold=threading.Event()))
    async with client.open(Timeout(PATIENCE).wrap(Retry(2, backoff=[0]))) as send:
        error = await attempt(send("GET", url, timeout=0.1))
        assert isinstance(error, client.error)
        assert "2 attempts" in note(error)


async def test_a_client_that_gives_up_a_little_early_has_met_the_deadline(
    server: FlakyServer, client: HTTPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers are not exact. Here a little is made a lot."""
    monkeypatch.setattr(context, "EARLIEST", PATIENCE)
    url = server.script("/", Answer(hold=threading.Event()))
    async with client.open(CircuitBreaker(5)) as send:
        with deadline(PATIENCE):
            assert type(await attempt(send("GET", url, timeout=0.05))) is DeadlineExceeded


@pytest.mark.parametrize(
    ("policy", "kind", "chunked"), [(Timeout(0.2), TimeoutExceeded, True), (QUICK, DeadlineExceeded, False)]
)
async def test_a_body_that_stops_is_left_at_its_time(
    server: FlakyServer, client: HTTPClient, policy: Policy[Any], kind: type[Exception], chunked: bool
) -> None:
    """It has the time of the attempt that brought it; the error says whose time it was."""
    url = server.script("/", Answer(body=[b"a", b"b"], drip=threading.Event(), chunked=chunked))
    async with client.open(policy) as send:
        with deadline(0.2) if kind is DeadlineExceeded else contextlib.nullcontext():
            reply = await send("GET", url, stream=True)
        began = time.monotonic()
        with pytest.raises(TimeoutExceeded, match="limit_body") as caught:
            await reply.read()
        assert type(caught.value) is kind
        assert time.monotonic() - began < PATIENCE / 2
        await reply.close()


async def test_a_body_takes_as_long_as_it_likes_where_the_rules_say_so(server: FlakyServer, client: HTTPClient) -> None:
    """What was left of the attempt is no limit to it."""
    rest = threading.Event()
    url = server.script("/", Answer(body=[b"a", b"b"], drip=rest))
    async with client.open(Timeout(0.2), rules=Rules(limit_body=False)) as send:
        reply = await send("GET", url, stream=True)
        timer = threading.Timer(0.2, rest.set)
        timer.start()
        assert await reply.read() == b"ab"
        timer.join()


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_body_has_the_time_of_the_whole_call(server: FlakyServer, client: HTTPClient, connection: str) -> None:
    """With the standard pipeline, whatever becomes of the connection."""
    rest = threading.Event()
    url = server.script("/", Answer(headers={"Connection": connection}, body=[b"a", b"b"], drip=rest))
    async with client.open(standard(total_timeout=PATIENCE, attempt_timeout=0.1)) as send:
        reply = await send("GET", url, stream=True)
        timer = threading.Timer(0.2, rest.set)
        timer.start()
        assert await reply.read() == b"ab"
        timer.join()


async def test_the_body_of_a_fallbacks_response_has_its_own_time(server: FlakyServer, client: HTTPClient) -> None:
    """What was left of the attempt that failed means nothing to it."""
    server.script("/mirror", Answer(body=b"mirrored"))
    async with client.open() as mirror:

        async def ask(failure: Any, ctx: Context) -> Any:
            return (await mirror("GET", f"{server.url}/mirror", stream=True)).raw

        policy = Fallback(handler=client.world.native(ask)).wrap(Timeout(PATIENCE, cooperative=True))
        async with client.open(policy) as send:
            reply = await send("GET", server.script("/", 503), stream=True)
            with process_clock_ahead(2 * PATIENCE):
                assert await reply.read() == b"mirrored"


async def test_a_body_that_was_read_is_not_late(server: FlakyServer, client: HTTPClient) -> None:
    """It is there for ever."""
    async with client.open(Timeout(PATIENCE)) as send:
        reply = await send("GET", server.url)
        with process_clock_ahead(2 * PATIENCE):
            assert await reply.read() == b"ok"


# --- telemetry, and the deadline on the wire --------------------------------------------------


async def test_the_operation_is_the_method_and_the_host(server: FlakyServer, client: HTTPClient) -> None:
    """No path and no query: those would make as many names as there are requests."""
    seen: list[Any] = []
    async with client.open(Policy.wrap(QUICK, listeners=[seen.append])) as send:
        await send("GET", f"{server.url}/users/4711?token=secret")

        async def call(ctx: Context) -> None:
            await send("GET", server.url)

        named = Context(operation="get-user", properties={"tenant": "a"})
        await client.world.execute(CircuitBreaker(5), call, named)
    finished = [it for it in seen if isinstance(it, events.ExecutionFinished)]
    assert [it.operation for it in finished] == ["GET 127.0.0.1", "get-user"]
    assert finished[1].properties == {"tenant": "a"}


async def test_the_deadline_is_told_to_hosts_that_are_named(server: FlakyServer, client: HTTPClient) -> None:
    """Anew for each attempt, under the name that `wire.Propagation` gives it; and to no other host."""
    elsewhere = f"{server.url}/to".replace("127.0.0.1", "localhost")
    server.script("/from", 503, Answer(302, {"Location": elsewhere}))
    named = Propagation(["127.0.0.1"], header="X-Budget-Ms")
    async with client.open(propagate_to=named) as send:
        with deadline(PATIENCE):
            await send("GET", f"{server.url}/from", headers={"X-Other": "1"})
        await send("GET", f"{server.url}/without")
    async with client.open(propagate_to=["127.0.0.1"]) as send:
        with deadline(PATIENCE):
            await send("GET", f"{server.url}/default", headers={ENVOY_EXPECTED_TIMEOUT: "99999999"})
    first, second, redirected, without, default = server.requests
    assert int(second.headers["X-Budget-Ms"]) <= int(first.headers["X-Budget-Ms"]) <= PATIENCE * 1000
    assert (redirected.path, redirected.headers["X-Budget-Ms"]) == ("/to", None)
    assert without.headers["X-Budget-Ms"] is None
    assert int(default.headers[ENVOY_EXPECTED_TIMEOUT]) <= PATIENCE * 1000


# --- wrong arguments --------------------------------------------------------------------------


def test_wrong_arguments_are_refused(client: HTTPClient) -> None:
    """Where they are written, with the value."""
    for policy, options, message in (
        (None, {}, "policy must be a policy, or have one for each host"),
        (Retry, {}, "policy must be a policy"),
        (QUICK, {"rules": 503}, "rules must be Rules, not 503"),
        (QUICK, {"propagate_to": "localhost"}, "propagate_to must be a sequence of hosts"),
    ):
        with pytest.raises(TypeError, match=message):
            client.make(policy, **options)  # type: ignore[arg-type]


# --- idempotency keys -------------------------------------------------------------------------


def keys_of(server: FlakyServer) -> list[str | None]:
    return [it.headers["Idempotency-Key"] for it in server.requests]


@pytest.mark.parametrize("outermost", [True, False])
async def test_a_key_of_the_execution_lets_a_post_be_repeated(
    server: FlakyServer, client: HTTPClient, outermost: bool
) -> None:
    """One key in all attempts of a request, another one for the next request, wherever the policy stands."""
    policy = IdempotencyKey().wrap(QUICK) if outermost else QUICK.wrap(IdempotencyKey())
    async with client.open(policy) as send:
        for path in ("/one", "/two"):
            reply = await send("POST", server.script(path, 503, Answer(fault="reset"), 200), data=b"body")
            assert reply.status == 200
    first, second = keys_of(server)[:3], keys_of(server)[3:]
    assert [len(set(it)) for it in (first, second)] == [1, 1]
    assert first[0] is not None
    assert first[0] != second[0]
    assert [it.body for it in server.requests] == [b"body"] * 6


async def test_a_header_of_the_requests_own_is_kept(server: FlakyServer, client: HTTPClient) -> None:
    """In any case of letters, and it is what lets the request be repeated."""
    async with client.open(IdempotencyKey().wrap(QUICK)) as send:
        url = server.script("/", 503, 200)
        assert (await send("POST", url, headers={"idempotency-key": "own"}, data=b"body")).status == 200
    assert keys_of(server) == ["own", "own"]


async def test_the_key_of_a_call_around_is_not_sent(server: FlakyServer, client: HTTPClient) -> None:
    """That call may send several requests, which are not the same one; a key that the caller has given is sent."""
    given = Context(properties={"idempotency_key": "order-7"})
    async with client.open(QUICK) as send:

        async def fn(ctx: Context) -> Any:
            return await send("POST", server.script("/", 503, 200), data=b"body")

        assert (await client.world.attempt(IdempotencyKey(), fn)).status == 503
        assert keys_of(server) == [None]
        assert (await client.world.attempt(Retry(1), fn, given)).status == 200
        assert keys_of(server) == [None, "order-7", "order-7"]


async def test_a_key_does_not_bring_a_body_back(server: FlakyServer, client: HTTPClient) -> None:
    """What can be sent only once is sent once."""
    async with client.open(IdempotencyKey().wrap(QUICK)) as send:
        outcome = await attempt(send("POST", server.script("/", 503, 200), data=client.generator(b"a", b"b")))
    assert getattr(outcome, "status", 503) == 503
    assert len(server.requests) == 1


async def test_the_rules_name_the_header(server: FlakyServer, client: HTTPClient) -> None:
    rules = Rules(idempotency_header="X-Request-Key")
    async with client.open(IdempotencyKey(lambda: "k").wrap(QUICK), rules=rules) as send:
        assert (await send("POST", server.script("/", 503, 200), data=b"body")).status == 200
    assert [it.headers["X-Request-Key"] for it in server.requests] == ["k", "k"]
    assert keys_of(server) == [None, None]
