"""IdempotencyKey: one key for each execution, so that a server can tell a repeated request from a new one."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.context import Context
from resilience.errors import KeyMisuse
from resilience.policy import Call, Policy
from resilience.record import Record

T = TypeVar("T")

#: Where the key is in `ctx.properties`.
PROPERTY = "idempotency_key"


@final
class GeneratedKey(str):
    """A key generated for one execution: a nested execution inherits it with the properties, but must not use it."""

    __slots__ = ("record",)

    record: Record | None

    def __reduce__(self) -> Any:
        """Pickle the text alone."""
        return str, (str(self),)


def key_for(ctx: Context) -> str | None:
    """Return the idempotency key of a context's execution: its own, or one that the caller passed."""
    key = ctx._info.properties.get(PROPERTY)
    if isinstance(key, GeneratedKey) and key.record is not ctx._info.record:
        return None
    return key if isinstance(key, str) else None


def _random_key() -> str:
    return str(uuid.uuid4())


@final
class IdempotencyKey(Policy[Never]):
    """Give each execution a key, `ctx.properties["idempotency_key"]`, which is the same in all of its attempts.

    The HTTP integrations send it as `Idempotency-Key`, and may then repeat a POST. A key that the caller passes,
    `Context(properties={"idempotency_key": ...})`, is kept: one that you have stored outlives the process. A nested
    execution gets its own generated key, but a key from the caller applies to everything inside.

    Put it in the executed pipeline or, if another policy passes its call to it (such as a `Keyed`), around the policy
    that repeats the call. Otherwise a second attempt is refused with a `TypeError`, because it would send another key.

    :param make: generates a key, a non-empty text; a random UUID by default.
    :param name: the name of this policy in errors; "IdempotencyKey" by default.

    The header is that of the IETF draft `draft-ietf-httpapi-idempotency-key-header`.

    >>> from resilience import Retry
    >>> from resilience.work import IdempotencyKey
    >>> charge = Retry().wrap(IdempotencyKey())
    >>> len(charge.execute(lambda ctx: ctx.properties["idempotency_key"]))
    36
    """

    _resilience_keeps_record = True

    def __init__(self, make: Callable[[], str] = _random_key, *, name: str | None = None) -> None:
        self._resilience_set_up(locals())
        self._make = checks.plain_function("make", make, ())

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        if key_for(ctx) is not None:
            return await call(ctx)
        record = ctx._info.record
        text = None if record is None else record.idempotency_key
        if text is None:
            if record is None and (ctx.attempt > 1 or ctx.hedge):  # a second key would let the server do the work twice
                raise KeyMisuse(
                    f"{self.name} does not know the key of the previous attempt, because another policy passes its "
                    f"call to it: put {self.name} around the policies that repeat the call"
                )
            text = self._make()
            if not isinstance(text, str) or not text:
                raise TypeError(f"make must return a text that is not empty, not {text!r}")
            if record is not None:  # no race condition: the policies of one execution run in one thread
                record.idempotency_key = text
        key = GeneratedKey(text)
        key.record = record
        return await call(ctx._with(properties=MappingProxyType({**ctx.properties, PROPERTY: key})))

    @override
    def describe(self) -> str:
        return f"{self.name}: one idempotency key for each execution, the same in all its attempts"
