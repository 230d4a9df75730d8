"""What the contexts of one execution share besides the call: the operation, properties, listeners, the record.

Also what the modules below the policies know of a policy, and of what is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, final

from resilience.record import Record
from resilience.repeats import Cap

#: A plain function that takes one event.
Listener: TypeAlias = Callable[[Any], object]

NO_PROPERTIES: Mapping[str, Any] = MappingProxyType({})


class Composable(Protocol):
    """A policy as a part of a chain. `Policy` describes the attributes."""

    name: str
    races: ClassVar[bool]
    _resilience_repeats: ClassVar[bool]
    _resilience_streams: ClassVar[bool]
    _resilience_answers: ClassVar[bool]

    def _resilience_refuses_until(self) -> float: ...

    async def around(self, call: Any, ctx: Any) -> Any:
        """Run the rest of the chain."""


class Executed(Protocol):
    """A policy, or a pipeline of policies, as what is executed. `Executable` describes the attributes."""

    name: str
    _resilience_keeps_record: bool
    _resilience_uses_workers: bool
    _resilience_foresees: bool
    _resilience_listeners: tuple[Listener, ...]

    def _resilience_chain(self) -> tuple[Composable, ...]: ...

    def _resilience_stage(self, innermost: Callable[[Any], Any] | None) -> Callable[[Any], Any]: ...


class Called(NamedTuple):
    """The function that an execution calls, and its arguments. Under `execute`, `arguments` is the context alone."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@final
@dataclass(slots=True, eq=False)  # never changed, but a frozen one would take three times as long to make
class ExecutionInfo:
    """The data that the contexts of one execution share, besides the call.

    :param cap: the cap on the repeats of this execution and of all executions inside it; None without a cap.
    :param hedge: the number of the attempt that a `Hedge` started beside the first; otherwise 0.
    :param foreseeing: the pipelines, besides the executed one, that can foresee refusals: another policy, such as a
        `Keyed`, has passed its call to them.
    :param limiters: the rate limiters around the function, if it asks for them.
    """

    operation: str | None
    properties: Mapping[str, Any]
    listeners: tuple[Listener, ...] = ()
    record: Record | None = None
    cap: Cap | None = None
    hedge: int = 0
    foreseeing: tuple[Executed, ...] = ()
    limiters: tuple[Composable, ...] = ()


NO_INFO = ExecutionInfo(None, NO_PROPERTIES)

#: The info of a context that contains nothing but the call: the execution inherits nothing, no policy has derived a
#: child from the context, and the function does not get it. Such a context need not become the ambient one.
BARE = ExecutionInfo(None, NO_PROPERTIES)
