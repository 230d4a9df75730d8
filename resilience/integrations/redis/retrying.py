"""The object that redis-py calls its `Retry`, and the execution that each call of it is.

What happens in an attempt is written once, as a coroutine. A blocking client runs it as blocking policies run: what
it awaits has finished when the await is reached.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

from redis.asyncio.retry import Retry as _AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry as _Retry

from resilience import execution
from resilience.callables import maybe_await
from resilience.context import waits_until
from resilience.integrations.redis.commands import Command, also_repeatable, may_repeat
from resilience.policies.timeout import Timeout
from resilience.policy import Pipeline, Policy
from resilience.runtimes.driving import drive

if TYPE_CHECKING:
    from resilience.context import Context

#: Answers by which the server says that the one command that was sent has not been carried out.
_REFUSALS = (BusyLoadingError, ReadOnlyError)

TOO_LATE = "the deadline of the execution has passed"


class OutcomeUnknown(RedisTimeoutError):
    """A command was cut off after it had been sent, may have been carried out, and was not sent again."""

    #: Says to Retry: not again.
    repeatable: bool = False


class PolicyDriven:
    """What the two Retry objects share: the policy, which stays one however often redis-py copies the object.

    :param policy: what each command runs under.
    :param repeat_writes: what may be sent again although it may have been carried out: see `protect`.
    """

    _supported_errors: tuple[type[Any], ...]

    def __init__(self, policy: Policy[Any], *, repeat_writes: bool | Collection[str] = False) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be a policy, not {policy!r}")
        super().__init__(NoBackoff(), 0)  # type: ignore[call-arg]  # redis-py itself retries 0 times
        self.policy: Policy[Any] = policy
        self.also_repeatable: frozenset[str] | None = also_repeatable(repeat_writes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return id(self.policy), self.also_repeatable, frozenset(self._supported_errors)

    def __deepcopy__(self, memo: object) -> Self:
        return copy.copy(self)

    def handles(self, error: Exception) -> bool:
        """Whether redis-py gives up the connection after this error."""
        return isinstance(error, self._supported_errors)

    def current_call(self) -> Call | None:
        """Return the execution under the same policy that surrounds this code."""
        call = _current.get()
        return call if call is not None and call.ctx is not None and call.retry.policy is self.policy else None

    def call_with_retry(
        self,
        do: Callable[[], Any],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> Any:
        """Run `do` under the policy; call `fail` after each attempt that failed with a supported error.

        For `redis.asyncio` the results of `do`, of `fail` and of this are to be awaited.
        """
        call = Call(self, do, fail, is_retryable, with_failure_count)
        if self.current_call() is not None:
            return self._run(call.part(do))
        return self._protect(self.policy, call, takes_context=True)()

    # What differs. Methods, as in the classes below: of `Any`, as one of them returns what the other awaits.
    _in_tasks: ClassVar[bool]  # whether what is called returns something to await
    _run: Any  # runs one of our coroutines to its end, or returns it to be awaited
    _limited: Any  # returns what does the same as `do`, and waits for it no longer than the deadline
    _protect: Any  # puts the policy around a call


@final
class PolicyRetry(PolicyDriven, _Retry):
    """A `redis.retry.Retry` whose attempts, waits and refusals are a policy's. What `protect` gives to connections.

    :param policy: what each command runs under. It may hold no `Timeout` that enforces its limit: that would leave
        the connection to a thread which still reads from it. A `Timeout(..., cooperative=True)` shortens the timeouts
        of the socket.
    :param repeat_writes: see `protect`. Connections of other classes than `protect`'s do not report what they send,
        and have every command repeated.
    :raises ValueError: for a `Timeout` that is not cooperative.
    """

    def __init__(self, policy: Policy[Any], *, repeat_writes: bool | Collection[str] = False) -> None:
        super().__init__(policy, repeat_writes=repeat_writes)
        for each in policy.policies if isinstance(policy, Pipeline) else (policy,):
            if isinstance(each, Timeout) and not each.settings()["cooperative"]:
                raise ValueError(
                    f"policy must not leave the connection to a thread that still reads from it, as {each!r} does; "
                    "with cooperative=True it shortens the timeouts of the socket"
                )

    _in_tasks = False
    _run = staticmethod(drive)
    _protect = staticmethod(execution.protect)

    def _limited(self, do: Callable[[], Any], ctx: Context) -> Callable[[], Any]:
        return do  # each operation on the socket keeps to the deadline


@final
class AsyncPolicyRetry(PolicyDriven, _AsyncRetry):
    """The same for `redis.asyncio`. Here the policy may hold any `Timeout`: the task is cancelled."""

    _in_tasks = True
    _run = staticmethod(lambda coroutine: coroutine)
    _protect = staticmethod(execution.aprotect)

    def _limited(self, do: Callable[[], Awaitable[Any]], ctx: Context) -> Callable[[], Awaitable[Any]]:
        if waits_until(ctx) == inf:
            return do  # a Timeout around it will cut it off by then
        return functools.partial(_in_time, do, ctx)


async def _in_time(do: Callable[[], Awaitable[Any]], ctx: Context) -> Any:
    limit = asyncio.timeout(ctx.timeout())
    try:
        async with limit:
            return await do()
    except TimeoutError:
        if not limit.expired():
            raise
        raise RedisTimeoutError(TOO_LATE) from None


_current: ContextVar[Call | None] = ContextVar("resilience.redis", default=None)


@final
class Call:
    """One execution: what the policy calls for each attempt, and what these have to know of one another."""

    def __init__(
        self,
        retry: PolicyDriven,
        do: Callable[[], Any],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None,
        with_failure_count: bool,
    ) -> None:
        self.retry: PolicyDriven = retry
        self.ctx: Context | None = None  # of the attempt that is running
        self.__qualname__ = "redis_command"  # the operation of an execution that is given none
        self._do = do
        self._fail = fail
        self._is_retryable = is_retryable
        self._counts = with_failure_count
        self._failures = 0
        # What an attempt ended with that `fail` was not called for. No attempt begins before it was: a pipeline that
        # watches keys raises `WatchError` there, as it must not go on with another connection.
        self._unsettled: Exception | None = None
        # What may have been carried out, and must not be twice.
        self._in_doubt: list[Command] | None = None

    def __call__(self, ctx: Context) -> Any:
        """Make an attempt."""
        return self.retry._run(self._attempt(ctx))

    async def _attempt(self, ctx: Context) -> Any:
        ctx.check()
        token = _current.set(self)
        self.ctx = ctx
        try:
            if self._unsettled is not None:
                await self._settle(self._unsettled)
            if self._in_doubt is not None:
                names = ", ".join(str(command[0]) for command in self._in_doubt) or "a command"
                raise OutcomeUnknown(f"{names} may have been carried out before it was cut off; not sent again")
            result = await self.part(self.retry._limited(self._do, ctx))
            self._unsettled = self._in_doubt = None
            return result
        finally:
            self.ctx = None  # tasks that were started inside have a copy of the variable: for them, too, it is over
            _current.reset(token)

    async def part(self, do: Callable[[], Any]) -> Any:
        """Run `do` once, and no more where it is a part of an attempt: connecting, say, has no attempts of its own."""
        try:
            result = do()
            return await result if self.retry._in_tasks else result
        except Exception as error:
            if self._judge(error):
                await self._settle(error)
            raise
        except BaseException:
            self._unsettled = RedisTimeoutError("the attempt was cut off")
            raise

    def sends(self, commands: list[Command] | None) -> None:
        """Note that a connection is about to send these commands; None where it does not know which."""
        if commands is None or not all(may_repeat(it, self.retry.also_repeatable) for it in commands):
            self._in_doubt = commands or []

    def _judge(self, error: Exception) -> bool:
        """Note what a failure says about a repetition; true if `fail` is to be called for it."""
        if self._in_doubt is not None and len(self._in_doubt) == 1 and isinstance(error, _REFUSALS):
            self._in_doubt = None
        refused = self._is_retryable is not None and not self._is_retryable(error)
        if refused or self._in_doubt is not None:
            _forbid(error)
        self._unsettled = error
        return self.retry.handles(error) and not refused

    async def _settle(self, error: Exception) -> None:
        """Call `fail`. What it raises ends the execution, except where it could only not connect again."""
        self._unsettled = None
        self._failures += 1
        try:
            await maybe_await(self._fail(error, self._failures) if self._counts else self._fail(error))
        except Exception as raised:
            if self._in_doubt is not None or not self.retry.handles(raised):
                _forbid(raised)
            raise


def _forbid(error: Any) -> None:
    """Say to Retry: not again."""
    error.repeatable = False
