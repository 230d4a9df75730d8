"""`resilience.integrations.requests` with requests itself, against a server that fails as scripted."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter
from requests.auth import HTTPDigestAuth
from typing_extensions import override

from resilience import CircuitBreaker, Context, Fallback
from resilience.integrations.http import NotRepeatable
from resilience.integrations.requests import ResilienceAdapter
from tests.integrations.requests_sessions import QUICK, Make, Recorder
from tests.integrations.servers import Answer, FlakyServer

# --- sessions ---------------------------------------------------------------------------------


def test_the_response_of_a_fallback_needs_no_connection(server: FlakyServer, session: Make) -> None:
    """Also if the session streams."""

    def cached(failure: Any, ctx: Context) -> requests.Response:
        answer = requests.Response()
        answer.status_code, answer._content, answer.request = 203, b"cached", failure.error.response.request
        return answer

    response = session(Fallback(handler=cached)).get(server.script("/", 503), stream=True)
    assert (response.status_code, response.text) == (203, "cached")


@pytest.mark.parametrize(
    "answer",
    [Answer(307, {"Location": "/"}), Answer(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n"'})],
    ids=["redirect", "challenge"],
)
def test_a_generator_is_not_sent_in_a_second_request(server: FlakyServer, session: Make, answer: Answer) -> None:
    """After a redirect or a challenge, requests itself would send an empty body."""
    body = (it for it in [b"once"])
    with pytest.raises(NotRepeatable, match="used up"):
        session().put(server.script("/", answer, 200), data=body, auth=HTTPDigestAuth("me", "secret"))
    assert [it.body for it in server.requests] == [b"once"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_the_second_request_of_digest_authentication_is_retried(
    server: FlakyServer, session: Make, wrapped: bool
) -> None:
    """A hook sends it, through the policy."""
    challenge = Answer(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth"'})
    url = server.script("/", 503, challenge, 503, 200)
    options = {"adapter": HTTPAdapter()} if wrapped else {}
    response = session(QUICK, **options).get(url, auth=HTTPDigestAuth("me", "secret"))
    assert response.status_code == 200
    assert ["Authorization" in it.headers for it in server.requests] == [False, False, True, True]


def test_a_redirect_is_followed_even_if_its_body_cannot_be_decoded(server: FlakyServer, session: Make) -> None:
    """As requests itself does. The body of any other response must be decoded."""
    wrong = {"Content-Encoding": "gzip", "Location": "/elsewhere"}
    http = session(QUICK)
    assert http.get(server.script("/", Answer(302, wrong))).text == "ok"
    with pytest.raises(requests.exceptions.ContentDecodingError):
        http.get(server.script("/", Answer(200, wrong)))
    assert len(server.requests) == 3


def test_hooks_get_only_the_response_that_is_returned(server: FlakyServer, session: Make) -> None:
    seen: list[int] = []
    session().get(server.script("/", 503, 200), hooks={"response": lambda it, **_: seen.append(it.status_code)})
    assert seen == [200]


# --- the adapter ------------------------------------------------------------------------------


def test_a_wrapped_adapter_sends_and_is_closed(server: FlakyServer, session: Make) -> None:
    """Its own changes of requests still apply."""

    class Signing(HTTPAdapter):
        @override
        def add_headers(self, request: Any, **options: Any) -> None:
            request.headers["X-Signature"] = "signed"

    session(QUICK, adapter=Signing()).get(server.script("/", 503, 200))
    assert [it.headers["X-Signature"] for it in server.requests] == ["signed"] * 2
    recorder = Recorder()
    ResilienceAdapter(QUICK, adapter=recorder).close()
    assert recorder.is_closed


def test_the_retries_of_urllib3_are_off(session: Make) -> None:
    adapter = session().get_adapter("http://x")
    assert isinstance(adapter, ResilienceAdapter)
    assert adapter.max_retries.total == 0


def test_a_session_can_be_pickled_if_its_policies_can(server: FlakyServer, session: Make) -> None:
    """A circuit breaker, which is shared, cannot."""
    client = pickle.loads(pickle.dumps(session(QUICK, pool_maxsize=3)))
    with client:
        assert client.get(server.script("/", 503, 200)).status_code == 200
        assert client.get_adapter("http://x")._pool_maxsize == 3
    with pytest.raises(TypeError, match="all its users share"):
        pickle.dumps(session(CircuitBreaker(5)))
