"""The deadline on the wire: what is written, what is believed, who is told."""

from __future__ import annotations

import contextvars
import copy
import pickle
import types
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience import Context, DeadlineExceeded, current_context, deadline
from resilience.integrations import wire
from resilience.integrations.wire import Acceptance, OfHost, Propagation, Steps, budget, ran_out


class TestMilliseconds:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(1.0, "1000"), (0.0019, "1"), (0.001, "1"), (1e9, "9999999999"), (inf, "9999999999")],
    )
    def test_are_written_rounded_down_in_ten_digits(self, seconds: float, text: str) -> None:
        """Whole milliseconds, never more than is left."""
        assert wire.format_milliseconds(seconds) == text

    @pytest.mark.parametrize("seconds", [0.0, 0.0009, -1.0])
    def test_that_would_be_zero_are_not_written(self, seconds: float) -> None:
        """Less than one is no request at all: 0 means "over" to one reader and "no limit" to another."""
        with pytest.raises(DeadlineExceeded):
            wire.format_milliseconds(seconds)
        with pytest.raises(DeadlineExceeded):
            wire.format_grpc_timeout(seconds)

    @pytest.mark.parametrize(("text", "seconds"), [("1500", 1.5), ("0", 0.0), (" 7\t", 0.007), ("0010", 0.01)])
    def test_are_read(self, text: str, seconds: float) -> None:
        """Digits are milliseconds; white space around them is none of theirs."""
        assert wire.parse_milliseconds(text) == seconds

    @pytest.mark.parametrize(
        "rubbish",
        ["", "-1", "+1", "1.5", "1e3", "NaN", "inf", "12345678901", "1 2", "100, 100", "\u0661", "0x10", "1\n2"],
    )
    def test_that_are_none_are_not_read(self, rubbish: str) -> None:
        """A sign, a fraction, too many digits, another alphabet: no number."""
        assert wire.parse_milliseconds(rubbish) is None


class TestGrpcTimeout:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0.001, "1000u"),
            (2.5, "2500000u"),
            (99.999999, "99999999u"),
            (100.0, "100000m"),
            (100_000.0, "100000S"),
            (1e8, "1666666M"),
            (6e9, "1666666H"),
            (inf, "99999999H"),
        ],
    )
    def test_is_written_in_the_finest_unit_that_fits(self, seconds: float, text: str) -> None:
        """Eight digits and a unit, rounded down."""
        assert wire.format_grpc_timeout(seconds) == text

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("2H", 7200.0), ("3M", 180.0), ("4S", 4.0), ("100m", 0.1), ("5u", 5e-6), ("1n", 1e-9), ("0S", 0.0)],
    )
    def test_is_read(self, text: str, seconds: float) -> None:
        """Digits and one of the six units."""
        assert wire.parse_grpc_timeout(text) == pytest.approx(seconds)

    @pytest.mark.parametrize("rubbish", ["", "S", "1", "1s", "1 S", "-1S", "123456789m", "1.5S", "1SS", "\u0661S"])
    def test_that_is_none_is_not_read(self, rubbish: str) -> None:
        """Units are case-sensitive, and more than eight digits are too many."""
        assert wire.parse_grpc_timeout(rubbish) is None


@pytest.mark.parametrize("header", wire.HEADERS)
@given(seconds=st.floats(min_value=0.001, max_value=1e7))
def test_what_is_written_is_read_as_no_more(header: str, seconds: float) -> None:
    """The other side never gets more than there is, and at most a unit less."""
    read = wire.parse_timeout(header, wire.format_timeout(header, seconds))
    assert read is not None
    assert seconds - 0.001 * max(1.0, seconds / 100) <= read <= seconds * (1 + 1e-12)


#: Digits, spaces and units, also such as `int` takes and HTTP does not. (For a text of any characters hypothesis would
#: first make a table of them all, which takes seconds.)
_TIMELY = "0123456789.+-_eE \t\n\xa0\u2003HMSmunxinfNa\x00\xb2\u0663\uff11\U0001d7d8"
_HOSTILE = st.text(st.sampled_from(_TIMELY), max_size=20)


@given(text=_HOSTILE)
def test_whatever_comes_is_seconds_or_nothing(text: str) -> None:
    """No header makes a reader raise, or gives a negative or endless time."""
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
            ("users.internal:443", "https://users.internal/"),
            ("*.internal", "http://a.b.internal/"),
            ("*.internal:81", "http://a.internal:81"),
            ("[::1]:8000", "http://[::1]:8000/"),
            ("[::1]", "http://[::1]/"),
            ("127.0.0.1", "127.0.0.1:5000"),
            ("*", "http://anybody.example/"),
        ],
    )
    def test_reaches_a_host_that_is_named(self, host: str, url: str) -> None:
        """By name, by name and port, by domain, or everybody."""
        assert Propagation([host]).reaches(url)

    @pytest.mark.parametrize(
        ("hosts", "url"),
        [
            ([], "http://users.internal/"),
            (["users.internal"], "http://other.internal/"),
            (["users.internal"], "http://users.internal.example.org/"),
            (["users.internal"], "http://example.org/users.internal"),
            (["users.internal"], "http://users.internal@example.org/"),
            (["users.internal:8000"], "http://users.internal:8001/"),
            (["users.internal:80"], "https://users.internal/"),
            (["*.internal"], "http://internal/"),
            (["*.internal"], "http://notinternal/"),
            (["users.internal"], "http://[::1/"),
            (["users.internal"], "/relative"),
            (["users.internal"], "http://users.internal:99999/"),
        ],
    )
    def test_reaches_no_other_host(self, hosts: list[str], url: str) -> None:
        """A host that is not named learns nothing, however its URL is written."""
        assert not Propagation(hosts).reaches(url)

    def test_writes_the_time_that_is_left(self, clock: Any) -> None:
        """The header holds the remaining time at the moment of asking."""
        propagation, ctx = Propagation(["a"]), Context(timeout=2.0)
        assert propagation.headers_for("http://a", ctx) == {"x-envoy-expected-rq-timeout-ms": "2000"}
        clock.advance(1.5)
        assert propagation.headers_for("http://a", ctx) == {"x-envoy-expected-rq-timeout-ms": "500"}

    def test_writes_the_header_that_was_chosen(self, clock: Any) -> None:
        """Another name, in the grammar of that name."""
        ctx = Context(timeout=2.0)
        assert Propagation(["a"], header="X-Timeout-Ms").headers_for("a", ctx) == {"x-timeout-ms": "2000"}
        assert Propagation(["a"], header="Grpc-Timeout").headers_for("a", ctx) == {"grpc-timeout": "2000000u"}

    def test_writes_nothing_without_a_deadline(self) -> None:
        """No limit is no header."""
        assert Propagation(["*"]).headers_for("http://a", Context()) == {}

    def test_refuses_where_nothing_is_left(self) -> None:
        """A named host is not asked with a 0; a host that is not named is none of this object's business."""
        over = Context(timeout=0)
        with pytest.raises(DeadlineExceeded):
            Propagation(["a"]).headers_for("http://a", over)
        assert Propagation(["a"]).headers_for("http://b", over) == {}

    @pytest.mark.parametrize("host", ["", "http://a", "a/b", "a*", "a b", "a@b", "a:b", "*.*", "[::1", "a:"])
    def test_refuses_what_is_no_host(self, host: str) -> None:
        """A pattern that would never match, or not as meant, is refused with its text."""
        with pytest.raises(ValueError, match=r"hosts must be"):
            Propagation([host])

    def test_refuses_arguments_of_the_wrong_kind(self) -> None:
        """A bare string is a slip for a list of one; a header's name is a token."""
        with pytest.raises(TypeError, match="hosts"):
            Propagation("users.internal")
        with pytest.raises(TypeError, match="hosts must be strings, not 42"):
            Propagation([42])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="header"):
            Propagation([], header="x: y")
        with pytest.raises(TypeError, match="header"):
            Propagation([], header=None)  # type: ignore[arg-type]

    @pytest.mark.parametrize("wrong", ["", 42, [42], ["a/b"]])
    def test_names_the_argument_that_a_client_was_given(self, wrong: Any) -> None:
        """A user of a client has written `propagate_to=`, and no `hosts`."""
        with pytest.raises((TypeError, ValueError), match=r"^propagate_to must be"):
            Propagation.to(wrong)

    def test_is_what_a_client_makes_of_its_argument(self) -> None:
        """Hosts, an object, or nothing."""
        mine = Propagation(["a"], header="x-ms")
        assert Propagation.to(mine) is mine
        assert Propagation.to(["a"]).hosts == ("a",)
        assert Propagation.to(None).hosts == ()
        assert repr(mine) == "Propagation(['a'], header='x-ms')"
        assert repr(Propagation(["a"])) == "Propagation(['a'])"


class TestAcceptance:
    def test_takes_the_shortest_of_what_is_said(self) -> None:
        """Several headers that are valid: the earliest end."""
        fields = [("X-Envoy-Expected-Rq-Timeout-Ms", "900"), ("Grpc-Timeout", "1S"), ("Connect-Timeout-Ms", "800")]
        assert Acceptance().seconds(fields) == 0.8

    @pytest.mark.parametrize(
        "fields",
        [
            [],
            [("other", "5")],
            [("grpc-timeout", "5")],
            [("connect-timeout-ms", "-5")],
            [("connect-timeout-ms", "5"), ("Connect-Timeout-Ms", "5")],
        ],
    )
    def test_hears_nothing_in_rubbish(self, fields: list[tuple[str, str]]) -> None:
        """Missing, unreadable or repeated: the default holds."""
        assert Acceptance().seconds(fields) == 60.0
        assert Acceptance(default=7.0).seconds(fields) == 7.0

    def test_a_header_that_is_rubbish_does_not_hide_another(self) -> None:
        """What can be read is."""
        assert Acceptance().seconds([("grpc-timeout", "x"), ("connect-timeout-ms", "500")]) == 0.5

    @pytest.mark.parametrize(
        ("settings", "asking", "not_saying"),
        [
            ({}, 60.0, 60.0),
            ({"cap": 2.0}, 2.0, 2.0),
            ({"default": 10.0}, 10.0, 10.0),
            ({"cap": 2.0, "default": 10.0}, 2.0, 10.0),
            ({"cap": inf}, 359_999_996_400.0, inf),
            ({"cap": inf, "default": 10.0}, 359_999_996_400.0, 10.0),
        ],
    )
    def test_gives_a_stranger_no_more_than_its_cap(
        self, settings: dict[str, float], asking: float, not_saying: float
    ) -> None:
        """By default no more than the time of a request that does not say; no bound only where that is asked for."""
        accept = Acceptance(**settings)
        assert accept.seconds([("grpc-timeout", "99999999H")]) == asking
        assert accept.seconds([]) == not_saying
        assert accept.seconds([("grpc-timeout", "1S")]) == 1.0

    def test_believes_only_its_headers(self) -> None:
        """What it was not told to read says nothing."""
        assert Acceptance(["x-ms"], cap=2.0).seconds([("grpc-timeout", "1S")]) == 2.0

    def test_refuses_wrong_arguments(self) -> None:
        """Numbers and names are checked where they are written."""
        with pytest.raises(ValueError, match="cap"):
            Acceptance(cap=0)
        with pytest.raises(ValueError, match="default"):
            Acceptance(default=float("nan"))
        with pytest.raises(TypeError, match="headers"):
            Acceptance("grpc-timeout")
        with pytest.raises(ValueError, match="headers"):
            Acceptance([""])


def test_a_name_that_holds_a_host_is_a_string_that_knows_what_is_left_without_it() -> None:
    """In copies and pickles, too: events and errors cross processes."""
    name = OfHost("GET example.org", common="GET")
    for it in (name, copy.copy(name), pickle.loads(pickle.dumps(name))):
        assert (it, it.common) == ("GET example.org", "GET")


class TestBudget:
    def test_only_shortens(self) -> None:
        """An earlier deadline around it stays."""
        assert budget(inf).deadline == inf
        with deadline(1.0) as outer:
            assert budget(5.0).deadline == outer.deadline
            assert budget(inf).deadline == outer.deadline
            assert budget(0.5).deadline < outer.deadline

    def test_is_ambient_in_its_block(self) -> None:
        """Inside it is found; outside, also after an error, it is gone."""
        ctx = budget(5.0)
        with pytest.raises(KeyError), Steps(ctx):
            assert current_context() is ctx
            with Steps(None):
                assert current_context().deadline == inf
            assert current_context() is ctx
            raise KeyError
        assert current_context().deadline == inf

    def test_is_gone_whatever_the_block_left_behind(self) -> None:
        """A block that was entered and never left ends with the request."""
        with Steps(budget(5.0)):
            deadline(1.0).__enter__()
        assert current_context().deadline == inf

    def test_of_a_coroutine_that_another_closes_is_not_put_there(self) -> None:
        """Where a coroutine is closed from outside, the ambient context is that of whoever closes it."""

        @types.coroutine
        def pause() -> Any:
            yield

        async def request() -> None:
            with Steps(budget(5.0)):
                await pause()

        coroutine = request()
        contextvars.copy_context().run(coroutine.send, None)
        with deadline(1.0) as mine:
            coroutine.close()
            assert current_context() is mine


class TestRanOut:
    class RpcError(Exception):
        __module__ = "grpc._channel"

        def __init__(self, name: str) -> None:
            self.name = name

        def code(self) -> Any:
            return types.SimpleNamespace(name=self.name)

    @pytest.mark.parametrize(
        ("error", "in_time", "too_late"),
        [
            (DeadlineExceeded(), True, True),
            (TimeoutError(), False, True),
            (ConnectionError(), False, True),
            (RpcError("DEADLINE_EXCEEDED"), False, True),
            (RpcError("INTERNAL"), False, False),
            (KeyError(), False, False),
            (ExceptionGroup("", [DeadlineExceeded(), ExceptionGroup("", [DeadlineExceeded()])]), True, True),
            (ExceptionGroup("", [DeadlineExceeded(), ConnectionError()]), False, True),
            (ExceptionGroup("", [DeadlineExceeded(), KeyError()]), False, False),
        ],
    )
    def test_is_the_deadline_or_the_network_once_it_is_over(
        self, error: Exception, in_time: bool, too_late: bool
    ) -> None:
        """A client that was given what was left raises an error of its own."""
        assert ran_out(error, Context(timeout=60)) is in_time
        assert ran_out(error, Context(timeout=0)) is too_late
        assert ran_out(error, Context(timeout=0.004)) is too_late  # the client's timer was early


class TestSteps:
    def test_leave_what_is_theirs_to_the_next(self) -> None:
        """A block that a generator holds open across a `yield` is its own, not the server's."""

        def body() -> Any:
            with deadline(1.0) as ctx:
                yield ctx
                yield current_context()
            yield current_context()

        ctx = budget(5.0)
        steps, items = Steps(ctx), body()
        with steps:
            inner = next(items)
        assert current_context().deadline == inf
        with steps:
            assert next(items) is inner
        with steps:
            assert next(items) is ctx
