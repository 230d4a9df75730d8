"""What `each` is to do, and one of its calls, in threads as in tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Never, TypeAlias

from resilience.errors import closable
from resilience.log import logger
from resilience.outcome import Outcome
from resilience.policy import Policy

#: Called with the number of items whose outcome has been delivered since the last time: `tqdm`'s `update`.
Progress: TypeAlias = Callable[[int], object]


class Job(NamedTuple):
    """The arguments of `each`."""

    policy: Policy[Any]
    function: Callable[[Any], Any]
    items: Any
    limit: int
    ordered: bool
    progress: Progress | None

    def resource(self, call: Call) -> Any:
        """Return what has to be closed if a call is not delivered; None if there is nothing, or others may have it."""
        is_shared = any(it._resilience_shares_results for it in self.policy._resilience_chain())
        return None if is_shared or not hasattr(call, "outcome") else closable(call.outcome)

    def pair(self, call: Call) -> tuple[Any, Outcome[Any]] | None:
        """Return the item of a call and its outcome, and report the progress; None for an error that is no outcome."""
        if isinstance(call.outcome, BaseException):
            return None
        if self.progress is not None:
            try:
                self.progress(1)
            except Exception:  # otherwise the outcome would be lost
                logger.exception("progress raised; it changes nothing")
        return call.item, call.outcome


class Call:
    """A call, with its outcome, or an error that is not an outcome, once it has ended."""

    __slots__ = ("item", "outcome")

    outcome: Outcome[Any] | BaseException

    def __init__(self, item: Any) -> None:
        self.item: Any = item

    def raise_error(self) -> Never:
        """Raise the error that is not an outcome."""
        error: Any = self.outcome
        del self.outcome
        try:
            raise error
        finally:
            del error  # no cycle: error -> traceback -> this frame -> error
