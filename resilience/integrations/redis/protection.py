"""Connections that take part in an execution, and `protect`, which makes a client use them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Iterable
from math import ceil
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection as AbstractAsyncConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import override

from resilience.callables import maybe_await
from resilience.errors import DeadlineExceeded
from resilience.integrations.redis.commands import Command
from resilience.integrations.redis.retrying import (
    TOO_LATE,
    AsyncPolicyRetry,
    Call,
    PolicyDriven,
    PolicyRetry,
    current_call,
)
from resilience.policy import Policy
from resilience.runtimes.driving import drive

ClientT = TypeVar(
    "ClientT",
    bound=redis.Redis | redis.ConnectionPool | redis.asyncio.Redis | redis.asyncio.ConnectionPool,
)


def protect(client: ClientT, policy: Policy[Any], *, repeat_writes: bool | Collection[str] = False) -> ClientT:
    """Run every command of a redis client under a policy, in place of redis-py's own retries. Return the client.

    :param client: a `Redis` client, or a connection pool, of `redis` or of `redis.asyncio`, that has not connected yet.
    :param policy: the policy around each command (or pipeline, or transaction): connecting, sending and reading the
        answer are one attempt. For a blocking client, a `Timeout` in it must be cooperative.
    :param repeat_writes: which commands may be sent again although they may have been executed. False:
        `REPEATABLE_COMMANDS` only. Names of commands: these as well. True: all, as redis-py's own retries do.
    :raises ValueError: if the client is connected or has a client-side cache, or if the policy would abandon a thread
        that uses a connection, or use a connection twice at once, as a `Hedge` does.
    :raises TypeError: for a cluster client, which has many pools and its own retry loop.

    The deadline of the context shortens the timeouts of the sockets (in asyncio: the attempt as a whole). It does not
    limit the lookup of the host name, nor the wait of a `BlockingConnectionPool` for a free connection. In blocking
    code it limits each read from the socket, so an answer that arrives in pieces may take longer.
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
        raise ValueError("client must not have connected yet: protect it before its first command")
    pool.connection_class = _connection_class(pool.connection_class)
    pool.connection_kwargs["retry"] = retry
    return client


#: What a pipeline that has watched keys sends when it gives its connection back. It handles only redis-py's own errors.
_RESET = [("UNWATCH",)]

#: `_connection_class` adds the real base, a class of redis-py: over TCP, TLS or a Unix socket, or of a Sentinel.
_RedisConnection: Any = object


class _Connection(_RedisConnection):  # type: ignore[misc]
    """A connection that connects within the attempt that needs it, and reports to that attempt what it sends.

    What makes it ready is a coroutine. A blocking connection drives it: everything that it awaits has already finished.
    """

    _commands: list[Command] | None = None
    _connecting = False

    async def _connect_now(self) -> None:
        self._connecting, outer = True, self._connecting
        try:
            await maybe_await(super().connect())
        except BaseException:  # redis-py would use the connection after half a handshake: without login, in another db
            await self._disconnect_now()
            raise
        finally:
            self._connecting = outer

    @override
    def send_command(self, *args: Any, **kwargs: Any) -> Any:  # in asyncio, the result is awaitable
        self._commands = [args]
        return super().send_command(*args, **kwargs)

    @override
    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> Any:
        self._commands = [tuple(command) for command in commands]
        return super().pack_commands(self._commands)

    async def _get_ready(self, commands: list[Command] | None, check_health: bool) -> None:
        """Connect, and check the health of the connection, before these commands are sent."""
        if not self.is_connected:
            if commands == _RESET and current_call(self.retry) is None:
                raise RedisConnectionError("the connection is closed, and watches nothing")
            await self._connect_now()
        if check_health and self.health_check_interval:
            await maybe_await(self.check_health())


class _AsyncConnection(_Connection):
    """A connection of `redis.asyncio`, where the deadline limits the attempt as a whole."""

    @override
    async def connect(self) -> None:
        if not self.is_connected and current_call(self.retry) is not None:
            await self._connect_now()

    @override
    async def can_read(self, *args: Any) -> bool:
        return self._is_open() and bool(await super().can_read(*args))

    @override
    async def can_read_destructive(self) -> bool:  # the name of `can_read` before redis-py 8
        return self._is_open() and bool(await super().can_read_destructive())

    def _is_open(self) -> bool:
        """Whether it is connected; raise if the server has closed it, so that the pool lets it connect again.

        By default, the pool of redis-py 8 uses a connection that can be read: it may hold a maintenance notification.
        """
        reader = self._reader if self.is_connected else None
        if isinstance(reader, asyncio.StreamReader) and (reader.at_eof() or reader.exception() is not None):
            raise RedisConnectionError("the server has closed the connection")
        return reader is not None

    @override
    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        if "timeout" in kwargs and not self.is_connected:  # a subscriber only reads
            await self.connect()
        return await super().read_response(*args, **kwargs)

    async def _disconnect_now(self) -> None:
        await self.disconnect(nowait=True)

    @override
    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        commands, self._commands = self._commands, None  # before the handshake or a PING overwrites it
        if self.health_check_interval or not self.is_connected:
            await self._get_ready(commands, check_health)
        call = current_call(self.retry)
        if call is not None and not self._connecting:
            call.sends(commands)
        task = asyncio.current_task()
        cancellations = task.cancelling() if task is not None else 0
        await super().send_packed_command(command, check_health=False)
        if task is not None and task.cancelling() > cancellations:
            # redis-py sends in `asyncio.wait_for`, which before Python 3.12 may lose a cancellation that arrives as
            # it ends (https://github.com/python/cpython/issues/86296), and a Timeout does not cancel a second time.
            await self._disconnect_now()
            raise asyncio.CancelledError


def _capped_timeout(name: str) -> property:
    """Return a property for a timeout of redis-py; its value is at most the time left."""
    own = f"_{name}"
    return property(
        lambda self: _capped(getattr(self, own), current_call(self.retry)),
        lambda self, value: setattr(self, own, value),
    )


class _BlockingConnection(_Connection):
    """A connection of `redis`, where the deadline limits each operation on the socket."""

    socket_timeout = _capped_timeout("socket_timeout")
    socket_connect_timeout = _capped_timeout("socket_connect_timeout")

    @property
    def is_connected(self) -> bool:
        return self._sock is not None

    @override
    def connect(self) -> None:
        if not self.is_connected and current_call(self.retry) is not None:
            drive(self._connect_now())

    @override
    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        commands, self._commands = self._commands, None  # before the handshake or a PING overwrites it
        if self.health_check_interval or not self.is_connected:
            drive(self._get_ready(commands, check_health))
        call = current_call(self.retry)
        self._shorten_timeout(call)
        if call is not None and not self._connecting:
            call.sends(commands)
        super().send_packed_command(command, check_health=False)

    @override
    def can_read(self, timeout: float = 0) -> bool:
        if not self.is_connected and current_call(self.retry) is None:
            return False
        if timeout != 0:  # the pool only asks
            timeout = _capped(timeout, current_call(self.retry))
        return bool(super().can_read(timeout))

    async def _disconnect_now(self) -> None:
        self.disconnect()

    @override
    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            call = current_call(self.retry)
            self._shorten_timeout(call)
            if "timeout" in kwargs:  # from a subscriber; None waits without a limit
                kwargs["timeout"] = _capped(kwargs["timeout"], call)
        except DeadlineExceeded:
            self.disconnect()  # the answer may still arrive, and must not be taken for that of another command
            raise RedisTimeoutError(TOO_LATE) from None
        return super().read_response(*args, **kwargs)

    def _shorten_timeout(self, call: Call | None) -> None:
        timeout = _capped(self._socket_timeout, call)
        if hasattr(self._sock, "gettimeout") and self._sock.gettimeout() != timeout:  # that of fakeredis has none
            self._sock.settimeout(timeout)


def _capped(limit: Any, call: Call | None) -> Any:
    """Return the smaller of redis-py's timeout and the time left; 0 and redis-py's sentinel are returned as is."""
    is_a_wait = limit is None or (isinstance(limit, (int, float)) and limit > 0)
    if call is None or call.ctx is None or not is_a_wait:
        return limit
    left = call.ctx.timeout()
    # A socket waits whole milliseconds. So the time left rarely differs between sending and reading, and is set once.
    return limit if left is None or (limit is not None and limit < left) else ceil(left * 1000) / 1000


@functools.cache
def _connection_class(base: type) -> type:
    """Return a subclass of `base` whose connections take part in executions."""
    if issubclass(base, _Connection):
        return base
    ours = _AsyncConnection if issubclass(base, AbstractAsyncConnection) else _BlockingConnection
    return type(base.__name__, (ours, base), {"__module__": base.__module__})
