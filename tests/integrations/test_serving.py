"""A request that a server answers within a budget: what its steps leave behind, and when its time was over."""

from __future__ import annotations

import contextvars
import types
from math import inf
from typing import Any

import pytest

from resilience import Context, DeadlineExceeded, current_context, deadline
from resilience.integrations._serving import Steps, budget, ran_out


class TestBudget:
    def test_is_reset_if_the_block_leaves_an_open_block_behind(self) -> None:
        """A block that was entered and never left ends with the request."""
        with Steps(budget(5.0)):
            deadline(1.0).__enter__()
        assert current_context().deadline == inf

    def test_of_a_coroutine_closed_from_outside_does_not_change_the_closers_context(self) -> None:

        @types.coroutine
        def pause() -> Any:
            yield

        async def request() -> None:
            with Steps(budget(5.0)):
                await pause()

        coroutine = request()
        contextvars.copy_context().run(coroutine.send, None)
        with deadline(1.0) as mine:
            coroutine.close()
            assert current_context() is mine


class TestRanOut:
    class RpcError(Exception):
        __module__ = "grpc._channel"

        def __init__(self, name: str) -> None:
            self.name = name

        def code(self) -> Any:
            return types.SimpleNamespace(name=self.name)

    @pytest.mark.parametrize(
        ("error", "in_time", "too_late"),
        [
            (DeadlineExceeded(), True, True),
            (TimeoutError(), False, True),
            (ConnectionError(), False, True),
            (RpcError("DEADLINE_EXCEEDED"), False, True),
            (RpcError("INTERNAL"), False, False),
            (KeyError(), False, False),
            (type("OfPostgreSQL", (Exception,), {"pgcode": "57014"})(), False, True),
            (type("OfSQLite", (Exception,), {"sqlite_errorname": "SQLITE_INTERRUPT"})(), False, True),
            (ExceptionGroup("", [DeadlineExceeded(), ExceptionGroup("", [DeadlineExceeded()])]), True, True),
            (ExceptionGroup("", [DeadlineExceeded(), ConnectionError()]), False, True),
            (ExceptionGroup("", [DeadlineExceeded(), KeyError()]), False, False),
        ],
    )
    def test_is_a_deadline_or_a_client_error_after_it(self, error: Exception, in_time: bool, too_late: bool) -> None:
        """A client whose timeouts were cut to the time left raises its own error."""
        assert ran_out(error, Context(timeout=60)) is in_time
        assert ran_out(error, Context(timeout=0)) is too_late
        assert ran_out(error, Context(timeout=0.004)) is too_late  # the client's timer was early
