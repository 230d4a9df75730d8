"""What the clients of both worlds share: how a call is limited, and how the policies see its failure.

gRPC gives each call one deadline, which its own core keeps, here and on the server. So the time that is
left becomes the `timeout` of each attempt, and a call that ran into it ends by itself: nothing has to be
cancelled. To the policies such a call is out of time (`DeadlineExceeded`), not a failure of the server;
the `Timeout` whose limit it was makes it its own. If it comes out of the pipeline, it is turned back into
the status that gRPC's callers know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, final

import grpc  # type: ignore[import-untyped]

from resilience.context import Context, current_context
from resilience.errors import DeadlineExceeded
from resilience.policy import Policy

#: gRPC tells us when a retry is welcome (gRFC A6): milliseconds, or -1 for "do not".
PUSHBACK = "grpc-retry-pushback-ms"

#: Seconds by which gRPC's timers and our clock may differ.
GRAIN = 0.05


@final
class OutOfTime(DeadlineExceeded):
    """A call that ran into the deadline that we gave it.

    :param status: the error that gRPC raised.
    """

    def __init__(self, message: str = "", *, policy: str | None = None, status: Any = None) -> None:
        super().__init__(message, policy=policy)
        self.status: Any = status


@final
class Kept:
    """The call that belongs to each reply, so that the one that comes out of the policies comes with its call."""

    def __init__(self) -> None:
        self._calls: list[tuple[object, Any]] = []

    def keep(self, reply: object, call: Any) -> None:
        """Remember the call of a reply."""
        self._calls.append((reply, call))

    def call_of(self, reply: object, answer: Callable[[Any], Any]) -> Any:
        """Return the call that this very reply came from; where a policy has answered instead, what `answer` makes."""
        for each, call in self._calls:
            if each is reply:
                return call
        return answer(reply)


def checked(policy: Policy[Any], unrepeatable: Iterable[str]) -> frozenset[str]:
    """Check the arguments of an interceptor; return the methods that are never repeated."""
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a policy, not {policy!r}")
    if isinstance(unrepeatable, str) or not isinstance(unrepeatable, Collection):
        raise TypeError(f"unrepeatable must be a collection of methods, not {unrepeatable!r}")
    for method in unrepeatable:
        if not isinstance(method, str) or not method.startswith("/"):
            raise ValueError(f"unrepeatable must name methods as '/package.Service/Method', not {method!r}")
    return frozenset(unrepeatable)


def method_of(details: Any) -> str:
    """Return the full name of the method that is called."""
    method: str | bytes = details.method
    return method.decode() if isinstance(method, bytes) else method


def context_of(details: Any) -> Context:
    """Return the context of an execution: the caller's own `timeout` is for all attempts together, as in gRPC."""
    outer = current_context()
    timeout = None if details.timeout is None else max(0.0, details.timeout)
    operation = outer.operation or method_of(details)
    return Context(timeout=timeout, operation=operation, properties=outer.properties)


def is_replayable(requests: object) -> bool:
    """Whether a stream of requests can be sent once more: a list or a tuple, nothing that may be used up."""
    return isinstance(requests, Sequence)


def ran_out(error: Any, ctx: Context) -> bool:
    """Whether a call failed because the time that we gave it was over."""
    code = getattr(error, "code", None)  # a bare `RpcError` of somebody's has none
    return callable(code) and code() is grpc.StatusCode.DEADLINE_EXCEEDED and ctx.remaining() <= GRAIN


def out_of_time(error: Any) -> OutOfTime:
    """Return what the policies see in the place of a call that ran into our deadline."""
    return OutOfTime("the call ran into the deadline of the execution", status=error)


def add_hints(error: Any, *, repeatable: bool) -> None:
    """Tell Retry what it has to know of a failed call, as attributes of the error."""
    pushback = _pushback(error)
    if pushback is not None and pushback >= 0:
        error.retry_after = pushback / 1000
    if not repeatable or (pushback is not None and pushback < 0):
        error.repeatable = False


def _pushback(error: Any) -> int | None:
    """Return the milliseconds that the server asks to wait; negative for "never", as is anything unreadable (A6)."""
    metadata: Any = getattr(error, "trailing_metadata", tuple)() or ()
    said = [value for key, value in metadata if key == PUSHBACK]
    if not said:
        return None
    text = said[-1] if isinstance(said[-1], str) else said[-1].decode("latin-1")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
