"""`Once` on a real server, with the blocking client and the asyncio one."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import redis
import redis.asyncio

from resilience.work import KeyInUse, KeyMismatch, Once
from tests.conftest import Boom
from tests.integrations.redis.server import RedisServer


def by_order(order: str, amount: int) -> str:
    return order


def test_once_makes_one_call_for_each_key(server: RedisServer) -> None:
    calls: list[str] = []

    def pay(order: str, amount: int) -> dict[str, int]:
        calls.append(order)
        if amount < 0:
            raise Boom
        return {"paid": amount}

    async def apay(order: str, amount: int) -> dict[str, int]:
        return pay(order, amount)

    async def in_a_loop() -> Any:
        async with redis.asyncio.Redis.from_url(f"redis://127.0.0.1:{server.port}") as client:
            return await Once(client, key=by_order, payload=lambda order, amount: amount).acall(apay, "a", 5)

    with redis.Redis.from_url(f"redis://127.0.0.1:{server.port}") as client:
        once = Once(client, key=by_order, payload=lambda order, amount: amount)
        assert once.call(pay, "a", 5) == once.call(pay, "a", 5) == asyncio.run(in_a_loop()) == {"paid": 5}
        assert calls == ["a"]
        with pytest.raises(KeyMismatch):
            once.call(pay, "a", 6)
        for _ in range(2):
            with pytest.raises(Boom):
                once.call(pay, "b", -1)
        with pytest.raises(KeyInUse) as caught:
            once.call(lambda order, amount: once.call(pay, order, amount), "c", 1)
        assert caught.value.retry_after is not None
        assert 55 < caught.value.retry_after <= 60


def test_a_serializer_may_return_bytes(server: RedisServer) -> None:
    for decodes in (False, True):
        with redis.Redis.from_url(f"redis://127.0.0.1:{server.port}", decode_responses=decodes) as client:
            once = Once(client, key=lambda order: order, serializer=pickle, name=f"pickled-{decodes}")
            assert [once.call(lambda order: {1, 2}, "a") for _ in range(2)] == [{1, 2}] * 2
