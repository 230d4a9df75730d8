"""Which commands may be sent again although they may have been executed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

_READS = (
    "BITCOUNT BITFIELD_RO BITPOS DBSIZE DIGEST DUMP EVALSHA_RO EVAL_RO EXISTS EXPIRETIME FCALL_RO FT.EXPLAIN "
    "FT.INFO FT.SEARCH GEODIST GEOHASH GEOPOS GEORADIUSBYMEMBER_RO GEORADIUS_RO GEOSEARCH GET GETBIT GETRANGE "
    "HEXISTS HEXPIRETIME HGET HGETALL HKEYS HLEN HMGET HPEXPIRETIME HPTTL HRANDFIELD HSCAN HSTRLEN HTTL HVALS "
    "JSON.ARRINDEX JSON.ARRLEN JSON.GET JSON.MGET JSON.OBJKEYS JSON.OBJLEN JSON.RESP JSON.STRLEN JSON.TYPE KEYS LCS "
    "LINDEX LLEN LPOS LRANGE MGET OBJECT PEXPIRETIME PFCOUNT PTTL RANDOMKEY SCAN SCARD SDIFF SDIFFCARD SINTER "
    "SINTERCARD SISMEMBER SMEMBERS SMISMEMBER SORT_RO SRANDMEMBER SSCAN STRLEN SUBSTR SUNION SUNIONCARD TOUCH TTL "
    "TYPE VCARD VDIM VEMB VGETATTR VINFO VISMEMBER VLINKS VRANDMEMBER VSIM XLEN XPENDING XRANGE XREAD XREVRANGE "
    "ZCARD ZCOUNT ZDIFF ZINTER ZINTERCARD ZLEXCOUNT ZMSCORE ZRANDMEMBER ZRANGE ZRANGEBYLEX ZRANGEBYSCORE ZRANK "
    "ZREVRANGE ZREVRANGEBYLEX ZREVRANGEBYSCORE ZREVRANK ZSCAN ZSCORE ZUNION "
)
_CONNECTION_AND_SERVER = (
    "COMMAND DISCARD ECHO EXEC INFO LASTSAVE MULTI PING PSUBSCRIBE PUNSUBSCRIBE ROLE SELECT SSUBSCRIBE SUBSCRIBE "
    "SUNSUBSCRIBE TIME UNSUBSCRIBE UNWATCH WATCH "
)
_OVERWRITES = "EXPIRE EXPIREAT HMSET LSET MSET PEXPIRE PEXPIREAT PSETEX SET SETEX"
_TWO_WORDS = {"CLIENT ID", "CONFIG GET", "MEMORY USAGE", "SCRIPT EXISTS", "SCRIPT LOAD"}

#: Commands that may be sent twice, by the names that redis-py sends: a second execution has the same effect, and an
#: equivalent answer. `SET` and the `EXPIRE` commands may be repeated only without a condition (`NX`, `XX`, `GT`, `LT`)
#: or `GET`. `DEL` is not included: it returns the number of deleted keys, which is 0 the second time.
REPEATABLE_COMMANDS: Final[frozenset[str]] = frozenset(
    {*_READS.split(), *_CONNECTION_AND_SERVER.split(), *_OVERWRITES.split(), *_TWO_WORDS}
)

#: A command as passed to redis-py: its name and its arguments.
Command = tuple[Any, ...]

#: For commands that are repeatable without a condition only: the index of the first option, and harmless options.
_OPTIONS_FROM = {"SET": 3, "EXPIRE": 3, "EXPIREAT": 3, "PEXPIRE": 3, "PEXPIREAT": 3}
_HARMLESS_OPTIONS = frozenset({"EX", "PX", "EXAT", "PXAT", "KEEPTTL"})


def also_repeatable(repeat_writes: bool | Collection[str]) -> frozenset[str] | None:
    """Return the commands that may be repeated besides `REPEATABLE_COMMANDS`; None for all."""
    if isinstance(repeat_writes, str) or not isinstance(repeat_writes, (bool, Collection)):
        raise TypeError(f"repeat_writes must be True, False or names of commands, not {repeat_writes!r}")
    if isinstance(repeat_writes, bool):
        return None if repeat_writes else frozenset()
    return frozenset(str(name).upper() for name in repeat_writes)


def may_repeat(commands: Iterable[Command], also: frozenset[str] | None) -> bool:
    """Whether all these commands may be executed twice; `also` is the result of `also_repeatable`."""
    if also is None:
        return True
    for command in commands:
        name = command[0].upper() if isinstance(command[0], str) else ""
        if name in also:
            continue
        if name not in REPEATABLE_COMMANDS:
            return False
        options_from = _OPTIONS_FROM.get(name)
        if options_from is not None and not all(_is_harmless(it) for it in command[options_from:]):
            return False
    return True


def _is_harmless(option: object) -> bool:
    return isinstance(option, (int, float)) or str(option).upper() in _HARMLESS_OPTIONS
