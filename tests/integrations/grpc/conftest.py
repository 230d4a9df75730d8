"""The dependency behind a server, and a client of it in each world."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.integrations.grpc.services import Client, Dependency, serving


@pytest.fixture
def dependency() -> Dependency:
    return Dependency()


@pytest.fixture
def target(dependency: Dependency) -> Iterator[str]:
    """The address of a blocking server for the dependency."""
    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(dependency.one),
        "Many": grpc.unary_stream_rpc_method_handler(dependency.many),
        "Join": grpc.stream_unary_rpc_method_handler(dependency.join),
        "Chat": grpc.stream_stream_rpc_method_handler(dependency.chat),
    }
    with serving(handlers) as target:
        yield target


@pytest.fixture(params=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest, target: str) -> Client:
    return Client(target, request.param)
