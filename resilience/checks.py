"""Checks of arguments, for constructors: the message names the parameter and the value.

Each check returns the value in the form in which the library stores it, so a constructor reads as a list of what it
accepts. Booleans are not numbers here: `Timeout(True)` is a mistake, not one second.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import FunctionType
from typing import Any, Never, TypeAlias, TypeVar, cast, final

from resilience.callables import is_coroutine_function, is_policy, name_of, signature_of

#: A length of time: seconds, or a `timedelta`.
Duration: TypeAlias = float | timedelta

F = TypeVar("F", bound=Callable[..., object])
R = TypeVar("R")
V = TypeVar("V")
C = TypeVar("C", bound=Callable[..., object] | None)


def number(name: str, value: object) -> float:
    """Return `value` as a float; refuse NaN and anything that is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number (an int or a float), not {value!r}")
    try:
        converted = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large: {value!r}") from None
    if math.isnan(converted):
        raise ValueError(f"{name} must be a number, not {value!r}")
    return converted


def positive(name: str, value: object) -> float:
    """Return `value` as a finite float that is more than 0."""
    converted = number(name, value)
    if not 0 < converted < math.inf:
        raise ValueError(f"{name} must be more than 0 and finite, not {value!r}")
    return converted


def within(name: str, value: object, least: float, most: float = math.inf) -> float:
    """Return `value` as a finite float from `least` to `most`."""
    converted = number(name, value)
    if not least <= converted <= most or math.isinf(converted):
        limits = "and finite" if most == math.inf else f"and at most {most:g}"
        raise ValueError(f"{name} must be at least {least:g} {limits}, not {value!r}")
    return converted


def seconds(name: str, value: object, *, zero: bool = False, infinite: bool = False) -> float:
    """Return a duration in seconds; refuse a negative one, and, by default, zero and infinity."""
    if type(value) is float and 0.0 < value < math.inf:
        return value  # always valid; this saves 350 ns for each delay that a backoff draws
    if isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be seconds (an int or a float) or a timedelta, not {value!r}")
    converted = number(name, value)
    if converted < 0 or (converted == 0 and not zero):
        raise ValueError(f"{name} must be {'zero or more' if zero else 'more than zero'} seconds, not {value!r}")
    if math.isinf(converted) and not infinite:
        raise ValueError(f"{name} must be finite, not {value!r}")
    return converted


def budget(name: str, value: object) -> float:
    """Return the seconds of a budget: 0 is already over, infinity is no limit."""
    if type(value) is float and value >= 0.0:
        return value  # as in `seconds`, whose keyword arguments would take longer than all of its checks
    if type(value) is int and 0 <= value <= sys.maxsize:  # not too large for a float
        return float(value)
    return seconds(name, value, zero=True, infinite=True)


def optional_seconds(name: str, value: object, *, zero: bool = False) -> float | None:
    """Return a duration in seconds, or None."""
    return None if value is None else seconds(name, value, zero=zero)


def whole(name: str, value: object, *, least: int = 1, most: float = math.inf) -> int:
    """Return a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number (an int), not {value!r}")
    if not least <= value <= most:
        limit = f"at least {least}" if value < least else f"at most {most}"
        raise ValueError(f"{name} must be {limit}, not {value!r}")
    return value


def ratio(name: str, value: object) -> float:
    """Return a share: more than 0, at most 1."""
    converted = number(name, value)
    if not 0 < converted <= 1:
        hint = f"; did you mean {converted / 100:g}?" if 1 < converted <= 100 else ""
        raise ValueError(f"{name} must be more than 0 and at most 1, not {value!r}{hint}")
    return converted


def fraction(name: str, value: object) -> float:
    """Return a share: more than 0, less than 1."""
    converted = number(name, value)
    if not 0 < converted < 1:
        hint = f"; did you mean {converted / 100:g}?" if 1 < converted < 100 else ""
        raise ValueError(f"{name} must be more than 0 and less than 1, not {value!r}{hint}")
    return converted


def flag(name: str, value: object) -> bool:
    """Return a boolean; any other truthy value is more likely an argument in the wrong place."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def optional_name(value: object) -> str | None:
    """Return the name of a policy, a string that is not empty, or None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"name must be a string, not {value!r}")
    if not value:
        raise ValueError(f"name must not be empty, but it is {value!r}")
    return value


def several(name: str, value: Iterable[V], what: str) -> tuple[V, ...]:
    """Return the elements of an argument that takes several; a single string is not several.

    :param what: what the argument must be, such as ``"a sequence of names"``.
    """
    if type(value) is tuple:
        return value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {what}, not {value!r}")
    return tuple(value)


def instance(name: str, value: V, kinds: type[Any] | tuple[type[Any], ...], what: str) -> V:
    """Return an object of one of these types.

    :param what: what the argument must be, such as ``"a policy"``.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {what}, not {value!r}")
    return value


def function(name: str, value: F) -> F:
    """Return a callable."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")
    if is_policy(value):
        raise TypeError(f"{name} must be a function, not the policy {value!r}")
    return value


def plain_function(name: str, value: F, takes: tuple[str, ...] | None = None) -> F:
    """Return a callable that is not a coroutine function.

    :param takes: the names of the positional arguments that it will be called with; it must be able to take them.
    """
    if is_coroutine_function(function(name, value)):
        raise TypeError(
            f"{name} must be a plain function: the coroutine function {name_of(value)} would never be awaited"
        )
    if takes is not None:
        parameters(name, value, takes)
    return value


def optional_function(name: str, value: C, takes: tuple[str, ...] | None = None) -> C:
    """Return what `plain_function` returns, or None."""
    if value is not None:
        plain_function(name, value, takes)
    return value


def optional_callable(name: str, value: C, takes: tuple[str, ...]) -> C:
    """Return a callable that can be called with these positional arguments, or None."""
    if value is not None:
        parameters(name, function(name, value), takes)
    return value


def no_class(name: str, value: object) -> None:
    """Raise if `value` is a class in the place of an object of it."""
    if isinstance(value, type):
        raise TypeError(f"{name} must be an object, not {value!r}: did you mean {value.__name__}()?")


def optional_randomness(name: str, value: R) -> R:
    """Return a source of randomness, or None."""
    no_class(name, value)
    if value is not None and not callable(getattr(value, "uniform", None)):
        raise TypeError(f"{name} must have a method uniform(a, b), as random.Random has; {value!r} has not")
    return value


def parameters(name: str, function: Callable[..., object], takes: tuple[str, ...]) -> None:
    """Raise if a callable cannot take the positional arguments that it will be called with."""
    if type(function) is FunctionType and not function.__dict__:  # saves the 20 us that `inspect` takes
        code, defaults = function.__code__, function.__defaults__ or ()
        if code.co_argcount - len(defaults) <= len(takes) <= code.co_argcount and not code.co_kwonlyargcount:
            return
    signature = signature_of(function)
    try:
        if signature is not None:
            signature.bind(*takes)
    except TypeError as error:
        call = f"{name}({', '.join(takes)})"
        raise TypeError(
            f"{name} is called as {call}, which {name_of(function)}{signature} cannot take: {error}"
        ) from None


def not_bare(written: str, value: object) -> None:
    """Raise if `value` is the function under a decorator without parentheses; `written` is the correct decorator."""
    if callable(value) and not isinstance(value, type) and not hasattr(value, "around"):
        raise TypeError(f"a policy is made before it decorates {name_of(value)}: did you mean {written}?")


def on_objects(method: F) -> F:
    """Let a method with `*arguments` check what Python checks if there is a `self`: `Retry.wrap(other)` lacks one."""
    return cast("F", _OnObjects(method))


@final
class _OnObjects:
    """A method that subclasses can only call on objects. The class that defines it may pass it any object."""

    def __init__(self, method: Callable[..., object]) -> None:
        self.__wrapped__: Any = method  # so named for tools that read the class

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner

    def __get__(self, instance: object, owner: type) -> Callable[..., object]:
        method = self.__wrapped__
        if instance is not None or owner is self._owner:
            return method.__get__(instance, owner)  # type: ignore[no-any-return]

        @functools.wraps(method)
        def of_class(*arguments: Any, **keywords: Any) -> object:
            if not (arguments and isinstance(arguments[0], owner)):
                name = method.__name__
                raise TypeError(
                    f"{owner.__name__}.{name} is called on the class, so there is no {owner.__name__}: "
                    f"did you mean {owner.__name__}(...).{name}(...), or {self._owner.__name__}.{name}(...)?"
                )
            return method(*arguments, **keywords)

        return of_class


@final
class NoBlock:
    """The `__enter__` of a policy, which is no context manager: the error of `with` says what to write instead.

    It is an `AttributeError`, so `hasattr` and `contextlib` find no such method; `dir`, and a mock made from it, do.
    """

    def __init__(self, number: int) -> None:
        self._number = number  # of the form, among those of the policy: in blocking code, in tasks

    def __get__(self, instance: object, owner: Any) -> Never:
        raise AttributeError(
            f"{owner.__name__} is not entered itself: write `{owner._resilience_blocks[self._number]}`"
        )


def warn(message: str) -> None:
    """Warn of a mistake that is not an error, at the line of the user's code that called the library."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("resilience."):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
