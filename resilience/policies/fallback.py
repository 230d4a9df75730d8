"""Fallback: return an answer in place of a failed call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from types import CoroutineType, FunctionType, MethodType
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast, final, overload

from typing_extensions import override

from resilience import checks
from resilience.ambient import get_ambient, reset_ambient, set_ambient
from resilience.callables import Unknown, is_policy, name_of
from resilience.context import Context
from resilience.errors import closable
from resilience.events.dispatch import emit, optional_listener, subscribers
from resilience.events.kinds import FallbackUsed
from resilience.info import Listener
from resilience.innermost import raise_if_cut_off
from resilience.matching import Matcher, On, OnResult, optional_predicate, rejects
from resilience.outcome import Failed, Failure, Outcome, Success, as_outcome, unwrap_stop_iteration
from resilience.policy import Call, Policy
from resilience.runtimes.tasks import replaces_cancellation

T = TypeVar("T")
A = TypeVar("A")
#: `Never` or `Any`: a handler that always raises, or whose result has no type. Both match a coroutine, too.
U = TypeVar("U", bound=Unknown)
A_co = TypeVar("A_co", covariant=True)

#: Makes the answer from the outcome and the context. May be asynchronous in asynchronous code.
Handler: TypeAlias = Callable[[Outcome[Any], Context], A]


@final
class _NotGiven:
    """The default of `value`: distinguishes `Fallback()` from `Fallback(None)` if there is a handler."""

    def __repr__(self) -> str:
        return "<not given>"  # in signatures, where the default would show an address


_NOT_GIVEN: Final[Any] = _NotGiven()


@final
class Fallback(Policy[A_co], Generic[A_co]):
    """Answer with a value, or with the result of a handler, when the call failed.

    :param value: the answer, returned as it is, even if it is falsy or callable; None by default. A function or method
        is reported by a `RuntimeWarning`: write `handler=` to have it called, and a `handler` that returns it to answer
        with it. The result that the value replaces is closed, if it can be; so is the response that a failure carries.
    :param handler: called as `handler(failure, ctx)` to make the answer, where `failure` is `Failure(error)` or the
        `Success(value)` that was not good enough. May be asynchronous in asynchronous code. What it raises reaches the
        caller, with the original error as its context.
    :param on: what is answered: an exception type, a tuple of them, or a predicate over the exception. Every
        `Exception` by default, including `Rejected` and `DeadlineExceeded`.
    :param on_result: a predicate over the result; true means that it is not good enough.
    :param ignore: exceptions that are never answered, even if `on` matches.
    :param on_fallback: called with a `FallbackUsed` before each answer.
    :param name: the name of this policy in errors and events; "Fallback" by default.

    A cancellation is never answered. Outermost, it answers every failure that the other policies could not prevent;
    inside a Retry it would hide the failure from the Retry.

    >>> from resilience import Fallback
    >>> Fallback("unknown").execute(lambda ctx: {}["name"])
    'unknown'
    """

    _resilience_answers = True

    @overload
    def __init__(
        self: Fallback[None],
        *,
        on: On = Exception,
        on_result: OnResult | None = None,
        ignore: On = (),
        on_fallback: Listener | None = None,
        name: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        value: A_co,
        *,
        on: On = Exception,
        on_result: OnResult | None = None,
        ignore: On = (),
        on_fallback: Listener | None = None,
        name: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: Fallback[U],
        *,
        handler: Callable[[Failure, Context], U],
        on: On = Exception,
        ignore: On = (),
        on_fallback: Listener | None = None,
        name: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        *,
        handler: Callable[[Failure, Context], Coroutine[Any, Any, A_co]],
        on: On = Exception,
        ignore: On = (),
        on_fallback: Listener | None = None,
        name: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        *,
        handler: Callable[[Failure, Context], A_co],
        on: On = Exception,
        ignore: On = (),
        on_fallback: Listener | None = None,
        name: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: Fallback[U],
        *,
        handler: Handler[U],
        on: On = Exception,
        on_result: OnResult | None,
        ignore: On = (),
        on_fallback: Listener | None = None,
        name: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        *,
        handler: Handler[Coroutine[Any, Any, A_co]],
        on: On = Exception,
        on_result: OnResult | None,
        ignore: On = (),
        on_fallback: Listener | None = None,
        name: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        *,
        handler: Handler[A_co],
        on: On = Exception,
        on_result: OnResult | None,
        ignore: On = (),
        on_fallback: Listener | None = None,
        name: str | None = None,
    ) -> None: ...
    def __init__(
        self,
        value: Any = _NOT_GIVEN,
        *,
        handler: Callable[..., Any] | None = None,
        on: On = Exception,
        on_result: OnResult | None = None,
        ignore: On = (),
        on_fallback: Listener | None = None,
        name: str | None = None,
    ) -> None:
        if handler is not None and value is not _NOT_GIVEN:
            raise ValueError(f"give a value or a handler, not both: value={value!r}, handler={handler!r}")
        _check_answer(value)
        self._value: A_co = None if value is _NOT_GIVEN else value  # type: ignore[assignment]  # Fallback[None]
        self._handler = checks.optional_callable("handler", handler, ("failure", "ctx"))
        self._failures = Matcher(on, ignore, own=True)
        self._on_result = optional_predicate("on_result", on_result)
        self._on_fallback = optional_listener("on_fallback", on_fallback)
        self._resilience_set_name(name)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T | A_co:
        try:
            result = await call(ctx)
        except Exception as error:
            if not (ctx.runtime.is_answerable and self._failures.judge(error)) or replaces_cancellation(error):
                raise
            raise_if_cut_off(ctx._timer, get_ambient(), error)  # a policy inside may have found no time left
            is_observed = self._on_fallback is not None or subscribers.fallbacks or ctx._info.listeners
            if self._handler is None and not is_observed and closable(error) is None:
                return self._value
            return await self._answer(unwrap_stop_iteration(error), ctx)
        try:
            if self._on_result is None or not rejects(self._on_result, result):
                return result
        except BaseException:  # no caller will see the result
            await ctx.runtime.close(result)
            raise
        return await self._answer(Success(result), ctx)

    async def _answer(self, failed: Failed, ctx: Context) -> A_co:
        outcome, discarded = as_outcome(failed), closable(failed)
        if discarded is self._value:  # it is the answer
            discarded = None
        try:
            emit(FallbackUsed, self.name, ctx, self._on_fallback, outcome=outcome)
        except BaseException:  # interrupted in a listener: no handler will see the result
            await ctx.runtime.close(discarded)
            raise
        if self._handler is None:
            await ctx.runtime.close(discarded)
            return self._value
        original = failed if isinstance(failed, Exception) else None
        traceback = None if original is None else original.__traceback__
        own = ctx.child()  # the handler may keep it, and execute other calls with it
        outer, token = get_ambient(), None
        try:
            token = set_ambient(own)  # inside the `try`, because Ctrl-C may come between any two steps
            return cast("A_co", await ctx.runtime.run(self._handler, outcome, own))
        except Exception as error:
            if error is original:
                # The handler raised the original again, and its frame holds it: without the frame there is no cycle.
                error.with_traceback(traceback)
            raise
        finally:
            try:
                if token is not None:
                    reset_ambient(token)
                else:
                    set_ambient(outer)
            except ValueError:  # as in `innermost`
                pass

    @override
    def _resilience_hint(self) -> str:
        if not callable(self._value):
            return ""
        return (
            f"; this Fallback answers with {name_of(self._value)}: did you mean @Fallback(...) with the answer in it?"
        )

    @override
    def settings(self) -> Mapping[str, object]:
        answer = {"value": self._value, "handler": None} if self._handler is None else {"handler": self._handler}
        return {
            **answer,
            "on": self._failures.on,
            "on_result": self._on_result,
            "ignore": self._failures.ignore,
            "on_fallback": self._on_fallback,
            "name": self._resilience_given_name,
        }

    @override
    def describe(self) -> str:
        answer = repr(self._value) if self._handler is None else f"what {self._handler!r} makes of it"
        return f"{self.name}: answers a failure with {answer}"


def _check_answer(value: object) -> None:
    """Raise or warn if a value is not what a Fallback answers with, but what its author expects it to use."""
    if isinstance(value, CoroutineType):
        value.close()
        raise TypeError(
            f"value is the coroutine {value.__qualname__}, which can be awaited only once: write "
            "Fallback(handler=...) with an `async def handler(failure, ctx)`"
        )
    if is_policy(value):
        raise TypeError(f"value is what a Fallback answers with, not a policy: write Fallback(...).wrap({value!r})")
    if isinstance(value, type) and issubclass(value, BaseException):
        name = value.__name__
        checks.warn(f"this Fallback answers with the class {name} itself: did you mean Fallback(..., on={name})?")
    elif isinstance(value, (FunctionType, MethodType)):
        name = name_of(value)
        checks.warn(
            f"this Fallback answers with the function {name} itself, and does not call it: did you mean "
            f"Fallback(handler={name}), or @Fallback(...) with the answer in it? For a function as the answer, write "
            f"Fallback(handler=lambda failure, ctx: {name})"
        )
