"""What counts: the words `on`, `on_result` and `ignore`, which mean the same in every policy.

`on` names what is handled: an exception type, a tuple of them, or a predicate over the exception.
`ignore` is never handled, and stronger. `on_result` is a predicate over a value that came back.

Two rules of the library stand above the user's words. A misuse of the library is no outcome. And
`Rejected` and `DeadlineExceeded`, the library's own "it was not even tried" and "there is no time
left", are handled by a policy that repeats or counts calls only where `on` names them as types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

from resilience import checks
from resilience.errors import DeadlineExceeded, Misuse, Rejected
from resilience.outcome import StoppedIteration

#: Exception type, tuple of exception types, or predicate over the exception.
On: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[Exception], bool]

#: Predicate over the value that a call returned.
OnResult: TypeAlias = Callable[[Any], object]

_OWN = (Rejected, DeadlineExceeded)


@final
class Matcher:
    """Decides whether an exception is one that a policy handles.

    :param own: whether `Rejected` and `DeadlineExceeded` are exceptions like others (Fallback), or
        have to be named (Retry, CircuitBreaker).
    """

    __slots__ = ("_above", "_ignored", "_named", "_on")

    def __init__(self, on: On, ignore: On, *, own: bool = False) -> None:
        self._on = _condition("on", on)
        self._ignored = None if ignore == () else _condition("ignore", ignore)
        self._above = (Misuse,) if own else (Misuse, *_OWN)
        types = on if isinstance(on, tuple) else (on,)
        self._named = tuple(it for it in types if isinstance(it, type) and issubclass(it, _OWN))

    def handles(self, error: Exception) -> bool:
        """Whether the policy handles this exception. What a predicate raises comes out."""
        if type(error) is StoppedIteration:
            error = error.error
        return not self.is_neutral(error) and bool(self._on(error))

    def is_neutral(self, error: Exception) -> bool:
        """Whether the policy handles this exception not at all, and it says nothing about the dependency either.

        It is one that `ignore` names, or one of the library's own that stands above the user's words.
        """
        if isinstance(error, self._above) and not isinstance(error, self._named):
            return True
        return self._ignored is not None and bool(self._ignored(error))


def _condition(name: str, value: Any) -> Callable[[Exception], object]:
    """Return what is asked of each exception."""
    if isinstance(value, tuple):
        if not value:
            raise ValueError(f"{name} must name at least one exception type, not ()")
        for each in value:
            _exception_type(name, each)
        return partial(_is_one_of, value)
    if isinstance(value, type):
        _exception_type(name, value)
        # What `isinstance` asks, without a frame of ours: 60 ns less. It asks a metaclass only about other classes.
        return type.__instancecheck__.__get__(value) if type(value) is type else partial(_is_one_of, (value,))
    if not callable(value):
        raise TypeError(f"{name} must be an exception type, a tuple of them or a predicate, not {value!r}")
    predicate: Callable[[Exception], object] = checks.plain_function(name, value)
    return predicate


def optional_predicate(name: str, value: OnResult | None) -> OnResult | None:
    """Return a predicate over results, or None."""
    return None if value is None else checks.plain_function(name, value)


def _is_one_of(types: tuple[type[BaseException], ...], error: Exception) -> bool:
    return isinstance(error, types)


def _exception_type(name: str, value: object) -> None:
    if not (isinstance(value, type) and issubclass(value, BaseException)):
        raise TypeError(f"{name} must name exception types, not {value!r}")


# --- transient -------------------------------------------------------------------------------

_HTTPX = frozenset(
    {"TimeoutException", "ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout"}
    | {"NetworkError", "ConnectError", "ReadError", "WriteError", "CloseError", "RemoteProtocolError"}
)

#: Top-level package -> names of its exception classes that mean "the network, not you": the
#: connection could not be made or broke, or an answer did not come in time. Matched by name along
#: the error's `__mro__`, so nothing is imported; not one of these is a builtin `ConnectionError`.
_NETWORK_ERRORS: dict[str, frozenset[str]] = {
    "resilience": frozenset({"TransientStatus"}),  # a response that says "not now", as the HTTP integrations raise it
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "httpcore": _HTTPX | {"ConnectionNotAvailable"},
    "httpcore2": _HTTPX | {"ConnectionNotAvailable"},
    "requests": frozenset({"ConnectionError", "Timeout", "ConnectTimeout", "ReadTimeout", "ChunkedEncodingError"}),
    "urllib3": frozenset(
        {"TimeoutError", "ConnectTimeoutError", "ReadTimeoutError", "NewConnectionError", "ProtocolError"}
    ),
    "aiohttp": frozenset(
        {"ClientConnectionError", "ClientConnectorError", "ClientOSError", "ClientPayloadError"}
        | {"ServerDisconnectedError", "ServerTimeoutError"}
    ),
    "redis": frozenset({"ConnectionError", "TimeoutError", "BusyLoadingError"}),
    "botocore": frozenset(
        {"ConnectionError", "HTTPClientError", "EndpointConnectionError", "ConnectTimeoutError"}
        | {"ReadTimeoutError", "ConnectionClosedError", "ResponseStreamingError"}
    ),
    "openai": frozenset({"APIConnectionError", "APITimeoutError"}),
    "anthropic": frozenset({"APIConnectionError", "APITimeoutError", "RetryableError"}),
    "pymongo": frozenset({"ConnectionFailure", "AutoReconnect", "NetworkTimeout", "ServerSelectionTimeoutError"}),
    "psycopg": frozenset({"ConnectionTimeout", "AdminShutdown", "CrashShutdown", "CannotConnectNow"}),
    "asyncpg": frozenset(
        {"PostgresConnectionError", "ConnectionDoesNotExistError", "ConnectionFailureError"}
        | {"AdminShutdownError", "CrashShutdownError", "CannotConnectNowError"}
    ),
}

#: Classes that derive from one above and yet will not go away by trying again.
_PERMANENT_ERRORS: dict[str, frozenset[str]] = {
    "requests": frozenset({"SSLError"}),
    "urllib3": frozenset({"SSLError"}),
    "aiohttp": frozenset(
        {"ClientSSLError", "ClientConnectorSSLError", "ClientConnectorCertificateError", "ServerFingerprintMismatch"}
    ),
    "redis": frozenset({"AuthenticationError", "AuthorizationError"}),
    "botocore": frozenset({"SSLError"}),
}

_NONE: frozenset[str] = frozenset()


def transient(error: Exception) -> bool:
    """Whether `error` is a network error that may be gone at the next try. The default of Retry's `on`.

    True for the builtin `ConnectionError` and `TimeoutError` (so for our own `TimeoutExceeded`) and
    for the connection and timeout errors of urllib, httpx, httpx2, httpcore, requests, urllib3, aiohttp,
    redis, botocore, grpc (status `UNAVAILABLE`), openai, anthropic, pymongo, psycopg, asyncpg and
    SQLAlchemy (connections that were invalidated). Certificate and authentication errors are not
    transient, nor is an HTTP status: a response is an answer. (The integrations for HTTP clients tell which
    responses are none: their `TransientStatus` is transient.)
    """
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    kind = type(error)
    if type(kind) is not type:  # a metaclass may forbid a table: where it says which classes are equal
        return any(test(error) for test in _tests_for(kind))
    tests = _tests_of.get(kind)
    if tests is None:
        tests = _tests_of[kind] = _tests_for(kind)
    return any(test(error) for test in tests)


_Test: TypeAlias = Callable[[Any], bool]

#: Class -> what its exceptions are asked; one yes is enough. To find that takes 3 us, and what passes by a Retry is of
#: a few classes. Weak, because a program may make classes while it runs.
_tests_of: WeakKeyDictionary[type[Exception], tuple[_Test, ...]] = WeakKeyDictionary()


def _tests_for(kind: type[Exception]) -> tuple[_Test, ...]:
    """Return what the exceptions of a class are to be asked: nothing, where the class says that they are not."""
    lineage = [(str(base.__module__).partition(".")[0], base.__name__) for base in kind.__mro__]
    if any(name in _PERMANENT_ERRORS.get(package, _NONE) for package, name in lineage):
        return ()
    if any(name in _NETWORK_ERRORS.get(package, _NONE) for package, name in lineage):
        return (_always,)
    return tuple([test for key, test in _BY_CONTENT.items() if key in lineage])


def _always(error: Any) -> bool:
    return True


def _is_unavailable(error: Any) -> bool:
    """grpc: one exception class for every status; only UNAVAILABLE says that the server was not there."""
    code = getattr(error, "code", None)
    return callable(code) and getattr(code(), "name", None) == "UNAVAILABLE"


def _lost_connection(error: Any) -> bool:
    """SQLAlchemy: the pool has found the connection dead and will give another one."""
    return getattr(error, "connection_invalidated", False) is True


def _without_sqlstate(error: Any) -> bool:
    """psycopg: an OperationalError that no server sent (no SQLSTATE), or one of class 08."""
    sqlstate = getattr(error, "sqlstate", None)
    return sqlstate is None or (isinstance(sqlstate, str) and sqlstate.startswith("08"))


def _reason_is_transient(error: Any) -> bool:
    """urllib3's `MaxRetryError` and urllib's `URLError` wrap what really happened."""
    reason = getattr(error, "reason", None)
    return isinstance(reason, Exception) and transient(reason)


def _is_marked(error: Any) -> bool:
    """openai, anthropic: an error for a status, which only their integrations take for more than an answer."""
    return getattr(error, "repeatable", None) is True


_BY_CONTENT: dict[tuple[str, str], _Test] = {
    ("grpc", "RpcError"): _is_unavailable,
    ("openai", "APIStatusError"): _is_marked,
    ("anthropic", "APIStatusError"): _is_marked,
    ("sqlalchemy", "DBAPIError"): _lost_connection,
    ("psycopg", "OperationalError"): _without_sqlstate,
    ("urllib3", "MaxRetryError"): _reason_is_transient,
    ("urllib", "URLError"): _reason_is_transient,
}
