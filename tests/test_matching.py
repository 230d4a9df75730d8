"""`on`, `on_result` and `ignore`: which failures and results a policy handles, and which errors are transient.

Retry, CircuitBreaker and Fallback use these parameters; these tests check only whether a policy handled an
exception or a result.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import importlib
import itertools
import re
import ssl
import urllib.error
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp
import anyio
import httpcore
import httpx
import httpx2
import psycopg
import psycopg2
import pytest
import requests
import urllib3

from resilience import (
    BulkheadFull,
    CircuitBreaker,
    CircuitIsolated,
    CircuitOpen,
    Context,
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
from resilience.network_errors import _known, proxy_status
from resilience.testing import ascript, script
from tests.conftest import Boom, FakeClock, Other, Script, World
from tests.functions import raising


class Bang(Boom):
    """A kind of Boom."""


class EqualClasses(type):
    """The metaclass of classes that are all equal, unhashable, and have their own `isinstance` check."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, EqualClasses)

    __hash__: Any = None

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Boom)


class AlsoBoom(Exception, metaclass=EqualClasses):
    """An exception type that a `Boom` is an instance of, too."""


class Truthless:
    """A result without a truth value, as SQL expressions and arrays; `requests.Response` is false for a 404."""

    def __bool__(self) -> bool:
        raise AssertionError("the truth value was used")


class Confused(Exception):
    """Defines a method on the instance that belongs on its metaclass."""

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
        (AlsoBoom, [AlsoBoom(), Boom()], [Other()]),
        (Confused, [Confused()], [Other()]),
    ],
    ids=[
        *("a type", "a narrow type", "a tuple", "a predicate", "Exception", "BaseException"),
        *("a type with a metaclass", "a type with a strange method"),
    ],
)
def test_on_selects_the_handled_exceptions(on: Any, handled: list[Exception], not_handled: list[Exception]) -> None:
    """By a type with its subclasses, a tuple of types, or a predicate."""
    matcher = Matcher(on, ())
    assert [matcher.judge(error) for error in handled] == [True] * len(handled)
    assert [matcher.judge(error) for error in not_handled] == [False] * len(not_handled)


@pytest.mark.parametrize("ignore", [Bang, (Other, Bang), lambda error: isinstance(error, Bang)])
@pytest.mark.parametrize("on", [Boom, Bang, (Boom, Bang), Exception, lambda error: True])
def test_ignore_takes_precedence_over_on(on: Any, ignore: Any) -> None:
    """An exception that both match is not handled."""
    matcher = Matcher(on, ignore)
    assert matcher.judge(Bang()) is None


def test_an_exception_that_neither_on_nor_ignore_matches_is_an_answer() -> None:
    """It is not handled, and not neutral either: to a circuit breaker the dependency has answered."""
    matcher = Matcher(Boom, Bang)
    assert matcher.judge(Other()) is False


@pytest.mark.parametrize("truth", [re.match("b", "busy"), [0], None, 0, ()])
def test_a_predicate_may_return_any_object(truth: object) -> None:
    """Its truth counts, as that of `on_result` does."""
    matcher = Matcher(lambda error: truth, ())
    assert matcher.judge(Boom()) is bool(truth)
    assert Matcher(Boom, lambda error: truth).judge(Boom()) is (None if truth else True)


def test_the_predicate_does_not_get_ignored_exceptions() -> None:
    """`ignore` is checked first."""
    shown: list[Exception] = []
    Matcher(lambda error: bool(shown.append(error)), Bang).judge(Bang())
    assert shown == []


# --- in the three policies that have these parameters ---


class Case(NamedTuple):
    """One of the three policies, and how it shows that it handled a failure or a result."""

    name: str
    make: Callable[..., Policy[Any]]
    handled: Callable[[Policy[Any], Script], bool]


#: The fallbacks that have answered.
answering: weakref.WeakSet[Fallback[str]] = weakref.WeakSet()


def recording_fallback(**parameters: Any) -> Policy[Any]:
    fallback = Fallback("answered", on_fallback=lambda event: answering.add(fallback), **parameters)
    return fallback


RETRY = Case(
    "Retry", lambda **parameters: Retry(2, backoff=[0], **parameters), lambda policy, script: script.calls == 2
)
BREAKER = Case(
    "CircuitBreaker",
    lambda **parameters: CircuitBreaker(1, **parameters),
    lambda policy, script: policy.stats().opened == 1,  # type: ignore[attr-defined]
)
FALLBACK = Case("Fallback", recording_fallback, lambda policy, script: policy in answering)
each_policy = pytest.mark.parametrize("case", [RETRY, BREAKER, FALLBACK], ids=lambda case: case.name)
repeats_or_counts = pytest.mark.parametrize("case", [RETRY, BREAKER], ids=lambda case: case.name)


async def handles(world: World, case: Case, step: Any, **parameters: Any) -> bool:
    """Return whether the policy handled the result or exception of the function."""
    policy = case.make(**parameters)
    script = Script(step)
    outcome = await world.attempt(policy, script.function())
    handled = case.handled(policy, script)
    assert outcome == ("answered" if handled and case is FALLBACK else step), "the outcome is not the step itself"
    return handled


@each_policy
@pytest.mark.parametrize("on", [Boom, (Other, Boom), lambda error: isinstance(error, Boom)])
async def test_on_and_ignore_mean_the_same_in_all_policies(world: World, clock: FakeClock, case: Case, on: Any) -> None:
    assert await handles(world, case, Boom(), on=on)
    assert not await handles(world, case, ValueError(), on=on)
    assert not await handles(world, case, Bang(), on=on, ignore=Bang)
    assert not await handles(world, case, Bang(), on=on, ignore=lambda error: isinstance(error, Bang))
    assert await handles(world, case, "bad", on=on, on_result=lambda result: result == "bad")
    for good in ("good", Truthless()):
        assert not await handles(world, case, good, on=on, on_result=lambda result: result == "bad")
    assert not await handles(world, case, "bad", on=on)


@each_policy
@pytest.mark.parametrize("parameter", ["on", "ignore", "on_result"])
async def test_an_error_of_a_predicate_reaches_the_caller(
    world: World, clock: FakeClock, case: Case, parameter: str
) -> None:
    """The predicate has made no decision then."""

    class Undecided(Boom):
        """An exception that `on` would match."""

    original = "a result" if parameter == "on_result" else Boom("the original")
    policy = case.make(**{"on": Boom, parameter: raising(Undecided)})
    script = Script(original)
    error = await world.attempt(policy, script.function())
    assert isinstance(error, Undecided)
    assert error.__context__ is (None if parameter == "on_result" else original)
    assert script.calls == 1


# --- rejections, deadlines and misuse of this library ---

OURS: list[Exception] = [
    *(Rejected("no"), CircuitOpen("no"), CircuitIsolated("no"), BulkheadFull("no")),
    *(WorkersExhausted("no"), DeadlineExceeded("no")),
]


@repeats_or_counts
async def test_rejections_and_deadlines_are_handled_only_if_named(world: World, clock: FakeClock, case: Case) -> None:
    """A call that was not made, or had no time, says nothing about the dependency: a broad `on` does not match it."""
    wide = [Exception, BaseException, ResilienceError, TimeoutError, TimeoutExceeded, (Exception, OSError), transient]
    for error, on in itertools.product(OURS, [*wide, lambda error: True]):
        assert not await handles(world, case, error, on=on), (error, on)


@repeats_or_counts
async def test_a_named_rejection_or_deadline_is_handled(world: World, clock: FakeClock, case: Case) -> None:
    for error in OURS:
        for on in (type(error), (Boom, type(error)), (Exception, type(error))):
            assert await handles(world, case, error, on=on), (error, on)


@repeats_or_counts
async def test_naming_a_rejection_names_its_subclasses_too(world: World, clock: FakeClock, case: Case) -> None:
    """`on=Rejected` matches every rejection, `on=CircuitOpen` no full bulkhead."""
    assert await handles(world, case, CircuitIsolated("no"), on=Rejected)
    assert await handles(world, case, CircuitIsolated("no"), on=CircuitOpen)
    assert not await handles(world, case, BulkheadFull("no"), on=(Exception, CircuitOpen))
    assert not await handles(world, case, Rejected("no"), on=CircuitOpen)
    assert not await handles(world, case, DeadlineExceeded("no"), on=(Exception, Rejected))
    assert not await handles(world, case, CircuitOpen("no"), on=(Exception, DeadlineExceeded))
    assert not await handles(world, case, CircuitOpen("no"), on=Rejected, ignore=CircuitOpen)


async def test_a_fallback_answers_rejections_and_deadlines(world: World) -> None:
    """It is usually the outermost policy."""
    for error in OURS:
        assert await handles(world, FALLBACK, error), error
        assert await handles(world, FALLBACK, error, on=lambda error: True), error
        assert not await handles(world, FALLBACK, error, ignore=type(error)), error
        assert not await handles(world, FALLBACK, error, on=Boom), error


@each_policy
async def test_other_errors_of_this_library_are_ordinary_failures(world: World, clock: FakeClock, case: Case) -> None:
    """The timeout of an attempt and an inner retry that gave up do say something about the dependency."""
    assert await handles(world, case, TimeoutExceeded("no"), on=Exception)
    assert await handles(world, case, RetriesExhausted("no"), on=Exception)
    assert await handles(world, case, TimeoutExceeded("no"), on=TimeoutError)


@each_policy
async def test_a_misuse_is_never_handled(world: World, clock: FakeClock, case: Case) -> None:
    """Whatever `on` is: a misuse is no outcome, and no answer to a circuit breaker either."""
    ways = [Exception, BaseException, Misuse, TypeError, (TypeError, RuntimeError, Misuse), lambda error: True]
    for kind, on in itertools.product((Misuse, AwaitableMisuse, SuspensionMisuse), ways):
        assert not await handles(world, case, error := kind("no"), on=on), (error, on)
        assert Matcher(on, ()).judge(error) is None, (error, on)


# --- transient -------------------------------------------------------------------------------


def fake(path: str, *bases: type[Exception]) -> type[Exception]:
    """Return a class whose module and name are `path`, as the clients' own classes have them."""
    module, _, name = path.rpartition(".")
    return type(name, bases or (Exception,), {"__module__": module})


HTTPX = (
    "TimeoutException ConnectTimeout ReadTimeout WriteTimeout PoolTimeout "
    "NetworkError ConnectError ReadError WriteError CloseError RemoteProtocolError"
)

KAFKA = "KafkaConnectionError KafkaTimeoutError NoBrokersAvailable NodeNotReadyError RequestTimedOutError"

#: What the clients raise if the network failed, where their own documentation says so.
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
        "ConnectionClosedError ResponseStreamingError IncompleteReadError"
    ),
    "openai": "APIConnectionError APITimeoutError",
    "anthropic": "APIConnectionError APITimeoutError RetryableError",
    "pymongo.errors": "ConnectionFailure AutoReconnect NetworkTimeout ServerSelectionTimeoutError",
    "psycopg.errors": (
        "ConnectionTimeout AdminShutdown CrashShutdown CannotConnectNow "
        "IdleInTransactionSessionTimeout IdleSessionTimeout"
    ),
    "psycopg2.errors": (
        "AdminShutdown CrashShutdown CannotConnectNow IdleInTransactionSessionTimeout IdleSessionTimeout"
    ),
    "asyncpg.exceptions": (
        "PostgresConnectionError ConnectionDoesNotExistError ConnectionFailureError "
        "AdminShutdownError CrashShutdownError CannotConnectNowError "
        "IdleInTransactionSessionTimeoutError IdleSessionTimeoutError"
    ),
    "valkey.exceptions": "ConnectionError TimeoutError BusyLoadingError",
    "azure.core.exceptions": "IncompleteReadError",
    "elastic_transport": "ConnectionError ConnectionTimeout",
    "opensearchpy.exceptions": "ConnectionError",
    "kafka.errors": f"{KAFKA} NetworkExceptionError",
    "aiokafka.errors": KAFKA,
    "pika.adapters.utils.connection_workflow": "AMQPConnectorStackTimeout",
}

LASTING_HTTPX = "HTTPStatusError InvalidURL UnsupportedProtocol LocalProtocolError TooManyRedirects DecodingError"

#: What the same clients raise for other reasons.
LASTING = {
    "httpx": LASTING_HTTPX,
    "httpx2": LASTING_HTTPX,
    "requests.exceptions": (
        "HTTPError InvalidURL MissingSchema TooManyRedirects JSONDecodeError RetryError ContentDecodingError"
    ),
    "urllib3.exceptions": "LocationParseError DecodeError HostChangedError",
    "aiohttp.client_exceptions": "ClientResponseError InvalidURL ContentTypeError WSServerHandshakeError",
    "redis.exceptions": "ResponseError DataError WatchError ReadOnlyError",
    "botocore.exceptions": "ClientError NoCredentialsError ParamValidationError",
    "openai": "BadRequestError AuthenticationError RateLimitError",
    "anthropic": "BadRequestError AuthenticationError RateLimitError",
    "pymongo.errors": "DuplicateKeyError OperationFailure ConfigurationError",
    "psycopg.errors": "UniqueViolation SyntaxError UndefinedTable",
    "psycopg2.errors": "UniqueViolation SyntaxError UndefinedTable",
    "asyncpg.exceptions": "UniqueViolationError InterfaceError SyntaxOrAccessError",
    "sqlalchemy.exc": "IntegrityError OperationalError ArgumentError",
    "grpc": "RpcError",
    "azure.core.exceptions": "HttpResponseError ClientAuthenticationError",
    "google.api_core.exceptions": "ServiceUnavailable TooManyRequests RetryError",
    "google.auth.exceptions": "RefreshError",
    "elasticsearch": "ApiError",
    "opensearchpy.exceptions": "TransportError",
    "kafka.errors": "TopicAuthorizationFailedError",
    "pika.exceptions": "ChannelClosedByBroker",
}

#: Subclasses of a transient class that another try does not help: certificates, credentials and pools.
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
    "valkey.exceptions.AuthenticationError": "valkey.exceptions.ConnectionError",
    "elastic_transport.TlsError": "elastic_transport.ConnectionError",
    "opensearchpy.exceptions.SSLError": "opensearchpy.exceptions.ConnectionError",
    "pika.exceptions.ProbableAuthenticationError": "pika.exceptions.AMQPConnectionError",
    "aiormq.exceptions.AuthenticationError": "builtins.ConnectionError",
    "psycopg_pool.errors.PoolTimeout": "psycopg.OperationalError",
    "psycopg_pool.errors.PoolClosed": "psycopg.OperationalError",
    "psycopg_pool.errors.TooManyRequests": "psycopg.OperationalError",
}


def paths(table: dict[str, str]) -> list[str]:
    return [f"{module}.{name}" for module, names in table.items() for name in names.split()]


def real(path: str) -> type[Exception]:
    """Return the class of the client, if it is installed, in a version that has it; otherwise a fake one."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None) or fake(path)
    except ImportError:
        return fake(path)


@pytest.mark.parametrize("kind", [fake, real])
def test_errors_of_the_well_known_clients_are_judged_by_package_and_class_name(kind: Any) -> None:
    """None is a builtin `ConnectionError`. A response is an answer, and a wrong argument stays wrong."""
    for table, expected in ((TRANSIENT, True), (LASTING, False)):
        errors = {path: kind(path) for path in paths(table)}
        assert [path for path, it in errors.items() if transient(it.__new__(it, "no")) is not expected] == []


@pytest.mark.parametrize("path", PERMANENT)
def test_errors_of_certificates_credentials_and_pools_are_not_transient(path: str) -> None:
    """Although their classes derive from a transient one."""
    parent = ConnectionError if PERMANENT[path].startswith("builtins.") else fake(PERMANENT[path])
    assert transient(parent("reset"))
    for kind in (fake(path, parent), real(path)):
        assert not transient(kind.__new__(kind, "bad certificate"))


def test_a_subclass_is_recognized_by_its_parents() -> None:
    """In any package: `class PaymentsDown(httpx.ConnectError)` is a connect error, also if it is an `OSError` first."""
    parent = fake("httpx.ConnectError")
    assert transient(fake("payments.PaymentsDown", parent)("no"))
    assert transient(fake("payments.PaymentsDown", OSError, parent)("no"))
    refused = fake("payments.Refused", OSError, fake("redis.exceptions.AuthenticationError"))
    assert not transient(refused(errno.ENETUNREACH, "no"))
    assert transient(fake("payments.Late", fake("sqlalchemy.exc.DBAPIError"), TimeoutError)("no"))
    assert not transient(fake("payments.Refused", TimeoutError, fake("redis.exceptions.AuthenticationError"))("no"))


def test_the_same_class_name_in_another_package_is_not_recognized() -> None:
    for path in ("payments.ConnectError", "httpx_payments.ConnectError", "redis_om.exceptions.ConnectionError"):
        assert not transient(fake(path)("no"))


def carrying(path: str, parent: str = "", **attributes: Any) -> Exception:
    """Make an error of a client, with these attributes."""
    error = fake(path, *([fake(parent)] if parent else []))("no")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def of_grpc(status: str, path: str = "grpc._channel._InactiveRpcError") -> Exception:
    return carrying(path, "grpc.RpcError", code=lambda: SimpleNamespace(name=status))


def of_google(response: object) -> Exception:
    package = "google.api_core.exceptions"
    return carrying(f"{package}.ServiceUnavailable", f"{package}.GoogleAPICallError", response=response)


LIBPQ = [psycopg, psycopg2]
REFUSED_PASSWORD = 'FATAL:  password authentication failed for user "joe"'


def of_libpq(answer: str, driver: Any) -> Exception:
    """Make the error of a connection, which has no SQLSTATE."""
    text = f'connection to server at "auth.password" failed: {answer}'
    error: Exception = driver.OperationalError(text)
    return error


def out_of_retries(reason: Any) -> Exception:
    pool: Any = None
    return urllib3.exceptions.MaxRetryError(pool, "/", reason)


CLOSED_BY_PIKA = "pika.exceptions.ConnectionClosed", "pika.exceptions.AMQPConnectionError"
CLOSED_BY_WEBSOCKETS = "websockets.exceptions.ConnectionClosedError", "websockets.exceptions.ConnectionClosed"
OF_SQLALCHEMY = [(f"sqlalchemy.exc.{it}", "sqlalchemy.exc.DBAPIError") for it in ("OperationalError", "InterfaceError")]
SDKS = ["openai.APIStatusError", "anthropic.APIStatusError"]
WRAPPING = [
    ("azure.core.exceptions.ServiceRequestError", "inner_exception"),
    ("azure.core.exceptions.ServiceResponseError", "inner_exception"),
    ("google.auth.exceptions.TransportError", "__cause__"),
]

#: Errors that are transient, and others of the same classes.
JUDGED: dict[str, tuple[list[Exception], list[Exception]]] = {
    "grpc, only if unavailable": (
        [of_grpc("UNAVAILABLE"), of_grpc("UNAVAILABLE", "grpc.aio._call.AioRpcError")],
        [of_grpc(it) for it in ("NOT_FOUND", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL")],
    ),
    "grpc, not without a status": (
        [],
        [carrying("grpc.RpcError", code=it) for it in (None, "UNAVAILABLE", lambda: None)],
    ),
    "google, by the error of grpc that it was made from; a response over HTTP is an answer": (
        [of_google(of_grpc("UNAVAILABLE"))],
        [of_google(of_grpc("NOT_FOUND")), of_google(requests.Response())],
    ),
    "pika, unless closed for another reason than a restart": (
        [carrying(*CLOSED_BY_PIKA), carrying(*CLOSED_BY_PIKA, reply_code=320)],
        [carrying(*CLOSED_BY_PIKA, reply_code=it) for it in (403, 200)],
    ),
    "websockets, unless the other side has closed: its close frame is an answer": (
        [carrying(*CLOSED_BY_WEBSOCKETS, rcvd=None)],
        [carrying(*CLOSED_BY_WEBSOCKETS, rcvd=SimpleNamespace(code=1008))],
    ),
    "sqlalchemy, if the connection was lost, whatever the driver": (
        [carrying(*it, connection_invalidated=True) for it in (*OF_SQLALCHEMY, ["sqlalchemy.exc.DBAPIError"])],
        [
            *(carrying(*it, connection_invalidated=False) for it in (*OF_SQLALCHEMY, ["sqlalchemy.exc.DBAPIError"])),
            *(carrying(*it) for it in OF_SQLALCHEMY),
        ],
    ),
    "psycopg, if no server answered: no SQLSTATE, or one of class 08": (
        [carrying("psycopg.OperationalError", sqlstate=it) for it in ("08006", "08001", None)],
        [carrying("psycopg.OperationalError", sqlstate=it) for it in ("57P01", "53300", "28P01", "0A000")],
    ),
    "psycopg2, as psycopg: no SQLSTATE, or one of class 08, which is named pgcode": (
        [carrying("psycopg2.OperationalError", pgcode=it) for it in ("08006", None)],
        [carrying("psycopg2.errors.QueryCanceled", "psycopg2.OperationalError", pgcode="57014")],
    ),
    "libpq, unless the password is refused": (
        [of_libpq(it, driver) for driver in LIBPQ for it in ("FATAL:  sorry, too many clients already", "refused")],
        [of_libpq(it, driver) for driver in LIBPQ for it in (REFUSED_PASSWORD, "no password supplied")],
    ),
    "urllib, by its reason, which is a text if there was an answer": (
        [urllib.error.URLError(it) for it in (ConnectionRefusedError("no"), TimeoutError())],
        [urllib.error.URLError("Not Found")],
    ),
    "urllib3, by its reason": (
        [out_of_retries(urllib3.exceptions.ProtocolError("reset"))],
        [*map(out_of_retries, (urllib3.exceptions.LocationParseError("no"), urllib3.exceptions.SSLError("bad"), None))],
    ),
    "SDKs, only if an integration has marked it": (
        [carrying(it, repeatable=True) for it in SDKS],
        [*(carrying(it) for it in SDKS), *(carrying(it, repeatable=False) for it in SDKS)],
    ),
    "SDKs, if an event of a stream says so": (
        [carrying(it, status_code=200, body={"error": {"type": "overloaded_error"}}) for it in SDKS]
        + [carrying("openai.APIError", body={"type": it, "code": None}) for it in ("server_error", "rate_limit_error")]
        + [carrying("openai.APIError", body={"type": "tokens", "code": "rate_limit_exceeded"})],
        [carrying(it, status_code=529, body={"error": {"type": "overloaded_error"}}) for it in SDKS]
        + [
            carrying("openai.APIError", body=it)
            for it in (None, "server_error", {}, {"error": "server_error"}, {"type": ["odd"], "code": "invalid_prompt"})
        ],
    ),
    "others, by the error of the HTTP client that they wrap": (
        [carrying(path, **{name: ConnectionError()}) for path, name in WRAPPING],
        [carrying(path, **{name: it}) for path, name in WRAPPING for it in (requests.exceptions.SSLError("no"), None)],
    ),
    "an OSError of all addresses, by its nearest cause": (
        [caused_by(OSError("all failed"), it) for it in (ConnectionError(), ExceptionGroup("", [ConnectionError()]))],
        [
            caused_by(OSError("all failed"), caused_by(ValueError(), ConnectionError())),
            caused_by(OSError("all failed"), ExceptionGroup("", [ConnectionError(), PermissionError()])),
            caused_by(fake("app.OddError", OSError)("all failed"), ConnectionError()),
        ],
    ),
    "TLS, unless a certificate is the cause": (
        [caused_by(httpx2.ConnectError("no"), ssl.SSLEOFError(8, "EOF occurred in violation of protocol"))],
        [caused_by(httpx2.ConnectError("no"), ssl.SSLCertVerificationError("expired"))],
    ),
    "incomplete reads": ([asyncio.IncompleteReadError(b"half", 8), anyio.IncompleteRead()], []),
    "proxies without a status, by the cause": (
        [
            httpx.ProxyError("Proxy Server could not connect: Host unreachable."),
            urllib3.exceptions.ProxyError("Unable to connect to proxy", ConnectionRefusedError()),
        ],
        [
            httpx.ProxyError("Invalid username/password"),
            urllib3.exceptions.ProxyError("Unable", urllib3.exceptions.SSLError("bad certificate")),
        ],
    ),
}


@pytest.mark.parametrize("rule", JUDGED)
def test_an_error_is_judged_by_what_it_carries(rule: str) -> None:
    """The class alone does not decide: only the kind of check is remembered for a class."""
    lost, others = JUDGED[rule]
    assert [it for it in lost if not transient(it)] == [it for it in others if transient(it)] == []


def test_remembering_a_class_does_not_keep_it_alive() -> None:
    """A program may make exception classes while it runs."""
    kinds = [fake("httpx.ConnectError"), fake("app.NotFound"), fake("psycopg.OperationalError")]
    assert [transient(kind("no")) for kind in kinds] == [True, False, True]
    gone = [weakref.ref(kind) for kind in kinds]
    del kinds
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert [ref for ref in _known if ref() is None] == [], "an entry is left"


def test_classes_that_compare_equal_are_judged_separately() -> None:
    """The entry for one class does not serve another, and classes that cannot be looked up are checked each time."""
    lost = EqualClasses("ConnectError", (Exception,), {"__module__": "httpx"})
    for _ in range(2):
        assert [transient(kind("no")) for kind in (lost, AlsoBoom)] == [True, False]


def test_a_certificate_error_that_the_caller_handles_is_no_cause() -> None:
    """Python makes it the context of all errors of another service, which a handler calls instead."""
    refused, lost = ssl.SSLCertVerificationError("expired"), ConnectionError("reset")

    async def call_another(failure: object, ctx: Context) -> str:
        return await Retry(backoff=[0]).call(ascript(lost, "fine"))

    another = Fallback(handler=lambda failure, ctx: Retry(backoff=[0]).call(script(lost, "fine")))
    assert another.call(script(refused)) == "fine"
    assert asyncio.run(Fallback(handler=call_another).call(ascript(refused))) == "fine"
    assert lost.__context__ is refused


def test_a_certificate_error_is_found_anywhere_in_the_chain() -> None:
    """In the cause, the context, a group, or the cause of a group. Cycles come to an end."""
    refused = ssl.SSLCertVerificationError("expired")

    def error(cause: BaseException | None = None, context: BaseException | None = None) -> ConnectionError:
        made = ConnectionError("no")
        made.__cause__, made.__context__ = cause, context
        return made

    of_a_group = ExceptionGroup("two addresses", [error()])
    of_a_group.__cause__ = refused
    deep = functools.reduce(lambda cause, _: error(cause), range(50), refused)
    hidden = [error(refused), error(None, refused), error(KeyError(), refused), error(error(error(refused))), deep]
    for outer in (
        *hidden,
        error(ExceptionGroup("two", [OSError(), refused])),
        of_a_group,
        ExceptionGroup("", [*hidden]),
    ):
        assert not transient(outer)
    circle = error()
    circle.__cause__ = error(circle)
    assert transient(circle)
    assert transient(error(circle))


def test_the_name_of_a_class_does_not_make_a_certificate_error_or_a_group_transient() -> None:
    assert not transient(type("SSLCertVerificationError", (ConnectionError,), {})("expired"))
    assert not transient(type("ConnectError", (ExceptionGroup,), {"__module__": "httpx"})("", [ValueError()]))


def test_a_group_is_transient_if_all_its_leaves_are_with_their_causes() -> None:
    leaf = ConnectionError("no")
    leaf.__cause__ = fake("httpx.ProxyError")("407 Proxy Authentication Required")
    assert [transient(it) for it in (leaf, ExceptionGroup("", [leaf]))] == [False, False]


# --- proxies ---


#: Answers of a proxy to CONNECT, and whether they are transient.
PROXY_ANSWERS = {
    "503 Service Unavailable": True,
    "502 Bad Gateway": True,
    "500 Unable to connect": True,
    "429 Too Many Requests": True,
    "408 Request Timeout": True,
    "425 Too Early": True,
    "499 Client Closed Request": False,
    "407 Proxy Authentication Required": False,
    "403 Forbidden": False,
    "400 Bad Request": False,
}


def of_sdk(name: str, answer: str) -> Exception:
    """The SDKs are imported by the tests that need them: it takes a second."""
    return caused_by(importlib.import_module(name).APIConnectionError(request=None), httpx.ProxyError(answer))


def of_urllib3(answer: str) -> Exception:
    return urllib3.exceptions.ProxyError("Unable to connect to proxy", OSError(f"Tunnel connection failed: {answer}"))


def of_aiohttp(answer: str) -> Exception:
    request: Any = None
    return aiohttp.ClientHttpProxyError(request, (), status=int(answer[:3]), message=answer[4:])


def of_botocore(answer: str) -> Exception:
    exceptions = importlib.import_module("botocore.exceptions")
    error: Exception = exceptions.ProxyConnectionError(proxy_url="http://auth.proxy", error=of_urllib3(answer))
    return error


#: What the clients raise for such an answer.
PROXY_ERRORS: dict[str, Callable[[str], Exception]] = {
    "http.client": lambda answer: OSError(f"Tunnel connection failed: {answer}"),
    "urllib": lambda answer: urllib.error.URLError(OSError(f"Tunnel connection failed: {answer}")),
    "urllib3": of_urllib3,
    "urllib3, out of retries": lambda answer: out_of_retries(of_urllib3(answer)),
    "requests": lambda answer: requests.exceptions.ProxyError(out_of_retries(of_urllib3(answer))),
    "httpx": httpx.ProxyError,
    "httpx2": httpx2.ProxyError,
    "httpcore": httpcore.ProxyError,
    "openai": functools.partial(of_sdk, "openai"),
    "anthropic": functools.partial(of_sdk, "anthropic"),
    "aiohttp": of_aiohttp,
    "botocore": of_botocore,
}


@pytest.mark.parametrize("client", PROXY_ERRORS)
def test_a_failed_connect_of_a_proxy_is_transient_unless_it_refuses_the_client(client: str) -> None:
    """The same for all clients: a proxy that asks for a login, or forbids the request, refuses."""
    assert {answer: transient(PROXY_ERRORS[client](answer)) for answer in PROXY_ANSWERS} == PROXY_ANSWERS


def test_only_an_error_of_a_proxy_has_the_status_of_its_answer() -> None:
    """Any other request may have been sent, so a POST is not sent again."""
    others = OSError("503 busy"), httpx.ReadError("503 busy"), carrying("httpx.ReadError", status=503)
    assert [proxy_status(it) for it in (httpx.ProxyError("503 busy"), *others)] == [503, None, None, None]
