"""What counts: `on`, `on_result`, `ignore`, what stands above them, and which errors are transient.

The policies that use these words are Retry, CircuitBreaker and Fallback; here they are asked only
whether they took an exception for theirs.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import ssl
import urllib.error
import weakref
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import anyio
import httpcore
import httpx
import httpx2
import openai
import pytest
import requests
import urllib3

from resilience import (
    BulkheadFull,
    CircuitBreaker,
    CircuitIsolated,
    CircuitOpen,
    DeadlineExceeded,
    Fallback,
    Policy,
    Rejected,
    ResilienceError,
    RetriesExhausted,
    Retry,
    TimeoutExceeded,
    WorkersExhausted,
    transient,
)
from resilience.errors import AwaitableMisuse, Misuse, SuspensionMisuse
from resilience.matching import Matcher
from tests.conftest import Boom, FakeClock, Script, World


class Bang(Boom):
    """A kind of Boom."""


class Other(Exception):
    """Nothing that a policy here is told of."""


class Judging(type):
    """The class of a class that says by itself which classes are its equals, and what is an instance of it."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, Judging)

    __hash__: Any = None

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Boom)


class Judge(Exception, metaclass=Judging):
    """What a `Boom` passes for."""


class Confused(Exception):
    """Has a method that only its class should have."""

    def __instancecheck__(self, instance: object) -> bool:
        return False


# --- on and ignore ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "handled", "not_handled"),
    [
        (Boom, [Boom(), Bang()], [Other()]),
        (Bang, [Bang()], [Boom()]),
        ((Bang, Other), [Bang(), Other()], [Boom()]),
        (lambda error: "yes" in str(error), [Boom("yes"), Other("yes")], [Boom("no")]),
        (Exception, [Boom(), Other(), OSError()], []),
        (BaseException, [Boom(), Other(), OSError()], []),
        (Judge, [Judge(), Boom()], [Other()]),
        (Confused, [Confused()], [Other()]),
    ],
    ids=[
        *("a type", "a narrow type", "a tuple", "a predicate", "Exception", "BaseException"),
        *("a type with a metaclass", "a type with a strange method"),
    ],
)
def test_on_names_what_is_handled(on: Any, handled: list[Exception], not_handled: list[Exception]) -> None:
    """A type with its children, a tuple of types, or a predicate over the exception."""
    matcher = Matcher(on, ())
    assert [matcher.handles(error) for error in handled] == [True] * len(handled)
    assert [matcher.handles(error) for error in not_handled] == [False] * len(not_handled)


@pytest.mark.parametrize("ignore", [Bang, (Other, Bang), lambda error: isinstance(error, Bang)])
@pytest.mark.parametrize("on", [Boom, Bang, (Boom, Bang), Exception, lambda error: True])
def test_ignore_is_stronger_than_on(on: Any, ignore: Any) -> None:
    """What both name is not handled."""
    matcher = Matcher(on, ignore)
    assert not matcher.handles(Bang())
    assert matcher.is_neutral(Bang())


def test_what_is_neither_named_nor_ignored_is_an_answer() -> None:
    """It is not handled, and not neutral either: to a circuit breaker the dependency has answered."""
    matcher = Matcher(Boom, Bang)
    assert not matcher.handles(Other())
    assert not matcher.is_neutral(Other())


def test_the_ignored_is_not_shown_to_the_predicate() -> None:
    """`ignore` is asked first: a predicate need not know what is ignored."""
    shown: list[Exception] = []
    Matcher(lambda error: bool(shown.append(error)), Bang).handles(Bang())
    assert shown == []


# --- in the three policies that use the words ------------------------------------------------


class Case:
    """One of the three policies, and how it shows that it took a failure or a result for its own."""

    def __init__(
        self, name: str, make: Callable[..., Policy[Any]], took: Callable[[Policy[Any], Script], bool]
    ) -> None:
        self.name = name
        self.make = make
        self.took = took

    def __repr__(self) -> str:
        return self.name


def fallback_that_notes(**words: Any) -> Policy[Any]:
    fallback = Fallback("answered", on_fallback=lambda event: setattr(fallback, "answered", True), **words)
    fallback.answered = False  # type: ignore[attr-defined]
    return fallback


RETRY = Case("Retry", lambda **words: Retry(2, backoff=[0], **words), lambda policy, script: script.calls == 2)
BREAKER = Case(
    "CircuitBreaker",
    lambda **words: CircuitBreaker(1, **words),
    lambda policy, script: policy.stats().opened == 1,  # type: ignore[attr-defined]
)
FALLBACK = Case("Fallback", fallback_that_notes, lambda policy, script: policy.answered)  # type: ignore[attr-defined]
each_policy = pytest.mark.parametrize("case", [RETRY, BREAKER, FALLBACK], ids=repr)
repeats_or_counts = pytest.mark.parametrize("case", [RETRY, BREAKER], ids=repr)


async def takes(world: World, case: Case, step: Any, **words: Any) -> bool:
    """Whether the policy took what the function ended with for its own."""
    policy = case.make(**words)
    script = Script(step)

    outcome = await world.attempt(policy, script.function())
    took = case.took(policy, script)
    assert outcome == ("answered" if took and case is FALLBACK else step), "what came out is the step itself"
    return took


@each_policy
@pytest.mark.parametrize("on", [Boom, (Other, Boom), lambda error: isinstance(error, Boom)])
async def test_the_words_mean_the_same_in_every_policy(world: World, clock: FakeClock, case: Case, on: Any) -> None:
    """`on`, `on_result` and `ignore`, in every world."""
    assert await takes(world, case, Boom(), on=on)
    assert not await takes(world, case, ValueError(), on=on)
    assert not await takes(world, case, Bang(), on=on, ignore=Bang)
    assert not await takes(world, case, Bang(), on=on, ignore=lambda error: isinstance(error, Bang))
    assert await takes(world, case, "bad", on=on, on_result=lambda result: result == "bad")
    assert not await takes(world, case, "good", on=on, on_result=lambda result: result == "bad")
    assert not await takes(world, case, "bad", on=on)


@each_policy
@pytest.mark.parametrize("word", ["on", "ignore", "on_result"])
async def test_what_a_predicate_raises_comes_out(world: World, clock: FakeClock, case: Case, word: str) -> None:
    """Predicates decide: one that raises has decided nothing, and its own error is what the caller gets."""

    class Undecided(Boom):
        """What `on` would name."""

    def undecided(value: object) -> bool:
        raise Undecided

    original = "a result" if word == "on_result" else Boom("the original")
    policy = case.make(**{"on": Boom, word: undecided})
    script = Script(original)

    error = await world.attempt(policy, script.function())
    assert isinstance(error, Undecided)
    assert error.__context__ is (None if word == "on_result" else original)
    assert script.calls == 1


@each_policy
async def test_the_truth_of_a_result_is_never_asked(world: World, clock: FakeClock, case: Case) -> None:
    """`requests.Response` is false for a 404, SQL expressions and arrays refuse to be true or false."""

    class Refuses:
        def __bool__(self) -> bool:
            raise AssertionError("nobody may ask")

    assert not await takes(world, case, Refuses(), on=Boom, on_result=lambda result: False)


# --- our own rejections, deadlines, and misuse -----------------------------------------------

OURS: list[Exception] = [
    Rejected("no"),
    CircuitOpen("no"),
    CircuitIsolated("no"),
    BulkheadFull("no"),
    WorkersExhausted("no"),
    DeadlineExceeded("no"),
]


@repeats_or_counts
async def test_rejections_and_deadlines_are_handled_only_where_they_are_named(
    world: World, clock: FakeClock, case: Case
) -> None:
    """A call that was not made, or that had no time, says nothing of the dependency: a wide `on` does not mean it."""
    wide = [Exception, BaseException, ResilienceError, TimeoutError, TimeoutExceeded, (Exception, OSError), transient]
    for error, on in itertools.product(OURS, [*wide, lambda error: True]):
        assert not await takes(world, case, error, on=on), (error, on)


@repeats_or_counts
async def test_a_rejection_or_deadline_that_is_named_is_handled(world: World, clock: FakeClock, case: Case) -> None:
    """By its own type, also in a tuple with others."""
    for error in OURS:
        for on in (type(error), (Boom, type(error)), (Exception, type(error))):
            assert await takes(world, case, error, on=on), (error, on)


@repeats_or_counts
async def test_naming_one_of_them_names_its_children_and_nobody_else(
    world: World, clock: FakeClock, case: Case
) -> None:
    """`on=Rejected` takes every rejection, `on=CircuitOpen` no full bulkhead."""
    assert await takes(world, case, CircuitIsolated("no"), on=Rejected)
    assert await takes(world, case, CircuitIsolated("no"), on=CircuitOpen)
    assert not await takes(world, case, BulkheadFull("no"), on=(Exception, CircuitOpen))
    assert not await takes(world, case, Rejected("no"), on=CircuitOpen)
    assert not await takes(world, case, DeadlineExceeded("no"), on=(Exception, Rejected))
    assert not await takes(world, case, CircuitOpen("no"), on=(Exception, DeadlineExceeded))
    assert not await takes(world, case, CircuitOpen("no"), on=Rejected, ignore=CircuitOpen)


async def test_a_fallback_answers_them(world: World) -> None:
    """That is what it is outermost for."""
    for error in OURS:
        assert await takes(world, FALLBACK, error), error
        assert await takes(world, FALLBACK, error, on=lambda error: True), error
        assert not await takes(world, FALLBACK, error, ignore=type(error)), error


@each_policy
async def test_our_other_errors_are_failures_like_others(world: World, clock: FakeClock, case: Case) -> None:
    """A timeout of one attempt, and an inner retry that gave up, do say something of the dependency."""
    assert await takes(world, case, TimeoutExceeded("no"), on=Exception)
    assert await takes(world, case, RetriesExhausted("no"), on=Exception)
    assert await takes(world, case, TimeoutExceeded("no"), on=TimeoutError)


async def test_a_retry_takes_a_timeout_for_transient_and_a_deadline_not(world: World, clock: FakeClock) -> None:
    """With its default `on`."""
    assert await takes(world, RETRY, TimeoutExceeded("no"))
    assert not await takes(world, RETRY, DeadlineExceeded("no"))


@each_policy
async def test_a_misuse_is_never_handled(world: World, clock: FakeClock, case: Case) -> None:
    """Whatever `on` says: it is no outcome, and a circuit breaker does not take it for an answer either."""
    ways = [Exception, BaseException, Misuse, TypeError, (TypeError, RuntimeError, Misuse), lambda error: True]
    for kind, on in itertools.product((Misuse, AwaitableMisuse, SuspensionMisuse), ways):
        assert not await takes(world, case, error := kind("no"), on=on), (error, on)
        assert Matcher(on, ()).is_neutral(error), (error, on)


# --- transient -------------------------------------------------------------------------------


def fake(path: str, *bases: type[Exception]) -> type[Exception]:
    """A class that says of itself that it is `path`, as the clients' own classes do."""
    module, _, name = path.rpartition(".")
    return type(name, bases or (Exception,), {"__module__": module})


HTTPX = (
    "TimeoutException ConnectTimeout ReadTimeout WriteTimeout PoolTimeout "
    "NetworkError ConnectError ReadError WriteError CloseError RemoteProtocolError"
)

#: What the clients raise when the network failed, where their own documentation says so.
TRANSIENT = {
    "resilience.integrations.http": "TransientStatus",
    "httpx": HTTPX,
    "httpx2": HTTPX,
    "httpcore": HTTPX + " ConnectionNotAvailable",
    "httpcore2": HTTPX + " ConnectionNotAvailable",
    "requests.exceptions": "ConnectionError Timeout ConnectTimeout ReadTimeout ChunkedEncodingError",
    "urllib3.exceptions": "TimeoutError ConnectTimeoutError ReadTimeoutError NewConnectionError ProtocolError",
    "aiohttp.client_exceptions": (
        "ClientConnectionError ClientConnectorError ClientOSError ClientPayloadError "
        "ServerDisconnectedError ServerTimeoutError"
    ),
    "redis.exceptions": "ConnectionError TimeoutError BusyLoadingError",
    "botocore.exceptions": (
        "ConnectionError HTTPClientError EndpointConnectionError ConnectTimeoutError ReadTimeoutError "
        "ConnectionClosedError ResponseStreamingError"
    ),
    "openai": "APIConnectionError APITimeoutError",
    "anthropic": "APIConnectionError APITimeoutError RetryableError",
    "pymongo.errors": "ConnectionFailure AutoReconnect NetworkTimeout ServerSelectionTimeoutError",
    "psycopg.errors": "ConnectionTimeout AdminShutdown CrashShutdown CannotConnectNow",
    "asyncpg.exceptions": (
        "PostgresConnectionError ConnectionDoesNotExistError ConnectionFailureError "
        "AdminShutdownError CrashShutdownError CannotConnectNowError"
    ),
}

#: What the same clients raise for other reasons.
LASTING = {
    "httpx": "HTTPStatusError InvalidURL UnsupportedProtocol LocalProtocolError TooManyRedirects DecodingError",
    "requests.exceptions": "HTTPError InvalidURL MissingSchema TooManyRedirects JSONDecodeError RetryError",
    "urllib3.exceptions": "LocationParseError DecodeError HostChangedError",
    "aiohttp.client_exceptions": "ClientResponseError InvalidURL ContentTypeError WSServerHandshakeError",
    "redis.exceptions": "ResponseError DataError WatchError ReadOnlyError",
    "botocore.exceptions": "ClientError NoCredentialsError ParamValidationError",
    "openai": "BadRequestError AuthenticationError RateLimitError",
    "anthropic": "BadRequestError AuthenticationError RateLimitError",
    "pymongo.errors": "DuplicateKeyError OperationFailure ConfigurationError",
    "psycopg.errors": "UniqueViolation SyntaxError UndefinedTable",
    "asyncpg.exceptions": "UniqueViolationError InterfaceError SyntaxOrAccessError",
    "sqlalchemy.exc": "IntegrityError OperationalError ArgumentError",
    "grpc": "RpcError",
}

#: Children of a transient class that trying again does not help: certificates and credentials.
PERMANENT = {
    "requests.exceptions.SSLError": "requests.exceptions.ConnectionError",
    "urllib3.exceptions.SSLError": "urllib3.exceptions.ProtocolError",
    "aiohttp.client_exceptions.ClientSSLError": "aiohttp.client_exceptions.ClientConnectorError",
    "aiohttp.client_exceptions.ClientConnectorSSLError": "aiohttp.client_exceptions.ClientConnectorError",
    "aiohttp.client_exceptions.ClientConnectorCertificateError": "aiohttp.client_exceptions.ClientConnectorError",
    "aiohttp.client_exceptions.ServerFingerprintMismatch": "aiohttp.client_exceptions.ClientConnectionError",
    "redis.exceptions.AuthenticationError": "redis.exceptions.ConnectionError",
    "redis.exceptions.AuthorizationError": "redis.exceptions.ConnectionError",
    "botocore.exceptions.SSLError": "botocore.exceptions.ConnectionError",
}


def paths(table: dict[str, str]) -> list[str]:
    return [f"{module}.{name}" for module, names in table.items() for name in names.split()]


def test_the_network_errors_of_the_well_known_clients_are_transient() -> None:
    """By the name of the class and its package: not one of them is a builtin `ConnectionError`."""
    assert [path for path in paths(TRANSIENT) if not transient(fake(path)("reset"))] == []


def test_their_other_errors_are_not_transient() -> None:
    """A response is an answer, and a wrong argument stays wrong."""
    assert [path for path in paths(LASTING) if transient(fake(path)("no"))] == []


@pytest.mark.parametrize("path", ["openai.APIStatusError", "anthropic.APIStatusError"])
def test_their_integrations_tell_which_status_is_no_answer(path: str) -> None:
    """By the mark on the error: the class alone says nothing."""
    overloaded = fake(path)("overloaded")
    assert not transient(overloaded)
    overloaded.repeatable = True  # type: ignore[attr-defined]
    assert transient(overloaded)
    overloaded.repeatable = False  # type: ignore[attr-defined]
    assert not transient(overloaded)


@pytest.mark.parametrize("path", PERMANENT)
def test_certificates_and_credentials_do_not_get_better(path: str) -> None:
    """Although their classes derive from a transient one."""
    parent = fake(PERMANENT[path])
    assert transient(parent("reset"))
    assert not transient(fake(path, parent)("bad certificate"))


@pytest.mark.parametrize(
    ("reason", "expected"),
    [(ConnectionRefusedError("no"), True), (TimeoutError(), True), ("Not Found", False)],
    ids=repr,
)
def test_the_standard_librarys_own_client_wraps_what_happened(reason: object, expected: bool) -> None:
    """`urllib.error.URLError` carries the real error, or a text for an answer that was one."""
    assert transient(urllib.error.URLError(reason)) is expected  # type: ignore[arg-type]


def test_a_class_of_the_users_own_is_known_by_its_parents() -> None:
    """Wherever it lives: `class PaymentsDown(httpx.ConnectError)` is a connect error."""
    parent = fake("httpx.ConnectError")
    assert transient(fake("payments.PaymentsDown", parent)("no"))


def test_the_same_name_elsewhere_is_something_else() -> None:
    """Package and name have to agree, and a package is not its namesake."""
    for path in ("payments.ConnectError", "httpx_payments.ConnectError", "redis_om.exceptions.ConnectionError"):
        assert not transient(fake(path)("no"))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError(),
        ConnectionResetError(),
        ConnectionRefusedError(),
        BrokenPipeError(),
        TimeoutError(),
        TimeoutExceeded("ours"),
    ],
    ids=repr,
)
def test_builtin_connection_and_timeout_errors_are_transient(error: Exception) -> None:
    """Ours among them, which is a `TimeoutError`."""
    assert transient(error)


@pytest.mark.parametrize(
    "error", [Exception(), OSError(), FileNotFoundError(), PermissionError(), ValueError(), KeyError(), EOFError()]
)
def test_other_builtin_errors_are_not_transient(error: Exception) -> None:
    """A file that is not there is not a network that is down."""
    assert not transient(error)


class Status:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize("path", ["grpc._channel._InactiveRpcError", "grpc.aio._call.AioRpcError"])
@pytest.mark.parametrize("status", ["UNAVAILABLE", "NOT_FOUND", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_grpc_is_transient_where_the_server_was_not_there(path: str, status: str) -> None:
    """One exception class for every status; only UNAVAILABLE says so."""
    kind = fake(path, fake("grpc.RpcError"))
    kind.code = lambda self: Status(status)  # type: ignore[attr-defined]
    assert transient(kind("no")) is (status == "UNAVAILABLE")


def test_grpc_without_a_status_is_not_transient() -> None:
    """Nobody knows what it was."""
    kind = fake("grpc.RpcError")
    for code in (None, "UNAVAILABLE", lambda self: None):
        kind.code = code  # type: ignore[attr-defined]
        assert not transient(kind("no"))


@pytest.mark.parametrize("name", ["OperationalError", "InterfaceError", "DBAPIError"])
def test_sqlalchemy_is_transient_where_the_connection_was_lost(name: str) -> None:
    """It says so itself, whatever the driver: `connection_invalidated`."""
    base = fake("sqlalchemy.exc.DBAPIError")
    kind = base if name == "DBAPIError" else fake(f"sqlalchemy.exc.{name}", base)
    for invalidated in (True, False):
        error = kind("gone")
        error.connection_invalidated = invalidated  # type: ignore[attr-defined]
        assert transient(error) is invalidated
    assert not transient(kind("no such attribute"))


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [(None, True), ("08006", True), ("08001", True), ("57P01", False), ("53300", False), ("28P01", False)],
)
def test_psycopg_is_transient_where_no_server_answered(sqlstate: str | None, expected: bool) -> None:
    """An `OperationalError` without SQLSTATE, or with one of class 08, comes from the connection."""
    error = fake("psycopg.OperationalError")("no")
    error.sqlstate = sqlstate  # type: ignore[attr-defined]
    assert transient(error) is expected


def test_each_error_is_asked_for_itself() -> None:
    """What is known of its class is only what it is to be asked."""
    kind = fake("psycopg.OperationalError")
    for sqlstate, expected in (("08006", True), ("42601", False), (None, True)):
        error = kind("no")
        error.sqlstate = sqlstate  # type: ignore[attr-defined]
        assert transient(error) is expected


def test_a_class_that_nobody_uses_any_more_is_forgotten() -> None:
    """What is known of it keeps no class alive: a program may make them while it runs."""
    kinds = [fake("httpx.ConnectError"), fake("app.NotFound"), fake("psycopg.OperationalError")]
    assert [transient(kind("no")) for kind in kinds] == [True, False, True]
    gone = [weakref.ref(kind) for kind in kinds]
    del kinds
    gc.collect()
    assert [it() for it in gone] == [None, None, None]


def test_classes_that_call_themselves_equal_are_asked_one_by_one() -> None:
    """What is known of one class is not said of another, and of one that cannot be looked up it is found anew."""
    lost = Judging("ConnectError", (Exception,), {"__module__": "httpx"})
    for _ in range(2):
        assert [transient(kind("no")) for kind in (lost, Judge)] == [True, False]


def test_a_certificate_is_found_wherever_it_hides() -> None:
    """In the cause, in the context beside another cause, in a group, in the cause of a group; cycles come to an end."""
    refused = ssl.SSLCertVerificationError("expired")

    def error(cause: BaseException | None = None, context: BaseException | None = None) -> ConnectionError:
        made = ConnectionError("no")
        made.__cause__, made.__context__ = cause, context
        return made

    of_a_group = ExceptionGroup("two addresses", [error()])
    of_a_group.__cause__ = refused
    hidden = [error(refused), error(None, refused), error(KeyError(), refused), error(error(error(refused)))]
    for it in (*hidden, error(ExceptionGroup("two", [OSError(), refused])), of_a_group, ExceptionGroup("", [*hidden])):
        assert not transient(it)
    circle = error()
    circle.__cause__ = error(circle)
    assert transient(circle)


def test_a_stream_that_ends_in_the_middle_is_a_lost_connection() -> None:
    """Of asyncio and of anyio."""
    assert transient(asyncio.IncompleteReadError(b"half", 8))
    assert transient(anyio.IncompleteRead())


def test_urllib3_is_asked_for_what_really_happened() -> None:
    """`MaxRetryError` wraps its reason."""
    pool: Any = None
    reset = urllib3.exceptions.ProtocolError("reset")
    parse = urllib3.exceptions.LocationParseError("nonsense")
    assert transient(urllib3.exceptions.MaxRetryError(pool, "/", reset))
    assert not transient(urllib3.exceptions.MaxRetryError(pool, "/", parse))
    assert not transient(urllib3.exceptions.MaxRetryError(pool, "/", urllib3.exceptions.SSLError("bad")))
    assert not transient(urllib3.exceptions.MaxRetryError(pool, "/", None))


# --- transient, and the real classes ---------------------------------------------------------

HTTPX2_ERRORS = {
    httpx2.ConnectError: True,
    httpx2.ReadError: True,
    httpx2.WriteError: True,
    httpx2.CloseError: True,
    httpx2.NetworkError: True,
    httpx2.ConnectTimeout: True,
    httpx2.ReadTimeout: True,
    httpx2.WriteTimeout: True,
    httpx2.PoolTimeout: True,
    httpx2.RemoteProtocolError: True,
    httpx2.LocalProtocolError: False,
    httpx2.UnsupportedProtocol: False,
    httpx2.TooManyRedirects: False,
    httpx2.DecodingError: False,
    httpx2.InvalidURL: False,
}

REQUESTS_ERRORS = {
    requests.ConnectionError: True,
    requests.Timeout: True,
    requests.ConnectTimeout: True,
    requests.ReadTimeout: True,
    requests.exceptions.ChunkedEncodingError: True,
    requests.exceptions.ProxyError: True,
    requests.exceptions.SSLError: False,
    requests.HTTPError: False,
    requests.TooManyRedirects: False,
    requests.JSONDecodeError: False,
    requests.exceptions.InvalidURL: False,
    requests.exceptions.ContentDecodingError: False,
    requests.exceptions.RetryError: False,
}


@pytest.mark.parametrize(("kind", "expected"), HTTPX2_ERRORS.items(), ids=lambda it: getattr(it, "__name__", ""))
def test_the_real_errors_of_httpx2(kind: type[Exception], expected: bool) -> None:
    """Its classes are where the table says that they are."""
    assert transient(kind("no")) is expected


def test_a_real_status_error_of_httpx2_is_an_answer() -> None:
    """Whoever wants to retry a 503 says so with `on` or `on_result`."""
    request = httpx2.Request("GET", "http://localhost/")
    response = httpx2.Response(503, request=request)
    with pytest.raises(httpx2.HTTPStatusError) as caught:
        response.raise_for_status()
    assert not transient(caught.value)


@pytest.mark.parametrize(("kind", "expected"), REQUESTS_ERRORS.items(), ids=lambda it: getattr(it, "__name__", ""))
def test_the_real_errors_of_requests(kind: type[Exception], expected: bool) -> None:
    """Its classes are where the table says that they are."""
    error = kind("no", "{", 0) if kind is requests.JSONDecodeError else kind("no")
    assert transient(error) is expected


#: What a proxy answers to CONNECT, and whether another try may be answered.
PROXY_ANSWERS = {
    "503 Service Unavailable": True,
    "502 Bad Gateway": True,
    "500 Unable to connect": True,
    "429 Too Many Requests": True,
    "407 Proxy Authentication Required": False,
    "403 Forbidden": False,
    "400 Bad Request": False,
}


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def proxy_errors(answer: str) -> dict[str, Exception]:
    """What clients raise for it."""
    pool: Any = None
    tunnel = OSError(f"Tunnel connection failed: {answer}")
    refused = urllib3.exceptions.ProxyError("Unable to connect to proxy", tunnel)
    request: Any = None
    return {
        "http.client": tunnel,
        "urllib": urllib.error.URLError(tunnel),
        "urllib3": refused,
        "urllib3, out of retries": urllib3.exceptions.MaxRetryError(pool, "/", refused),
        "requests": requests.exceptions.ProxyError(urllib3.exceptions.MaxRetryError(pool, "/", refused)),
        "httpx": httpx.ProxyError(answer),
        "httpx2": httpx2.ProxyError(answer),
        "httpcore": httpcore.ProxyError(answer),
        "openai": caused_by(openai.APIConnectionError(request=request), httpx.ProxyError(answer)),
        "anthropic": caused_by(anthropic.APIConnectionError(request=request), httpx.ProxyError(answer)),
        "aiohttp": aiohttp.ClientHttpProxyError(request, (), status=int(answer[:3]), message=answer[4:]),
    }


@pytest.mark.parametrize("client", proxy_errors("503 Service Unavailable"))
@pytest.mark.parametrize(("answer", "expected"), PROXY_ANSWERS.items(), ids=lambda it: str(it)[:3])
def test_a_proxy_that_has_not_connected_is_no_connection(client: str, answer: str, expected: bool) -> None:
    """The same for all clients: transient, unless it asks for a login or forbids it."""
    assert transient(proxy_errors(answer)[client]) is expected


def test_a_proxy_whose_answer_is_no_status() -> None:
    """Of a SOCKS proxy, and one that could not be reached itself."""
    assert transient(httpx.ProxyError("Proxy Server could not connect: Host unreachable."))
    assert not transient(httpx.ProxyError("Invalid username/password"))
    assert transient(urllib3.exceptions.ProxyError("Unable to connect to proxy", ConnectionRefusedError()))
    assert not transient(urllib3.exceptions.ProxyError("Unable", urllib3.exceptions.SSLError("bad certificate")))
