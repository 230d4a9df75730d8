"""The connections that take part in an execution, and the function that gives them to a client."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection as AbstractAsyncConnection
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import override

from resilience.callables import maybe_await
from resilience.errors import DeadlineExceeded
from resilience.integrations.redis.retrying import TOO_LATE, AsyncPolicyRetry, PolicyDriven, PolicyRetry
from resilience.policy import Policy
from resilience.runtimes.driving import drive

if TYPE_CHECKING:
    from resilience.integrations.redis.commands import Command
    from resilience.integrations.redis.retrying import Call

ClientT = TypeVar(
    "ClientT",
    bound=redis.Redis | redis.ConnectionPool | redis.asyncio.Redis | redis.asyncio.ConnectionPool,
)


def protect(client: ClientT, policy: Policy[Any], *, repeat_writes: bool | Collection[str] = False) -> ClientT:
    """Run every command of a redis client under a policy, in place of redis-py's own retries. Return the client.

    :param client: a `Redis` client, or a connection pool, of `redis` or of `redis.asyncio`, that has not connected yet.
    :param policy: what each command (or pipeline, or transaction) runs under: connecting, sending and reading the
        answer are one attempt. For a blocking client a `Timeout` in it has to be cooperative.
    :param repeat_writes: what may be sent again although it may have been carried out. False: `REPEATABLE_COMMANDS`
        only. Names of commands: these as well. True: everything, as redis-py's own retries do.
    :raises ValueError: if the client is connected, caches on its side, or the policy would leave a connection to a
        thread.
    :raises TypeError: for a cluster client, which has many pools and a loop of its own.

    The deadline of the context shortens the timeouts of the sockets (in asyncio: the attempt as a whole). What it does
    not reach: looking up the host's name, and the wait of a `BlockingConnectionPool` for a free connection. In
    blocking code it holds for each read from the socket, so an answer that trickles in may take longer.
    """
    pool: Any = getattr(client, "connection_pool", client)
    retry: PolicyDriven
    if isinstance(pool, redis.asyncio.ConnectionPool):
        retry = AsyncPolicyRetry(policy, repeat_writes=repeat_writes)
    elif isinstance(pool, redis.ConnectionPool):
        retry = PolicyRetry(policy, repeat_writes=repeat_writes)
    else:
        raise TypeError(f"client must be a Redis client or a connection pool, not {client!r}")
    if getattr(pool, "cache", None) is not None:
        raise ValueError("client must not cache on its side: such a connection asks for the server's version at once")
    if any(getattr(pool, name, ()) for name in ("_available_connections", "_in_use_connections", "_connections")):
        raise ValueError("client must not have connected yet: its connections are of another kind")
    pool.connection_class = _connection_class(pool.connection_class)
    pool.connection_kwargs["retry"] = retry
    return client


#: What stands here in the end is a connection class of redis-py: over TCP, TLS or a Unix socket, or of a Sentinel.
_RedisConnection: Any = object


class _Connection(_RedisConnection):  # type: ignore[misc]
    """A connection that is made in the attempt that needs it, and reports to it what it sends.

    Written once, as coroutines: a blocking connection drives them, and what they await has finished by then.
    """

    _commands: list[Command] | None = None
    _connecting = False

    def _call(self) -> Call | None:
        return self.retry.current_call() if isinstance(self.retry, PolicyDriven) else None

    async def _resilient_connect(self) -> None:
        if self._call() is not None:
            await self._really_connect()

    async def _really_connect(self) -> None:
        self._connecting, outer = True, self._connecting
        try:
            await maybe_await(super().connect())
        finally:
            self._connecting = outer

    @override
    def send_command(self, *args: Any, **kwargs: Any) -> Any:  # in asyncio, it is to be awaited
        self._commands = [args]
        return super().send_command(*args, **kwargs)

    @override
    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> Any:
        self._commands = [tuple(command) for command in commands]
        return super().pack_commands(self._commands)

    async def _resilient_send_packed_command(self, command: Any, check_health: bool = True) -> None:
        commands, self._commands = self._commands, None  # before PING and the like overwrite it
        if not self.is_connected:
            await self._really_connect()
        if check_health and self.health_check_interval:
            await maybe_await(self.check_health())
        self._shorten()
        call = self._call()
        if call is not None and not self._connecting:
            call.sends(commands)
        await self._put_on_the_wire(command)


class _AsyncConnection(_Connection):
    """One of `redis.asyncio`, where the attempt as a whole keeps to the deadline."""

    connect = _Connection._resilient_connect
    send_packed_command = _Connection._resilient_send_packed_command

    @override
    async def can_read(self) -> bool:
        return self.is_connected and bool(await super().can_read())

    @override
    async def can_read_destructive(self) -> bool:  # its name until redis-py 8
        return self.is_connected and bool(await super().can_read_destructive())

    def _shorten(self) -> None:
        """Leave the socket as it is."""

    async def _put_on_the_wire(self, command: Any) -> None:
        task = asyncio.current_task()
        cancellations = task.cancelling() if task is not None else 0
        await super().send_packed_command(command, check_health=False)
        if task is not None and task.cancelling() > cancellations:
            # redis-py sends in `asyncio.wait_for`, which until Python 3.12 may lose a cancellation that comes as it
            # ends (https://github.com/python/cpython/issues/86296): the Timeout whose it was would never fire again.
            await self.disconnect(nowait=True)
            raise asyncio.CancelledError


def _driven(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: drive(method(self, *args, **kwargs))


def _what_is_left(name: str) -> property:
    """Return the property in which redis-py finds what is left of a timeout where it reads the timeout."""
    own = f"_{name}"
    return property(lambda self: self._in_time(getattr(self, own)), lambda self, value: setattr(self, own, value))


class _BlockingConnection(_Connection):
    """One of `redis`, where each operation on the socket keeps to the deadline."""

    connect = _driven(_Connection._resilient_connect)
    send_packed_command = _driven(_Connection._resilient_send_packed_command)
    socket_timeout = _what_is_left("socket_timeout")
    socket_connect_timeout = _what_is_left("socket_connect_timeout")

    @property
    def is_connected(self) -> bool:
        return self._sock is not None

    @override
    def can_read(self, timeout: float = 0) -> bool:
        if not self.is_connected and self._call() is None:
            return False
        return bool(super().can_read(self._in_time(timeout)))

    async def _put_on_the_wire(self, command: Any) -> None:
        super().send_packed_command(command, check_health=False)

    @override
    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._shorten()
            if "timeout" in kwargs:  # of a subscriber, who may want to wait for ever
                kwargs["timeout"] = self._in_time(kwargs["timeout"])
        except DeadlineExceeded:
            self.disconnect()  # the answer is on its way, and must not be taken for that of another command
            raise RedisTimeoutError(TOO_LATE) from None
        return super().read_response(*args, **kwargs)

    def _shorten(self) -> None:
        """Let the socket wait no longer than there is time left."""
        timeout = self._in_time(self._socket_timeout)
        if self._sock is not None and self._sock.gettimeout() != timeout:
            self._sock.settimeout(timeout)

    def _in_time(self, limit: Any) -> Any:
        """Return the smaller of a timeout of redis-py's and what is left; 0 and its sentinel mean something else."""
        is_a_wait = limit is None or (isinstance(limit, (int, float)) and limit > 0)
        call = self._call() if is_a_wait else None
        if call is None or call.ctx is None:
            return limit
        left = call.ctx.timeout()
        return limit if left is None or (limit is not None and limit < left) else left


@functools.cache
def _connection_class(base: type) -> type:
    """Return the class of connections that does what ours do, and otherwise what `base` does."""
    if issubclass(base, _Connection):
        return base
    ours = _AsyncConnection if issubclass(base, AbstractAsyncConnection) else _BlockingConnection
    return type(base.__name__, (ours, base), {"__module__": base.__module__})
