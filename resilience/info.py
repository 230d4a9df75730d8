"""The data that the contexts of one execution share: the call, the operation, properties, listeners, the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
class ExecutionInfo:
    """The data that the contexts of one execution share, besides the call. Immutable.

    :param cap: the cap on the repeats of this execution and of all executions inside it; None without a cap.
    :param hedge: the number of the attempt that a `Hedge` started beside the first; otherwise 0.
    :param chosen: the pipelines that can foresee refusals to which another policy, such as a `Keyed`, has passed the
        call; and, if the function asks for them, the rate limiters around it.
    """

    __slots__ = ("cap", "chosen", "hedge", "listeners", "operation", "properties", "record")

    def __init__(
        self,
        operation: str | None = None,
        properties: Mapping[str, Any] = NO_PROPERTIES,
        listeners: tuple[Listener, ...] = (),
        record: Record | None = None,
        cap: Cap | None = None,
        hedge: int = 0,
        chosen: tuple[Named, ...] = (),
    ) -> None:
        self.operation: str | None = operation
        self.properties: Mapping[str, Any] = properties
        self.listeners: tuple[Listener, ...] = listeners
        self.record: Record | None = record
        self.cap: Cap | None = cap
        self.hedge: int = hedge
        self.chosen: tuple[Named, ...] = chosen

    def with_listeners(self, *listeners: Listener) -> ExecutionInfo:
        """Return a copy with these listeners added."""
        return self._copy(self.listeners + listeners, self.cap, self.hedge, self.chosen)

    def with_properties(self, properties: Mapping[str, Any]) -> ExecutionInfo:
        """Return a copy with these properties added."""
        merged = MappingProxyType({**self.properties, **properties})
        return ExecutionInfo(self.operation, merged, self.listeners, self.record, self.cap, self.hedge, self.chosen)

    def with_cap(self, cap: Cap) -> ExecutionInfo:
        """Return a copy with a cap on repeats."""
        return self._copy(self.listeners, cap, self.hedge, self.chosen)

    def with_hedge(self, hedge: int) -> ExecutionInfo:
        """Return a copy for the hedged attempt of this number."""
        return self._copy(self.listeners, self.cap, hedge, self.chosen)

    def with_chosen(self, policy: Named) -> ExecutionInfo:
        """Return a copy with a policy added to `chosen`."""
        return self._copy(self.listeners, self.cap, self.hedge, (*self.chosen, policy))

    def _copy(
        self, listeners: tuple[Listener, ...], cap: Cap | None, hedge: int, chosen: tuple[Named, ...]
    ) -> ExecutionInfo:
        return ExecutionInfo(self.operation, self.properties, listeners, self.record, cap, hedge, chosen)


NO_INFO = ExecutionInfo()

#: The info of a context that contains nothing but the call: the execution inherits nothing, no policy has derived a
#: child from the context, and the function does not get it. Such a context need not become the ambient one.
BARE = ExecutionInfo()
