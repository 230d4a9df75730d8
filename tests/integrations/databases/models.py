"""A table for SQLAlchemy, and functions of the tests that use it."""

from __future__ import annotations

import psycopg
from sqlalchemy import Engine, String, select, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from resilience import Retry
from resilience.integrations.sqlalchemy import transient
from tests.integrations.databases import sqlite

AGAIN = Retry(3, on=transient, backoff=[0])

FOREVER, LONG = text(sqlite.FOREVER), text(sqlite.LONG)


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(String(40), unique=True)


class Account(Base):
    __tablename__ = "accounts"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  # SQLAlchemy's own form


def notes(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(select(Note.text).order_by(Note.id)))


def lost(error: type[DBAPIError] = OperationalError) -> DBAPIError:
    return error("select 1", None, psycopg.OperationalError("gone"), connection_invalidated=True)
