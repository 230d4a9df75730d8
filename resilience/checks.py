"""Refusing wrong arguments where they are written, with the parameter and the value in the message.

Every check returns the value in the form in which the library keeps it, so that a constructor reads
as a list of what it accepts. Booleans are no numbers here: `Timeout(True)` is a slip, not a second.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from resilience.callables import is_coroutine_function, name_of

if TYPE_CHECKING:
    from collections.abc import Callable

#: A length of time: seconds, or a `timedelta`.
Duration: TypeAlias = float | timedelta

F = TypeVar("F", bound="Callable[..., object]")
R = TypeVar("R")
C = TypeVar("C", bound="Callable[..., object] | None")


def format_number(value: float) -> str:
    """Return a number as it was written: every digit, and no `.0`."""
    text = repr(float(value))
    return text.removesuffix(".0")


def number(name: str, value: object) -> float:
    """Return `value` as a float; refuse what is no number, and NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        converted = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large: {value!r}") from None
    if math.isnan(converted):
        raise ValueError(f"{name} must not be NaN")
    return converted


def within(name: str, value: object, least: float, most: float = math.inf) -> float:
    """Return a finite number from `least` to `most`."""
    converted = number(name, value)
    if not least <= converted <= most or math.isinf(converted):
        limits = "and finite" if most == math.inf else f"and at most {most:g}"
        raise ValueError(f"{name} must be at least {least:g} {limits}, not {value!r}")
    return converted


def seconds(name: str, value: object, *, zero: bool = False, infinite: bool = False) -> float:
    """Return a duration in seconds; refuse negative ones, and zero and infinity unless they mean something."""
    if type(value) is float and 0.0 < value < math.inf:
        return value  # nothing can be wrong with it: 350 ns less for each delay that a backoff draws
    if isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be seconds (a number) or a timedelta, not {value!r}")
    converted = number(name, value)
    if converted < 0 or (converted == 0 and not zero):
        raise ValueError(f"{name} must be {'zero or more' if zero else 'more than zero'} seconds, not {value!r}")
    if math.isinf(converted) and not infinite:
        raise ValueError(f"{name} must be finite, not {value!r}")
    return converted


def optional_seconds(name: str, value: object, *, zero: bool = False) -> float | None:
    """Return a duration in seconds, or None."""
    return None if value is None else seconds(name, value, zero=zero)


def whole(name: str, value: object, *, least: int = 1) -> int:
    """Return a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value!r}")
    return value


def ratio(name: str, value: object) -> float:
    """Return a share: more than 0, at most 1."""
    converted = number(name, value)
    if not 0 < converted <= 1:
        hint = f"; did you mean {converted / 100:g}?" if 1 < converted <= 100 else ""
        raise ValueError(f"{name} must be more than 0 and at most 1, not {value!r}{hint}")
    return converted


def flag(name: str, value: object) -> bool:
    """Return a real boolean; a truthy something is more likely an argument in the wrong place."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def plain_function(name: str, value: F, takes: tuple[str, ...] | None = None) -> F:
    """Return a callable that gives its answer when it is called; refuse one that has to be awaited.

    :param takes: what it will be called with, by name; a callable that cannot take that is refused.
    """
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")
    if is_coroutine_function(value):
        raise TypeError(
            f"{name} must be a plain function: the coroutine function {name_of(value)} would never be awaited"
        )
    if takes is not None:
        _check_parameters(name, value, takes)
    return value


def optional_callable(name: str, value: C, takes: tuple[str, ...]) -> C:
    """Return a callable that can be called with these parameters, or None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")
    if value is not None:
        _check_parameters(name, value, takes)
    return value


def optional_randomness(name: str, value: R) -> R:
    """Return a source of randomness, or None."""
    if isinstance(value, type):
        raise TypeError(f"{name} must be an object, not {value!r}: did you mean {value.__name__}()?")
    if value is not None and not callable(getattr(value, "uniform", None)):
        raise TypeError(f"{name} must have a method uniform(a, b), as random.Random has; {value!r} has not")
    return value


def _check_parameters(name: str, function: Callable[..., object], takes: tuple[str, ...]) -> None:
    """Refuse a callable whose parameters cannot take what it will be called with."""
    if type(function) is FunctionType and not function.__dict__:  # `inspect` takes 20 us for what its code says at once
        code, defaults = function.__code__, function.__defaults__ or ()
        if code.co_argcount - len(defaults) <= len(takes) <= code.co_argcount and not code.co_kwonlyargcount:
            return
    try:
        signature = inspect.signature(function)
    except Exception:  # it has none, as many builtins, or a foreign `__signature__` is no such thing
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        call = f"{name}({', '.join(takes)})"
        raise TypeError(
            f"{name} is called as {call}, which {name_of(function)}{signature} cannot take: {error}"
        ) from None


def not_bare(written: str, value: object) -> None:
    """Refuse the function that a decorator without its parentheses is given; `written` is what was meant."""
    if callable(value) and not isinstance(value, type):
        raise TypeError(f"a policy is made before it decorates {name_of(value)}: did you mean {written}?")


def warn(message: str) -> None:
    """Warn of what is surely a mistake and yet no error, at the user's line, whatever frames of ours stand between."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("resilience."):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def optional_name(value: object) -> str | None:
    """Return the name of a policy: a text that is not empty, or None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"name must be a string, not {value!r}")
    if not value:
        raise ValueError("name must not be empty")
    return value
