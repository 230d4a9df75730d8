"""A call under a policy, written once for blocking channels and for grpc.aio: its attempts, its time, its failure.

gRPC gives each call one deadline, which its own core keeps, here and on the server. So the time that is
left becomes the `timeout` of each attempt, and a call that ran into it ends by itself: nothing has to be
cancelled. To the policies such a call is out of time (`DeadlineExceeded`), not a failure of the server;
the `Timeout` whose limit it was makes it its own. If it comes out of the pipeline, it is turned back into
the status that gRPC's callers know; and so is a `DeadlineExceeded` of a policy, where the time was over before a call
was made.

What happens in an attempt is one coroutine. A blocking channel drives it: what it awaits has finished by then.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, final

import grpc  # type: ignore[import-untyped]

from resilience.ambient import current_context
from resilience.callables import maybe_await
from resilience.context import Context
from resilience.errors import DeadlineExceeded
from resilience.integrations.grpc.answers import DeadlineStatus
from resilience.integrations.http import NotRepeatable
from resilience.policy import Policy

#: A server of gRPC says when a retry is welcome (gRFC A6): milliseconds, or -1 for "do not".
PUSHBACK: Final = "grpc-retry-pushback-ms"

#: Seconds by which gRPC's timers and our clock may differ.
GRAIN: Final = 0.05

#: Replies of a call that are kept, the last ones: a policy may go on for hours because of what they say.
_KEPT: Final = 8


class Kind(NamedTuple):
    """A kind of method, by whether its requests and its replies are streams."""

    sends_stream: bool
    gets_stream: bool

    @property
    def name(self) -> str:
        """What grpc calls it: ``"unary_stream"``."""
        return "_".join("stream" if is_stream else "unary" for is_stream in self)


KINDS: Final = tuple(Kind(sends, gets) for sends in (False, True) for gets in (False, True))


@final
class OutOfTime(DeadlineExceeded):
    """A call that ran into the deadline that we gave it.

    :param status: the error that gRPC raised.
    """

    def __init__(self, message: str = "", *, policy: str | None = None, status: Any = None) -> None:
        super().__init__(message, policy=policy)
        self.status: Any = status


class Side(NamedTuple):
    """What differs between a blocking channel and one of grpc.aio.

    :param in_tasks: whether a call is to be awaited.
    :param run: runs one of our coroutines to its end, or returns it to be awaited.
    :param iterate: begins to read a stream of replies; `following` gets the next one.
    :param covers_once: how much the policy covers of a call with one reply whose requests cannot be sent again.
    :param sleep: waits for so many seconds.
    :param answered: makes the call that stands for what a policy has answered instead, by a stream or not.
    """

    in_tasks: bool
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    iterate: Callable[[Any], Any]
    following: Callable[[Any], Any]
    covers_once: Literal["reply", "start"]
    sleep: Callable[[float], Any]
    answered: Callable[[Any, bool], Any]


@final
class Calls:
    """What the calls of one channel have in common.

    :param policy: what they run under.
    :param unrepeatable: the methods that are never repeated.
    """

    def __init__(self, side: Side, policy: Policy[Any], unrepeatable: Collection[str]) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be a policy, not {policy!r}")
        if isinstance(unrepeatable, str) or not isinstance(unrepeatable, Collection):
            raise TypeError(f"unrepeatable must be a collection of methods, not {unrepeatable!r}")
        for method in unrepeatable:
            if not isinstance(method, str) or not method.startswith("/"):
                raise ValueError(f"unrepeatable must name methods as '/package.Service/Method', not {method!r}")
        self.side: Side = side
        self.policy: Policy[Any] = policy
        self.unrepeatable: frozenset[str] = frozenset(unrepeatable)


@final
class Call:
    """A call on its way through a policy: the function that the policy calls for each attempt.

    :param continuation: makes an attempt; given by grpc.
    :param details: what grpc says about the call.
    :param request: a message, or the messages of a stream.
    """

    def __init__(self, calls: Calls, kind: Kind, continuation: Callable[..., Any], details: Any, request: Any) -> None:
        self._side = calls.side
        self._kind = kind
        self._continuation = continuation
        self._details = details
        self._method: str = details.method.decode() if isinstance(details.method, bytes) else details.method
        self._request = request
        # A stream of requests that is no list or tuple may be used up: the second time it would be empty.
        self._is_replayable = kind.sends_stream and isinstance(request, Sequence)
        self._sends_once = kind.sends_stream and not self._is_replayable
        self._may_repeat = not self._sends_once and self._method not in calls.unrepeatable
        self._has_begun = False
        self.__qualname__: str = self._method  # the operation of an execution that is given none
        self._replies: deque[tuple[object, Any]] = deque(maxlen=_KEPT)

    def __call__(self, ctx: Context) -> Any:
        """Make an attempt."""
        return self._side.run(self.attempt(ctx))

    @property
    def repeatable(self) -> bool:
        """Whether the call may be made now, or again. A Retry asks this."""
        return self._may_repeat or not self._has_begun

    async def run(self, protect: Callable[..., Any], policy: Policy[Any]) -> Any:
        """Make the call under the policy by `protect` or `aprotect`, and return what grpc hands to the caller."""
        try:
            reply = protect(policy, self, self._context(), takes_context=True)()
            return self._call_of(await reply if self._side.in_tasks else reply)
        except DeadlineExceeded as error:
            status: Any = error.status if isinstance(error, OutOfTime) else None
            status = status or DeadlineStatus(str(error), policy=error.policy, timeout=error.timeout)
        except Exception as error:
            self._mark(error)
            raise
        finally:
            self._let_go()
        try:
            raise status
        finally:
            del status  # no cycle: error -> traceback -> this frame -> error

    async def attempt(self, ctx: Context) -> Any:
        """Make one attempt, and return what the policies see of it."""
        call = self._begin(ctx)
        if self._side.in_tasks:
            call = await call
        try:
            reply = await self._covered(call)
        except grpc.RpcError as error:
            _mark_pushback(error)
            if _ran_out(error, ctx):
                await maybe_await(self._side.sleep(ctx.remaining()))  # gRPC's timer is a little early
                raise OutOfTime("the call ran into the deadline of the execution", status=error) from error
            raise
        self._replies.append((reply, reply if isinstance(reply, Replies) else call))
        return reply

    def _context(self) -> Context | None:
        """Return the context of the execution: the caller's own `timeout` is for all attempts together, as in gRPC."""
        if self._details.timeout is None:
            return None
        outer = current_context()
        timeout = max(0.0, self._details.timeout)
        return Context(timeout=timeout, operation=outer._info.operation or self._method, properties=outer.properties)

    def _begin(self, ctx: Context) -> Any:
        """Begin an attempt with the time that is left. What has been sent, and may not be sent twice, is refused."""
        timeout = ctx.timeout()
        if not self.repeatable:
            raise NotRepeatable("the call was not made again: its requests, or its method, allow it only once")
        self._has_begun = True
        request = iter(self._request) if self._is_replayable else self._request
        return self._continuation(_limited(self._details, timeout), request)

    async def _covered(self, call: Any) -> Any:
        """Wait for as much of a call as the policy covers, and return what the policy sees of it."""
        if self._sends_once and (self._kind.gets_stream or self._side.covers_once == "start"):
            return call
        if not self._kind.gets_stream:
            return await call if self._side.in_tasks else call.result()
        replies = self._side.iterate(call)
        try:
            first = [await maybe_await(self._side.following(replies))]
        except (StopIteration, StopAsyncIteration):
            first = []
        except grpc.RpcError:
            raise
        except BaseException:  # Ctrl-C
            call.cancel()
            raise
        return Replies(call, replies, first)

    def _call_of(self, reply: object) -> Any:
        """Return grpc's call that this very reply came from, or one that stands for a policy's answer."""
        for each, call in tuple(self._replies):  # a thread that was walked away from may add to it
            if each is reply:
                return call
        return self._side.answered(reply, self._kind.gets_stream)

    def _let_go(self) -> None:
        """Forget what was sent, and what came of it.

        A call of grpc.aio keeps the context that it was made in, and that keeps this: it would be a cycle.
        """
        self._replies.clear()
        del self._continuation, self._request

    def _mark(self, error: Exception) -> None:
        """Mark an error, also one of a policy, with which a Retry further out must not make the call again."""
        if not self.repeatable and getattr(error, "repeatable", True) is not False:
            try:
                error.repeatable = False  # type: ignore[attr-defined]
            except Exception:  # one that refuses attributes goes without
                return


@final
class Replies:
    """The replies of a call whose first one has been waited for, and everything else that the call can do."""

    def __init__(self, call: Any, replies: Any, first: list[Any]) -> None:
        self._call = call
        self._replies = replies
        self._first = first

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._replies)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return self._first.pop() if self._first else await anext(self._replies)

    def close(self) -> None:
        """End a call whose replies are not wanted."""
        self._call.cancel()

    async def aclose(self) -> None:
        """Do the same."""
        self._call.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _limited(details: Any, timeout: float | None) -> Any:
    """Return the details of a call with another timeout."""
    if timeout is None and details.timeout is None:
        return details
    replace = getattr(details, "_replace", None)  # grpc's own are named tuples
    if replace is not None:
        return replace(timeout=timeout)
    changed = copy.copy(details)
    changed.timeout = timeout
    return changed


def _ran_out(error: Any, ctx: Context) -> bool:
    """Whether a call failed because the time that we gave it was over."""
    code = getattr(error, "code", None)  # a bare `RpcError` of another library has none
    return callable(code) and code() is grpc.StatusCode.DEADLINE_EXCEEDED and ctx.remaining() <= GRAIN


def _mark_pushback(error: Any) -> None:
    """Mark the error with what the server says of another attempt, for Retry."""
    pushback = _pushback(error)
    if pushback is not None and pushback >= 0:
        error.retry_after = pushback / 1000
    elif pushback is not None:
        error.repeatable = False


def _pushback(error: Any) -> int | None:
    """Return the milliseconds that the server asks to wait; negative for "never", as is anything unreadable (A6)."""
    metadata: Any = getattr(error, "trailing_metadata", tuple)() or ()
    said = [value for key, value in metadata if key == PUSHBACK]
    if not said:
        return None
    text = said[-1] if isinstance(said[-1], str) else said[-1].decode("latin-1")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
