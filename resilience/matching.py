"""Which outcomes count: the parameters `on`, `on_result` and `ignore`, which mean the same in every policy.

`on` defines which exceptions are handled: an exception type, a tuple of them, or a predicate over the exception.
Exceptions that `ignore` matches are never handled; it is stronger. `on_result` is a predicate over the returned value.

Two rules of the library stand above the user's words. A misuse of the library is no outcome. And
`Rejected` and `DeadlineExceeded`, the library's own "it was not even tried" and "there is no time
left", are handled by a policy that repeats or counts calls only where `on` names them as types.

An exception group is handled if each of its leaves is handled, and neutral if one of them is neutral or only some of
them are handled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, final

from resilience import checks
from resilience.clock import FOREVER
from resilience.errors import DeadlineExceeded, Misuse, Rejected
from resilience.outcome import StoppedIteration

#: Exception type, tuple of exception types, or predicate over the exception.
On: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[Exception], bool]

#: Predicate over the value that a call returned.
OnResult: TypeAlias = Callable[[Any], object]

_OWN = (Rejected, DeadlineExceeded)


@final
class Matcher:
    """Decides whether an exception is one that a policy handles.

    :param own: whether `Rejected` and `DeadlineExceeded` are exceptions like others (Fallback), or
        have to be named (Retry, CircuitBreaker).
    :param name: what the parameter is called that `on` comes from.
    """

    __slots__ = ("_above", "_apart", "_ignored", "_named", "_names_groups", "_on", "ignore", "on")

    def __init__(self, on: On, ignore: On, *, own: bool = False, name: str = "on") -> None:
        self.on: On = on
        self.ignore: On = ignore
        self._on = _condition(name, on)
        self._ignored = None if ignore == () else _condition("ignore", ignore)
        self._above = (Misuse,) if own else (Misuse, *_OWN)
        self._apart = (*self._above, ExceptionGroup, StoppedIteration)
        types = on if isinstance(on, tuple) else (on,)
        self._named = tuple(it for it in types if isinstance(it, type) and issubclass(it, _OWN))
        self._names_groups = any(isinstance(it, type) and issubclass(it, BaseExceptionGroup) for it in types)

    def handles(self, error: Exception) -> bool:
        """Whether the policy handles this exception. What a predicate raises reaches the caller."""
        if issubclass(type(error), self._apart):  # `isinstance` looks for a `__class__` with each: 100 ns more
            return self._handles_apart(error)
        return (self._ignored is None or not self._ignored(error)) and bool(self._on(error))

    def judge(self, error: Exception) -> bool | None:
        """Do so where an exception may also say nothing (None): where the policy `is_neutral` to it."""
        if issubclass(type(error), self._apart):
            return True if self._handles_apart(error) else None if self.is_neutral(error) else False
        return None if self._ignored is not None and self._ignored(error) else bool(self._on(error))

    def _handles_apart(self, error: Exception) -> bool:
        """Do so for exceptions that are more than what the user's words say of them."""
        if isinstance(error, StoppedIteration):
            return self.handles(error.error)
        if isinstance(error, ExceptionGroup) and not self._names_groups:
            return all(self.handles(leaf) for leaf in error.exceptions)
        return not self.is_neutral(error) and bool(self._on(error))

    def names(self, refusal: type[Exception]) -> bool:
        """Whether `on` names this kind of refusal, or one above or below it, as a type."""
        return any(issubclass(refusal, it) or issubclass(it, refusal) for it in self._named)

    def is_neutral(self, error: Exception) -> bool:
        """Whether the policy handles this exception not at all, and it says nothing about the dependency either.

        It is one that `ignore` names, or one of the library's own that stands above the user's words, or a group of
        which only a part is handled.
        """
        if isinstance(error, ExceptionGroup) and not self._names_groups:
            return any(self.is_neutral(leaf) or self.handles(leaf) for leaf in error.exceptions)
        if isinstance(error, self._above) and not isinstance(error, self._named):
            return True
        return self._ignored is not None and bool(self._ignored(error))


def _condition(name: str, value: Any) -> Callable[[Exception], object]:
    """Return what is asked of each exception."""
    if isinstance(value, tuple):
        if not value:
            raise ValueError(f"{name} must name at least one exception type, not ()")
        for each in value:
            _exception_type(name, each)
        return partial(_is_one_of, value)
    if isinstance(value, type):
        _exception_type(name, value)
        # What `isinstance` asks, without a frame of ours: 60 ns less. It asks a metaclass only about other classes.
        return type.__instancecheck__.__get__(value) if type(value) is type else partial(_is_one_of, (value,))
    if not callable(value):
        raise TypeError(f"{name} must be an exception type, a tuple of them or a predicate, not {value!r}")
    predicate: Callable[[Exception], object] = checks.plain_function(name, value, ("error",))
    return predicate


def optional_predicate(name: str, value: OnResult | None) -> OnResult | None:
    """Return a predicate over results, or None."""
    return None if value is None else checks.plain_function(name, value, ("result",))


def _is_one_of(types: tuple[type[BaseException], ...], error: Exception) -> bool:
    return isinstance(error, types)


def _exception_type(name: str, value: object) -> None:
    if not (isinstance(value, type) and issubclass(value, BaseException)):
        raise TypeError(f"{name} must name exception types, not {value!r}")


def asked_delay(carrier: object) -> float:
    """Return the delay in seconds that an error or a result asks for, 0 for none. Unparsable values are ignored."""
    try:
        asked = getattr(carrier, "retry_after", None)
        return 0.0 if asked is None else min(checks.seconds("retry_after", asked, zero=True), FOREVER)
    except Exception:  # a property that raises says nothing
        return 0.0


def is_repeatable(carrier: object) -> bool:
    """Whether a call may be made again: unless what is called, or what it ended with, says `repeatable = False`."""
    try:
        return getattr(carrier, "repeatable", True) is not False
    except Exception:
        return True
