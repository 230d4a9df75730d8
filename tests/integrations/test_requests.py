"""`resilience.integrations.requests` against requests itself, and a server that fails as it is told."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter
from requests.auth import HTTPDigestAuth
from typing_extensions import override

from resilience import CircuitBreaker, Context, Fallback
from resilience.integrations.http import NotRepeatable
from resilience.integrations.requests import ResilienceAdapter
from tests.integrations.requests_sessions import QUICK, Make, Recorder, file_in_the_middle
from tests.integrations.servers import Answer, FlakyServer

# --- a session as usual -----------------------------------------------------------------------


def test_a_fallback_answers_with_a_response_that_it_has_made(server: FlakyServer, session: Make) -> None:
    """One without a connection, also where the session streams."""

    def cached(failure: Any, ctx: Context) -> requests.Response:
        answer = requests.Response()
        answer.status_code, answer._content, answer.request = 203, b"cached", failure.error.response.request
        return answer

    response = session(Fallback(handler=cached)).get(server.script("/", 503), stream=True)
    assert (response.status_code, response.text) == (203, "cached")


def test_a_file_survives_retries_and_a_redirect(server: FlakyServer, session: Make, tmp_path: Path) -> None:
    """Where requests and the adapter both wind a file back, each attempt of each hop gets it whole."""
    server.script("/from", 503, Answer(307, {"Location": "/to"}))
    server.script("/to", 503, 200)
    with file_in_the_middle(b"content", tmp_path / "file") as file:
        assert session().put(f"{server.url}/from", data=file).status_code == 200
    assert [it.body for it in server.requests] == [b"content"] * 4


@pytest.mark.parametrize(
    "answer",
    [Answer(307, {"Location": "/"}), Answer(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n"'})],
    ids=["redirect", "challenge"],
)
def test_a_generator_does_not_survive_a_second_request(server: FlakyServer, session: Make, answer: Answer) -> None:
    """What requests itself sends again, after a redirect or a challenge, is not sent with an empty body either."""
    body = (it for it in [b"once"])
    with pytest.raises(NotRepeatable, match="used up"):
        session().put(server.script("/", answer, 200), data=body, auth=HTTPDigestAuth("me", "secret"))
    assert [it.body for it in server.requests] == [b"once"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_digest_authentication(server: FlakyServer, session: Make, wrapped: bool) -> None:
    """The second request of digest authentication, which a hook sends, goes through the policy too."""
    challenge = Answer(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth"'})
    url = server.script("/", 503, challenge, 503, 200)
    options = {"adapter": HTTPAdapter()} if wrapped else {}
    response = session(QUICK, **options).get(url, auth=HTTPDigestAuth("me", "secret"))
    assert response.status_code == 200
    assert ["Authorization" in it.headers for it in server.requests] == [False, False, True, True]


def test_hooks_see_the_response_that_is_returned(server: FlakyServer, session: Make) -> None:
    """Not those that were discarded."""
    seen: list[int] = []
    session().get(server.script("/", 503, 200), hooks={"response": lambda it, **_: seen.append(it.status_code)})
    assert seen == [200]


def test_many_threads_and_one_session(server: FlakyServer, session: Make) -> None:
    """An adapter keeps nothing of a request on itself."""
    one = session()
    paths = [f"/{number}" for number in range(40)]
    for path in paths:
        server.script(path, 503, Answer(body=path.encode()))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda path: one.get(server.url + path).content, paths))
    assert answers == [path.encode() for path in paths]


# --- the adapter ------------------------------------------------------------------------------


def test_an_adapter_that_is_wrapped_sends(server: FlakyServer, session: Make) -> None:
    """A user's own adapter does what it did, inside of the policy, and is closed with ours."""

    class Signing(HTTPAdapter):
        @override
        def add_headers(self, request: Any, **options: Any) -> None:
            request.headers["X-Signature"] = "signed"

    session(QUICK, adapter=Signing()).get(server.script("/", 503, 200))
    assert [it.headers["X-Signature"] for it in server.requests] == ["signed"] * 2
    recorder = Recorder()
    ResilienceAdapter(QUICK, adapter=recorder).close()
    assert recorder.is_closed


@pytest.mark.parametrize(
    ("policy", "options", "error", "message"),
    [
        (QUICK, {"adapter": 1}, TypeError, "adapter must be an adapter of requests, not 1"),
        (QUICK, {"adapter": HTTPAdapter(max_retries=3)}, ValueError, "must not retry by itself"),
        (QUICK, {"adapter": HTTPAdapter(), "pool_maxsize": 3}, ValueError, "belong to the adapter that is wrapped"),
    ],
)
def test_wrong_arguments(policy: Any, options: Any, error: type[Exception], message: str) -> None:
    """They are refused where they are written."""
    with pytest.raises(error, match=message):
        ResilienceAdapter(policy, **options)


def test_urllib3_does_not_retry(session: Make) -> None:
    """Its own retries are off."""
    adapter = session().get_adapter("http://x")
    assert isinstance(adapter, ResilienceAdapter)
    assert adapter.max_retries.total == 0


def test_pickling(server: FlakyServer, session: Make) -> None:
    """A session pickles as it does without us, if its policies do; a circuit, which is shared, does not."""
    one = pickle.loads(pickle.dumps(session(QUICK, pool_maxsize=3)))
    with one:
        assert one.get(server.script("/", 503, 200)).status_code == 200
        assert one.get_adapter("http://x")._pool_maxsize == 3
    with pytest.raises(TypeError, match="all its users share"):
        pickle.dumps(session(CircuitBreaker(5)))
