"""The parameters `on`, `on_result` and `ignore`, which have the same meaning in every policy.

`on` defines which exceptions are handled: an exception type, a tuple of them, or a predicate over the exception. An
exception that `ignore` matches is never handled. `on_result` is a predicate over the returned value.

Two rules take precedence over these parameters. A misuse of the library is not an outcome. And a policy that repeats or
counts calls handles `Rejected` ("not even tried") and `DeadlineExceeded` ("no time left") only if `on` names their
type.

An exception group is what all of its leaves are: handled, not handled, or neutral. It is also neutral if they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import UnionType
from typing import Any, TypeAlias, Union, final, get_origin

from resilience import checks
from resilience.errors import DeadlineExceeded, Misuse, Rejected
from resilience.outcome import ErrorAnswer, StoppedIteration

#: Exception type, tuple of exception types, or predicate over the exception.
On: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[Exception], object]

#: Predicate over the value that a call returned.
OnResult: TypeAlias = Callable[[Any], object]

_OWN = (Rejected, DeadlineExceeded)
_RESERVED = (Misuse, *_OWN)
_SPECIAL = (*_RESERVED, ExceptionGroup, StoppedIteration)


_check_of = type.__instancecheck__.__get__


@final
class Matcher:
    """Decides whether a policy handles an exception.

    :param own: whether the library's own `Rejected` and `DeadlineExceeded` are treated like other exceptions, as in
        Fallback. By default, `on` has to name them, as in Retry and CircuitBreaker.
    :param name: the name of the policy's parameter that `on` comes from, for error messages.
    """

    __slots__ = ("_ignored", "_on", "_reserved", "ignore", "on")

    def __init__(self, on: On, ignore: On, *, own: bool = False, name: str = "on") -> None:
        self.on: On = on
        self.ignore: On = ignore
        self._on = _condition(name, on)
        self._ignored = None if names_nothing(ignore) else _condition("ignore", ignore)
        self._reserved = Misuse if own else _RESERVED

    def judge(self, error: Exception) -> bool | None:
        """Return whether the policy handles this exception; None if it is neutral. An error of a predicate is raised.

        A neutral exception is not handled, and shows neither a success nor a failure of the service: an exception that
        `ignore` matches, an error of the library that `on` would have to name, and a group whose leaves are not all the
        same.
        """
        if issubclass(type(error), _SPECIAL):  # `isinstance` would also look up `__class__`: 100 ns more
            if isinstance(error, StoppedIteration):
                return self.judge(error.error)
            if isinstance(error, _types_in(self.ignore, BaseExceptionGroup)):
                return None
            if isinstance(error, ExceptionGroup) and not _types_in(self.on, BaseExceptionGroup):
                verdicts = {self.judge(leaf) for leaf in error.exceptions}
                return verdicts.pop() if len(verdicts) == 1 else None
            if isinstance(error, self._reserved) and not isinstance(error, _types_in(self.on, _OWN)):
                return None
        return None if self._ignored is not None and self._ignored(error) else bool(self._on(error))

    def names(self, refusal: type[Exception]) -> bool:
        """Whether `on` names this class of refusals, a superclass or a subclass of it."""
        return any(issubclass(refusal, it) or issubclass(it, refusal) for it in _types_in(self.on, _OWN))


def names_nothing(on: On) -> bool:
    """Whether a condition is the empty tuple. A comparison would call the `__eq__` of a wrong argument."""
    return isinstance(on, tuple) and not on


def _types_in(on: On, kinds: type[BaseException] | tuple[type[BaseException], ...]) -> tuple[type[Any], ...]:
    """Return the types that this condition names and that are subclasses of `kinds`."""
    if isinstance(on, tuple):
        return tuple([it for it in on if issubclass(it, kinds)])
    return (on,) if isinstance(on, type) and issubclass(on, kinds) else ()


def _condition(name: str, value: Any) -> Callable[[Exception], object]:
    """Return the predicate over exceptions that a parameter stands for."""
    if isinstance(value, (type, tuple)):
        types = value if isinstance(value, tuple) else (value,)
        if not types:
            raise ValueError(f"{name} must name at least one exception type, not ()")
        for each in types:
            if not (isinstance(each, type) and issubclass(each, BaseException)):
                raise TypeError(f"{name} must name exception types, not {each!r}")
        # What `isinstance` calls, without a Python frame: 60 ns less. A class with a metaclass may define its own.
        return _check_of(value) if type(value) is type else partial(_is_one_of, types)
    origin = get_origin(value)  # `ExceptionGroup[ValueError]` and `Optional[ValueError]` can be called
    if not callable(value) or origin is not None:
        is_several = isinstance(value, (list, set, frozenset)) or origin in (Union, UnionType)
        hint = "; did you mean a tuple?" if is_several else ""
        raise TypeError(f"{name} must be an exception type, a tuple of them or a predicate, not {value!r}{hint}")
    predicate: Callable[[Exception], object] = checks.plain_function(name, value, ("error",))
    return predicate


def _is_one_of(types: tuple[type[BaseException], ...], error: Exception) -> bool:
    return isinstance(error, types)


def optional_predicate(name: str, value: OnResult | None) -> OnResult | None:
    """Return a predicate over results, or None."""
    return checks.optional_function(name, value, ("result",))


def rejects(on_result: OnResult, result: object) -> bool:
    """Whether a result is not good enough. The predicate is not asked about an error with which a service answered."""
    return type(result) is not ErrorAnswer and bool(on_result(result))
