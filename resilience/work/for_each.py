"""each: many concurrent calls, up to a limit, and no faster than their outcomes are consumed."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar, final, overload

import anyio
from anyio.abc import TaskGroup

from resilience import checks
from resilience.callables import is_coroutine_function, require_callable
from resilience.errors import BlockMisuse
from resilience.outcome import Outcome
from resilience.policy import Policy
from resilience.work.each_calls import Job, Progress
from resilience.work.each_tasks import Tasks
from resilience.work.each_threads import Threads

Item = TypeVar("Item")
R = TypeVar("R")
D = TypeVar("D")


@overload
def each(
    policy: Policy[D],
    function: Callable[[Item], Awaitable[R]],
    items: Iterable[Item] | AsyncIterable[Item],
    *,
    limit: int,
    ordered: bool = False,
    progress: Progress | None = None,
) -> Each[Item, R | D]: ...
@overload
def each(
    policy: Policy[D],
    function: Callable[[Item], R],
    items: Iterable[Item],
    *,
    limit: int,
    ordered: bool = False,
    progress: Progress | None = None,
) -> Each[Item, R | D]: ...
def each(
    policy: Policy[Any],
    function: Callable[[Any], Any],
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    limit: int,
    ordered: bool = False,
    progress: Progress | None = None,
) -> Each[Any, Any]:
    """Call `function(item)` under the policy for each item, at most `limit` at once.

    It returns a context manager, whose value iterates over pairs of item and outcome, `Success(...)` or `Failure(...)`:

        async with each(policy, fetch, urls, limit=10) as outcomes:
            async for url, outcome in outcomes:
                ...

    With blocking functions use `with` and `for`; `limit` threads make the calls. Items are read on demand: at most
    `2 * limit` items are read and not yet delivered. At the end of the block, no more items are read, tasks are
    cancelled, running threads are awaited, results that were not delivered are closed, and an error of the block is
    raised as it is.

    :param limit: how many calls may run at once, at least 1.
    :param ordered: whether outcomes come in the order of the items; by default, as they end.
    :param progress: called with 1 for each delivered outcome, such as `tqdm`'s `update`, or `lambda n:
        bar.advance(task, n)` for `rich`. What it raises is logged.
    :raises TypeError: for a wrong policy, function or items, and for asynchronous items of a blocking function.

    >>> from resilience import Retry
    >>> from resilience.work import each
    >>> with each(Retry(), str.upper, "abc", limit=2, ordered=True) as outcomes:
    ...     [outcome.unwrap() for item, outcome in outcomes]
    ['A', 'B', 'C']
    """
    checks.instance("policy", policy, Policy, "a policy")
    require_callable(function, "each", "each(policy, fetch, urls, limit=10)")
    checks.instance("items", items, (Iterable, AsyncIterable), "iterable")
    limit, ordered = checks.whole("limit", limit), checks.flag("ordered", ordered)
    checks.optional_function("progress", progress, ("count",))
    return Each(Job(policy, function, items, limit, ordered, progress))


@final
class Each(Generic[Item, R]):
    """The context manager that `each` returns."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._threads: Threads
        self._tasks: Tasks
        self._group: TaskGroup
        self._is_open = False

    if not TYPE_CHECKING:  # pragma: no branch (type checkers know that it is not iterable)

        def __iter__(self) -> Never:
            raise TypeError("`each` is entered first: `with each(...) as outcomes:`, and in it `for ... in outcomes:`")

        __aiter__ = __iter__

    def __enter__(self) -> Iterator[tuple[Item, Outcome[R]]]:
        if not isinstance(self._job.items, Iterable) or is_coroutine_function(self._job.function):
            raise TypeError("these items or calls are asynchronous: use `async with each(...)`")
        self._open()
        self._threads = Threads(self._job, iter(self._job.items))
        return self._threads

    def __exit__(self, *error: object) -> None:
        self._is_open = False
        self._threads.close()

    async def __aenter__(self) -> AsyncIterator[tuple[Item, Outcome[R]]]:
        self._open()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._tasks = Tasks(self._job)
        self._group.start_soon(self._tasks.read)
        return self._tasks

    async def __aexit__(self, *error: object) -> None:
        self._is_open = False
        self._tasks.close()
        self._group.cancel_scope.cancel()
        try:
            await self._group.__aexit__(None, None, None)  # without the error of the block, which it would wrap
        except ExceptionGroup as group:  # an error in closing the items, unwrapped as well
            raise group.exceptions[0] from None
        finally:
            await self._tasks.discard()

    def _open(self) -> None:
        if self._is_open:
            raise BlockMisuse("this block of `each` is in use: open another one")
        self._is_open = True
