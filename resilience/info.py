"""What the contexts of one execution share besides the call: the operation, properties, listeners, the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, final

from resilience.record import Named, Record
from resilience.repeats import Cap

#: A plain function that takes one event.
Listener: TypeAlias = Callable[[Any], object]

NO_PROPERTIES: Mapping[str, Any] = MappingProxyType({})


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
    foreseeing: tuple[Named, ...] = ()
    limiters: tuple[Named, ...] = ()


NO_INFO = ExecutionInfo(None, NO_PROPERTIES)

#: The info of a context that contains nothing but the call: the execution inherits nothing, no policy has derived a
#: child from the context, and the function does not get it. Such a context need not become the ambient one.
BARE = ExecutionInfo(None, NO_PROPERTIES)
