"""SQLAlchemy's sessions and connections in units of work, in asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from resilience import Policy, Timeout
from resilience.integrations.sqlalchemy import OutcomeUnknown, unit_of_work
from tests.integrations.databases.models import AGAIN, Base, Note
from tests.integrations.databases.sqlite import PATIENCE


@asynccontextmanager
async def async_engine(file: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{file}", connect_args={"timeout": 0})
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    try:
        yield engine
    finally:
        await engine.dispose()


async def test_a_cancelled_commit_is_not_repeated(file: Path) -> None:
    """Its outcome is unknown."""

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


async def test_a_plain_function_with_an_async_session_is_refused(file: Path) -> None:
    """Of an engine and of a sessionmaker; the error says what to write."""

    def add(work: Any) -> None:
        pytest.fail("the unit was called")

    async with async_engine(file) as engine:
        for source, kind in ((engine, "AsyncConnection"), (async_sessionmaker(engine), "AsyncSession")):
            with pytest.raises(TypeError, match=rf"add is a plain function, .* \({kind}\): write `async def`"):
                unit_of_work(AGAIN, source)(add)()
