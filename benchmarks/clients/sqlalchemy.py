"""SQLAlchemy with SQLite: a transaction that reads one number, hand-written and as a unit of work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import Connection, create_engine, literal, select
from sqlalchemy.exc import OperationalError

from benchmarks.clients import Functions, entry
from benchmarks.clients.servers import Servers
from benchmarks.functions import ANSWER, ATTEMPTS, SECONDS
from benchmarks.libraries import HAND_WRITTEN, OURS
from benchmarks.timing import SYNC
from resilience import Policy, Retry, Timeout
from resilience.integrations.sqlalchemy import transient, unit_of_work

LIMITED = f"{OURS}, with a deadline"

_QUESTION = select(literal(ANSWER))


@entry("SQLAlchemy, a transaction in SQLite", SYNC)
@asynccontextmanager
async def blocking(servers: Servers) -> AsyncIterator[Functions]:
    engine = create_engine("sqlite://")

    def hand_written() -> int:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with engine.begin() as connection:
                    return int(connection.scalar(_QUESTION) or 0)
            except OperationalError:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("there is an attempt")

    @unit_of_work(Retry(ATTEMPTS, on=transient), engine)
    def unit(connection: Connection) -> int:
        return int(connection.scalar(_QUESTION) or 0)

    @unit_of_work(Policy.wrap(Timeout(SECONDS, cooperative=True), Retry(ATTEMPTS, on=transient)), engine)
    def limited(connection: Connection) -> int:
        return int(connection.scalar(_QUESTION) or 0)

    try:
        yield {HAND_WRITTEN: hand_written, OURS: unit, LIMITED: limited}
    finally:
        engine.dispose()
