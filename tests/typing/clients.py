"""Units of work, and protected clients, which have the type of the client. Read by test_types.py; not run."""

from __future__ import annotations

import sqlite3
from typing import TypeVar, assert_type

import redis
import redis.asyncio
from anthropic import Anthropic, AsyncAnthropic
from anthropic.lib.vertex import AnthropicVertex
from anthropic.types import Message
from openai import AsyncAzureOpenAI, AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from resilience import Fallback, Retry
from resilience.integrations import anthropic, dbapi, http, openai, sqlalchemy
from resilience.integrations.redis import protect

T = TypeVar("T")


def connect() -> sqlite3.Connection:
    return sqlite3.connect("test.db")


@dbapi.unit_of_work(Retry(), connect)
def add(connection: sqlite3.Connection, a: int, *, b: str = "") -> int:
    return a


async def aconnect() -> sqlite3.Connection:
    return connect()


@dbapi.unit_of_work(Retry(), aconnect)
async def aadd(connection: sqlite3.Connection, a: int) -> int:
    return a


@dbapi.unit_of_work(Fallback(None).wrap(Retry()), connect)
def add_or_none(connection: sqlite3.Connection, a: int) -> int:
    return a


assert_type(add(1, b="b"), int)
assert_type(add_or_none(1), int | None)
add("a")  # type: ignore[arg-type]
add(connect(), 1)  # type: ignore[arg-type, call-arg]


@dbapi.unit_of_work(Retry(), connect)  # type: ignore[arg-type]
def wrong(connection: Session) -> None: ...


engine = create_engine("sqlite://")


@sqlalchemy.unit_of_work(Retry(), sessionmaker(engine))
def with_session(session: Session, name: str) -> str:
    return name


@sqlalchemy.unit_of_work(Retry(), sessionmaker(engine))
def load(session: Session, model: type[T], key: int) -> T:
    return session.get_one(model, key)


@sqlalchemy.unit_of_work(Retry(), engine)
def with_connection(connection: Connection) -> int:
    return 1


@sqlalchemy.unit_of_work(Retry(), async_sessionmaker(create_async_engine("sqlite+aiosqlite://")))
async def with_async_session(session: AsyncSession, name: str) -> str:
    return name


assert_type(with_session("a"), str)
assert_type(load(int, 1), int)
assert_type(with_connection(), int)
with_session()  # type: ignore[call-arg]


async def main() -> None:
    assert_type(await with_async_session("a"), str)
    assert_type(await aadd(1), int)


assert_type(protect(redis.Redis(), Retry()), redis.Redis)
assert_type(protect(redis.asyncio.Redis(), Retry()), redis.asyncio.Redis)
protect(1, Retry())  # type: ignore[type-var]


def same_type(azure: AsyncAzureOpenAI, vertex: AnthropicVertex) -> None:
    assert_type(openai.protect(OpenAI(), Retry()), OpenAI)
    assert_type(openai.protect(AsyncOpenAI(), http.standard()), AsyncOpenAI)
    assert_type(openai.protect(azure, Retry()), AsyncAzureOpenAI)
    assert_type(anthropic.protect(Anthropic(), Retry()), Anthropic)
    assert_type(anthropic.protect(AsyncAnthropic(), Retry()), AsyncAnthropic)
    assert_type(anthropic.protect(vertex, http.standard()), AnthropicVertex)


async def same_results() -> None:
    client = openai.protect(AsyncOpenAI(), Retry())
    assert_type(await client.chat.completions.create(model="m", messages=[]), ChatCompletion)
    assert_type(anthropic.protect(Anthropic(), Retry()).messages.create(model="m", max_tokens=1, messages=[]), Message)
