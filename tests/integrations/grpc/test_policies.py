"""Calls under a policy: what holds for blocking channels and for grpc.aio."""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from math import inf
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from resilience import (
    Bulkhead,
    CircuitBreaker,
    CircuitOpen,
    Context,
    DeadlineExceeded,
    Fallback,
    Hedge,
    Retry,
    Timeout,
    TimeoutExceeded,
    deadline,
)
from resilience.integrations.grpc import PolicyInterceptor
from resilience.integrations.http import NotRepeatable
from tests.conftest import FakeClock, Frozen, Heavy, Watched, no_collector
from tests.custom import Doing, Recording, Sleeping, Twice
from tests.functions import raising
from tests.integrations.grpc.services import (
    EXCEEDED,
    FINE,
    INTERNAL,
    NOW,
    PATIENCE,
    REQUEST,
    UNAVAILABLE,
    Client,
    Dependency,
    answering,
    aprotected,
    status,
)
from tests.versions import is_installed

UNREPEATABLE = {"unrepeatable": ["/test.Test/One"]}


class TestRetry:
    @pytest.mark.parametrize("method", Dependency.methods)
    def test_repeats_a_call_that_is_unavailable(self, client: Client, dependency: Dependency, method: str) -> None:
        """With no configuration, for every kind of method whose requests can be sent again; with the same metadata."""
        dependency.steps = [UNAVAILABLE, UNAVAILABLE, b"fine"]
        assert client.call(NOW, method, REQUEST[method], metadata=iter([("who", "ada")])) == FINE[method]
        assert [requests for _, requests, _ in dependency.seen] == [b"ab"] * 3
        assert [metadata.get("who") for metadata in dependency.metadata] == ["ada"] * 3

    def test_repeats_nothing_after_the_first_reply_of_a_stream(self, client: Client, dependency: Dependency) -> None:
        """The caller has that reply already; the error is raised where it happened."""
        dependency.steps = [[b"a", UNAVAILABLE]]
        assert status(lambda: client.call(NOW, "Many")) is UNAVAILABLE
        assert len(dependency.seen) == 1

    @pytest.mark.parametrize("replies", [[], [b"a"], [b"a", b"b", b"c"]])
    def test_returns_all_replies(self, client: Client, dependency: Dependency, replies: list[bytes]) -> None:
        """The first one, which the policy has waited for, and the others; also none."""
        dependency.steps = [replies]
        assert client.call(NOW, "Many") == replies

    @pytest.mark.parametrize("method", ["Join", "Chat"])
    def test_sends_an_iterator_of_requests_once(self, client: Client, dependency: Dependency, method: str) -> None:
        """The second time it would be empty. A policy sees the failure only if a blocking call waits for one reply."""
        dependency.steps = [UNAVAILABLE, b"fine"]
        breaker = CircuitBreaker(1)
        assert status(lambda: client.call(NOW.wrap(breaker), method, iter([b"a", b"b"]))) is UNAVAILABLE
        assert breaker.stats().opened == (client.is_blocking and method == "Join")
        assert [requests for _, requests, _ in dependency.seen] == [b"ab"]

    @pytest.mark.parametrize("limit", [None, Timeout(0.3), Timeout(0.3, cooperative=True)], ids=str)
    def test_repeats_no_listed_method(self, client: Client, dependency: Dependency, limit: Timeout | None) -> None:
        """UNAVAILABLE may come after the work has been done; the error of a Timeout knows nothing of the call.

        A Retry around the stub does not repeat it either.
        """
        dependency.steps = [Dependency.hang if limit else UNAVAILABLE, b"fine"]
        policy = NOW if limit is None else NOW.wrap(limit)
        with pytest.raises(TimeoutExceeded if limit else grpc.RpcError) as caught:
            NOW.call(lambda: client.call(policy, "One", settings=UNREPEATABLE))
        assert limit or caught.value.code() is UNAVAILABLE  # type: ignore[attr-defined]
        assert len(dependency.seen) == 1

    def test_does_not_hedge_an_unrepeatable_call_that_waits(self, client: Client, dependency: Dependency) -> None:
        """Only one of two attempts could be made, and the refusal of the other would end the call."""
        waiting = Sleeping(0.1, 0.2)  # the attempt is not over while a second one would begin
        assert client.call(Hedge(0.02).wrap(waiting), "One", settings=UNREPEATABLE) == b"fine"
        assert len(dependency.seen) == 1

    @pytest.mark.parametrize("method", ["Join", "Chat"])
    def test_no_policy_can_send_an_iterator_twice(self, client: Client, dependency: Dependency, method: str) -> None:
        """A policy that does not check `repeatable` gets an error, instead of a success of an empty call."""
        with pytest.raises(NotRepeatable):
            client.call(Twice(), method, iter([b"a", b"b"]))
        assert len(dependency.seen) <= 1  # 0: the client was gone before the call had arrived

    @pytest.mark.parametrize("method", ["Join", "Chat"])
    def test_repeats_a_call_that_was_not_sent(self, client: Client, dependency: Dependency, method: str) -> None:
        """A call that a breaker has refused is made when the breaker allows it."""
        breaker = CircuitBreaker(1, open_for=0.05)
        breaker.capture(lambda ctx: 1 / 0)
        policy = Retry(20, on=CircuitOpen, backoff=[0.02]).wrap(breaker)
        assert client.call(policy, method, iter([b"a", b"b"])) == FINE[method]
        assert [requests for _, requests, _ in dependency.seen] == [b"ab"]

    @pytest.mark.parametrize(
        ("pushback", "expected"), [("50", [0.05]), ("0", [0.0]), ("-1", []), ("soon", []), ("99999999999", [])]
    )
    def test_obeys_the_pushback_of_the_server(
        self, client: Client, dependency: Dependency, pushback: str, expected: list[float]
    ) -> None:
        """`grpc-retry-pushback-ms` is the least that a Retry waits; 0 asks for a retry at once.

        A negative pushback means no retry, and so does one that cannot be parsed (gRFC A6).
        """
        dependency.steps, dependency.pushback = [UNAVAILABLE, b"fine"], pushback
        delays: list[float] = []
        retry = Retry(3, backoff=[0], on_retry=lambda event: delays.append(event.delay))
        with nullcontext() if expected else pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            assert client.call(retry, "One") == b"fine"
        assert (delays, len(dependency.seen)) == (expected, 1 + len(expected))

    def test_on_result_judges_the_reply(self, client: Client, dependency: Dependency) -> None:
        """The function gets the message, not grpc's call object."""
        dependency.steps = [b"pending", b"fine"]
        assert client.call(Retry(3, backoff=[0], on_result=lambda reply: reply == b"pending"), "One") == b"fine"

    def test_cancels_a_stream_that_it_discards(self, client: Client, dependency: Dependency) -> None:
        dependency.steps = [[b"bad", Dependency.hang], [b"fine"]]
        kept: list[Any] = []  # so that it is not the collector that ends the call
        refuse = Retry(2, backoff=[0], on_result=lambda replies: kept.append(replies) or len(kept) == 1)
        assert client.call(refuse, "Many") == [b"fine"]
        assert dependency.gone.wait(PATIENCE)


class TestOtherPolicies:
    @pytest.mark.parametrize("method", Dependency.methods)
    def test_a_breaker_counts_failures_and_refuses(self, client: Client, dependency: Dependency, method: str) -> None:
        """A refused call raises `CircuitOpen`, and nothing is sent."""
        dependency.steps = [INTERNAL]
        breaker = CircuitBreaker(2)
        for _ in range(2):
            assert status(lambda: client.call(breaker, method, REQUEST[method])) is INTERNAL
        with pytest.raises(CircuitOpen):
            client.call(breaker, method, REQUEST[method])
        assert len(dependency.seen) == 2

    @pytest.mark.parametrize("requests", [REQUEST, {**REQUEST, "Join": iter([b"a"]), "Chat": iter([b"a"])}])
    def test_a_fallback_replaces_a_refused_call(self, client: Client, requests: dict[str, Any]) -> None:
        """With a message, or with an iterable of messages if the replies are a stream."""
        for method in Dependency.methods:
            answer: Any = b"cached" if isinstance(FINE[method], bytes) else [b"cached", b"too"]
            assert client.call(answering(answer), method, requests[method]) == answer

    def test_an_rpc_error_that_is_no_call_is_raised(self, client: Client, dependency: Dependency) -> None:
        """A blocking channel would take it for the call, which it is if grpc has made it."""
        dependency.steps = [INTERNAL]
        with pytest.raises(grpc.RpcError, match="for maintenance"):
            client.call(Fallback(handler=raising(grpc.RpcError("for maintenance"))), "One")

    def test_a_breaker_does_not_count_the_callers_deadline(self, client: Client, dependency: Dependency) -> None:
        """A deadline of the caller says nothing about the server."""
        dependency.steps = [Dependency.hang]
        breaker = CircuitBreaker(1)
        assert status(lambda: client.call(breaker, "One", timeout=0.1)) is EXCEEDED
        assert breaker.stats().state.name == "CLOSED"


class TestDeadline:
    @pytest.mark.parametrize("method", Dependency.methods)
    def test_is_sent_to_the_server(self, client: Client, dependency: Dependency, method: str) -> None:
        """The time left in the context becomes the deadline of the call; the earlier one of two holds."""
        with deadline(50.0):
            for limit in ({}, {"timeout": 20.0}, {"timeout": 90.0}):
                client.call(NOW, method, REQUEST[method], **limit)
        client.call(NOW, method, REQUEST[method])
        left = [seconds for _, _, seconds in dependency.seen]
        assert left == [pytest.approx(40, abs=10.1), pytest.approx(15, abs=5.1), pytest.approx(40, abs=10.1), inf]

    def test_is_bounded_by_what_grpc_can_send(self, client: Client, dependency: Dependency) -> None:
        """A client may ask for 40,000 years, of which gRPC would make no time at all."""
        with deadline(99_999_999 * 3600.0):
            assert client.call(NOW, "One") == b"fine"
        assert dependency.seen[0][2] > 1e6

    @pytest.mark.parametrize("method", Dependency.methods)
    def test_ends_a_call_with_the_status_of_grpc(self, client: Client, dependency: Dependency, method: str) -> None:
        """A call that runs into the context's deadline fails with gRPC's own error, and is not repeated."""
        dependency.steps = [Dependency.hang]
        began = time.monotonic()
        with deadline(0.3), pytest.raises(grpc.RpcError) as caught:
            client.call(NOW, method, REQUEST[method])
        error: Any = caught.value
        assert (error.code(), isinstance(error, DeadlineExceeded)) == (EXCEEDED, False)
        assert time.monotonic() - began < 10
        assert len(dependency.seen) == 1
        assert dependency.gone.wait(PATIENCE)

    @pytest.mark.parametrize("cause", [None, ValueError("nothing cached")])
    def test_has_the_status_of_grpc_also_with_another_cause(
        self, client: Client, dependency: Dependency, cause: Exception | None
    ) -> None:
        """A handler that raises the failure again may give it a cause of its own."""

        def fails(failure: Any, ctx: Context) -> bytes:
            raise failure.error from cause

        dependency.steps = [Dependency.hang]
        assert status(lambda: client.call(Fallback(handler=fails), "One", timeout=0.1)) is EXCEEDED

    @pytest.mark.parametrize("timeout", [0, -1.0])
    def test_that_has_passed_makes_no_call(self, client: Client, dependency: Dependency, timeout: float) -> None:
        """For grpc a timeout of 0 may still mean a call."""
        assert status(lambda: client.call(NOW, "One", timeout=timeout)) is EXCEEDED
        with deadline(0):
            assert status(lambda: client.call(NOW, "One")) is EXCEEDED
        assert dependency.seen == []

    def test_that_passes_in_a_queue_has_the_status_of_grpc(self, client: Client, dependency: Dependency) -> None:
        """The error is also the policy's, which waits for a permit; nothing was sent."""
        full = Bulkhead(1, queue=1)
        with full.slot(), pytest.raises(grpc.RpcError, match="deadline") as caught:
            client.call(full, "One", timeout=0.05)
        error: Any = caught.value
        assert isinstance(error, DeadlineExceeded)
        assert (error.code(), error.policy) == (EXCEEDED, full.name)
        assert ((error.details(),), tuple(error.trailing_metadata())) == (error.args, ())
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert dependency.seen == []

    def test_that_has_passed_is_a_finished_call_for_other_interceptors(self, target: str) -> None:
        """An interceptor around ours gets a call that has failed, with all methods of a call."""
        seen: list[Any] = []

        class Outer(grpc.UnaryUnaryClientInterceptor):
            def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
                call = continuation(client_call_details, request)
                call.add_done_callback(seen.append)
                assert (call.code(), call.done(), call.exception()) == (EXCEEDED, True, call)
                assert {call.cancel(), call.cancelled(), call.running()} == {False}
                assert (call.debug_error_string(), call.traceback()) == ("", call.__traceback__)
                return call

        with grpc.insecure_channel(target) as plain:
            channel = grpc.intercept_channel(plain, Outer(), PolicyInterceptor(NOW))
            assert status(lambda: channel.unary_unary("/test.Test/One")(b"", timeout=0)) is EXCEEDED
        assert [it.code() for it in seen] == [EXCEEDED]

    @pytest.mark.parametrize("cooperative", [False, True])
    @pytest.mark.parametrize("method", Dependency.methods)
    def test_of_an_attempt_is_a_timeout_and_is_repeated(
        self, client: Client, dependency: Dependency, method: str, cooperative: bool
    ) -> None:
        """A `Timeout` inside of a Retry limits one attempt, whether its timer or grpc's fires first."""
        dependency.steps = [Dependency.hang, b"fine"]
        policy = Retry(20, backoff=[0]).wrap(Timeout(0.1, cooperative=cooperative))  # 20: the machine may be busy
        assert client.call(policy, method, REQUEST[method]) == FINE[method]
        assert len(dependency.seen) >= 2
        assert dependency.seen[0][2] <= 0.2
        assert dependency.gone.wait(PATIENCE)

    def test_of_an_attempt_that_sends_is_a_timeout(self, client: Client, dependency: Dependency) -> None:
        """Also if the time ends between two requests, while the event loop is blocked."""
        pauses = iter([0.4])

        class Requests(list[bytes]):
            def __iter__(self) -> Iterator[bytes]:
                for each in super().__iter__():
                    yield each
                    time.sleep(next(pauses, 0))

        policy = Retry(20, backoff=[0]).wrap(Timeout(0.2, cooperative=True))
        assert client.call(policy, "Chat", Requests(REQUEST["Chat"])) == FINE["Chat"]

    @pytest.mark.parametrize(
        ("step", "cooperative"),
        [(Dependency.hang, False), (Dependency.hang, True), (Dependency.early, True)],
        ids=["enforced", "cooperative", "early"],
    )
    def test_of_a_timeout_is_an_error_of_that_timeout(
        self, client: Client, dependency: Dependency, step: object, cooperative: bool
    ) -> None:
        """The error names the policy whose limit it was, also if grpc's clock is a little ahead."""
        dependency.steps = [step]
        with pytest.raises(TimeoutExceeded, match=r"0\.1 s") as caught:
            client.call(Timeout(0.1, cooperative=cooperative), "One")
        assert not isinstance(caught.value, DeadlineExceeded)

    def test_of_the_server_itself_is_a_status_like_others(self, client: Client, dependency: Dependency) -> None:
        """A server that ran out of its own time has not used up ours."""
        dependency.steps = [EXCEEDED]
        failures: list[Any] = []
        with deadline(60):
            fallback = Fallback(handler=lambda failure, ctx: failures.append(failure.error) or b"cached")
            assert client.call(fallback, "One") == b"cached"
        assert isinstance(failures[0], grpc.RpcError)

    def test_says_nothing_about_another_failure_of_the_server(
        self, client: Client, dependency: Dependency, clock: FakeClock
    ) -> None:
        """Although that arrives when the time is up."""

        class Seen(list[Any]):
            def append(self, call: Any) -> None:
                clock.advance(PATIENCE)

        dependency.steps, dependency.seen = [INTERNAL], Seen()
        breaker = CircuitBreaker(1)
        with deadline(PATIENCE):
            assert status(lambda: client.call(breaker, "One")) is INTERNAL
        assert breaker.stats().state.name == "OPEN"

    def test_is_shared_by_all_attempts(self, client: Client, dependency: Dependency) -> None:
        """A stub's `timeout` is for the whole call, as in gRPC, not for each attempt."""
        dependency.steps = [UNAVAILABLE, UNAVAILABLE, b"fine"]
        recording = Recording()
        client.call(NOW.wrap(recording), "One", timeout=60.0)
        assert len({ctx.deadline for ctx in recording.seen}) == 1
        assert [ctx.attempt for ctx in recording.seen] == [1, 2, 3]


class TestContextOfACall:
    @pytest.mark.parametrize("limit", [{}, {"timeout": PATIENCE}])
    def test_names_the_method_and_inherits_the_rest(self, client: Client, limit: dict[str, float]) -> None:
        """The operation is the method, unless the caller has set one; properties are inherited."""
        recording = Recording()
        client.call(recording, "One", **limit)
        outer = Context(operation="checkout", properties={"user": "ada"})
        Retry().execute(lambda ctx: client.call(recording, "One", **limit), outer)
        assert [it.operation for it in recording.seen] == ["/test.Test/One", "checkout"]
        assert recording.seen[1].properties == {"user": "ada"}


@pytest.mark.parametrize("method", Dependency.methods)
def test_a_call_is_freed_without_the_cyclic_collector(client: Client, method: str) -> None:
    """A call of grpc.aio keeps the context that it was made in, but what is executed there does not keep the call.

    (Of a call that fails, grpc itself makes a cycle; before 1.83, grpc.aio makes one of every call.)
    """
    if not client.is_blocking and is_installed("grpcio<1.83"):
        pytest.skip("grpc.aio makes a cycle of every call")
    recording = Recording()
    with no_collector():
        assert client.call(recording, method, REQUEST[method]) == FINE[method]
        executions = [weakref.ref(ctx.called.function) for ctx in recording.seen if ctx.called]
        recording.seen.clear()
        assert [execution() for execution in executions] == [None]


def test_an_error_whose_attributes_cannot_be_set_is_raised_unchanged(client: Client, dependency: Dependency) -> None:
    """A policy raises it after a call that must not be made again."""
    with pytest.raises(Frozen, match="4711"):
        client.call(Doing(after=raising(Frozen(4711))), "One", settings=UNREPEATABLE)
    assert len(dependency.seen) == 1


class OwnDetails(grpc.ClientCallDetails):  # type: ignore[misc]
    """Call details of another interceptor: those of grpc are named tuples, others need not be."""

    def __init__(self, timeout: float | None) -> None:
        self.method, self.timeout, self.metadata = b"/test.Test/One", timeout, grpc.aio.Metadata()
        self.credentials = self.wait_for_ready = None


@pytest.mark.parametrize("own", [None, 60.0])
async def test_other_call_details_are_limited_in_a_copy(target: str, dependency: Dependency, own: float | None) -> None:
    """The server has the time of the policy, and the outer interceptor still has its own details."""
    details = OwnDetails(own)

    class Around(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            return await continuation(details, request)

    async with aprotected(target, Timeout(20.0, cooperative=True), Around()) as channel:
        assert await channel.unary_unary("/test.Test/One")(b"?") == b"fine"
    ((_, _, left),) = dependency.seen
    assert 10 < left <= 21
    assert details.timeout == own


def test_polling_keeps_only_the_last_replies() -> None:
    """However often a policy repeats a call because of its reply, most replies are freed."""
    watched, alive = Watched(), list[int]()

    def is_pending(reply: object) -> bool:
        alive.append(len(watched.alive))
        return watched.seen < 50

    done = SimpleNamespace(result=lambda: watched.watch(Heavy()))
    details = grpc.aio.ClientCallDetails("/a.B/C", None, None, None, None)
    poll = PolicyInterceptor(Retry(None, on_result=is_pending, backoff=[0]))
    assert poll.intercept_unary_unary(lambda details, request: done, details, b"") is done
    assert (watched.seen, max(alive) < 15) == (50, True)
