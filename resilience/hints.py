"""Hints on another call, carried by an error, a result or a called object: `retry_after`, and `repeatable = False`."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

from resilience import checks


def asked_delay(carrier: Any) -> float:
    """Return the delay in seconds that an error or a result asks for, an exception group the longest of its errors'.

    0 if there is none, or an invalid one.
    """
    longest = 0.0
    try:
        if (asked := getattr(carrier, "retry_after", None)) is not None:
            longest = as_delay(asked)
    except Exception:  # no number, or a property that raises
        pass
    if issubclass(type(carrier), BaseExceptionGroup):  # `isinstance` would ask a proxy for its class, which may raise
        longest = max(longest, *map(asked_delay, carrier.exceptions))
    return longest


def as_delay(asked: Any) -> float:
    """Return a delay in seconds as a number; 0 for None and for a negative number.

    :raises TypeError: if it is no number.
    """
    if asked is None:
        return 0.0
    try:
        return checks.seconds("retry_after", asked, zero=True, infinite=True)
    except ValueError:
        return 0.0


def may_overlap(function: object) -> bool:
    """Whether a call may be made beside one that runs, or that waits in a policy before it begins."""
    return allows(function, "repeatable") and allows(function, "_resilience_may_overlap")


def forbid_repeat(error: Exception, reason: str | None = None) -> None:
    """Mark an error so that no Retry repeats the call, and note the reason on it, unless it is marked already.

    Some errors refuse attributes and stay as they are, so the function has to refuse a further call itself.
    """
    try:
        if getattr(error, "repeatable", True) is not False:
            error.repeatable = False  # type: ignore[attr-defined]
            if reason is not None:
                error.add_note(reason)
    except Exception:
        return


def allows(function: object, name: str) -> bool:
    """Whether this attribute of a called object is not `False`.

    On a plain function or method it means nothing: a decorator may have copied it there.
    """
    try:
        is_plain = type(function) is FunctionType or type(function) is MethodType
        return is_plain or getattr(function, name, True) is not False
    except Exception:  # a property that raises
        return True


def is_repeatable(ended: Any) -> bool:
    """Whether a call may be made again after this error or result; after a group, whether after each of its errors."""
    try:
        if getattr(ended, "repeatable", True) is False:
            return False
    except Exception:  # as in `allows`
        pass
    is_group = issubclass(type(ended), BaseExceptionGroup)  # `isinstance` would ask a proxy for its class
    return not is_group or all(map(is_repeatable, ended.exceptions))
