"""One server for all tests of redis, and each client in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.redis.clients import Side
from tests.integrations.redis.server import RedisServer


@pytest.fixture(scope="package")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A running, empty server, regardless of the previous test."""
    shared_server.refresh()
    return shared_server


@pytest.fixture(params=["threads", "asyncio"])
def side(request: pytest.FixtureRequest, server: RedisServer) -> Side:
    return Side(request.param, server)
