"""Which commands may be sent again, although they may have been carried out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, final

from redis.commands import READ_COMMANDS

#: Commands that may be sent twice: doing one again has the same effect, and gives the same answer. `SET` and the
#: `EXPIRE`s are among them as long as they carry no condition (`NX`, `XX`, `GT`, `LT`, `GET`). `DEL` is not: it answers
#: how many keys there were, and that is 0 the second time.
REPEATABLE_COMMANDS: Final[frozenset[str]] = (
    READ_COMMANDS
    | frozenset(
        # what redis-py's own table leaves out, or does not know yet in older versions
        "COMMAND DBSIZE DISCARD DUMP ECHO EXEC EXPIRETIME GEORADIUSBYMEMBER_RO GEORADIUS_RO GEOSEARCH HRANDFIELD "
        "HSCAN INFO LASTSAVE LCS LPOS MULTI OBJECT PEXPIRETIME PFCOUNT PING PSUBSCRIBE PUNSUBSCRIBE ROLE SCAN SELECT "
        "SINTERCARD SMISMEMBER SORT_RO SSCAN SSUBSCRIBE SUBSCRIBE SUBSTR SUNSUBSCRIBE TIME TOUCH TYPE UNSUBSCRIBE "
        "UNWATCH WATCH XLEN XPENDING XRANGE XREAD XREVRANGE ZDIFF ZINTER ZINTERCARD ZLEXCOUNT ZMSCORE ZRANDMEMBER "
        "ZRANGEBYLEX ZRANGEBYSCORE ZRANK ZREVRANGE ZREVRANGEBYLEX ZREVRANGEBYSCORE ZREVRANK ZSCAN ZUNION "
        # writes that overwrite
        "EXPIRE EXPIREAT HMSET LSET MSET PEXPIRE PEXPIREAT PSETEX SET SETEX".split()
    )
    | frozenset({"CLIENT ID", "CONFIG GET", "MEMORY USAGE", "SCRIPT EXISTS", "SCRIPT LOAD"})
)

#: A command as it is given to redis-py: its name and its arguments.
Command = tuple[Any, ...]

#: Where the options begin, for the commands that are repeatable only without a condition; and the harmless options.
_OPTIONS_FROM = {"SET": 3, "EXPIRE": 3, "EXPIREAT": 3, "PEXPIRE": 3, "PEXPIREAT": 3}
_HARMLESS_OPTIONS = frozenset({"EX", "PX", "EXAT", "PXAT", "KEEPTTL"})


@final
class Repeatable:
    """The rule of one client.

    :param repeat_writes: True: every command may be repeated. False: `REPEATABLE_COMMANDS`. Names: these as well.
    """

    __slots__ = ("_all", "_also")

    def __init__(self, repeat_writes: bool | Collection[str]) -> None:
        if isinstance(repeat_writes, str) or not isinstance(repeat_writes, (bool, Collection)):
            raise TypeError(f"repeat_writes must be True, False or names of commands, not {repeat_writes!r}")
        self._all = repeat_writes is True
        self._also = frozenset(() if isinstance(repeat_writes, bool) else (str(it).upper() for it in repeat_writes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repeatable) and (self._all, self._also) == (other._all, other._also)

    def __hash__(self) -> int:
        return hash((self._all, self._also))

    def allows(self, command: Command) -> bool:
        """Whether this command may be carried out twice."""
        name = command[0].upper() if isinstance(command[0], str) else ""
        if self._all or name in self._also:
            return True
        options = command[_OPTIONS_FROM.get(name, len(command)) :]
        return name in REPEATABLE_COMMANDS and all(
            isinstance(it, (int, float)) or str(it).upper() in _HARMLESS_OPTIONS for it in options
        )
