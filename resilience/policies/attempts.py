"""The block form of a Retry: `for attempt in retry.attempts(): with attempt: ...`. Part of Retry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import final

from typing_extensions import override

from resilience import checks
from resilience.ambient import Block, block_context, set_ambient
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import BlockMisuse, is_refusal
from resilience.policies.retry_state import RetryRules, RetryState, too_late
from resilience.runtimes.base import Runtime
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS

_BLOCK = "write `for attempt in retry.attempts():` and in it `with attempt:` around the work"


@final
class Attempts:
    """The attempts of one block, for `for` and `async for`. Each is a context manager."""

    def __init__(self, rules: RetryRules) -> None:
        self._rules = rules
        self.ctx: Context = block_context()
        self._began: float | None = None  # when the first attempt began
        self._state: RetryState | None = None
        self._failed: Exception | None = None  # what the last block raised, if another attempt follows
        self.was_entered: bool = False  # of the last attempt; keeping the attempt itself would be a reference cycle

    def __iter__(self) -> Iterator[Attempt]:
        return self

    def __next__(self) -> Attempt:
        attempt = drive(self._next(BLOCKING))
        if attempt is None:
            raise StopIteration
        return attempt

    def __aiter__(self) -> AsyncIterator[Attempt]:
        return self

    async def __anext__(self) -> Attempt:
        attempt = await self._next(TASKS)
        if attempt is None:
            raise StopAsyncIteration
        return attempt

    async def _next(self, runtime: Runtime) -> Attempt | None:
        if self._began is None:
            now = clock.now()
            if now >= self.ctx.deadline:
                raise too_late(self._rules.policy)
            self._began = now
            return Attempt(self, 1)
        if not self.was_entered:
            checks.warn(f"{self._rules.policy}: an attempt was not entered, so it is not retried: {_BLOCK}")
        error, self._failed = self._failed, None
        if error is None or self._state is None:
            return None
        try:
            if not (self._state.begins_at_once(runtime) or await self._state.wait(runtime)):
                self._state.conclude()
                raise error
        finally:
            self._state.release_last()
            del error
        self.was_entered = False
        return Attempt(self, self._state.begin_next().attempt)

    def holds_back(self, error: Exception) -> bool:
        """Return true if another attempt follows a failed block, false if its error is raised."""
        if not self._rules.failures.handles(error):
            if self._state is not None and is_refusal(error):
                self._state.explain(error)
            return False
        self._state = self._state or RetryState(self._rules, self.ctx, self._began)
        try:
            if self._state.continues(error):
                self._failed = error
            else:
                self._state.conclude()
        finally:
            if self._failed is None:  # no cycle: error -> traceback -> frame of the block -> this object -> error
                self._state.release_last()
        return self._failed is not None

    def succeeded(self) -> None:
        """Record that a block succeeded."""
        if self._rules.budget is not None:
            self._rules.budget.succeeded()


@final
class Attempt(Block):
    """One attempt: suppresses an error of its block while another attempt can be made."""

    __slots__ = ("_attempts", "entered", "number")

    def __init__(self, attempts: Attempts, number: int) -> None:
        self._attempts = attempts
        self._ctx = self._token = None
        self.entered: bool = False  # never reset: a second entry would overwrite the token of the first
        #: 1 for the first attempt.
        self.number: int = number

    def __enter__(self) -> Attempt:
        if self.entered:
            raise BlockMisuse(f"this attempt was entered before, and each is for one block: {_BLOCK}")
        self.entered = self._attempts.was_entered = True
        self._ctx = ctx = block_context(self._attempts.ctx)
        ctx.attempt = self.number
        self._token = set_ambient(ctx)
        return self

    @override
    def __exit__(  # type: ignore[override]  # it may suppress the error
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        Block.__exit__(self, kind, error, traceback)
        if error is None:
            self._attempts.succeeded()
        return isinstance(error, Exception) and self._attempts.holds_back(error)
