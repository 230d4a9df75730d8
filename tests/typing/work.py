"""Work around a call. Read by test_types.py; not run."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import assert_type

from resilience import Failure, Fallback, Retry, Success, events
from resilience.integrations.answers import Answer, answer_to
from resilience.shared import MemoryStore
from resilience.work import Gate, IdempotencyKey, KeyInUse, Once, Supervisor, each
from tests.typing.execute import fetch


def length(text: str) -> int:
    return len(text)


async def alength(text: str) -> int:
    return len(text)


async def texts() -> AsyncIterator[str]:
    yield "text"


def gate() -> None:
    gate = Gate(name="work")
    assert_type(gate.wrap(Retry()).execute(fetch), str)
    assert_type(gate.drain(timedelta(seconds=5)), bool)
    gate.drain("5")  # type: ignore[arg-type]


async def drained() -> bool:
    return await Gate().adrain(5)


def keys() -> None:
    assert_type(IdempotencyKey(lambda: "key").wrap(Retry()).execute(fetch), str)
    assert_type(Once(MemoryStore(), key=length).call(length, "text"), int)
    Once({}, key=length, payload=length, lease=timedelta(minutes=1), keep=5)
    Once({})  # type: ignore[call-arg]
    IdempotencyKey(length)  # type: ignore[arg-type]
    try:
        pass
    except KeyInUse as error:
        assert_type(error.retry_after, float | None)


def many() -> None:
    with each(Retry(), length, ["a"], limit=2, progress=print) as pairs:
        for text, outcome in pairs:
            assert_type(text, str)
            assert_type(outcome, Success[int] | Failure)
    with each(Fallback(None), length, ["a"], limit=2) as pairs_or_none:
        assert_type(next(pairs_or_none)[1], Success[int | None] | Failure)
    each(Retry(), length, ["a"])  # type: ignore[call-overload]
    each(Retry(), length, texts(), limit=2)  # type: ignore[arg-type]


async def amany() -> None:
    async with each(Retry(), alength, texts(), limit=2, ordered=True) as pairs:
        async for text, outcome in pairs:
            assert_type(text, str)
            assert_type(outcome, Success[int] | Failure)


def parked(event: events.Parked) -> None:
    assert_type(event.name, str)
    assert_type(event.restarts, int)
    assert_type(event.last, Failure)


async def supervised() -> None:
    async with Supervisor(restart=[1, 2], within=timedelta(minutes=5), on_parked=parked) as supervisor:
        supervisor.start_soon(alength, "text", name="length")
        supervisor.start_soon(length, "text")  # type: ignore[arg-type]
        assert_type(supervisor.parked, tuple[str, ...])
        assert_type(await supervisor.adrain(5), bool)


def answered(record: logging.LogRecord) -> None:
    """A filter of a framework's log has the error as `logging` types it."""
    if record.exc_info and (error := record.exc_info[1]) is not None:
        assert_type(answer_to(error), Answer | None)
