"""The same in asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from resilience import Policy, Retry, Timeout, deadline
from resilience.integrations.sqlalchemy import OutcomeUnknown, transient, unit_of_work
from tests.integrations.databases.models import AGAIN, FOREVER, Base, Note
from tests.integrations.databases.sqlite import PATIENCE, Locked


@asynccontextmanager
async def async_engine(file: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{file}", connect_args={"timeout": 0})
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    try:
        yield engine
    finally:
        await engine.dispose()


async def test_an_asynchronous_session_is_done_again_as_a_whole(file: Path) -> None:
    """A lock, a commit, a mistake: as with blocking sessions."""
    sessions = []

    async def add(session: AsyncSession, text: str) -> str:
        sessions.append(session)
        session.add(Note(text=text))
        return text

    async with async_engine(file) as engine:
        other = Locked(file)
        retry = Retry(2, on=transient, backoff=[0], on_retry=other.release)
        unit = unit_of_work(retry, async_sessionmaker(engine))
        assert await unit(add)("a") == "a"
        assert len(sessions) == 2
        with pytest.raises(IntegrityError):
            await unit(add)("a")
        assert len(sessions) == 3

        async def read(connection: AsyncConnection) -> list[str]:
            return list(await connection.scalars(select(Note.text)))

        with deadline(PATIENCE):
            assert await unit_of_work(retry, engine)(read)() == ["a"]


async def test_an_asynchronous_statement_keeps_to_the_deadline(file: Path) -> None:
    """For sessions and for connections."""

    async def forever(work: Any) -> None:
        await work.execute(FOREVER)

    async with async_engine(file) as engine:
        for source in (engine, async_sessionmaker(engine)):
            with deadline(0.1), pytest.raises(OperationalError, match="interrupted"):
                await unit_of_work(AGAIN, source)(forever)()


async def test_a_cancelled_unit_gives_its_connection_back(file: Path) -> None:
    """A Timeout cancels the first attempt; the second one does the work."""
    attempts = []

    async def add(session: AsyncSession) -> None:
        attempts.append(session)
        session.add(Note(text=f"attempt {len(attempts)}"))
        await session.flush()
        if len(attempts) == 1:
            await anyio.sleep(PATIENCE)

    async with async_engine(file) as engine:
        unit = unit_of_work(Policy.wrap(AGAIN, Timeout(0.5)), async_sessionmaker(engine))
        await unit(add)()
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        async with engine.connect() as connection:
            assert list(await connection.scalars(select(Note.text))) == ["attempt 2"]


async def test_a_cancelled_commit_is_not_repeated(file: Path) -> None:
    """Nobody knows how far it came."""

    class Slow(AsyncSession):
        async def commit(self) -> None:
            await super().commit()
            await anyio.sleep(PATIENCE)

    async def add(session: AsyncSession) -> None:
        session.add(Note(text="a"))

    async with async_engine(file) as engine:
        unit = unit_of_work(Policy.wrap(AGAIN, Timeout(0.3)), async_sessionmaker(engine, class_=Slow))
        with pytest.raises(OutcomeUnknown):
            await unit(add)()
        async with engine.connect() as connection:
            assert list(await connection.scalars(select(Note.text))) == ["a"]


async def test_a_plain_function_is_not_given_an_asynchronous_session(file: Path) -> None:
    """Neither by an engine nor by a sessionmaker; the error says what to write."""

    def add(work: Any) -> None:
        pytest.fail("it was given one")

    async with async_engine(file) as engine:
        for source, kind in ((engine, "AsyncConnection"), (async_sessionmaker(engine), "AsyncSession")):
            with pytest.raises(TypeError, match=rf"add is a plain function, .* \({kind}\): write `async def`"):
                unit_of_work(AGAIN, source)(add)()
