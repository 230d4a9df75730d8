"""The block form of Retry: the attempts of one block, and each attempt as a context manager."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Final, final

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

#: What to write in place of a wrong use.
USAGE: Final = "write `for attempt in retry.attempts():` and in it `with attempt:` around the work"


@final
class Attempts:
    """The attempts of one block, for `for` and `async for`. Each is a context manager."""

    # Here for `__del__`, because an interrupt may prevent `__init__`:
    _began: float | None = None  # when the first attempt began
    _state: RetryState | None = None
    _failed: Exception | None = None  # what the last block raised, if another attempt follows

    def __init__(self, rules: RetryRules) -> None:
        self._rules = rules
        self.ctx: Context  # that around the loop
        self.was_entered: bool = False  # of the last attempt; keeping the attempt itself would be a reference cycle

    def __iter__(self) -> Iterator[Attempt]:
        self._check_before_loop()
        return self

    def __next__(self) -> Attempt:
        attempt = drive(self._next(BLOCKING))
        if attempt is None:
            raise StopIteration
        return attempt

    def __aiter__(self) -> AsyncIterator[Attempt]:
        self._check_before_loop()
        return self

    async def __anext__(self) -> Attempt:
        attempt = await self._next(TASKS)
        if attempt is None:
            raise StopAsyncIteration
        return attempt

    def _check_before_loop(self) -> None:
        if self._began is not None:  # the loop would end at once
            raise BlockMisuse("these attempts are for one loop: call `retry.attempts()` again for the next one")

    async def _next(self, runtime: Runtime) -> Attempt | None:
        if self._began is None:
            self.ctx = block_context()
            now = clock.now()
            if now >= self.ctx.deadline:
                raise too_late(self._rules.policy)
            self._began = now
            return Attempt(self, 1)
        self._warn_if_not_entered()
        error, self._failed = self._failed, None
        if error is None or self._state is None:
            return None
        try:
            state = self._state
            if state.give_up_if_late() or not (state.begins_at_once(runtime) or await state.wait(runtime)):
                state.conclude()
                raise error
        finally:
            self._state.release_last()
            del error
        self.was_entered = False
        return Attempt(self, self._state.begin_next().attempt)

    def __del__(self) -> None:
        if self._state is None:
            if self._began is not None:  # the loop was left at the first attempt
                self._warn_if_not_entered()
        elif self._failed is not None or not self.was_entered:  # it was left after a failed block, or before the next
            self._state.give_back()

    def _warn_if_not_entered(self) -> None:
        if not self.was_entered:
            self.was_entered = True  # as far as `__del__` is concerned: one warning is enough
            if self._state is not None:
                self._state.give_back()
            checks.warn(f"{self._rules.policy}: an attempt was not entered, so it is not retried: {USAGE}")

    def holds_back(self, error: Exception) -> bool:
        """Return true if another attempt follows a failed block, false if its error is raised."""
        if not self._rules.failures.judge(error):
            if self._state is not None and is_refusal(error):
                self._state.explain(error)
            return False
        self._state = self._state or RetryState(self._rules, self.ctx, self._began)
        try:
            if self._state.decide(error):
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
        self.number: int = number
        """1 for the first attempt."""

    def __enter__(self) -> Attempt:
        if self.entered:
            raise BlockMisuse(f"this attempt was entered before, and each is for one block: {USAGE}")
        self.entered = self._attempts.was_entered = True
        self._ctx = ctx = block_context(None, self._attempts.ctx.deadline)
        ctx.attempt = self.number
        try:
            self._token = set_ambient(ctx)
        except BaseException:  # interrupted: see `Block`
            ctx.is_over = True
            raise
        return self

    @override
    def __exit__(  # type: ignore[override]  # it may suppress the error
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        Block.__exit__(self, kind, error, traceback)
        if error is None:
            self._attempts.succeeded()
        return isinstance(error, Exception) and self._attempts.holds_back(error)
