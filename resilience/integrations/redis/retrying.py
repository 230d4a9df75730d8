"""The `Retry` objects that redis-py calls, and the execution that each call begins."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from math import inf
from typing import Any, ClassVar, Self, final

from redis.asyncio.retry import Retry as _AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry as _Retry
from typing_extensions import override

from resilience import checks
from resilience.callables import maybe_await
from resilience.context import Context, waits_until
from resilience.hints import forbid_repeat
from resilience.integrations._calls import ClientCall
from resilience.integrations.redis.commands import Command, also_repeatable, may_repeat
from resilience.policies.keyed import Keyed
from resilience.policies.timeout import Timeout
from resilience.policy import Policy

#: Errors that prove, if a single command was sent, that the server has not executed it.
_REFUSALS = (BusyLoadingError, ReadOnlyError)

TOO_LATE = "the deadline of the execution has passed"


class OutcomeUnknown(RedisTimeoutError):
    """A command that was cut off after it had been sent: it may have been executed, and was not sent again."""

    #: A Retry does not repeat the call.
    repeatable: bool = False


class PolicyDriven:
    """The common base of the two Retry classes. Copies, of which redis-py makes many, share the policy."""

    _in_tasks: ClassVar[bool]  #: whether the functions of redis-py return awaitables
    _supported_errors: tuple[type[Any], ...]

    def __init__(self, policy: Policy[Any], *, repeat_writes: bool | Collection[str] = False) -> None:
        self.policy: Policy[Any] = checks.instance("policy", policy, Policy, "a policy")
        for each in policy._resilience_chain():
            if each.races and not isinstance(each, Keyed):
                raise ValueError(
                    f"policy must not make two attempts at once, as {each!r} does: they would use one connection, and "
                    "each may read the answer to the other; put it around the calls of the client"
                )
            if isinstance(each, Timeout) and not self._in_tasks and not each.settings()["cooperative"]:
                raise ValueError(
                    f"policy must not leave the connection to a thread that still reads from it, as {each!r} does; "
                    "with cooperative=True it shortens the timeouts of the socket"
                )
        super().__init__(NoBackoff(), 0)  # type: ignore[call-arg]  # redis-py itself retries 0 times
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
        """Whether redis-py closes the connection after this error."""
        return isinstance(error, self._supported_errors)

    def call_with_retry(
        self,
        do: Callable[[], Any],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> Any:
        """Run `do` under the policy; call `fail` after each attempt that failed with a supported error.

        In `redis.asyncio`, the results of `do`, `fail` and this method are awaitable.
        """
        return Call(self, do, fail, is_retryable, with_failure_count).run()


@final
class PolicyRetry(PolicyDriven, _Retry):
    """A `redis.retry.Retry` that leaves attempts, waits and refusals to a policy. `protect` gives it to connections.

    :param policy: the policy around each command. It must not contain a `Timeout` that enforces its limit: that would
        abandon a thread which still reads from the connection. A `Timeout(..., cooperative=True)` shortens the
        timeouts of the socket.
    :param repeat_writes: see `protect`. Only the connections that `protect` sets up report what they send; with other
        connections, every command is repeated.
    :raises ValueError: for a `Timeout` that is not cooperative, or a `Hedge`.
    """

    _in_tasks = False


@final
class AsyncPolicyRetry(PolicyDriven, _AsyncRetry):
    """`PolicyRetry` for `redis.asyncio`. Its policy may contain any `Timeout`: the task is cancelled."""

    _in_tasks = True


async def _with_limit(do: Callable[[], Awaitable[Any]], ctx: Context) -> Any:
    limit = asyncio.timeout(ctx.timeout())
    try:
        async with limit:
            return await do()
    except TimeoutError:
        if not limit.expired():
            raise
        raise RedisTimeoutError(TOO_LATE) from None


_current: ContextVar[Call | None] = ContextVar("resilience.redis", default=None)


def current_call(retry: object) -> Call | None:
    """Return the execution whose attempt is running here, if it is one under the policy of this Retry object."""
    call = _current.get()
    if call is None or call.ctx is None or call.retry.policy is not getattr(retry, "policy", None):
        return None
    return call


@final
class Call(ClientCall):
    """One execution: the function that the policy calls for each attempt, and the state that attempts share."""

    _resilience_operation: ClassVar[str] = "redis_command"  # the default operation of the execution

    def __init__(
        self,
        retry: PolicyDriven,
        do: Callable[[], Any],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None,
        with_failure_count: bool,
    ) -> None:
        self.retry: PolicyDriven = retry
        self.in_tasks: bool = retry._in_tasks
        self.ctx: Context | None = None  # the context of the running attempt
        self._do = do
        self._fail = fail
        self._is_retryable = is_retryable
        self._passes_count = with_failure_count
        self._failures = 0
        # The error of the last attempt if `fail` was not called for it. It is called before the next attempt: there a
        # pipeline that watches keys raises `WatchError`, because it must not continue on another connection.
        self._unreported: Exception | None = None
        # Commands that may have been executed, and must not be executed twice; empty if they are unknown.
        self._in_doubt: list[Command] | None = None

    @override
    async def _run(self) -> Any:
        try:
            if current_call(self.retry) is not None:  # as part of an attempt, connecting has no attempts of its own
                return await self._part()
            result = self._execute(self.retry.policy)
            return await result if self.in_tasks else result
        except Exception as error:
            if self._in_doubt is not None:  # a Timeout has cut it off
                forbid_repeat(error)
            raise
        finally:
            # The error refers to this in its traceback: a reference cycle. And the event loop keeps the context
            # variables, which refer to this, as long as a connection is open that was made during the call.
            del self._do, self._fail, self._is_retryable, self._unreported

    @override
    async def _attempt(self, ctx: Context) -> Any:
        ctx.check()
        token = _current.set(self)
        self.ctx = ctx
        try:
            if self._unreported is not None:
                await self._report(self._unreported)
            if self._in_doubt is not None:
                names = ", ".join(str(command[0]) for command in self._in_doubt) or "a command"
                raise OutcomeUnknown(f"{names} may have been carried out before it was cut off; not sent again")
            # An enforced Timeout cuts a task off; in blocking code, the deadline limits each operation on the socket.
            ends_by_itself = not self.in_tasks or waits_until(ctx) == inf
            result = await self._part(None if ends_by_itself else ctx)
            self._unreported = self._in_doubt = None
            return result
        finally:
            self.ctx = None  # tasks that `do` started keep their copy of the variable: the attempt ends for them, too
            _current.reset(token)

    async def _part(self, limit: Context | None = None) -> Any:
        """Run `do` once, as an attempt or as part of one.

        :param limit: the context whose deadline ends it.
        """
        try:
            if limit is not None:
                return await _with_limit(self._do, limit)
            result = self._do()
            return await result if self.in_tasks else result
        except Exception as error:
            if self._note(error):
                await self._report(error)
            raise
        except BaseException:
            self._unreported = RedisTimeoutError("the attempt was cut off")
            raise

    def sends(self, commands: list[Command] | None) -> None:
        """Note that a connection is about to send these commands; None if it does not know which."""
        if commands is None or not may_repeat(commands, self.retry.also_repeatable):
            self._in_doubt = commands or []

    def _note(self, error: Exception) -> bool:
        """Note an error, and mark it if the call must not be repeated; true if `fail` has to be called for it."""
        if self._in_doubt is not None and len(self._in_doubt) == 1 and isinstance(error, _REFUSALS):
            self._in_doubt = None
        refused = self._is_retryable is not None and not self._is_retryable(error)
        if refused or self._in_doubt is not None:
            forbid_repeat(error)
        self._unreported = error
        return self.retry.handles(error) and not refused

    async def _report(self, error: Exception) -> None:
        """Call `fail`. If it raises, Retry stops, unless it only failed to reconnect and no command is in doubt."""
        self._unreported = None
        self._failures += 1
        try:
            await maybe_await(self._fail(error, self._failures) if self._passes_count else self._fail(error))
        except Exception as raised:
            if self._in_doubt is not None or not self.retry.handles(raised):
                forbid_repeat(raised)
            raise
