"""The deadline on the wire: what is written, what is accepted, and which hosts get it."""

from __future__ import annotations

import copy
import pickle
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience import Context, DeadlineExceeded
from resilience.integrations import wire
from resilience.integrations.wire import Acceptance, OfHost, Propagation


@pytest.mark.parametrize(
    ("header", "seconds", "text"),
    [
        *(
            ("x-ms", *it)
            for it in [(1.0, "1000"), (0.0019, "1"), (0.001, "1"), (1e9, "9999999999"), (inf, "9999999999")]
        ),
        ("grpc-timeout", 0.001, "1000u"),
        ("grpc-timeout", 2.5, "2500000u"),
        ("grpc-timeout", 99.999999, "99999999u"),
        ("grpc-timeout", 100.0, "100000m"),
        ("grpc-timeout", 100_000.0, "100000S"),
        ("grpc-timeout", 1e8, "1666666M"),
        ("grpc-timeout", 6e9, "1666666H"),
        ("grpc-timeout", inf, "99999999H"),
    ],
)
def test_a_timeout_is_written_rounded_down(header: str, seconds: float, text: str) -> None:
    """Whole milliseconds in ten digits; for gRPC, eight digits and the finest unit that fits."""
    assert wire.format_timeout(header, seconds) == text


@pytest.mark.parametrize("header", wire.HEADERS)
@pytest.mark.parametrize("seconds", [0.0, 0.0009, -1.0])
def test_a_timeout_that_would_be_zero_raises(header: str, seconds: float) -> None:
    """Zero means "over" to one reader and "no limit" to another."""
    with pytest.raises(DeadlineExceeded):
        wire.format_timeout(header, seconds)


@pytest.mark.parametrize(
    ("header", "text", "seconds"),
    [
        *(("x-ms", *it) for it in [("1500", 1.5), ("0", 0.0), (" 7\t", 0.007), ("0010", 0.01)]),
        *(("x-ms", it, None) for it in ["", "-1", "+1", "1.5", "1e3", "NaN", "inf", "12345678901", "1 2", "100, 100"]),
        *(("x-ms", it, None) for it in ["\u0661", "0x10", "1\n2"]),
        *(("grpc-timeout", *it) for it in [("2H", 7200.0), ("3M", 180.0), ("4S", 4.0), ("100m", 0.1), ("0S", 0.0)]),
        *(("grpc-timeout", *it) for it in [("5u", 5e-6), ("1n", 1e-9)]),
        *(
            ("grpc-timeout", it, None)
            for it in ["", "S", "1", "1s", "1 S", "-1S", "123456789m", "1.5S", "1SS", "\u0661S"]
        ),
    ],
)
def test_a_timeout_is_parsed(header: str, text: str, seconds: float | None) -> None:
    """White space around milliseconds is ignored. A sign, a fraction, too many digits or another alphabet is no number.

    For gRPC: digits and one of the six units, which are case-sensitive.
    """
    assert wire.parse_timeout(header, text) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("header", wire.HEADERS)
@given(seconds=st.floats(min_value=0.001, max_value=1e7))
def test_a_written_timeout_is_never_parsed_as_a_longer_one(header: str, seconds: float) -> None:
    """The other side never gets more than there is, and at most one unit less."""
    read = wire.parse_timeout(header, wire.format_timeout(header, seconds))
    assert read is not None
    assert seconds - 0.001 * max(1.0, seconds / 100) <= read <= seconds * (1 + 1e-12)


#: Digits, spaces and units, also those that `int` accepts and HTTP does not. (For a text of any characters hypothesis
#: would first make a table of them all, which takes seconds.)
_CHARACTERS = "0123456789.+-_eE \t\n\xa0\u2003HMSmunxinfNa\x00\xb2\u0663\uff11\U0001d7d8"
_HOSTILE = st.text(st.sampled_from(_CHARACTERS), max_size=20)


@given(text=_HOSTILE)
def test_any_text_is_parsed_as_seconds_or_nothing(text: str) -> None:
    """No header makes a reader raise, or results in a negative or endless time."""
    for header in wire.HEADERS:
        read = wire.parse_timeout(header, text)
        assert read is None or 0 <= read < inf


class TestPropagation:
    @pytest.mark.parametrize(
        ("host", "url"),
        [
            ("users.internal", "http://users.internal/42"),
            ("users.internal", "https://users.internal:8443"),
            ("Users.Internal", "http://USERS.internal./"),
            ("users.internal", "users.internal"),
            ("users.internal:8000", "http://users.internal:8000/x?y=http://other/"),
            *((f"a:{port}", f"{it}://a/") for it, port in {"http": 80, "ws": 80, "https": 443, "wss": 443}.items()),
            ("a:65535", "http://a:65535/"),
            ("*.internal", "http://a.b.internal/"),
            ("*.internal:81", "http://a.internal:81"),
            ("[::1]:8000", "http://[::1]:8000/"),
            ("[::1]", "http://[::1]/"),
            ("127.0.0.1", "127.0.0.1:5000"),
            ("*", "http://anybody.example/"),
        ],
    )
    def test_reaches_the_named_hosts(self, host: str, url: str) -> None:
        """By name, by name and port, by domain, or all."""
        assert Propagation([host]).reaches(url)

    @pytest.mark.parametrize(
        ("hosts", "url"),
        [
            ([], "http://users.internal/"),
            (["users.internal:8000"], "http://users.internal:8001/"),
            (["users.internal:80"], "https://users.internal/"),
            *((["*.internal"], f"http://{it}internal/") for it in ("", "not")),
            *((["users.internal"], f"http://{it}") for it in ("other.internal/", "users.internal.example.org/")),
            *((["users.internal"], f"http://{it}") for it in ("example.org/users.internal", "[::1/")),
            *((["users.internal"], f"http://{it}") for it in ("users.internal@example.org/", "users.internal:99999/")),
            *((["users.internal"], it) for it in ("/relative", "http://example.org\\@users.internal/")),
        ],
    )
    def test_reaches_no_other_host(self, hosts: list[str], url: str) -> None:
        """However a URL is written."""
        assert not Propagation(hosts).reaches(url)

    def test_writes_the_time_left_in_the_format_of_its_header(self, clock: Any) -> None:
        """To a named host, which is never sent a 0; without a deadline, nothing."""
        ctx = Context(timeout=2.0)
        assert Propagation(["a"], header="X-Timeout-Ms").headers_for("a", ctx) == {"x-timeout-ms": "2000"}
        assert Propagation(["a"], header="Grpc-Timeout").headers_for("a", ctx) == {"grpc-timeout": "2000000u"}
        propagation = Propagation(["a"])
        assert propagation.headers_for("http://a", ctx) == {"x-envoy-expected-rq-timeout-ms": "2000"}
        clock.advance(1.5)
        assert propagation.headers_for("http://a", ctx) == {"x-envoy-expected-rq-timeout-ms": "500"}
        clock.advance(0.5)
        with pytest.raises(DeadlineExceeded):
            propagation.headers_for("http://a", ctx)
        assert propagation.headers_for("http://b", ctx) == propagation.headers_for("http://a", Context()) == {}

    def test_of_a_client_is_made_of_hosts_an_object_or_none(self) -> None:
        mine = Propagation(["a"], header="x-ms")
        assert Propagation.to(mine) is mine
        assert Propagation.to(["a"]).hosts == ("a",)
        assert Propagation.to(None).hosts == ()
        assert repr(mine) == "Propagation(['a'], header='x-ms')"
        assert repr(Propagation(["a"])) == "Propagation(['a'])"


class TestAcceptance:
    @pytest.mark.parametrize(
        ("fields", "seconds"),
        [
            ([("X-Envoy-Expected-Rq-Timeout-Ms", "900"), ("Grpc-Timeout", "1S"), ("Connect-Timeout-Ms", "800")], 0.8),
            ([("grpc-timeout", "x"), ("connect-timeout-ms", "500")], 0.5),
            ([], 7.0),
            ([("other", "5")], 7.0),
            ([("grpc-timeout", "5")], 7.0),
            ([("connect-timeout-ms", "-5")], 7.0),
            ([("connect-timeout-ms", "5"), ("Connect-Timeout-Ms", "5")], 7.0),
            ([("x-envoy-expected-rq-timeout-ms", "rubbish")], 7.0),
        ],
    )
    def test_takes_the_shortest_of_the_valid_headers(self, fields: list[tuple[str, str]], seconds: float) -> None:
        """Without one, the default holds. A header that is repeated is ignored."""
        assert Acceptance(default=7.0).seconds(fields) == seconds

    @pytest.mark.parametrize(
        ("settings", "with_header", "without_header"),
        [
            ({}, 60.0, 60.0),
            ({"cap": 2.0}, 2.0, 2.0),
            ({"default": 10.0}, 10.0, 10.0),
            ({"cap": 2.0, "default": 10.0}, 2.0, 10.0),
            ({"cap": inf}, 359_999_996_400.0, inf),
            ({"cap": inf, "default": 10.0}, 359_999_996_400.0, 10.0),
        ],
    )
    def test_gives_a_client_no_more_than_its_cap(
        self, settings: dict[str, float], with_header: float, without_header: float
    ) -> None:
        """The cap is by default the time of a request without a header; infinity means no bound."""
        accept = Acceptance(**settings)
        assert accept.seconds([("grpc-timeout", "99999999H")]) == with_header
        assert accept.seconds([]) == without_header
        assert accept.seconds([("grpc-timeout", "1S")]) == 1.0


def test_a_name_with_a_host_also_holds_the_name_without_it() -> None:
    """In copies and pickles, too: events and errors cross processes."""
    name = OfHost("GET example.org", common="GET")
    for it in (name, copy.copy(name), pickle.loads(pickle.dumps(name))):
        assert (it, it.common) == ("GET example.org", "GET")
