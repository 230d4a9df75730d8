"""What identifies a call: the key of Keyed, SingleFlight and Cache.

A key function gets the same arguments as the function: `key(url)` for `call(fetch, url)`, the context for
`execute(fn)`. Without one, the key is the function with all of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import CoroutineType
from typing import Any, Concatenate, TypeAlias, TypeVar

from resilience.callables import name_of, refuse_arguments
from resilience.context import Context
from resilience.errors import ArgumentMisuse, KeyMisuse

T = TypeVar("T")

#: A function that is called with the arguments of a call. The last type includes the others, which give up to four
#: parameters of a lambda a type: in pyright's strict mode, a parameter without one is an error.
OfCall: TypeAlias = (
    Callable[Concatenate[Any, ...], T]
    | Callable[Concatenate[Any, Any, ...], T]
    | Callable[Concatenate[Any, Any, Any, ...], T]
    | Callable[Concatenate[Any, Any, Any, Any, ...], T]
    | Callable[..., T]
)

#: Returns the key of a call.
Key: TypeAlias = OfCall[Hashable]


def key_of(ctx: Context, make: Key | None, policy: str) -> Hashable:
    """Return the key of the call that a context carries. If a look-up of the key raises, call `refuse_unhashable`.

    :param make: the key function of the policy, if it has one. An error in it is raised.
    :raises KeyMisuse: if there is no key function and the function takes only the context, or if the key function is
        asynchronous.
    """
    if make is None:
        if ctx._arguments is None:
            raise KeyMisuse(f"{policy}: a function of the context has no arguments to be its key: give key=")
        if ctx._keywords:
            return (ctx._function, ctx._arguments, *sorted(ctx._keywords.items()))
        return ctx._function, ctx._arguments
    arguments, keywords = (ctx,) if ctx._arguments is None else ctx._arguments, ctx._keywords
    try:
        key = make(*arguments, **keywords) if keywords else make(*arguments)
    except TypeError as error:
        try:
            refuse_arguments(make, arguments, keywords, error, takes_context=False)
        except ArgumentMisuse as misuse:
            raise ArgumentMisuse(f"key= is called with what the function is called with: {misuse}") from None
        raise
    if type(key) is CoroutineType:
        key.close()
        raise KeyMisuse(f"{policy}: key must be a plain function: {name_of(make)} returned a coroutine")
    return key


def refuse_unhashable(key: Hashable, policy: str) -> None:
    """Raise `KeyMisuse` for a key that cannot be hashed."""
    try:
        hash(key)
    except TypeError as error:
        raise KeyMisuse(f"{policy}: the key of a call must be hashable: {error}; give key= to choose one") from None


def refuse_foreign(key: Hashable, make: Key | None, policy: str) -> None:
    """Raise a `TypeError` for a key that no call can have: an argument instead of the function with its arguments."""
    if make is None and not (isinstance(key, tuple) and key and callable(key[0])):
        raise TypeError(
            f"{policy}: no call has the key {key!r}: without key=, a key is (function, arguments), with the "
            "undecorated function; give key= to choose one"
        )


def key_in_words(make: Key | None) -> str:
    """Return the description of a key for `describe`."""
    return "function and its arguments" if make is None else f"key of {name_of(make)}"
