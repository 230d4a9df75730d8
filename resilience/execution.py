"""An execution that has something to inherit, or somebody to report to.

Most have neither, and go straight to the chain. This one takes over the deadline and the facts of
the context around it, keeps the record that the caller's `Context` then shows, and tells the
listeners of `ExecutionFinished`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from resilience import events
from resilience.clock import clock
from resilience.context import Context, Facts, Record, get_ambient
from resilience.outcome import Failure, Outcome, Success

if TYPE_CHECKING:
    from resilience.events import Listener


@final
class Execution:
    """The block around one run of a chain. `value` is set inside it to what came out.

    :param policy: the name of what is executed.
    :param listeners: those who listen to it alone.
    :param inner: the new context of this execution.
    :param ctx: the context that the caller passed in, if any.
    """

    __slots__ = ("_listeners", "_policy", "_record", "_inner", "value")

    def __init__(
        self,
        policy: str,
        listeners: tuple[Listener, ...],
        inner: Context,
        ctx: Context | None,
    ) -> None:
        self._policy = policy
        self._listeners = listeners
        self._inner = inner
        self._record: Record | None = None
        self.value: Any = None
        outer = get_ambient()
        source = ctx or outer
        if source is not None:
            inner.deadline = source.deadline if outer is None else min(source.deadline, outer.deadline)
            inner._facts = Facts(source.operation, source.properties)
        if ctx is not None or self._is_heard():
            self._record = Record()
            inner._facts = inner._facts._replace(record=self._record)
            if ctx is not None:
                ctx._report = self._record

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._record is None:
            return
        self._record.ended = clock.now()
        if self._is_heard():
            self._tell(error)

    def _is_heard(self) -> bool:
        return bool(self._listeners) or events.finishing.is_heard

    def _tell(self, error: BaseException | None) -> None:
        assert self._record is not None
        outcome: Outcome[Any] | None = None  # cancelled or interrupted: no outcome
        if error is None:
            outcome = Success(self.value)
        elif isinstance(error, Exception):
            outcome = Failure(error)
        heard = self._inner.child()
        heard._facts = heard._facts._replace(listeners=self._listeners)
        numbers = {"attempts": self._record.attempts, "elapsed": self._record.elapsed, "outcome": outcome}
        events.emit(events.ExecutionFinished, self._policy, heard, **numbers)
