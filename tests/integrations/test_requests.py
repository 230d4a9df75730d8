"""`resilience.integrations.requests` against requests itself, and a server that fails as it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from resilience import Policy, Retry
from resilience.integrations.requests import ResilienceAdapter
from tests.integrations.servers import Answer, FlakyServer, unused_url

QUICK = Retry(3, backoff=[0])


@pytest.fixture
def session() -> Iterator[Callable[..., requests.Session]]:
    """`session(policy, **options)` makes a session that sends everything through the policy."""
    made: list[requests.Session] = []

    def make(policy: Policy[Any], **options: Any) -> requests.Session:
        made.append(requests.Session())
        made[-1].mount("http://", ResilienceAdapter(policy, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_status_that_says_not_now_is_retried(server: FlakyServer, session) -> None:
    """A plain Retry sends a GET again that was answered with 503, over the connection it has."""
    url = server.script("/", 503, 503, Answer(body=b"fine"))
    response = session(QUICK).get(url)
    assert (response.status_code, response.content) == (200, b"fine")
    assert (len(server.requests), server.connections) == (3, 1)


def test_a_post_is_not_sent_again(server: FlakyServer, session) -> None:
    """What may have been carried out is not repeated; the response comes as it is."""
    response = session(QUICK).post(server.script("/", 503), data=b"order")
    assert (response.status_code, len(server.requests)) == (503, 1)


def test_a_post_that_was_never_sent_is_tried_again(session) -> None:
    """Where no connection could be made, any method is repeated."""
    with pytest.raises(requests.ConnectionError) as caught:
        session(QUICK).post(unused_url(), data=iter([b"order"]))
    assert "3 attempts" in caught.value.__notes__[-1]
