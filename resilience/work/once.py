"""Once: make the call for an idempotency key once, and answer later calls with the same key with its result.

    free         claim the key for `lease` seconds, and call
    done         answer with the kept result, without a call
    in progress  refuse, with the seconds until the claim ends: a server answers 409
    mismatch     refuse, because the same key came with another payload: a server answers 422
    failed       give up the claim, so that the next call may claim the key
    cut off      leave the claim to its lease, because the work may be done, or go on in a thread

If a process dies, its claim ends with its lease; then the call may be made again. So the guarantee is "at least once",
and "once" only as long as no process dies. For an exact guarantee, put a unique constraint into the transaction that
does the work.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, Final, Never, Protocol, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.checks import Duration
from resilience.context import Context
from resilience.errors import KeyMisuse, Misuse, Rejected, TimeoutExceeded
from resilience.events.dispatch import report_refusal
from resilience.formats import format_number
from resilience.log import logger
from resilience.policies.keys import OfCall, key_of
from resilience.policy import Call, Policy
from resilience.work.claims import Claim, ClaimStore, Store, as_claim_store

T = TypeVar("T")

#: The prefixes of a result that the serializer returns as text or as bytes: stores keep text.
_TEXT: Final = "text:"
_BYTES: Final = "base64:"


class KeyInUse(Rejected):
    """A call with this key is in progress. `retry_after` is the time until its claim ends, at the latest."""


class KeyMismatch(ValueError):
    """The key was used before, with another payload."""


class Serializer(Protocol):
    """Converts results to text or bytes, and back: `json`, `pickle` and their like."""

    def dumps(self, value: Any, /) -> Any:
        """Convert a value to text or bytes."""
        ...

    def loads(self, text: Any, /) -> Any:
        """Convert text or bytes to the value."""
        ...


@final
class Once(Policy[Never]):
    """Make the call for a key once. Later calls with the same key get its result.

    :param store: where claims and results are stored: a mapping or `MemoryStore` (in this process), a function that
        opens a DB-API connection (SQLite, PostgreSQL, MySQL and others), or a client of `redis` or `redis.asyncio`.
    :param key: called with the same arguments as the function; returns the idempotency key, a non-empty text or
        a whole number, which is stored as text: `7` and `"7"` are the same key.
    :param payload: called with the same arguments; returns a value that must be equal for equal keys. It is compared
        in its serialized form.
    :param lease: how many seconds a claim lasts, 60 by default: more than the longest call takes. After a call that
        was cancelled or cut off by a `Timeout`, or a dead process, others are refused until it ends.
    :param keep: for how many seconds a result is kept, a day by default.
    :param serializer: an object with `dumps` and `loads`; JSON by default.
    :param name: the name of this policy in errors and events, and part of the keys in the store; "Once" by default.
        Operations with the same name and store share their keys: give each its own name.
    :raises KeyInUse: while a call with this key is in progress.
    :raises KeyMismatch: for a key that was used with another payload.
    :raises Rejected: if the store is not available, so that no call is made twice because of that.

    It follows the IETF draft on the Idempotency-Key header. In tasks, a store with a blocking client blocks the event
    loop: use an asynchronous client, or a store that answers at once.

    >>> from resilience.work import Once
    >>> pay = Once({}, key=lambda order, amount: order)
    >>> pay.call("paid {1} for {0}".format, "order-7", 5), pay.call("never".format, "order-7", 5)
    ('paid 5 for order-7', 'paid 5 for order-7')
    """

    _resilience_streams = False
    _resilience_keeps_record = True
    _resilience_shares = "store"

    def __init__(
        self,
        store: Store,
        *,
        key: OfCall[Any],
        payload: OfCall[Any] | None = None,
        lease: Duration = 60.0,
        keep: Duration = 86400.0,
        serializer: Serializer = json,
        name: str | None = None,
    ) -> None:
        self._resilience_set_up(locals())
        self._store: ClaimStore = as_claim_store(store)
        self._key = checks.plain_function("key", key)
        self._payload = checks.optional_function("payload", payload)
        self._lease = checks.seconds("lease", lease)
        self._keep = checks.seconds("keep", keep)
        if not (callable(getattr(serializer, "dumps", None)) and callable(getattr(serializer, "loads", None))):
            raise TypeError(f"serializer must have dumps and loads, as json has, not {serializer!r}")
        self._serializer = serializer

    @override
    async def around(self, call: Call[T], ctx: Context) -> Any:
        key = self._key_of(ctx)
        token, fingerprint = secrets.token_hex(16), self._fingerprint(ctx)
        claim = await self._claim(ctx, key, token, fingerprint)
        if not claim.is_mine:
            return self._known(claim, fingerprint, ctx)
        try:
            result = await call(ctx)
        except Exception as error:
            if not _was_cut_off(error, ctx):
                await self._end(ctx, self._store.give_up, key, token)
            raise
        try:
            text = self._as_text(result)
            await self._end(ctx, self._store.finish, key, token, text, self._keep)
        except BaseException:  # no caller will see the result
            await ctx.runtime.close(result)
            raise
        return result

    def _key_of(self, ctx: Context) -> str:
        key = key_of(ctx, self._key, self.name)
        if isinstance(key, bool) or not isinstance(key, (str, int)) or key == "":
            raise KeyMisuse(
                f"{self.name}: the key of a call is a text or a whole number, and not empty; it was {key!r}"
            )
        name = self.name.replace("%", "%25").replace(":", "%3A")  # no key can reach the keys of another name
        return f"resilience:once:{name}:{key}"

    def _fingerprint(self, ctx: Context) -> str:
        if self._payload is None:
            return ""
        called: Any = ctx.called
        text = self._serializer.dumps(self._payload(*called.arguments, **called.keywords))
        return hashlib.sha256(text if isinstance(text, bytes) else str(text).encode()).hexdigest()

    def _known(self, claim: Claim, fingerprint: str, ctx: Context) -> Any:
        if claim.fingerprint != fingerprint:
            raise KeyMismatch(f"{self.name}: this key was used before, with another payload")
        if claim.result is not None:
            return self._from_text(claim.result)
        why = "a call with this key is in progress"
        raise report_refusal(KeyInUse(why, policy=self.name, retry_after=claim.remaining), ctx)

    def _as_text(self, result: object) -> str:
        kept = self._serializer.dumps(result)
        return f"{_BYTES}{b64encode(kept).decode()}" if isinstance(kept, bytes) else f"{_TEXT}{kept}"

    def _from_text(self, text: str) -> Any:
        is_bytes = text.startswith(_BYTES)
        return self._serializer.loads(b64decode(text.removeprefix(_BYTES)) if is_bytes else text.removeprefix(_TEXT))

    async def _claim(self, ctx: Context, key: str, token: str, fingerprint: str) -> Any:
        try:
            return await ctx.runtime.run(self._store.claim, key, token, fingerprint, self._lease)
        except Misuse:
            raise
        except Exception as error:
            why = "the store of the keys is not available"
            raise report_refusal(Rejected(why, policy=self.name), ctx) from error

    async def _end(self, ctx: Context, step: Callable[..., object], *arguments: object) -> None:
        """Finish or give up the claim in the store. If that fails, the claim ends with its lease."""
        try:
            await ctx.runtime.run(step, *arguments)
        except Exception:
            logger.exception("%s could not record in its store how a call has ended", self.name)

    @override
    def describe(self) -> str:
        lease, keep = format_number(self._lease), format_number(self._keep)
        return f"{self.name}: one call for each key, claimed for {lease} s; its result is kept for {keep} s"


def _was_cut_off(error: Exception, ctx: Context) -> bool:
    """Whether a `Timeout` inside has cut off the function, rather than the function failed by itself."""
    record = ctx._info.record  # None if another policy has passed its call to this one
    return isinstance(error, TimeoutExceeded) if record is None else record.was_cut_off
