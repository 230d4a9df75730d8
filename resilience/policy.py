"""Policies, and pipelines of them: each is defined by the other.

A policy is one coroutine, `around(call, ctx)`, which runs the rest of the chain with `await call(ctx)`. The rest of
this module puts policies around one another; the methods that users call are in `executable`.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Never, TypeAlias, final, overload

from typing_extensions import TypeVar, override

from resilience import checks
from resilience.callables import name_of
from resilience.context import Context
from resilience.executable import Executable
from resilience.execution import Stage, compose, compose_for_threads
from resilience.info import Listener

T = TypeVar("T")
W = TypeVar("W", bound="Policy[Any]")
D_co = TypeVar("D_co", covariant=True, default=Never)

# What each policy of a pipeline may answer. One for each, because mypy joins the answers of a `*policies` to `object`.
A1 = TypeVar("A1", default=Never)
A2 = TypeVar("A2", default=Never)
A3 = TypeVar("A3", default=Never)
A4 = TypeVar("A4", default=Never)
A5 = TypeVar("A5", default=Never)
A6 = TypeVar("A6", default=Never)
A7 = TypeVar("A7", default=Never)

#: The rest of a chain, as a policy sees it.
Call: TypeAlias = Callable[[Context], Awaitable[T]]


class Policy(Executable[D_co]):
    """What to do around a call. `Policy[D]`: `D` is what it may return besides the call's own result.

    Subclass it and write `around`; the same code then runs in threads, in asyncio and in trio:

    >>> class Shout(Policy):
    ...     async def around(self, call, ctx):
    ...         return (await call(ctx)).upper()
    >>> Shout().call(str.strip, "  hello ")
    'HELLO'
    """

    #: The name of this policy in errors and events: by default that of its class.
    name: str = "Policy"

    #: Whether it may run its call several times at once, with `ctx.runtime.race`. In threads, everything inside it then
    #: runs as the coroutines that policies are written as.
    races: ClassVar[bool] = False

    # The private attributes, under names that a subclass will not choose. What may run the rest of a chain more
    # than once says so: to those inside it, a limit is one for each attempt.
    _resilience_repeats: ClassVar[bool] = False
    _resilience_streams: ClassVar[bool] = True  # whether it can stand around a stream

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name the policies of a class after it."""
        super().__init_subclass__(**kwargs)
        owner = next(it for it in cls.__mro__ if "name" in vars(it))  # pragma: no branch (`Policy` has one)
        if owner is not cls and vars(owner)["name"] == owner.__name__:  # not a name that a class has chosen
            cls.name = cls.__name__

    if not TYPE_CHECKING:  # pragma: no branch (to a checker, it would make every name one that may be set)

        def __setattr__(self, name: str, value: object) -> None:
            if name[:1] != "_" and name != "name":
                _check_assignment(self, name, value)
            super().__setattr__(name, value)

    @abstractmethod
    async def around(self, call: Call[T], ctx: Context) -> T | D_co:
        """Run the rest of the chain with `await call(ctx)`, once, several times or not at all.

        Await only `call` and what `ctx` and `ctx.runtime` offer. Pass a derived context inwards (`ctx.child(...)`),
        never a changed one. Only an `Exception` is an outcome: let everything else through, and release what you hold
        in a `finally`.
        """

    def settings(self) -> Mapping[str, object]:
        """Return the parameters that this policy was built with, by name."""
        return {}

    def describe(self) -> str:
        """Return one line that says what this policy does, with every number."""
        return repr(self)

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self).__init__).parameters
        changed = (
            f"{key}={value!r}"
            for key, value in self.settings().items()
            # as text: a backoff made anew is the default
            if key not in parameters or repr(value) != repr(parameters[key].default)
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    # --- composing ---

    # The first policy is `self`: what it answers is `D_co` in `a.wrap(b)`, and `A1` in `Policy.wrap(a, b)`. The union
    # is for pyright: it takes the bare class for a `Policy[Never]`, and would bind `A1` to `Never` before it sees `a`.
    @overload
    def wrap(
        self: Policy[Never] | Policy[A1],
        /,
        *more: Policy[Never],
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co | A1]: ...
    @overload
    def wrap(
        self: Policy[Never] | Policy[A1],
        b: Policy[A2],
        c: Policy[A3] = ...,
        d: Policy[A4] = ...,
        e: Policy[A5] = ...,
        f: Policy[A6] = ...,
        /,
        *more: Policy[A7],
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co | A1 | A2 | A3 | A4 | A5 | A6 | A7]: ...
    def wrap(*policies: Policy[Any], name: str | None = None, listeners: Iterable[Listener] = ()) -> Pipeline[Any]:
        """Put policies around one another: `a.wrap(b, c)` and `Policy.wrap(a, b, c)` are both a(b(c(fn))).

        :param policies: outermost first. A policy may be in many pipelines, which then share its state.
        :param name: the name of the pipeline in errors and events; "Pipeline" by default.
        :param listeners: plain functions of one event, for what happens inside this pipeline.
        :raises TypeError: for an object that is not a policy, and for listeners that cannot be called.

        >>> from resilience import Policy, Retry, Timeout
        >>> Policy.wrap(Retry(), Timeout(2.0), name="users")
        Policy.wrap(Retry(), Timeout(seconds=2.0), name='users')
        """
        return Pipeline(*policies, name=name, listeners=listeners)

    # --- as an execution sees it ---

    @override
    def _resilience_chain(self) -> tuple[Policy[Any], ...]:
        return (self,)

    def _resilience_refuses_until(self) -> float:
        """Return the instant on the process clock until which every call will be refused."""
        return -inf

    def _resilience_races(self) -> bool:
        """Return whether a policy that a call meets may run the rest of the chain several times at once."""
        return self.races

    @override
    def _resilience_blocking(self) -> Stage:
        return compose_for_threads(self._resilience_chain())

    @override
    def _resilience_tasks(self, innermost: Stage) -> Stage:
        return compose(self._resilience_chain(), innermost)


@final
class Pipeline(Policy[D_co]):
    """Policies around one another, the first one outermost: `Pipeline(a, b, c)` is a(b(c(fn))).

    `Policy.wrap(a, b, c)` and `a.wrap(b, c)` make the same. A pipeline is a policy: it nests, and wraps further.
    Where its policies answer with several types, mypy infers their union from `wrap`, but `object` from `Pipeline`.

    :param policies: outermost first, at least one.
    :param name: the name of the pipeline in errors and events; "Pipeline" by default.
    :param listeners: plain functions of one event, for what happens inside this pipeline.
    :raises TypeError: for an object that is not a policy, and for listeners that cannot be called.

    >>> from resilience import Pipeline, Retry, Timeout
    >>> Pipeline(Retry(), Timeout(2.0)).policies
    (Retry(), Timeout(seconds=2.0))
    """

    def __init__(self, *policies: Policy[D_co], name: str | None = None, listeners: Iterable[Listener] = ()) -> None:
        if not policies:
            raise TypeError("a pipeline needs at least one policy")
        for policy in policies:
            _check_policy(policy)
        self._given_name = checks.optional_name(name)
        self.name: str = name or "Pipeline"
        if not isinstance(listeners, Iterable):
            raise TypeError(f"listeners must be a sequence of functions, not {listeners!r}")
        self._resilience_listeners = tuple(listeners)
        for listener in self._resilience_listeners:
            checks.plain_function("listeners", listener, ("event",))
        self._parts: tuple[Policy[Any], ...] = sum((_dissolved(policy) for policy in policies), ())
        self._chain: tuple[Policy[Any], ...] | None = None
        self._races = any(part._resilience_races() for part in self._parts)
        self._resilience_keeps_record = any(it._resilience_keeps_record for it in self._parts)
        self._resilience_foresees = True in [it._resilience_foresees for it in self._parts]
        self._composed: dict[Stage | None, Stage] = {}  # by the innermost stage in tasks; None for threads

    @property
    def policies(self) -> tuple[Policy[Any], ...]:
        """Every policy in the order in which a call meets them, outermost first; nested pipelines are flattened."""
        return sum((part.policies if type(part) is Pipeline else (part,) for part in self._parts), ())

    def find(self, kind: type[W]) -> W:
        """Return the one policy of this class, with its type: `pipeline.find(CircuitBreaker).state`.

        It looks in nested pipelines, too. If there are several, name them and take `pipeline["name"]`.

        :raises LookupError: if there is none.
        :raises ValueError: if there are several.

        >>> from resilience import Retry, Timeout
        >>> Pipeline(Retry(), Timeout(2.0)).find(Timeout)
        Timeout(seconds=2.0)
        """
        if not (isinstance(kind, type) and issubclass(kind, Policy)):
            raise TypeError(f"a policy is found by its class, or by its name, pipeline['name'], not by {kind!r}")
        found = [it for it in self._spelled_out() if isinstance(it, kind)]
        return self._only(found, f"{kind.__name__} in {self.name}", LookupError)

    def __getitem__(self, name: str) -> Policy[Any]:
        """Return the one policy, or nested pipeline, of this name.

        :raises KeyError: if there is none.
        :raises ValueError: if there are several.
        """
        if not isinstance(name, str):  # also what a loop over a pipeline asks for
            raise TypeError(f"a policy is found by its name, not by {name!r}; all of them are in pipeline.policies")
        found = [it for it in self._spelled_out() if it.name == name]
        return self._only(found, f"policy named {name!r} in {self.name}", KeyError)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T | D_co:
        return await compose(self._resilience_chain(), call)(ctx)  # type: ignore[no-any-return]

    @override
    def settings(self) -> Mapping[str, object]:
        return {"policies": self.policies, "name": self._given_name, "listeners": self._resilience_listeners}

    @override
    def describe(self) -> str:
        how_many = "1 policy" if len(self.policies) == 1 else f"{len(self.policies)} policies, outermost first"
        lines = [f"{self.name}: {how_many}"]
        lines += [f"{number}. {policy.describe()}" for number, policy in enumerate(self.policies, 1)]
        return "\n".join(lines)

    @override
    def __repr__(self) -> str:
        extras = [f"name={self._given_name!r}"] if self._given_name else []
        if self._resilience_listeners:
            extras.append(f"listeners={list(self._resilience_listeners)!r}")
        return f"Policy.wrap({', '.join([repr(part) for part in self._parts] + extras)})"

    def __reduce__(self) -> Any:
        """Copy a pipeline as a pipeline of the same policies."""
        make = functools.partial(Pipeline, name=self._given_name, listeners=self._resilience_listeners)
        return make, self._parts

    # --- as an execution sees it ---

    def _spelled_out(self) -> Iterator[Policy[Any]]:
        """Go through the policies and the nested pipelines, outermost first."""
        for part in self._parts:
            yield part
            if type(part) is Pipeline:
                yield from part._spelled_out()

    def _only(self, found: list[W], what: str, missing: type[LookupError]) -> W:
        if not found:
            raise missing(f"there is no {what}, only {', '.join(repr(it.name) for it in self._spelled_out())}")
        if len(found) > 1:
            these = ", ".join(repr(it) for it in found)
            raise ValueError(f"there is more than one {what}: {these}; give each a name of its own")
        return found[0]

    @override
    def _resilience_chain(self) -> tuple[Policy[Any], ...]:
        if self._chain is None:
            heard = (_Heard(self._resilience_listeners),) if self._resilience_listeners else ()
            self._chain = heard + self._inside()
        return self._chain

    @override
    def _resilience_races(self) -> bool:
        return self._races

    @override
    def _resilience_blocking(self) -> Stage:
        stage = self._composed.get(None)
        if stage is None:
            stage = self._composed[None] = compose_for_threads(self._inside())
        return stage

    @override
    def _resilience_tasks(self, innermost: Stage) -> Stage:
        stage = self._composed.get(innermost)
        if stage is None:
            stage = self._composed[innermost] = compose(self._inside(), innermost)
        return stage

    def _inside(self) -> tuple[Policy[Any], ...]:
        """Return the policies that a call meets whose execution knows the listeners: it is this pipeline's own."""
        return sum((part._resilience_chain() for part in self._parts), ())


@final
class _Heard(Policy[Never]):
    """Lets the listeners of a pipeline inside another one hear what happens in it."""

    def __init__(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        return await call(ctx._with_info(ctx._info.with_listeners(*self._listeners)))


def _check_policy(policy: object) -> None:
    if not isinstance(policy, Policy):
        hint = ""
        if isinstance(policy, type) and issubclass(policy, Policy):
            hint = ": make an instance of it"
        elif isinstance(policy, (list, tuple)):
            hint = ": unpack them, Pipeline(*policies)"
        elif callable(policy):
            hint = f"; to run {name_of(policy)} under policies, write Pipeline(...)({name_of(policy)})"
        raise TypeError(f"only policies can be wrapped, not {policy!r}{hint}")


def _check_assignment(policy: Policy[Any], name: str, value: object) -> None:
    """Refuse to put a value in the place of a method (a stub may stand there), and to set what a policy was built with.

    The library's own policies read their parameters once; what a user's class keeps in public is its own affair.
    """
    kind = type(policy)
    is_method = callable(getattr(kind, name, None)) and not callable(value)
    if is_method or (kind.__module__.startswith("resilience.") and name in inspect.signature(kind).parameters):
        hint = f": build another one, `{kind.__name__}({name}={value!r})`" if name in policy.settings() else ""
        what = "a method" if is_method else "a parameter"
        raise AttributeError(f"{name} is {what} of {kind.__name__}, which does not change once it is built{hint}")


def _dissolved(policy: Policy[Any]) -> tuple[Policy[Any], ...]:
    """Return the parts of a pipeline without a name or listeners, which is only a way of writing its policies."""
    if type(policy) is Pipeline and not policy._given_name and not policy._resilience_listeners:
        return policy._parts
    return (policy,)
