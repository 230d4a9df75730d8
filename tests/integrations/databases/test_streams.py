"""Rows of a server-side cursor under `policy.streaming`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice

import pytest
from sqlalchemy import Connection, Engine, select, text

from resilience import Bulkhead, Retry
from tests.integrations.databases.models import AGAIN, Note, lost


@pytest.fixture
def filled(engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.execute(text("insert into notes (text) values ('a'), ('b'), ('c'), ('d')"))
    return engine


def reader(engine: Engine, *failures: Exception) -> Callable[[], Iterator[str]]:
    """A generator function over the rows, read in batches; its first calls fail with these errors."""
    remaining = list(failures)

    def read() -> Iterator[str]:
        with engine.connect().execution_options(stream_results=True, max_row_buffer=2) as connection:
            if remaining:
                raise remaining.pop(0)
            yield from connection.scalars(select(Note.text).order_by(Note.text))

    return read


def test_a_query_that_fails_before_its_first_row_is_repeated(filled: Engine) -> None:
    """With a new connection, as the failed one is closed with its source."""
    assert list(AGAIN.streaming().call(reader(filled, lost(), lost()))) == ["a", "b", "c", "d"]
    assert filled.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_the_connection_is_held_until_the_end_of_the_stream(filled: Engine) -> None:
    """It returns to the pool when the consumer leaves."""
    bulkhead = Bulkhead(1)
    with closing(bulkhead.streaming().call(reader(filled))) as rows:
        assert list(islice(rows, 2)) == ["a", "b"]
        assert (filled.pool.checkedout(), bulkhead.stats().in_flight) == (1, 1)  # type: ignore[attr-defined]
    assert (filled.pool.checkedout(), bulkhead.stats().in_flight) == (0, 0)  # type: ignore[attr-defined]


def test_a_result_is_closed_as_well_as_its_iterator(filled: Engine) -> None:
    """A function may return the result itself, which holds the cursor, and not only an iterator."""
    with filled.connect() as connection:

        def query(connection: Connection) -> Iterator[tuple[str]]:
            results.append(connection.execute(select(Note.text)))
            return results[-1]  # type: ignore[return-value]

        results: list[object] = []
        with closing(Retry().streaming().call(query, connection)) as rows:
            assert next(rows) == ("a",)
        assert results[0].closed  # type: ignore[attr-defined]
