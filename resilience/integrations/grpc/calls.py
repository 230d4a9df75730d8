"""What the clients of both worlds share: how a call is limited, and how the policies see its failure.

gRPC gives each call one deadline, which its own core keeps, here and on the server. So the time that is
left becomes the `timeout` of each attempt, and a call that ran into it ends by itself: nothing has to be
cancelled. To the policies such a call is out of time (`DeadlineExceeded`), not a failure of the server;
the `Timeout` whose limit it was makes it its own. If it comes out of the pipeline, it is turned back into
the status that gRPC's callers know; and so is a `DeadlineExceeded` of a policy, where the time was over before a call
was made.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from typing_extensions import override

from resilience.context import Context, current_context
from resilience.errors import DeadlineExceeded
from resilience.integrations.http import NotRepeatable
from resilience.policy import Policy

#: gRPC tells us when a retry is welcome (gRFC A6): milliseconds, or -1 for "do not".
PUSHBACK = "grpc-retry-pushback-ms"

#: Seconds by which gRPC's timers and our clock may differ.
GRAIN = 0.05

#: Replies of a call that are kept, the last ones: a policy may go on for hours because of what they say.
_KEPT = 8


@final
class OutOfTime(DeadlineExceeded):
    """A call that ran into the deadline that we gave it.

    :param status: the error that gRPC raised.
    """

    def __init__(self, message: str = "", *, policy: str | None = None, status: Any = None) -> None:
        super().__init__(message, policy=policy)
        self.status: Any = status


@final
class _DeadlineStatus(DeadlineExceeded, grpc.aio.AioRpcError):  # type: ignore[misc]
    """The status of a call that was not made, because its time was over: `DEADLINE_EXCEEDED`.

    To an interceptor around ours it is also the call itself, which grpc's blocking channels hand out in its place.
    """

    def __init__(self, message: str = "", *, policy: str | None = None, timeout: float | None = None) -> None:
        DeadlineExceeded.__init__(self, message, policy=policy, timeout=timeout)
        self.message: str = message

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return self.message

    def debug_error_string(self) -> str:
        return ""

    def initial_metadata(self) -> tuple[()]:
        return ()

    trailing_metadata = initial_metadata

    def result(self, timeout: float | None = None) -> Any:
        raise self

    def exception(self, timeout: float | None = None) -> _DeadlineStatus:
        return self

    def traceback(self, timeout: float | None = None) -> Any:
        return self.__traceback__

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        fn(self)

    def done(self) -> bool:
        return True

    def cancelled(self) -> bool:
        return False

    running = cancel = cancelled

    @override
    def __str__(self) -> str:
        return self.message

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"


def as_status(error: DeadlineExceeded) -> Any:
    """Return what gRPC's callers know a call by whose time was over: gRPC's own error, if it was made at all."""
    if isinstance(error, OutOfTime):
        return error.status
    return _DeadlineStatus(str(error), policy=error.policy, timeout=error.timeout)


class Call(ABC):
    """A call on its way through a policy: the function that the policy calls for each attempt.

    Derived from it are the ways to make one in either world: `__call__(ctx)` makes an attempt with `begin(ctx)`, and
    hands what that raises to `out_of_time` or to `failed`.

    :param continuation: makes an attempt; given by grpc.
    :param details: what grpc tells about the call.
    :param requests: returns what is to be sent, for each attempt anew.
    :param repeatable: whether the call may be made again once it has been begun.
    """

    def __init__(
        self, continuation: Callable[..., Any], details: Any, requests: Callable[[], Any], *, repeatable: bool
    ) -> None:
        self._continuation = continuation
        self._details = details
        self._requests = requests
        self._may_repeat = repeatable
        self._has_begun = False
        self._calls: deque[tuple[object, Any]] = deque(maxlen=_KEPT)

    @property
    def repeatable(self) -> bool:
        """Whether the call may be made now, or again. A Retry asks this."""
        return self._may_repeat or not self._has_begun

    @abstractmethod
    def __call__(self, ctx: Context) -> Any:
        """Make an attempt."""

    def context(self) -> Context:
        """Return the context of the execution: the caller's own `timeout` is for all attempts together, as in gRPC."""
        outer = current_context()
        timeout = None if self._details.timeout is None else max(0.0, self._details.timeout)
        operation = outer.operation or method_of(self._details)
        return Context(timeout=timeout, operation=operation, properties=outer.properties)

    def begin(self, ctx: Context) -> Any:
        """Begin an attempt, with the time that is left, and return what grpc makes of it.

        :raises NotRepeatable: if it must not be made, because it has been begun before.
        """
        timeout = ctx.timeout()
        if not self.repeatable:
            raise NotRepeatable("the call was not made again: its requests, or its method, allow it only once")
        self._has_begun = True
        return self._continuation(_limited(self._details, timeout), self._requests())

    def failed(self, error: Any) -> None:
        """Tell Retry what it has to know of a failed attempt, as attributes of the error."""
        pushback = _pushback(error)
        if pushback is not None and pushback >= 0:
            error.retry_after = pushback / 1000
        elif pushback is not None:
            error.repeatable = False

    def mark(self, error: Exception) -> None:
        """Mark an error, also one of a policy, with which a Retry further out must not make the call again."""
        if not self.repeatable and getattr(error, "repeatable", True) is not False:
            try:
                error.repeatable = False  # type: ignore[attr-defined]
            except Exception:  # one that refuses attributes goes without
                return

    def keep(self, reply: object, call: Any) -> None:
        """Remember which of grpc's calls a reply came from."""
        self._calls.append((reply, call))

    def of(self, reply: object, answer: Callable[[Any], Any]) -> Any:
        """Return grpc's call that this very reply came from; where a policy has answered instead, `answer(reply)`."""
        for each, call in tuple(self._calls):  # a thread that was walked away from may add to it
            if each is reply:
                return call
        return answer(reply)


def checked(policy: Policy[Any], unrepeatable: Collection[str]) -> frozenset[str]:
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


def _limited(details: Any, timeout: float | None) -> Any:
    """Return the details of a call with another timeout."""
    replace = getattr(details, "_replace", None)  # grpc's own are named tuples
    if replace is not None:
        return replace(timeout=timeout)
    changed = copy.copy(details)
    changed.timeout = timeout
    return changed


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


def _pushback(error: Any) -> int | None:
    """Return the milliseconds that the server asks to wait; negative for "never", as is anything unreadable (A6)."""
    metadata: Any = getattr(error, "trailing_metadata", tuple)() or ()
    said = [value for key, value in metadata if key == PUSHBACK]
    if not said:
        return None
    text = said[-1] if isinstance(said[-1], str) else said[-1].decode("latin-1")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
