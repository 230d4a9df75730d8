"""Policies, and pipelines of policies, in one module because `Policy.wrap` returns a `Pipeline`, which is a `Policy`.

A policy is one coroutine, `around(call, ctx)`, which runs the rest of the chain with `await call(ctx)`. A pipeline
composes policies. The methods that execute functions are in `executable`.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from math import inf
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Never, Self, SupportsIndex, TypeAlias, final, get_origin, overload

from typing_extensions import TypeVar, override

from resilience import checks
from resilience.callables import name_of
from resilience.context import Context
from resilience.executable import Executable
from resilience.execution import Stage, compose
from resilience.info import Listener

T = TypeVar("T")
W = TypeVar("W", bound="Policy[Any]")
D_co = TypeVar("D_co", covariant=True, default=Never)

# The types of the policies' own answers. One for each policy, because mypy joins those of `*policies` to `object`.
A1 = TypeVar("A1", default=Never)
A2 = TypeVar("A2", default=Never)
A3 = TypeVar("A3", default=Never)
A4 = TypeVar("A4", default=Never)
A5 = TypeVar("A5", default=Never)
A6 = TypeVar("A6", default=Never)
A7 = TypeVar("A7", default=Never)

_set = object.__setattr__

#: The rest of a chain, as a policy sees it.
Call: TypeAlias = Callable[[Context], Awaitable[T]]


class Policy(Executable[D_co]):
    """Code that runs around a call. `Policy[D]`: `D` is what it may return besides the call's own result.

    Subclass it and write `around`; the same code then runs in threads, in asyncio and in trio:

    >>> class Shout(Policy):
    ...     async def around(self, call, ctx):
    ...         return (await call(ctx)).upper()
    >>> Shout().call(str.strip, "  hello ")
    'HELLO'
    """

    name: str = "Policy"
    """The name of this policy in errors and events; by default, the name of its class."""

    races: ClassVar[bool] = False
    """Whether it may run its call several times at once, with `ctx.runtime.race`. In threads, the policies inside it
    then always run as coroutines."""

    # Whether it may run the rest of the chain several times: then a limit inside it is a limit for each attempt.
    _resilience_repeats: ClassVar[bool] = False
    _resilience_streams: ClassVar[bool] = True  # whether it can be used around a stream
    _resilience_shares: ClassVar[str] = ""  # the state that all users of one object share
    _resilience_shares_results: ClassVar[bool] = False  # whether several callers may get the same result
    _resilience_answers: ClassVar[bool] = False  # whether it may answer a call that a policy inside refuses
    # What `settings` returns. The policies of which a program may have one for each host compute it, to save memory.
    _resilience_settings: Mapping[str, object] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the name of the class the default name of its policies, and refuse an `around` with other parameters."""
        super().__init_subclass__(**kwargs)
        around = vars(cls).get("around")
        if isinstance(around, FunctionType):
            checks.parameters(f"{cls.__name__}.around", around, ("self", "call", "ctx"))
            if around.__code__.co_varnames[1:3] == ("ctx", "call"):
                raise TypeError(f"{cls.__name__}.around is called as around(call, ctx), not around(ctx, call)")
        owner = next(it for it in cls.__mro__ if "name" in vars(it))  # pragma: no branch (`Policy` has one)
        if vars(owner)["name"] == owner.__name__:  # the name is not one set explicitly
            cls.name = cls.__name__

    if TYPE_CHECKING:  # what a type checker infers for `Keyed`: the class of a policy, and what it may answer

        def _resilience_class(self) -> Self: ...
        def _resilience_answer(self) -> D_co: ...

    if not TYPE_CHECKING:  # pragma: no branch (type checkers would allow an assignment to any name)

        def __setattr__(self, name: str, value: object) -> None:
            if name[:1] != "_" and name != "name":
                _check_assignment(self, name, value)
            _set(self, name, value)

    @abstractmethod
    async def around(self, call: Call[T], ctx: Context) -> T | D_co:
        """Run the rest of the chain with `await call(ctx)`, once, several times or not at all.

        Await only `call` and what `ctx` and `ctx.runtime` offer. Pass a derived context inwards (`ctx.child(...)`),
        never a changed one. Only an `Exception` is an outcome: let everything else through, and release what you hold
        in a `finally`.
        """
        return await call(ctx)  # for `super().around(call, ctx)`

    def settings(self) -> Mapping[str, object]:
        """Return the parameters that this policy was built with, by name."""
        return self._resilience_settings

    def describe(self) -> str:
        """Return one line that says what this policy does, with all of its numbers."""
        return repr(self)

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self).__init__).parameters
        changed = (
            f"{key}={_shown(key, value)}"
            for key, value in self.settings().items()
            # as text, because two equal backoffs are different objects
            if key not in parameters or repr(value) != repr(parameters[key].default)
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> str | tuple[Any, ...]:
        """Refuse to be copied or pickled if its users share a state: two copies would let twice as many calls run."""
        if self._resilience_shares:
            raise TypeError(
                f"{self.name} cannot be copied or pickled, because all its users share its {self._resilience_shares}: "
                "build another one"
            )
        return super().__reduce_ex__(protocol)

    def _resilience_set_up(self, parameters: Mapping[str, Any]) -> None:
        """Keep a constructor's parameters (`locals()`) as the settings, with durations in seconds; set the name."""
        self._resilience_settings = {
            key: value.total_seconds() if isinstance(value, timedelta) else value
            for key, value in parameters.items()
            if key != "self"
        }
        self._resilience_set_name(parameters["name"])

    def _resilience_set_name(self, name: str | None) -> None:
        """Set the given name. Without one, that of the class is the name."""
        given = checks.optional_name(name)
        if given is not None:
            self.name = given

    @property
    def _resilience_given_name(self) -> str | None:
        return vars(self).get("name")

    # --- composing ---

    # The first policy is `self`: its answer has the type `D_co` in `a.wrap(b)`, and `A1` in `Policy.wrap(a, b)`. The
    # union is for pyright: it takes the bare class for a `Policy[Never]`, and would bind `A1` to `Never` too early.
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
    @checks.on_objects
    def wrap(*policies: Policy[Any], name: str | None = None, listeners: Iterable[Listener] = ()) -> Pipeline[Any]:
        """Put policies around one another: `a.wrap(b, c)` and `Policy.wrap(a, b, c)` are both a(b(c(fn))).

        :param policies: outermost first. A policy may be in many pipelines, which then share its state.
        :param name: the name of the pipeline in errors and events; "Pipeline" by default.
        :param listeners: plain functions of one event, called with each event inside this pipeline.
        :raises TypeError: for an object that is not a policy, and for listeners that cannot be called.

        >>> from resilience import Policy, Retry, Timeout
        >>> Policy.wrap(Retry(), Timeout(2.0), name="users")
        Policy.wrap(Retry(), Timeout(seconds=2.0), name='users')
        """
        return Pipeline(*policies, name=name, listeners=listeners)

    # --- for executions ---

    @override
    def _resilience_chain(self) -> tuple[Policy[Any], ...]:
        return (self,)

    def _resilience_refuses_until(self) -> float:
        """Return the instant on the process clock until which all calls will be refused; -infinity if there is none."""
        return -inf


@final
class Pipeline(Policy[D_co]):
    """Policies around one another, the first one outermost: `Pipeline(a, b, c)` is a(b(c(fn))).

    `Policy.wrap(a, b, c)` and `a.wrap(b, c)` are equivalent. A pipeline is a policy, so it can be nested and wrapped.
    If its policies answer with several types, mypy infers their union from `wrap`, but `object` from `Pipeline`.

    :param policies: outermost first, at least one.
    :param name: the name of the pipeline in errors and events; "Pipeline" by default.
    :param listeners: plain functions of one event, called with each event inside this pipeline.
    :raises TypeError: for an object that is not a policy, and for listeners that cannot be called.

    >>> from resilience import Pipeline, Retry, Timeout
    >>> Pipeline(Retry(), Timeout(2.0)).policies
    (Retry(), Timeout(seconds=2.0))
    """

    def __init__(self, *policies: Policy[D_co], name: str | None = None, listeners: Iterable[Listener] = ()) -> None:
        if not policies:
            raise TypeError("a pipeline needs at least one policy")
        parts: list[Policy[Any]] = []
        for policy in policies:
            # The real type first, because `isinstance` of an abstract class would be a seventh of the time of all this.
            if Policy not in type(policy).__mro__ and not isinstance(policy, Policy):
                raise _no_policy(policy)
            parts += policy._as_parts() if type(policy) is Pipeline else (policy,)
        self._resilience_set_name(name)
        self._resilience_listeners = checks.several("listeners", listeners, "a sequence of functions")
        for listener in self._resilience_listeners:
            checks.plain_function("listeners", listener, ("event",))
        if self._resilience_listeners:
            self._resilience_keeps_record = True
        chain: list[Policy[Any]] = []
        for part in parts:
            chain += part._as_chain() if type(part) is Pipeline else (part,)
            if part._resilience_keeps_record:  # what a part needs, the pipeline needs; the class has the defaults
                self._resilience_keeps_record = True
            if part._resilience_foresees:
                self._resilience_foresees = True
            if part._resilience_uses_workers:
                self._resilience_uses_workers = True
        # What may race may also be a `Keyed`, whose policies are not known yet, such as a Timeout. That matters only to
        # a breaker: without one, each call under a `Keyed` would take twice as long for nothing.
        if self._resilience_foresees and any(it.races for it in chain):
            self._resilience_uses_workers = True
        self._parts, self._chain = tuple(parts), tuple(chain)
        self._composed: dict[Stage | None, Stage] = {}  # by the argument of `_resilience_stage`

    @property
    def policies(self) -> tuple[Policy[Any], ...]:
        """All policies, outermost first, which is the order in which a call passes them; pipelines are flattened."""
        return sum((part.policies if type(part) is Pipeline else (part,) for part in self._parts), ())

    def find(self, kind: type[W]) -> W:
        """Return the one policy of this class, with its type: `pipeline.find(CircuitBreaker).state`.

        Nested pipelines are searched, too. Type arguments, as in `Keyed[CircuitBreaker]`, are for type checkers only.

        :raises LookupError: if there is none.
        :raises ValueError: if there are several; name them, and use `pipeline["name"]` instead.

        >>> from resilience import Retry, Timeout
        >>> Pipeline(Retry(), Timeout(2.0)).find(Timeout)
        Timeout(seconds=2.0)
        """
        given, kind = kind, get_origin(kind) or kind
        if not (isinstance(kind, type) and issubclass(kind, Policy)):
            raise TypeError(f"a policy is found by its class, or by its name, pipeline['name'], not by {given!r}")
        found = [it for it in self._walk() if isinstance(it, kind)]
        return self._single(found, f"{kind.__name__} in {self.name}", LookupError)

    def __getitem__(self, name: str) -> Policy[Any]:
        """Return the one policy, or nested pipeline, of this name.

        :raises KeyError: if there is none.
        :raises ValueError: if there are several.
        """
        if not isinstance(name, str):  # iteration over a pipeline asks for index 0
            raise TypeError(f"a policy is found by its name, not by {name!r}; all of them are in pipeline.policies")
        found = [it for it in self._walk() if it.name == name]
        return self._single(found, f"policy named {name!r} in {self.name}", KeyError)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T | D_co:
        if self._resilience_foresees:  # a Retry in it looks here for the circuits inside it
            ctx = ctx._with(foreseeing=(*ctx._info.foreseeing, self))
        return await compose(self._as_chain(), call)(ctx)  # type: ignore[no-any-return]

    @override
    def settings(self) -> Mapping[str, object]:
        return {"policies": self.policies, "name": self._resilience_given_name, "listeners": self._resilience_listeners}

    @override
    def describe(self) -> str:
        how_many = "1 policy" if len(self.policies) == 1 else f"{len(self.policies)} policies, outermost first"
        lines = [f"{self.name}: {how_many}"]
        lines += [f"{number}. {policy.describe()}" for number, policy in enumerate(self.policies, 1)]
        return "\n".join(lines)

    @override
    def __repr__(self) -> str:
        extras = [f"name={self._resilience_given_name!r}"] if self._resilience_given_name else []
        if self._resilience_listeners:
            extras.append(f"listeners={list(self._resilience_listeners)!r}")
        return f"Policy.wrap({', '.join([repr(part) for part in self._parts] + extras)})"

    def __reduce__(self) -> Any:
        """Copy and pickle a pipeline as a new pipeline of the same policies."""
        make = functools.partial(Pipeline, name=self._resilience_given_name, listeners=self._resilience_listeners)
        return make, self._parts

    def _as_parts(self) -> tuple[Policy[Any], ...]:
        """Return what it is in another pipeline: itself if it has a name or listeners, otherwise its parts."""
        return (self,) if self._resilience_given_name or self._resilience_listeners else self._parts

    def _as_chain(self) -> tuple[Policy[Any], ...]:
        """Return its chain within another one. The context of an execution has only the listeners of the whole."""
        listeners = self._resilience_listeners
        return (_WithListeners(listeners), *self._chain) if listeners else self._chain

    def _walk(self) -> Iterator[Policy[Any]]:
        """Yield the policies and the nested pipelines, outermost first."""
        for part in self._parts:
            yield part
            if type(part) is Pipeline:
                yield from part._walk()

    def _single(self, found: list[W], what: str, missing: type[LookupError]) -> W:
        if not found:
            raise missing(f"there is no {what}, only {', '.join(repr(it.name) for it in self._walk())}")
        if len(found) > 1:
            raise ValueError(f"there is more than one {what}: {', '.join(map(repr, found))}; give each a name")
        return found[0]

    # --- for executions ---

    @override
    def _resilience_chain(self) -> tuple[Policy[Any], ...]:
        return self._chain

    @override
    def _resilience_stage(self, innermost: Stage | None) -> Stage:
        stage = self._composed.get(innermost)
        if stage is None:
            stage = self._composed[innermost] = super()._resilience_stage(innermost)
        return stage


def as_pipeline(policy: Policy[Any]) -> Pipeline[Any]:
    """Return a pipeline of this name that keeps the chain of a policy, where each call has a function of its own."""
    if type(policy) is Pipeline:
        return policy
    pipeline = Pipeline(policy)
    pipeline.name = policy.name  # not as a parameter: a policy of the user's own may have any name, even ""
    return pipeline


@final
class _WithListeners(Policy[Never]):
    """Adds the listeners of a nested pipeline to the context."""

    def __init__(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        return await call(ctx._with(listeners=ctx._info.listeners + self._listeners))


def _no_policy(value: object) -> TypeError:
    """Return the error for a part of a pipeline that is not a policy."""
    hint = ""
    if isinstance(value, type) and issubclass(value, Policy):
        hint = ": make an instance of it"
    elif isinstance(value, (list, tuple)):
        hint = ": unpack them, Pipeline(*policies)"
    elif hasattr(value, "for_host"):
        hint = ": wrap the policy of each host, PerHost(lambda origin: Pipeline(..., policies.for_host(origin)))"
    elif callable(value):
        hint = f"; to run {name_of(value)} under policies, write Pipeline(...)({name_of(value)})"
    return TypeError(f"only policies can be wrapped, not {value!r}{hint}")


def _check_assignment(policy: Policy[Any], name: str, value: object) -> None:
    """Refuse an assignment to a method, except of another callable (a test's stub), and to any other attribute.

    The second rule applies only to the library's own policies, which read their parameters once.
    """
    kind = type(policy)
    is_method = callable(getattr(kind, name, None))
    is_refused = not callable(value) if is_method else kind.__module__.startswith("resilience.")
    if is_refused:
        hint = f": build another one, `{kind.__name__}({name}={value!r})`" if name in policy.settings() else ""
        known = "a parameter" if name in inspect.signature(kind).parameters else "no attribute"
        what = "a method" if is_method else "an attribute" if hasattr(kind, name) else known
        raise AttributeError(f"{name} is {what} of {kind.__name__}, which does not change once it is built{hint}")


def _shown(key: str, value: object) -> str:
    """Return the repr of a setting, without the entries of a store: they are the results of calls."""
    return f"<{type(value).__name__}>" if key == "store" and isinstance(value, Mapping) else repr(value)
