"""The deadline on the wire: how the time left is written into a request, and read from one.

An instant on this process's clock means nothing to another process. A request carries the remaining seconds; the
receiving service opens a budget with them. The time on the network is not counted, so the receiver has slightly too
much time, never too little; a writer rounds down.

    x-envoy-expected-rq-timeout-ms    milliseconds; Envoy sends it to its upstreams. The default
    connect-timeout-ms                milliseconds, at most 10 digits (the Connect protocol)
    grpc-timeout                      at most 8 digits and a unit: H M S m u n (gRPC over HTTP/2)

Headers of any other name are milliseconds, too. A reader accepts exactly this grammar: values with a sign, a fraction
or too many digits are ignored, and so are repeated headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import inf
from typing import Final, final
from urllib.parse import urlsplit

from resilience import checks
from resilience.checks import Duration
from resilience.context import Context
from resilience.errors import DeadlineExceeded

__all__ = [
    "CONNECT_TIMEOUT",
    "ENVOY_EXPECTED_TIMEOUT",
    "GRPC_TIMEOUT",
    "HEADERS",
    "Acceptance",
    "OfHost",
    "Propagation",
    "format_grpc_timeout",
    "format_milliseconds",
    "format_timeout",
    "parse_grpc_timeout",
    "parse_milliseconds",
    "parse_timeout",
]

ENVOY_EXPECTED_TIMEOUT: Final = "x-envoy-expected-rq-timeout-ms"
GRPC_TIMEOUT: Final = "grpc-timeout"
CONNECT_TIMEOUT: Final = "connect-timeout-ms"

#: The headers that a server reads by default.
HEADERS: Final = (ENVOY_EXPECTED_TIMEOUT, GRPC_TIMEOUT, CONNECT_TIMEOUT)

#: The seconds for a request without a header, and the most that a request may ask for, if a server sets neither.
DEFAULT_SECONDS: Final = 60.0

_MOST_MILLISECONDS = 9_999_999_999  # ten digits: 115 days
_MILLISECONDS = re.compile(r"[0-9]{1,10}")
_GRPC = re.compile(r"([0-9]{1,8})([HMSmun])")
_GRPC_SECONDS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "S": 1.0, "M": 60.0, "H": 3600.0}
_GRPC_PER_SECOND = {"u": 1_000_000.0, "m": 1_000.0, "S": 1.0, "M": 1 / 60, "H": 1 / 3600}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a valid name of an HTTP header
_HOST = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[^\[\]:/@?#*\s.][^\[\]:/@?#*\s]*|\*)(:(?P<port>[0-9]{1,5}))?")
_PORTS = range(1, 65536)
DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


@final
class OfHost(str):
    """A name that contains a host, for errors and logs.

    :param common: the name without the host, for metrics: a label must have few different values, and users who can
        choose a URL can choose the host.

    >>> OfHost("GET example.org", common="GET").common
    'GET'
    """

    __slots__ = ("common",)

    common: str

    def __new__(cls, text: str, common: str) -> OfHost:
        """Create the string."""
        name = super().__new__(cls, text)
        name.common = common
        return name

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Keep the attribute in copies and pickles."""
        return OfHost, (str(self), self.common)


# --- writing ---------------------------------------------------------------------------------


def format_milliseconds(seconds: float) -> str:
    """Write whole milliseconds, rounded down, at most ten digits.

    :raises DeadlineExceeded: for less than one millisecond: 0 would mean "already over" or "no limit", depending on
        the reader, and no response arrives in less.

    >>> format_milliseconds(1.2345)
    '1234'
    """
    _check_sendable(seconds)
    return str(int(min(_MOST_MILLISECONDS, seconds * 1000)))


def format_grpc_timeout(seconds: float) -> str:
    """Write the value of a `grpc-timeout`: in the finest unit that needs at most eight digits, rounded down.

    :raises DeadlineExceeded: for less than one millisecond, as in `format_milliseconds`.

    >>> format_grpc_timeout(2.5), format_grpc_timeout(3600)
    ('2500000u', '3600000m')
    """
    _check_sendable(seconds)
    for unit, per_second in _GRPC_PER_SECOND.items():
        if seconds * per_second < 100_000_000:
            return f"{int(seconds * per_second)}{unit}"
    return "99999999H"


def format_timeout(header: str, seconds: float) -> str:
    """Write seconds as the value of this header."""
    return format_grpc_timeout(seconds) if header.lower() == GRPC_TIMEOUT else format_milliseconds(seconds)


def _check_sendable(seconds: float) -> None:
    if seconds < 0.001:
        raise DeadlineExceeded("less than a millisecond is left, too little for a request")


# --- reading ---------------------------------------------------------------------------------


def parse_milliseconds(text: str) -> float | None:
    """Parse one to ten digits as milliseconds; return seconds, or None for anything else. 0 means "already over".

    >>> parse_milliseconds("1500"), parse_milliseconds("0"), parse_milliseconds("-1"), parse_milliseconds("1e3")
    (1.5, 0.0, None, None)
    """
    return int(text) / 1000 if _MILLISECONDS.fullmatch(text.strip(" \t")) else None


def parse_grpc_timeout(text: str) -> float | None:
    """Parse the value of a `grpc-timeout`; return seconds, or None for anything else.

    >>> parse_grpc_timeout("100m"), parse_grpc_timeout("2S"), parse_grpc_timeout("2 S"), parse_grpc_timeout("2")
    (0.1, 2.0, None, None)
    """
    match = _GRPC.fullmatch(text.strip(" \t"))
    return int(match[1]) * _GRPC_SECONDS[match[2]] if match else None


def parse_timeout(header: str, text: str) -> float | None:
    """Parse the value of this header; return seconds, or None for anything else."""
    return parse_grpc_timeout(text) if header.lower() == GRPC_TIMEOUT else parse_milliseconds(text)


# --- clients ---------------------------------------------------------------------------------


@final
class Propagation:
    """Which hosts get the time left, and in which header.

    :param hosts: each is a host (``"users.internal"``), a host and its port
        (``"localhost:8000"``, ``"[::1]:8000"``), all hosts below a domain (``"*.internal"``, not ``internal``
        itself), or ``"*"`` for all. Case does not matter.
    :param header: the name of the header. `grpc-timeout` is written in its own grammar, any other as
        whole milliseconds.
    :raises ValueError: for an invalid host or header name.

    By default, clients send it to no host, because the header reveals something about your service, and because a cache
    or a signature may not expect it.

    >>> from resilience import Context
    >>> internal = Propagation(["*.internal"])
    >>> list(internal.headers_for("http://users.internal/42", Context(timeout=2.0)))
    ['x-envoy-expected-rq-timeout-ms']
    >>> internal.headers_for("http://example.org/", Context(timeout=2.0))
    {}
    """

    def __init__(self, hosts: Iterable[str], *, header: str = ENVOY_EXPECTED_TIMEOUT) -> None:
        self.hosts: tuple[str, ...] = checks.several("hosts", hosts, "a sequence of hosts")
        self.header: str = _header_name("header", header)
        self._patterns = frozenset(_pattern("hosts", host) for host in self.hosts)

    @classmethod
    def to(cls, propagate_to: Propagation | Iterable[str] | None) -> Propagation:
        """Return the meaning of a client's `propagate_to=`: hosts for the default header, or a Propagation as it is."""
        if isinstance(propagate_to, Propagation):
            return propagate_to
        hosts = () if propagate_to is None else checks.several("propagate_to", propagate_to, "a sequence of hosts")
        for host in hosts:
            _pattern("propagate_to", host)
        return cls(hosts)

    def __repr__(self) -> str:
        extra = "" if self.header == ENVOY_EXPECTED_TIMEOUT else f", header={self.header!r}"
        return f"Propagation({list(self.hosts)!r}{extra})"

    def reaches(self, url: str) -> bool:
        """Whether the host of this URL (or this host, with or without a port) gets the time left."""
        if "\\" in url:  # to some clients, a backslash ends the host
            return False
        try:
            parts = urlsplit(url if "//" in url else f"//{url}")
            host, port = parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme)
        except ValueError:  # not a URL; the client will refuse it
            return False
        if not host:
            return False
        host = host.removesuffix(".")
        labels = host.split(".")
        names = [host, "*"] + [f"*.{'.'.join(labels[start:])}" for start in range(1, len(labels))]
        return any((name, None) in self._patterns or (name, port) in self._patterns for name in names)

    def headers_for(self, url: str, ctx: Context) -> dict[str, str]:
        """Return the header to add to a request. It is empty for a host that is not listed, or without a deadline.

        Call it for every attempt. Replace an existing header of that name: it may come from the request that is being
        answered, and its value is then too large.

        :raises DeadlineExceeded: if less than a millisecond is left for a host that is listed.
        """
        if not self._patterns or ctx.deadline == inf or not self.reaches(url):
            return {}
        return {self.header: format_timeout(self.header, ctx.remaining())}


def _header_name(name: str, value: str) -> str:
    if not _TOKEN.fullmatch(checks.instance(name, value, str, "the name of a header")):
        raise ValueError(f"{name} must be the name of a header, not {value!r}")
    return value.lower()


def _pattern(name: str, value: str) -> tuple[str, int | None]:
    """Parse a host into its name (or `*.suffix`, or `*`) and port, as they are compared."""
    text = checks.instance(name, value, str, "strings").lower()
    wildcard = "*." if text.startswith("*.") else ""
    match = _HOST.fullmatch(text.removeprefix(wildcard))
    if match is None or (wildcard and match["host"] == "*") or int(match["port"] or 1) not in _PORTS:
        hint = f"; did you mean '*{value}'?" if value.startswith(".") else ""
        raise ValueError(f"{name} must be 'host', 'host:port', '*.domain' or '*', not {value!r}{hint}")
    return wildcard + match["host"].strip("[]").removesuffix("."), int(match["port"]) if match["port"] else None


# --- servers ---------------------------------------------------------------------------------


@final
class Acceptance:
    """Which headers a server accepts, and the bounds of their values.

    :param headers: names of headers; if several are valid, the shortest time applies.
    :param cap: the most seconds that a request may ask for; as many as `default` by default, infinity for no bound.
    :param default: the seconds for a request without a header; as many as `cap` by default, infinity for no limit. If
        neither is given, both are 60 seconds.
    """

    def __init__(
        self, headers: Iterable[str] = HEADERS, *, cap: Duration | None = None, default: Duration | None = None
    ) -> None:
        names = checks.several("headers", headers, "a sequence of names")
        self.headers: tuple[str, ...] = tuple(_header_name("headers", it) for it in names)
        given = {"cap": cap, "default": default}
        checked = {name: checks.seconds(name, it, infinite=True) for name, it in given.items() if it is not None}
        self.cap: float = checked.get("cap", checked.get("default", DEFAULT_SECONDS))
        self.default: float = checked.get("default", self.cap)

    def seconds(self, fields: Iterable[tuple[str, str]]) -> float:
        """Return the seconds that a request with these header fields gets; infinity for no limit."""
        found: dict[str, list[str]] = {}
        for name, text in fields:
            if (known := name.lower()) in self.headers:
                found.setdefault(known, []).append(text)
        parsed = [parse_timeout(name, texts[0]) for name, texts in found.items() if len(texts) == 1]
        return self.granted(min((seconds for seconds in parsed if seconds is not None), default=None))

    def granted(self, asked: float | None) -> float:
        """Return the seconds that a request gets. `asked` is None if the request does not ask for any."""
        return self.default if asked is None else min(asked, self.cap)
