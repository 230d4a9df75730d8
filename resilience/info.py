"""What an execution is about: what is called, what for, its listeners, and the record that is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, final

from resilience.record import Executed, Record
from resilience.repeats import Cap

#: A plain function of one event.
Listener: TypeAlias = Callable[[Any], object]

NO_PROPERTIES: Mapping[str, Any] = MappingProxyType({})


class Called(NamedTuple):
    """What an execution calls, and with what. Under `execute`, `arguments` is the context alone."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@final
class ExecutionInfo:
    """What contexts of an execution have in common, besides the call. Never written to once it is made.

    :param cap: what the repeats of this execution, and of all inside it, are taken from; None where there is no cap.
    :param hedge: 0, or the number of the attempt beside another one.
    :param chosen: the policies that a `Keyed` has chosen for what runs with this, where that asks for them.
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
        chosen: tuple[Executed, ...] = (),
    ) -> None:
        self.operation: str | None = operation
        self.properties: Mapping[str, Any] = properties
        self.listeners: tuple[Listener, ...] = listeners
        self.record: Record | None = record
        self.cap: Cap | None = cap
        self.hedge: int = hedge
        self.chosen: tuple[Executed, ...] = chosen

    def with_listeners(self, *listeners: Listener) -> ExecutionInfo:
        """Return the same, with these listeners added."""
        return self._copy(self.listeners + listeners, self.cap, self.hedge, self.chosen)

    def with_properties(self, properties: Mapping[str, Any]) -> ExecutionInfo:
        """Return the same, with these properties added."""
        merged = MappingProxyType({**self.properties, **properties})
        return ExecutionInfo(self.operation, merged, self.listeners, self.record, self.cap, self.hedge, self.chosen)

    def with_cap(self, cap: Cap) -> ExecutionInfo:
        """Return the same, with a cap on repeats."""
        return self._copy(self.listeners, cap, self.hedge, self.chosen)

    def with_hedge(self, hedge: int) -> ExecutionInfo:
        """Return the same, for an attempt of this number beside another one."""
        return self._copy(self.listeners, self.cap, hedge, self.chosen)

    def with_chosen(self, policy: Executed) -> ExecutionInfo:
        """Return the same, with a policy that was chosen for the call."""
        return self._copy(self.listeners, self.cap, self.hedge, (*self.chosen, policy))

    def _copy(
        self, listeners: tuple[Listener, ...], cap: Cap | None, hedge: int, chosen: tuple[Executed, ...]
    ) -> ExecutionInfo:
        return ExecutionInfo(self.operation, self.properties, listeners, self.record, cap, hedge, chosen)


NO_INFO = ExecutionInfo()

#: That of a context which says no more than a fresh one: its execution inherits nothing, no policy has derived another
#: one from it, and the function is not handed it. So it need not be made the ambient one. In tasks its function is an
#: `async def`, too, which does nothing before it is awaited.
BARE = ExecutionInfo()
