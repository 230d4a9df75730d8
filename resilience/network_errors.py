"""`transient`: recognizes the network errors of many clients by the names of their classes, and imports no client."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias
from weakref import ref

from resilience.notes import is_handled_outside
from resilience.outcome import message_of

#: Top-level package -> names of its exception classes for network errors: a connection could not be made or broke, or
#: an answer did not come in time. Nothing is imported. None of them is a builtin `ConnectionError`.
_NETWORK_ERRORS: Final = {
    "http": "IncompleteRead RemoteDisconnected BadStatusLine",
    "smtplib": "SMTPServerDisconnected SMTPConnectError",
    "asyncio": "IncompleteReadError",
    "ssl": "SSLEOFError SSLZeroReturnError",
    "anyio": "BrokenResourceError ConnectionFailed IncompleteRead",
    "trio": "BrokenResourceError TooSlowError",
    "resilience": "TransientStatus",  # a response that says "not now", as the HTTP integrations raise it
    "httpx httpx2 httpcore httpcore2": (
        "TimeoutException ConnectTimeout ReadTimeout WriteTimeout PoolTimeout "
        "NetworkError ConnectError ReadError WriteError CloseError RemoteProtocolError"
    ),
    "httpcore httpcore2": "ConnectionNotAvailable",
    "requests": "ConnectionError Timeout ConnectTimeout ReadTimeout ChunkedEncodingError",
    "urllib3": "TimeoutError ConnectTimeoutError ReadTimeoutError NewConnectionError ProtocolError",
    "aiohttp": (
        "ClientConnectionError ClientConnectorError ClientOSError ClientPayloadError "
        "ServerDisconnectedError ServerTimeoutError"
    ),
    "redis valkey": "ConnectionError TimeoutError BusyLoadingError",
    "botocore": (
        "ConnectionError HTTPClientError EndpointConnectionError ConnectTimeoutError "
        "ReadTimeoutError ConnectionClosedError ResponseStreamingError IncompleteReadError"
    ),
    "openai anthropic": "APIConnectionError APITimeoutError",
    "anthropic": "RetryableError",
    "pymongo": "ConnectionFailure AutoReconnect NetworkTimeout ServerSelectionTimeoutError",
    "psycopg psycopg2": (
        "ConnectionTimeout AdminShutdown CrashShutdown CannotConnectNow "
        "IdleInTransactionSessionTimeout IdleSessionTimeout"
    ),
    "asyncpg": (
        "PostgresConnectionError ConnectionDoesNotExistError ConnectionFailureError "
        "AdminShutdownError CrashShutdownError CannotConnectNowError "
        "IdleInTransactionSessionTimeoutError IdleSessionTimeoutError"
    ),
    "azure": "IncompleteReadError",
    "elastic_transport": "ConnectionError ConnectionTimeout",  # of elasticsearch
    "opensearchpy": "ConnectionError",
    "pika": "AMQPConnectorStackTimeout",
    "kafka aiokafka": (
        "KafkaConnectionError KafkaTimeoutError NoBrokersAvailable NodeNotReadyError RequestTimedOutError"
    ),
    "kafka": "NetworkExceptionError",
}

#: Types of errors that mean "not now", as the API of a language model reports them in a stream that is open.
_NOT_NOW: Final = frozenset(
    {"overloaded_error", "api_error", "rate_limit_error", "timeout_error", "server_error", "rate_limit_exceeded"}
)

#: Errors of TLS that mean that the other side has ended the connection; the error of a certificate that was refused.
_ENDED_TLS: Final = frozenset({"SSLEOFError", "SSLZeroReturnError"})
_REFUSED_CERTIFICATE: Final = frozenset({"SSLCertVerificationError"})

#: The status of a proxy's answer in messages of http.client and httpcore; words of a message that asks for a login.
_TUNNEL = "Tunnel connection failed: "
_STATUS = re.compile(rf"(?:{_TUNNEL})?([1-5][0-9]{{2}})\b")
_LOGIN = re.compile(r"username|password|auth", re.IGNORECASE)

#: The end of libpq's message. What is before it, such as the name of a host, may contain any word.
_REFUSED_LOGIN = re.compile(r"failed: (?:FATAL: .*authentication failed|.*no password supplied)")

#: How many causes of an error are inspected.
_MAX_CAUSES = 20

#: `errno` of errors for which a connection could not be made or broke, besides those of `ConnectionError`.
_NETWORK_ERRNOS = frozenset(
    getattr(errno, name)
    for name in "EHOSTUNREACH EHOSTDOWN ENETUNREACH ENETDOWN ENETRESET ETIMEDOUT EADDRNOTAVAIL".split()
    if hasattr(errno, name)
)


def transient(error: Exception) -> bool:
    """Whether `error` is a network error that may be gone at the next try. The default of Retry's `on`.

    True for the builtin `ConnectionError` and `TimeoutError` (so for our own `TimeoutExceeded`), for the `OSError`s of
    connecting (no route, unreachable, timed out, a temporary failure to resolve a name), and for the connection and
    timeout errors of asyncio's streams, http.client, smtplib, urllib, httpx, httpx2, httpcore, requests, urllib3,
    aiohttp, anyio, trio, redis, botocore, grpc (status `UNAVAILABLE`), openai, anthropic, pymongo, psycopg, psycopg2,
    asyncpg and SQLAlchemy (connections that were invalidated), valkey, elasticsearch, opensearchpy, azure-core,
    google-api-core (made from grpc's `UNAVAILABLE`), google-auth, kafka, aiokafka, pika, aio-pika and websockets
    (without a close frame). Also for an error of TLS that means that the connection has ended (`SSLEOFError`), and for
    an exception group if it is true for all its leaves.
    The error of a proxy that did not connect is transient, unless the proxy asks for a login (407) or forbids it
    (another 4xx).

    An error that the API of OpenAI or Anthropic reports in an open stream is transient if it says "not now", such as
    `overloaded_error`.

    Certificate and authentication errors are not transient, wherever they are in the chain of causes. Nor is an HTTP
    status: a response is an answer. (The integrations for HTTP clients raise `TransientStatus` for responses such as a
    503; that error is transient.)
    """
    if not _test_of(type(error))(error):
        return False
    if error.__cause__ is None and error.__context__ is None:
        return True
    if _involves(error, _REFUSED_CERTIFICATE):
        return False
    proxy = next((it for it in _causes(error) if _test_of(type(it)) is _proxy_may_connect), None)
    return proxy is None or _proxy_may_connect(proxy)


def _are_transient(group: Any) -> bool:
    return all(map(transient, group.exceptions))


def _is_of_connecting(error: Any) -> bool:
    """Whether an `OSError` means that a connection could not be made or broke.

    asyncio, anyio and trio raise one without a number for all addresses of a host, http.client if a proxy has not
    connected.
    """
    if type(error) is not OSError or error.errno is not None:
        return error.errno in _NETWORK_ERRNOS
    text = str(error)
    if text.startswith(_TUNNEL):
        return _proxy_may_connect(error)
    cause = error.__cause__
    return _has_transient_cause(error) if isinstance(cause, Exception) else text.startswith("Multiple exceptions: ")


def _is_temporary(error: Any) -> bool:
    """Whether a name could not be resolved now, but may be later."""
    import socket  # the code that raises this error has imported it; at the top, it would take 2 ms

    return bool(error.errno == socket.EAI_AGAIN)


def _has_transient_cause(error: Any) -> bool:
    causes = _causes(error)
    if not 0 < len(causes) < _MAX_CAUSES:  # more would exhaust the stack, as each is judged by the next
        return False
    # In a ring, as after `raise group.exceptions[0] from group`, the cause would be judged by this error.
    return all(it is not error for it in _related(causes[0])) and transient(causes[0])


def _causes(error: BaseException) -> list[Exception]:
    """Return the causes of an error, the nearest one first, and at most `_MAX_CAUSES`."""
    found: list[Exception] = []
    while isinstance(cause := error.__cause__, Exception) and len(found) < _MAX_CAUSES:
        found.append(cause)
        error = cause
    return found


def _involves(error: BaseException, names: frozenset[str]) -> bool:
    """Whether this error, or one in its causes, contexts and groups, is of a class with one of these names."""
    return any(_is_named(type(each), names) for each in _related(error))


def _is_named(kind: type, names: frozenset[str]) -> bool:
    return not names.isdisjoint([base.__name__ for base in kind.__mro__])


def _related(error: BaseException) -> list[BaseException]:
    """Return this error, and those in its causes, contexts and groups, each once.

    A context that the caller was handling before the call is left out.
    """
    found, ids = [error], {id(error)}
    for each in found:  # the list grows during the loop
        cause, context = each.__cause__, each.__context__
        if context is not None and context is not cause and is_handled_outside(context):
            context = None
        for other in (cause, context, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())):
            if other is not None and id(other) not in ids:
                ids.add(id(other))
                found.append(other)
    return found


_Test: TypeAlias = Callable[[Any], bool]


#: Finding the test takes 3 us, and most exceptions have one of a few classes. Weak, because a program may create
#: classes at run time: a reference is removed together with its class. (A `WeakKeyDictionary` takes twice as long.)
_known: dict[ref[type[Exception]], _Test] = {}


def _test_of(kind: type[Exception]) -> _Test:
    if type(kind) is not type:  # a metaclass may define `__eq__` or `__hash__` of its classes
        return _find_test(kind)
    test = _known.get(ref(kind))
    if test is None:
        test = _known[ref(kind, _known.pop)] = _find_test(kind)
    return test


def _find_test(kind: type[Exception]) -> _Test:
    """Return the test of the first class in the `__mro__` that has one, matched by package and name.

    An `OSError` that has none is judged by its `errno`. A builtin network error needs none, unless another of its
    classes is for permanent errors.
    """
    if _is_named(kind, _REFUSED_CERTIFICATE):
        return _never
    if issubclass(kind, ExceptionGroup):
        return _are_transient
    default = _is_of_connecting if issubclass(kind, OSError) else _never
    names = ((str(base.__module__).partition(".")[0], base.__name__) for base in kind.__mro__)
    test = next((_TESTS[name] for name in names if name in _TESTS), default)
    return _always if test is not _never and issubclass(kind, (ConnectionError, TimeoutError)) else test


def _always(error: Any) -> bool:
    return True


def _never(error: Any) -> bool:
    return False


def _proxy_may_connect(error: Any) -> bool:
    """Whether a proxy that has not connected may do so at a retry, which adds no login and no permission."""
    parts = (*error.args, *getattr(error, "kwargs", {}).values())  # requests, urllib3 and botocore wrap the error
    inner = next((it for it in parts if isinstance(it, Exception)), None)
    if inner is not None:
        return transient(inner)
    status = proxy_status(error)
    if status is None:
        return not _LOGIN.search(message_of(error))
    return status >= 500 or status in {408, 425, 429}


def proxy_status(error: Any) -> int | None:
    """Return the status with which a proxy has refused to connect; None for any other error."""
    is_of_tunnel = type(error) is OSError and str(error).startswith(_TUNNEL)
    if not is_of_tunnel and _test_of(type(error)) is not _proxy_may_connect:
        return None
    status = getattr(error, "status", None)
    match = _STATUS.match(message_of(error))
    return status if isinstance(status, int) else int(match[1]) if match else None


def grpc_status(error: Any) -> str | None:
    """Return the status of an error from grpc, such as `"UNAVAILABLE"`; None for any other error.

    The class of the error says little: a channel has one private class for all errors.
    """
    if any(str(kind.__module__).partition(".")[0] == "grpc" for kind in type(error).__mro__):
        with suppress(Exception):  # a bare `RpcError` has none
            return str(error.code().name)
    return None


def _is_unavailable(error: Any) -> bool:
    return grpc_status(error) == "UNAVAILABLE"  # only then, the server was not reached


def _is_of_ended_tls(error: Any) -> bool:
    return _involves(error, _ENDED_TLS)


def _has_unavailable(error: Any) -> bool:
    """Whether google's clients have made this error from one of grpc. They make others from HTTP responses."""
    return _is_unavailable(getattr(error, "response", None))


def _without_sqlstate(error: Any) -> bool:
    """Whether an error from psycopg or psycopg2 was not sent by a server (no SQLSTATE), or is of class 08."""
    sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if sqlstate is None:
        return not _refuses_login(error)
    return isinstance(sqlstate, str) and sqlstate.startswith("08")


def _refuses_login(error: Exception) -> bool:
    """Whether PostgreSQL has refused a password, in English: errors of connecting have no SQLSTATE in libpq."""
    return _REFUSED_LOGIN.search(message_of(error)) is not None


def _is_of_closed_connection(error: Any) -> bool:
    """Whether an error from asyncpg means that its connection was lost before, or in a transaction that it ends."""
    return "connection is closed" in message_of(error)


def _has(attribute: str, value: object, default: object = None) -> _Test:
    """Return a test for errors that have this value in this attribute."""
    return lambda error: bool(getattr(error, attribute, default) == value)


def _is_not_now(error: Any) -> bool:
    """Whether an integration has marked an error for a status as repeatable, or an error in a stream says "not now"."""
    if getattr(error, "repeatable", False) is True:
        return True
    if getattr(error, "status_code", 200) != 200:  # an answer
        return False
    body = getattr(error, "body", None)
    details = body.get("error", body) if isinstance(body, Mapping) else None
    if not isinstance(details, Mapping):
        return False
    return str(details.get("type")) in _NOT_NOW or str(details.get("code")) in _NOT_NOW


def _wraps_transient(attribute: str) -> _Test:
    """Return a test for errors that have the actual error in this attribute."""

    def test(error: Any) -> bool:
        inner = getattr(error, attribute, None)
        return isinstance(inner, Exception) and transient(inner)

    return test


def _has_unreadable_answer(error: Any) -> bool:
    """Whether an error from aiohttp means that the server has not answered in HTTP, as other clients report it."""
    return _is_named(type(error.__cause__), frozenset({"HttpProcessingError"}))


def _is_of_ended_connection(error: Any) -> bool:
    """Whether an error from httpx means that the server has ended an HTTP/2 connection, or allows no more requests."""
    text = message_of(error)
    return "ConnectionState.CLOSED" in text or "Max outbound streams is 0" in text


def _each(table: Mapping[str, str], test: _Test) -> dict[tuple[str, str], _Test]:
    return {
        (package, name): test
        for packages, names in table.items()
        for package in packages.split()
        for name in names.split()
    }


#: Package and name of a class -> the test of its exceptions.
_TESTS: Final[dict[tuple[str, str], _Test]] = {
    **_each({"socket": "gaierror"}, _is_temporary),
    **_each(_NETWORK_ERRORS, _always),
    # They derive from one of these, but a retry cannot help.
    **_each({"aiohttp": "ClientConnectorCertificateError ServerFingerprintMismatch"}, _never),
    **_each({"redis valkey": "AuthenticationError AuthorizationError"}, _never),
    **_each({"aiormq pika": "AuthenticationError ProbableAuthenticationError"}, _never),
    **_each({"pika": "ProbableAccessDeniedError ConnectionWrongStateError NoFreeChannels"}, _never),
    **_each({"psycopg_pool": "PoolTimeout PoolClosed TooManyRequests"}, _never),
    # Errors of clients for all failures of TLS. A retry can only help if the connection has ended.
    **_each({"requests urllib3 botocore opensearchpy": "SSLError"}, _is_of_ended_tls),
    **_each({"aiohttp": "ClientSSLError ClientConnectorSSLError", "elastic_transport": "TlsError"}, _is_of_ended_tls),
    # The proxy refused to connect the client, or failed to.
    **_each({"aiohttp": "ClientHttpProxyError", "botocore": "ProxyConnectionError"}, _proxy_may_connect),
    **_each({"requests urllib3 httpx httpx2 httpcore httpcore2": "ProxyError"}, _proxy_may_connect),
    **_each({"grpc": "RpcError"}, _is_unavailable),
    **_each({"openai anthropic": "APIStatusError", "openai": "APIError"}, _is_not_now),
    # The pool has found the connection dead, and will return another one.
    **_each({"sqlalchemy": "DBAPIError"}, _has("connection_invalidated", True)),
    **_each({"psycopg psycopg2": "OperationalError"}, _without_sqlstate),
    **_each({"asyncpg": "InterfaceError"}, _is_of_closed_connection),
    **_each({"urllib3": "MaxRetryError", "urllib": "URLError"}, _wraps_transient("reason")),
    **_each({"azure": "ServiceRequestError ServiceResponseError"}, _wraps_transient("inner_exception")),
    **_each({"google": "GoogleAPICallError"}, _has_unavailable),
    **_each({"google": "TransportError"}, _has_transient_cause),
    # The connection could not be made or broke, or RabbitMQ has closed it to stop or restart.
    **_each({"pika": "AMQPConnectionError"}, _has("reply_code", 320, default=320)),
    # The connection was lost. If the other side closes it, it says why, in a frame.
    **_each({"websockets": "ConnectionClosedError"}, _has("rcvd", None)),
    **_each({"httpx httpx2 httpcore httpcore2": "LocalProtocolError"}, _is_of_ended_connection),
    **_each({"aiohttp": "ClientResponseError"}, _has_unreadable_answer),
}
