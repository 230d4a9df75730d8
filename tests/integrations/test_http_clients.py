"""The rules that all HTTP clients share, tested with each: statuses, repeats, bodies, responses and deadlines."""

from __future__ import annotations

import contextlib
import gc
import io
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
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
    Hedge,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    deadline,
    events,
)
from resilience.callables import maybe_await
from resilience.integrations.http import TRANSIENT_STATUSES, NotRepeatable, Rules, TransientStatus, standard
from resilience.integrations.http.exchange import Exchange
from resilience.integrations.wire import ENVOY_EXPECTED_TIMEOUT, Propagation
from resilience.runtimes import base
from resilience.runtimes.driving import drive
from resilience.work import IdempotencyKey
from tests.conftest import FakeClock, Watched
from tests.contention.beside import until
from tests.custom import Recording
from tests.integrations.http_clients import (
    BLOCKING,
    CLIENTS,
    QUICK,
    Client,
    Requests,
    Urllib3,
    each_of,
    outcome_of,
    process_clock_ahead,
)
from tests.integrations.servers import PATIENCE, Answer, Server, notes_of, unused_url
from tests.integrations.upload_bodies import SlowFile
from tests.policies.retries import oversleep

TASKS = [it for it in CLIENTS if not it.world.blocking]


client, blocking_client = each_of(CLIENTS), each_of(BLOCKING)


# --- statuses ---------------------------------------------------------------------------------


async def test_transient_statuses_are_retried_and_others_are_results(server: Server, client: Client) -> None:
    """Under a plain Retry, with no configuration. 500 is a result, as it is as often a bug as an overload."""
    results = [200, 204, 304, 400, 404, 409, 500, 501]
    async with client.open() as send:
        for status in sorted(TRANSIENT_STATUSES):
            reply = await send("GET", server.script(f"/{status}", status, status, Answer(body=b"fine")))
            assert (reply.status, reply.body) == (200, b"fine")
        for status in results:
            assert (await send("GET", server.script(f"/{status}", status, 200))).status == status
    assert len(server.requests) == 3 * len(TRANSIENT_STATUSES) + len(results)


@pytest.mark.parametrize(("body", "chunked"), [(b"", False), (b"x" * 1_000_000, False), (b"x" * 1_000_000, True)])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_that_was_closed_before_a_wait_that_took_too_long_is_not_returned(
    server: Server,
    client: Client,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    body: bytes,
    chunked: bool,
) -> None:
    """Nobody could read its body, unless it was empty, or was read in the attempt. Some clients would show none."""
    oversleep(clock, monkeypatch, 10.0)
    url = server.script("/", Answer(503, body=[body], chunked=chunked))
    async with client.open(Retry(backoff=[2], max_elapsed=5)) as send:
        if (body and stream) or not client.reads_in_attempt:
            with pytest.raises(DeadlineExceeded, match="the last response was closed before it"):
                await send("GET", url, stream=stream)
        else:
            assert await (await send("GET", url, stream=stream)).read() == body


@pytest.mark.parametrize("stream", [True, False])
async def test_the_last_response_is_returned(server: Server, client: Client, stream: bool) -> None:
    """The caller gets the server's response, with its body and headers, and no error."""
    url = server.script("/", 503, 503, Answer(503, {"X-Why": "busy"}, b"the third"), 200)
    async with client.open() as send:
        reply = await send("GET", url, stream=stream)
        assert (reply.status, reply.headers["X-Why"], await reply.read()) == (503, "busy", b"the third")
    assert len(server.requests) == 3


async def test_a_response_is_returned_when_concurrent_attempts_have_failed(server: Server, client: Client) -> None:
    """That of the first attempt, although its client may have closed it by itself before the other one came."""
    both = threading.Event()
    url = server.script("/", Answer(503, hold=both), Answer(503, delay=0.1))
    threading.Thread(target=lambda: (server.wait_until(lambda: len(server.requests) == 2), both.set())).start()
    async with client.open(Hedge(0.005), connections=2) as send:
        assert (await send("GET", url)).status == 503
    assert len(server.requests) == 2


async def test_a_retry_waits_as_long_as_the_server_asks(server: Server, client: Client, clock: FakeClock) -> None:
    """The wait is the longer one of the backoff and what the server asks for."""
    cases = [("retry-after-ms", "2500", 2.5), *(("Retry-After", *it) for it in (("2", 2.0), ("-5", 0), ("soon", 0)))]
    async with client.open() as send:
        for header, value, delay in cases:
            clock.sleeps.clear()
            assert (await send("GET", server.script("/", Answer(429, {header: value}), 200))).status == 200
            assert sum(clock.sleeps) == delay


async def test_the_standard_pipeline_has_a_breaker_for_each_host(server: Server, client: Client) -> None:
    """The open circuit of one host does not refuse requests to another."""
    url = server.script("/down", 503)
    async with client.open(standard(attempts=1, min_calls=2, failure_ratio=1.0)) as send:
        assert [(await send("GET", url)).status for _ in range(2)] == [503, 503]
        assert isinstance(await outcome_of(send("GET", url)), CircuitOpen)
        assert (await send("GET", url.replace("127.0.0.1", "localhost"))).status == 503
    assert len(server.requests) == 3


async def test_a_fallback_that_returns_no_response_is_an_error(server: Server, client: Client) -> None:
    """The client could not use anything else. The response that was replaced is closed."""
    replaced: list[Any] = []

    def cached(failure: Any, ctx: Context) -> str:
        replaced.append(failure.error.response)
        return "cached"

    async with client.open(Fallback(handler=cached)) as send:
        for _ in range(2):  # with one connection
            error = await outcome_of(send("GET", server.script("/", Answer(503, body=b"x" * 99_999)), stream=True))
            assert isinstance(error, TypeError)
            assert "answered with 'cached'" in str(error)
    assert len(replaced) == 2


# --- what may be sent again -------------------------------------------------------------------


async def test_idempotent_requests_are_sent_again(server: Server, client: Client) -> None:
    """After any failure: a transient status, a reset connection, a closed connection, an answer that is no HTTP."""
    async with client.open() as send:
        for method, headers in (("PUT", {}), ("DELETE", {}), ("POST", {"idempotency-key": "4711"})):
            for failure in (503, Answer(fault="reset"), Answer(fault="close"), Answer(fault="garbage")):
                server.requests.clear()
                reply = await send(method, server.script("/", failure, 200), headers=headers, data=b"order")
                assert (reply.status, [it.body for it in server.requests]) == (200, [b"order"] * 2)


async def test_requests_that_are_not_idempotent_are_sent_once(server: Server, client: Client) -> None:
    """The server may have carried them out, and a note on the error says so."""
    async with client.open() as send:
        for method, headers in (("POST", {}), ("PATCH", {}), ("POST", {"Idempotency-Key": ""})):
            server.requests.clear()
            reply = await send(method, server.script("/", 503, 200), headers=headers, data=b"order")
            assert reply.status == 503
            for fault in ("reset", "close", "garbage"):
                url = server.script("/", Answer(fault=fault), 200)  # type: ignore[arg-type]
                error = await outcome_of(send(method, url, headers=headers, data=b"order"))
                assert isinstance(error, client.error)
                assert error.repeatable is False  # type: ignore[attr-defined]
                assert f"{method} may have been carried out, and carries no Idempotency-Key" in notes_of(error)
            assert [it.body for it in server.requests] == [b"order"] * 4


async def test_any_request_is_tried_again_if_there_was_no_connection(server: Server, client: Client) -> None:
    """Nothing was sent, so that a POST is repeated too, and its body, a generator or a file, is unread."""
    async with client.open() as send:
        for body in [client.generator(b"on", b"ce")] + [io.BytesIO(b"once")] * (not client.takes_no_file):
            error = await outcome_of(send("POST", unused_url(), data=body))
            assert isinstance(error, client.error)
            assert "3 attempts" in notes_of(error)
            assert (await send("POST", server.url, data=body)).status == 200
    assert {it.body for it in server.requests} == {b"once"}


@pytest.mark.parametrize(("status", "attempts"), [(503, 3), (407, 1)])
async def test_a_request_through_a_proxy_that_does_not_connect_was_not_sent(
    server: Server, client: Client, status: int, attempts: int
) -> None:
    """Any method may be repeated, unless the proxy asks for a login: it would ask again."""
    server.script("nowhere.invalid:443", status)
    async with client.open(Retry(3, on=Exception, backoff=[0]), proxy=server.url) as send:
        error = await outcome_of(send("POST", "https://nowhere.invalid/", data=client.generator(b"order")))
        assert isinstance(error, client.error)
        assert ("the request is not sent again: the proxy asks for a login" in notes_of(error)) is (status == 407)
    assert [it.method for it in server.requests] == ["CONNECT"] * attempts


async def test_the_failure_says_whether_the_request_may_be_repeated(server: Server, client: Client) -> None:
    """It has the attribute `repeatable`, which a listener can read: a status, and an error of the client."""
    seen: list[tuple[bool, bool]] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.AttemptFailed):
            error: Any = event.outcome.error
            seen.append((getattr(error, "repeatable", True), "POST may have been carried out" in notes_of(error)))

    async with client.open(Policy.wrap(QUICK, listeners=[listen])) as send:
        url = server.script("/", 503, 503, 200, Answer(fault="reset"))
        await send("POST", url)
        await send("GET", url)
        assert isinstance(await outcome_of(send("POST", url)), client.error)
    assert seen == [(False, True), (True, False), (False, True)]


class AlwaysTwice(Policy[Any]):
    """Calls twice, also if the request must not be repeated."""

    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            return await call(ctx)
        except TransientStatus as failure:
            await ctx.runtime.close(failure.response)
        except TimeoutExceeded:
            pass
        return await call(ctx)


async def test_a_policy_that_ignores_repeatable_cannot_repeat_a_post(server: Server, client: Client) -> None:
    """A second call for a request that must not be sent twice sends nothing."""
    async with client.open(AlwaysTwice()) as send:
        assert (await send("GET", server.script("/", 503, 200))).status == 200
        error = await outcome_of(send("POST", server.script("/", 503, 200)))
        assert isinstance(error, NotRepeatable)
        assert "POST may have been carried out" in str(error)
    assert [it.method for it in server.requests] == ["GET", "GET", "POST"]


async def test_a_post_is_not_sent_again_after_a_timeout(server: Server, client: Client) -> None:
    """The error is that of the Timeout, and a Retry around it still knows that the request was sent."""
    url = server.script("/", Answer(hold=threading.Event()))
    async with client.open(QUICK.wrap(Timeout(0.3))) as send:
        error = await outcome_of(send("POST", url, data=b"order"))
        assert isinstance(error, TimeoutExceeded)
        assert error.repeatable is False  # type: ignore[attr-defined]
    server.wait_until(lambda: server.requests)
    assert len(server.requests) == 1


async def test_a_client_closed_between_two_attempts_sends_nothing_more(server: Server, client: Client) -> None:
    """Also if attempts are left and any error is retried."""

    class Closing(Policy[Any]):
        """Closes the client between two attempts."""

        async def around(self, call: Any, ctx: Context) -> Any:
            with contextlib.suppress(TransientStatus):
                await call(ctx)
            await maybe_await(end())
            return await Retry(5, on=Exception, backoff=[0]).around(call, ctx)

    async with client.open(Closing()) as send:
        end = send.end
        error = await outcome_of(send("GET", server.script("/", 503)))
        assert isinstance(error, (NotRepeatable, RuntimeError))
        assert "closed" in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("client", [Requests(), Urllib3()], ids=repr)
async def test_a_client_that_was_closed_can_be_used_again(server: Server, client: Client) -> None:
    """With new connections. Its later requests are sent again after a failure."""
    async with client.open() as send:
        for _ in range(2):
            assert (await send("GET", server.script("/", 503, 200))).status == 200
            send.end()
    assert server.connections == 2


# --- bodies of requests -----------------------------------------------------------------------


async def test_a_repeatable_body_is_sent_whole_at_each_attempt(server: Server, client: Client, tmp_path: Path) -> None:
    """A body in memory, a file, and forms."""
    path = tmp_path / "file"
    path.write_bytes(b"once")
    with path.open("rb") as file:
        bodies: list[Any] = [b"once", "once", *[io.BytesIO(b"once"), file] * (not client.takes_no_file)]
        async with client.open() as send:
            for options in [*({"data": it} for it in bodies), *(make() for make in client.repeatable.values())]:
                server.requests.clear()
                url = server.script("/", 503, Answer(fault="reset"), 200)
                assert (await send("PUT", url, **options)).status == 200
                sent = [it.body for it in server.requests]
                assert sent == sent[:1] * 3
                assert sent[0].count(b"once") == 1 or "compress" in options


@pytest.mark.parametrize("answer", [503, Answer(fault="reset")], ids=["503", "reset"])
async def test_a_one_shot_body_is_sent_once(server: Server, client: Client, answer: Any) -> None:
    """A second attempt would send an empty body, and be answered with 200. An idempotency key does not change that."""
    async with client.open(IdempotencyKey().wrap(QUICK)) as send:
        forms = {} if client.takes_no_file else client.one_shots
        for options in [{"data": client.generator(b"on", b"ce")}, *(make() for make in forms.values())]:
            server.requests.clear()
            url = server.script("/", answer, 200)
            outcome = await outcome_of(send("PUT", url, **options))
            if isinstance(outcome, Exception):
                assert "its body can be sent only once" in notes_of(outcome)
            else:
                assert outcome.status == 503
            assert [b"once" in it.body for it in server.requests] == [True]


async def test_a_redirect_does_not_send_a_one_shot_body_again(server: Server, client: Client) -> None:
    """The client itself would send an empty body to the second URL."""
    server.script("/from", Answer(307, {"Location": "/to"}))
    async with client.open() as send:
        error = await outcome_of(send("PUT", f"{server.url}/from", data=client.generator(b"on", b"ce")))
        assert isinstance(error, client.used_up)
    assert [(it.path, it.body) for it in server.requests] == [("/from", b"once")]


async def test_each_hop_of_a_redirect_has_its_own_attempts(server: Server, client: Client, tmp_path: Path) -> None:
    """A file is rewound for each hop, to its position before, if the client itself does so; and the headers stay."""
    server.script("/from", 503, Answer(307, {"Location": "/to"}))
    server.script("/to", 503, Answer(body=b"there"))
    path = tmp_path / "file"
    path.write_bytes(b"skipped body")
    with path.open("rb") as file:
        file.seek(len(b"skipped "))
        async with client.open() as send:
            data = b"body" if "httpx" in repr(client) else file
            reply = await send("PUT", f"{server.url}/from", data=data, headers={"X-A": "1"})
            assert (reply.status, reply.body) == (200, b"there")
    assert [(it.path, it.body) for it in server.requests] == [(it, b"body") for it in ("/from", "/from", "/to", "/to")]
    assert {it.headers["X-A"] for it in server.requests} == {"1"}


@pytest.mark.parametrize("policy", [QUICK, AlwaysTwice()], ids=["retry", "always-twice"])
async def test_a_file_that_is_still_being_read_is_not_sent_again(
    server: Server, blocking_client: Client, clock: FakeClock, policy: Policy[Any]
) -> None:
    """An attempt that a Timeout has abandoned continues to read; to rewind its file would mix up both bodies."""
    file = SlowFile(b"x" * 10, lambda: clock.advance(PATIENCE))
    async with blocking_client.open(policy.wrap(Timeout(PATIENCE))) as send:
        error = await outcome_of(send("PUT", server.url, data=file))
        assert isinstance(error, TimeoutExceeded if policy is QUICK else NotRepeatable)
        file.may_continue.set()
        server.wait_until(lambda: Timeout.abandoned() == 0)
    assert [it.body for it in server.requests] in ([b"x" * 10], [])  # httpx does not begin to send after its time


# --- responses --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_connections_of_discarded_responses_are_free(server: Server, client: Client, stream: bool) -> None:
    """With one connection for all, they keep no request waiting. A body that was read keeps its connection."""
    discarded = Answer(503, body=b"x" * 1_000_000)
    async with client.open() as send:
        for _ in range(3):
            reply = await send("GET", server.script("/", discarded, discarded, 200), stream=stream)
            assert await reply.read() == b"ok"
    before = server.connections
    async with client.open(**({} if client.reads_in_attempt else {"read_body": True})) as send:
        assert (await send("GET", server.script("/", discarded, discarded, 200))).body == b"ok"
    assert server.connections == before + 1


async def test_threads_can_share_a_client(server: Server, blocking_client: Client) -> None:
    """It keeps no data of a request."""
    paths = [f"/{number}" for number in range(40)]
    for path in paths:
        server.script(path, 503, Answer(body=path.encode()))
    async with blocking_client.open(connections=8) as send:
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda path: drive(send("GET", server.url + path)), paths))
    assert [it.body for it in replies] == [path.encode() for path in paths]


async def test_a_stream_is_open_when_it_is_returned(server: Server, client: Client) -> None:
    """The caller reads the body. A stream that is closed early returns its connection."""
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


@pytest.mark.parametrize("chunked", [True, False])
async def test_only_a_body_read_in_the_attempt_is_retried(server: Server, client: Client, chunked: bool) -> None:
    """An error of a stream that the caller reads is raised, and not retried."""
    cut = Answer(body=[b"first", b"rest"], fault="cut", chunked=chunked)
    slow = Answer(body=[b"first", b"rest"], drip=threading.Event(), chunked=chunked)
    options = {} if client.reads_in_attempt else {"read_body": True}
    async with client.open(Retry(9, backoff=[0]).wrap(Timeout(0.2)), **options) as send:
        reply = await send("GET", server.script("/", cut, slow, Answer(body=b"whole")))
        assert reply.body == b"whole"
    async with client.open() as send:
        url = server.script("/once", cut, 200)
        reply = await outcome_of(send("GET", url, stream=True))
        assert isinstance(await outcome_of(reply.read()), client.error)
    assert len(server.requests_to("/once")) == 1


@pytest.mark.parametrize("retried", [False, True])
async def test_the_response_of_an_abandoned_attempt_is_closed(
    server: Server, blocking_client: Client, clock: FakeClock, retried: bool
) -> None:
    """Its connection is free for the next attempt, or closed at the end."""
    late = threading.Event()
    url = server.script("/", Answer(body=b"x" * 999_999, hold=late), Answer(body=b"in time"))
    again = Retry(2, backoff=[0], on_retry=lambda event: late.set())

    def time_out() -> None:
        server.wait_until(lambda: server.requests)
        clock.advance(PATIENCE)

    threading.Thread(target=time_out).start()
    async with blocking_client.open(Policy.wrap(*[again] * retried, Timeout(PATIENCE))) as send:
        outcome = await outcome_of(send("GET", url, stream=True))
        if retried:
            assert await outcome.read() == b"in time"
        else:
            assert isinstance(outcome, TimeoutExceeded)
        late.set()
        server.wait_until(lambda: Timeout.abandoned() == 0)
        assert (await send("GET", f"{server.url}/other")).body == b"ok"  # the pool has one connection


class Watching(Policy[Any]):
    """Watches the responses that are not good enough, and counts how many are alive at the start of each call."""

    def __init__(self) -> None:
        self.answers = Watched()
        self.alive: list[int] = []

    async def around(self, call: Any, ctx: Context) -> Any:
        self.alive.append(len(self.answers.alive))
        try:
            return await call(ctx)
        except TransientStatus as error:
            self.answers.watch(error.response)
            raise


async def test_many_attempts_keep_few_responses(server: Server, client: Client) -> None:
    """An execution that lasts for hours holds no more than a short one."""
    watching = Watching()
    async with client.open(Policy.wrap(Retry(10, backoff=[0]), watching)) as send:
        assert (await send("GET", server.script("/", *[503] * 10))).status == 503
    assert (len(watching.alive), max(watching.alive) <= 2) == (10, True)


class Leaving(Policy[Any]):
    """Leaves its call behind in a thread or task as soon as the server has the request, and keeps its outcome."""

    def __init__(self, server: Server, group: Any) -> None:
        self.server = server
        self.group = group
        self.outcomes: list[object] = []

    async def around(self, call: Any, ctx: Context) -> Any:
        async def left_behind() -> None:
            self.outcomes.append(await outcome_of(call(ctx)))

        if self.group is None:
            threading.Thread(target=lambda: drive(left_behind())).start()
            self.server.wait_until(lambda: self.server.requests)
        else:
            self.group.start_soon(left_behind)
            await anyio.to_thread.run_sync(self.server.wait_until, lambda: self.server.requests)
        raise LookupError("not waiting for it")


async def test_a_response_that_comes_after_the_end_of_its_exchange_is_closed(server: Server, client: Client) -> None:
    """The caller has left for any reason, for example Ctrl-C. An attempt that begins then sends nothing."""
    late = threading.Event()
    url = server.script("/", Answer(body=b"x" * 999_999, hold=late))
    async with contextlib.AsyncExitStack() as stack:
        blocking = client.world.blocking
        leaving = Leaving(server, None if blocking else await stack.enter_async_context(anyio.create_task_group()))
        send = await stack.enter_async_context(client.open(leaving))
        assert isinstance(await outcome_of(send("GET", url, stream=True)), LookupError)
        late.set()
        await until(client.world, lambda: leaving.outcomes)
        (outcome,) = leaving.outcomes
        assert isinstance(outcome, DeadlineExceeded)
        assert "the response came after its time" in str(outcome)
        await until(client.world, lambda: server.open_connections == 0)
    assert len(server.requests) == 1


@pytest.mark.parametrize("client", TASKS, ids=repr)
async def test_a_closed_response_is_freed_with_its_request(server: Server, client: Client) -> None:
    """They are kept neither until the deadline of the body, nor by the exchange.

    An open connection keeps that, in the context in which it was created.
    """
    recording = Recording()
    url = server.script("/", Answer(body=[b"first", b"rest"], drip=threading.Event()))
    async with client.open(Timeout(100 * PATIENCE).wrap(recording)) as send:
        body = client.generator(b"content")
        reply = await send("PUT", url, data=body, stream=True)
        kept = [weakref.ref(it) for it in (body, reply.raw)]
        await reply.close()
        del body, reply
        await until(client.world, lambda: gc.collect() >= 0 and not any(it() for it in kept))
    [ctx] = recording.seen
    assert ctx.called is not None
    assert isinstance(ctx.called.function, Exchange)


# --- time -------------------------------------------------------------------------------------


DRIPPING = Answer(body=[b"x" * 20_000] * 2000, chunked=True, pause=0.02)


@pytest.mark.parametrize(
    ("policy", "answer"),
    [
        (QUICK, Answer(hold=threading.Event())),
        (QUICK, DRIPPING),
        (Timeout(PATIENCE), Answer(hold=threading.Event())),
        (Timeout(PATIENCE, cooperative=True), DRIPPING),
    ],
    ids=["hangs", "drips", "enforced", "cooperative"],
)
async def test_a_request_ends_in_time(server: Server, client: Client, policy: Policy[Any], answer: Answer) -> None:
    """Also under policies that do not enforce it, and if no single wait is too long. The connection is free again."""
    url = server.script("/", answer)
    async with client.open(policy) as send:
        began = time.monotonic()
        with deadline(0.1):
            assert type(await outcome_of(send("GET", url))) is DeadlineExceeded
        assert 0.09 <= time.monotonic() - began < PATIENCE / 2
        assert (await send("GET", f"{server.url}/other")).status == 200


async def test_a_server_that_drips_its_headers_cannot_outlast_a_timeout(server: Server, client: Client) -> None:
    """Also in blocking code, where each byte is in time for every timeout of the client."""
    async with client.open(standard(total_timeout=0.1, attempt_timeout=0.1, attempts=1)) as send:
        assert isinstance(await outcome_of(send("GET", server.script("/", Answer(fault="drip")))), TimeoutExceeded)


async def test_a_deadline_that_no_client_can_take_is_bounded(server: Server, client: Client) -> None:
    """The client of a service may ask for 40,000 years."""
    async with client.open() as send:
        with deadline(1e12):
            assert (await send("GET", server.url, timeout=None)).status == 200


async def test_nothing_is_sent_after_the_deadline(server: Server, client: Client) -> None:
    async with client.open(CircuitBreaker(5)) as send:
        with deadline(0):
            assert type(await outcome_of(send("GET", server.url))) is DeadlineExceeded
    assert server.connections == 0


@pytest.mark.parametrize("cooperative", [True, False])
async def test_an_attempts_timeout_is_named_and_retried(server: Server, client: Client, cooperative: bool) -> None:
    """It is no deadline of the whole call, so that the attempt is repeated."""
    url = server.script("/", Answer(hold=threading.Event()))
    async with client.open(Retry(2, backoff=[0]).wrap(Timeout(0.1, cooperative=cooperative))) as send:
        error = await outcome_of(send("GET", url))
        assert type(error) is TimeoutExceeded
        assert "no result within 0.1 s" in str(error)
        assert "2 attempts" in notes_of(error)


async def test_a_timeout_of_the_client_is_a_failure_like_others(server: Server, client: Client) -> None:
    """If it is shorter than the time left, the error is the client's, and is retried unless a stream is being read."""
    async with client.open(Timeout(PATIENCE).wrap(Retry(2, backoff=[0]))) as send:
        error = await outcome_of(send("GET", server.script("/", Answer(hold=threading.Event())), timeout=0.1))
        assert isinstance(error, client.error)
        assert "2 attempts" in notes_of(error)
        url = server.script("/", Answer(body=[b"a", b"b"], drip=threading.Event()))
        reply = await send("GET", url, timeout=0.1, stream=True)
        assert isinstance(await outcome_of(reply.read()), client.error)
        await reply.close()


async def test_a_client_timeout_just_before_the_deadline_counts_as_the_deadline(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers are not exact. The tolerance is enlarged here."""
    monkeypatch.setattr(base, "TIMER_TOLERANCE", PATIENCE)
    url = server.script("/", Answer(hold=threading.Event()))
    async with client.open(CircuitBreaker(5)) as send:
        with deadline(PATIENCE):
            assert type(await outcome_of(send("GET", url, timeout=0.05))) is DeadlineExceeded


@pytest.mark.parametrize(
    ("policy", "kind", "chunked"), [(Timeout(0.2), TimeoutExceeded, True), (QUICK, DeadlineExceeded, False)]
)
async def test_reading_a_body_ends_at_the_deadline_of_its_attempt(
    server: Server, client: Client, policy: Policy[Any], kind: type[Exception], chunked: bool
) -> None:
    """The error says which limit that was."""
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


@pytest.mark.parametrize("client", TASKS, ids=repr)
async def test_a_cancelled_request_is_not_retried(server: Server, client: Client) -> None:
    """Its connection is free again."""
    url = server.script("/", Answer(hold=threading.Event()), 200)
    async with client.open(Timeout(PATIENCE).wrap(QUICK)) as send:
        async with anyio.create_task_group() as group:
            group.start_soon(send, "GET", url)
            await until(client.world, lambda: server.requests)
            group.cancel_scope.cancel()
        assert len(server.requests) == 1
        assert (await send("GET", url)).status == 200


@pytest.mark.parametrize(
    ("policy", "rules", "connection"),
    [
        (Retry(9, backoff=[0]).wrap(Timeout(0.2)), Rules(limit_body=False), "close"),
        (standard(total_timeout=PATIENCE, attempt_timeout=0.1), Rules(), "keep-alive"),  # the time of the whole call
    ],
    ids=["limit_body=False", "standard"],
)
async def test_a_body_outlasts_its_attempt(
    server: Server, client: Client, policy: Any, rules: Rules, connection: str
) -> None:
    """On a connection that is kept and on one that is closed."""
    rest = threading.Event()
    url = server.script("/", Answer(headers={"Connection": connection}, body=[b"a", b"b"], drip=rest))
    async with client.open(policy, rules=rules) as send:
        reply = await send("GET", url, stream=True)
        timer = threading.Timer(0.2, rest.set)
        timer.start()
        assert await reply.read() == b"ab"
        timer.join()


async def test_the_body_of_a_fallbacks_response_has_its_own_deadline(server: Server, client: Client) -> None:
    """The deadline of the attempt that failed does not apply to it."""
    server.script("/mirror", Answer(body=b"mirrored"))
    async with client.open() as mirror:

        async def ask(failure: Any, ctx: Context) -> Any:
            return (await mirror("GET", f"{server.url}/mirror", stream=True)).raw

        policy = Fallback(handler=client.world.native(ask)).wrap(Timeout(PATIENCE, cooperative=True))
        async with client.open(policy) as send:
            reply = await send("GET", server.script("/", 503), stream=True)
            with process_clock_ahead(2 * PATIENCE):
                assert await reply.read() == b"mirrored"


async def test_a_body_that_was_read_stays_available_after_the_deadline(server: Server, client: Client) -> None:
    async with client.open(Timeout(PATIENCE)) as send:
        reply = await send("GET", server.url)
        with process_clock_ahead(2 * PATIENCE):
            assert await reply.read() == b"ok"


# --- telemetry, and the deadline on the wire --------------------------------------------------


async def test_the_operation_is_the_method_and_the_host(server: Server, client: Client) -> None:
    """No path and no query, of which there are as many as requests. Labels of metrics are without the host, too."""
    recording = Recording()
    async with client.open(recording) as send:
        await send("GET", f"{server.url}/users/4711?token=secret")

        async def call(ctx: Context) -> None:
            await send("GET", server.url)

        named = Context(operation="get-user", properties={"tenant": "a"})
        await client.world.execute(CircuitBreaker(5), call, named)
    assert [it.operation for it in recording.seen] == ["GET 127.0.0.1", "get-user"]
    assert recording.seen[0].operation.common == "GET"  # type: ignore[union-attr]
    assert recording.seen[1].properties == {"tenant": "a"}


async def test_the_deadline_is_sent_to_the_named_hosts_only(server: Server, client: Client) -> None:
    """The header of `wire.Propagation` holds the time left at each attempt."""
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


# --- idempotency keys -------------------------------------------------------------------------


def keys_of(server: Server) -> list[str | None]:
    return [it.headers["Idempotency-Key"] for it in server.requests]


@pytest.mark.parametrize("outermost", [True, False])
async def test_an_idempotency_key_lets_a_post_be_repeated(server: Server, client: Client, outermost: bool) -> None:
    """One key in all attempts of a request, and another one for the next request, wherever the policy stands."""
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


async def test_the_idempotency_key_of_an_outer_call_is_not_sent(server: Server, client: Client) -> None:
    """That call may send several different requests. A key that the caller has given is sent."""
    given = Context(properties={"idempotency_key": "order-7"})
    async with client.open(QUICK) as send:

        async def fn(ctx: Context) -> Any:
            return await send("POST", server.script("/", 503, 200), data=b"body")

        assert (await client.world.attempt(IdempotencyKey(), fn)).status == 503
        assert keys_of(server) == [None]
        assert (await client.world.attempt(Retry(1), fn, given)).status == 200
        assert keys_of(server) == [None, "order-7", "order-7"]


async def test_rules_name_the_idempotency_header(server: Server, client: Client) -> None:
    """One of the request, in upper or lower case, is kept; it lets the request be repeated."""
    rules = Rules(idempotency_header="X-Request-Key")
    async with client.open(IdempotencyKey(lambda: "k").wrap(QUICK), rules=rules) as send:
        for headers in ({}, {"x-request-key": "own"}):
            reply = await send("POST", server.script("/", 503, 200), headers=headers, data=b"body")
            assert reply.status == 200
    assert [it.headers["X-Request-Key"] for it in server.requests] == ["k", "k", "own", "own"]
    assert keys_of(server) == [None] * 4
