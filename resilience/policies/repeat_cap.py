"""RepeatCap: a limit on retries and hedges in everything inside, across all layers that retry."""

from __future__ import annotations

from typing import Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.context import Context
from resilience.policy import Call, Policy
from resilience.repeats import Cap

T = TypeVar("T")


@final
class RepeatCap(Policy[Never]):
    """Allow at most `repeats` retries and hedges in each call, by all policies inside together.

    That includes the executions that the function starts, in its tasks, in threads that inherit its `contextvars` (such
    as those of `asyncio.to_thread`), and in a `detached()` block. Three attempts in each of three layers are 27 calls
    at the bottom, and 3 under a `RepeatCap(2)` around them. The caller gets the last failure of the call.

    :param repeats: the maximum number, zero or more. If caps are nested, each one counts.
    :param name: the name of this policy in `describe()`; "RepeatCap" by default.

    >>> from resilience import RepeatCap, Retry
    >>> calls = []
    >>> def flaky():
    ...     calls.append(1)
    ...     raise ConnectionError("reset")
    >>> layer = Retry(3, backoff=[0])
    >>> RepeatCap(2).wrap(layer).capture(lambda ctx: layer.call(flaky))
    Failure(error=ConnectionError('reset'))
    >>> len(calls)
    3
    """

    def __init__(self, repeats: int, *, name: str | None = None) -> None:
        self._resilience_set_up(locals())
        checks.not_bare("@RepeatCap(2)", repeats)
        self._repeats = checks.whole("repeats", repeats, least=0)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        return await call(ctx._with(cap=Cap(self._repeats, ctx._info.cap)))

    @override
    def describe(self) -> str:
        times = "1 retry or hedge" if self._repeats == 1 else f"{self._repeats} retries and hedges"
        return f"{self.name}: at most {times} in everything inside, nested calls included"
