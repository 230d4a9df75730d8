"""AdaptiveLimit: a limit on concurrent calls, learned from their latency."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Never, TypeVar, cast, final

from typing_extensions import override

from resilience import checks, forks
from resilience.ambient import block_context
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import LimitExceeded
from resilience.events.dispatch import emit, optional_listener
from resilience.events.kinds import LimitChanged
from resilience.formats import format_count, format_number
from resilience.info import Listener
from resilience.matching import Matcher, On
from resilience.network_errors import transient
from resilience.policies.live_permits import LivePermits, Slot
from resilience.policy import Call, Policy
from resilience.runtimes.tasks import replaces_cancellation
from resilience.state.concurrency import MAX_SAMPLES, Aimd, Algorithm, Period
from resilience.state.permits import ONE_PERMIT

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class LimitStats:
    """A snapshot of an adaptive limit.

    :param limit: how many calls may run at once now.
    :param in_flight: how many are running; more than `limit` only after the limit has fallen.
    :param queued: how many calls wait.
    :param rejected: how many calls have been refused so far.
    """

    limit: int
    in_flight: int
    queued: int
    rejected: int


@final
class AdaptiveLimit(Policy[Never]):
    """Let as many calls run at once as the service can handle without a queue, and refuse the others.

    It is a Bulkhead that adapts its limit: about every `window`, the limit falls by a tenth while a tenth of the calls
    take longer than `slower_than`, or while the service refuses some. Otherwise it rises by one, if at least half of it
    was used.

    :param slower_than: seconds; or another algorithm, with `update(limit, sample)` and `reset()`, such as `Seeking()`.
    :param initial: the limit to begin with, 20 by default.
    :param least: the smallest limit, 1 by default.
    :param most: the largest limit, 200 by default.
    :param queue: how many calls may wait, 0 by default.
    :param max_wait: how many seconds a call may wait; by default as long as its deadline allows.
    :param window: after how many seconds the limit is evaluated again, 1 by default; at least twice the time of the
        quickest call.
    :param min_samples: how many calls must have ended by then, 50 by default and at most 10,000; otherwise it waits for
        more.
    :param headroom: the maximum ratio of the limit to the observed concurrency, at least 1; 5 by default. A larger
        limit falls by one at a time.
    :param on: failures that mean that the service cannot keep up; `transient` by default. Other failures, and cancelled
        calls, are not counted: a quick failure is not a quick call. `Rejected` and `DeadlineExceeded` only if they are
        named here as types: a predicate is not asked about them.
    :param on_change: called with a `LimitChanged` for each change of the limit.
    :param observe_only: true for a limit that refuses nothing, and lets no call wait: it learns, and reports each call
        beyond the limit (`CallRejected` with `shadow`), which is made without a permit and not counted.
    :param name: the name of this policy in errors and events; "AdaptiveLimit" by default.
    :raises LimitExceeded: if the limit is reached, and the queue is full or `max_wait` has passed.
    :raises DeadlineExceeded: if the budget of the execution ends while it waits. A `Timeout` around it ends the wait
        with its own error.

    Place it next to the function, inside every policy that waits: it must measure only the service.

    >>> from resilience import AdaptiveLimit
    >>> limit = AdaptiveLimit(0.3, initial=2)
    >>> limit.execute(lambda ctx: limit.stats().in_flight)
    1
    """

    _resilience_shares = "permits"
    _resilience_blocks = ("with limit.slot():", "async with limit.slot():")

    def __init__(
        self,
        slower_than: Duration | Algorithm,
        *,
        initial: int = 20,
        least: int = 1,
        most: int = 200,
        queue: int = 0,
        max_wait: Duration | None = None,
        window: Duration = 1.0,
        min_samples: int = 50,
        headroom: float = 5.0,
        on: On = transient,
        on_change: Listener | None = None,
        observe_only: bool = False,
        name: str | None = None,
    ) -> None:
        self._resilience_set_up(locals())
        self._algorithm = _as_algorithm(slower_than)
        self._least = checks.whole("least", least)
        self._most = checks.whole("most", most, least=least, most=sys.float_info.max)
        self._initial = checks.whole("initial", initial, least=least, most=most)
        self._window = checks.seconds("window", window)
        self._min_samples = checks.whole("min_samples", min_samples, most=MAX_SAMPLES)  # no more are kept
        self._headroom = checks.within("headroom", headroom, 1)
        self._failures = Matcher(on, ())
        self._on_change = optional_listener("on_change", on_change)
        self._permits = LivePermits(self.name, initial, queue, max_wait, observe_only, _limit_exceeded)
        self._reset()
        forks.reset_after_fork(self, AdaptiveLimit._reset)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        permits = self._permits.machine
        free = permits.free
        while True:
            try:
                if free and not permits.waiting:
                    del free[-1]  # as in `Bulkhead.around`
                    break
            except IndexError:  # pragma: no cover (as there)
                pass
            if permits.queue:
                await self._permits.wait(ctx, ctx.runtime)
                break
            if not self._permits.make_room(ctx):
                return await call(ctx)  # without a permit, as it only observes
        try:
            period, began = self._period, clock.now()
            try:
                result = await call(ctx)
            except Exception as error:
                self._failed(error, period, began, ctx)
                raise
            try:
                self._ended(period, began, ctx)
            except BaseException:  # no caller will see the result
                await ctx.runtime.close(result)
                raise
            return result
        finally:
            free += ONE_PERMIT
            if permits.waiting:
                try:
                    self._permits.hand_on()
                except BaseException:  # as in `Bulkhead.around`
                    self._permits.hand_on()
                    raise

    def slot(self) -> LimitSlot:
        """Return a block that holds a permit: `with limit.slot():` or `async with limit.slot():`.

        It waits no longer than the deadline of the ambient context. The time of the block, and what it raises, count
        like those of a call.
        """
        return LimitSlot(self)

    def stats(self) -> LimitStats:
        """Return a snapshot of the limit."""
        return LimitStats(*self._permits.machine.counts())

    def reset(self) -> None:
        """Discard what was learned, and start with the initial limit. Running calls keep their permits."""
        with self._lock:
            self._forget_locked()
        self._permits.hand_on()
        self._must_forget = True
        self._in_turn(self._reset_algorithm)

    @override
    def describe(self) -> str:
        learns = "by " + repr(self._algorithm)
        if isinstance(self._algorithm, Aimd):
            learns = f"lower while a tenth of the calls takes longer than {self._algorithm!r} s"
        now = self._permits.machine.limit
        text = f"{self.name}: {self._least} to {self._most} at once, {now} now, {learns}"
        if self._window != 1:
            text += f", evaluated every {format_number(self._window)} s"
        if self._min_samples != 50:
            text += f", after {format_count(self._min_samples, 'call')}"
        if self._headroom != 5:
            text += f", at most {format_number(self._headroom)} times as many as run"
        return f"{text}; {self._permits.describe()}"

    # --- private ---

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._turn: list[None] = [None]  # empty while a thread uses the algorithm
        self._must_forget = False  # whether the algorithm must be reset before its next update
        self._forget_locked()
        self._algorithm.reset()

    def _forget_locked(self) -> None:
        self._limit = float(self._initial)  # the machine uses its integer part
        self._period = Period()
        self._rejected_before = self._permits.machine.rejected
        self._permits.machine.resize(self._initial)

    def _failed(self, error: Exception, period: Period, began: float, ctx: Context) -> None:
        if self._failures.judge(error) and not replaces_cancellation(error):
            self._period.dropped = True
            self._ended(period, began, ctx)

    def _ended(self, began_in: Period, began: float, ctx: Context) -> None:
        """Record how long a call took; evaluate the limit, if it is time."""
        now, period, permits = clock.now(), self._period, self._permits.machine
        is_waited_for = bool(permits.waiting) and permits.counts()[2] > 0  # the queue may hold a mark, and no caller
        number = period.note(now - began, began_in, permits.in_flight(), is_waited_for, now)
        if number >= self._min_samples and now >= period.next_evaluation:
            self._in_turn(partial(self._evaluate, period, now, ctx))

    def _in_turn(self, step: Callable[[], None]) -> None:
        """Use the algorithm, in one thread at a time and outside the lock. A no-op while another thread uses it."""
        turn = self._turn
        try:
            del turn[-1]  # not a call: an interrupt after it could lose the turn
        except IndexError:
            return
        try:
            step()
        finally:
            turn += (None,)  # not a call either

    def _reset_algorithm(self) -> None:
        if self._must_forget:
            self._must_forget = False
            self._algorithm.reset()

    def _evaluate(self, period: Period, now: float, ctx: Context) -> None:
        """Let the algorithm compute the limit, and set it."""
        self._reset_algorithm()
        if period is not self._period or len(period.samples) < self._min_samples:
            return  # another thread has evaluated it
        rejected = self._permits.machine.rejected
        sample = period.sample(now, self._window, rejected > self._rejected_before)
        self._rejected_before, limit = rejected, self._limit
        answer: Any = self._algorithm.update(limit, sample)
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        wanted, reason = answer if is_pair else (answer, type(self._algorithm).__name__)
        wanted = checks.number("the limit that update(limit, sample) returned", wanted)
        checks.instance("the reason that update(limit, sample) returned", reason, str, "a string")
        # A limit far above the actual use falls, but slowly: a quiet night should not lower it at once.
        wanted = min(wanted, max(limit - 1, sample.inflight * self._headroom))
        self._set(min(float(self._most), max(float(self._least), wanted)), reason, period, ctx)

    def _set(self, limit: float, reason: str, period: Period, ctx: Context) -> None:
        with self._lock:
            if period is not self._period:
                return  # the limit was reset in the meantime
            self._limit = limit
            old, new = self._permits.machine.limit, int(limit)
            if old == new:
                return
            self._period = Period(period.next_evaluation)
            self._period.dropped = period.dropped
            self._permits.machine.resize(new)
        self._permits.hand_on()  # before the listeners, which may be slow
        emit(LimitChanged, self.name, ctx, self._on_change, old=old, new=new, reason=reason)


@final
class LimitSlot:
    """A permit held for a block, which is timed like a call."""

    def __init__(self, limit: AdaptiveLimit) -> None:
        self._limit = limit
        self._slot = Slot(limit._permits)
        self._period: Period
        self._began: float

    def __enter__(self) -> None:
        self._slot.__enter__()
        self._period, self._began = self._limit._period, clock.now()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        limit = self._limit
        try:
            if not self._slot.is_held:
                return
            if error is None:
                limit._ended(self._period, self._began, block_context())
            elif isinstance(error, Exception):
                limit._failed(error, self._period, self._began, block_context())
        finally:
            self._slot.__exit__()

    async def __aenter__(self) -> None:
        await self._slot.__aenter__()
        self._period, self._began = self._limit._period, clock.now()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)


def _as_algorithm(value: Any) -> Algorithm:
    # Not with `isinstance`: from Python 3.12 on, a protocol does not see what `__getattr__` answers.
    methods = [getattr(value, name, None) for name in ("update", "reset")]
    if all(map(callable, methods)) and not isinstance(value, type):
        checks.plain_function("slower_than.update", value.update, ("limit", "sample"))
        checks.plain_function("slower_than.reset", value.reset, ())
        return cast("Algorithm", value)
    checks.not_bare("@AdaptiveLimit(0.5)", value)
    if methods[0] is not None:
        raise TypeError(f"slower_than must be seconds, or have update(limit, sample) and reset(), not {value!r}")
    return Aimd(checks.seconds("slower_than", value))


def _limit_exceeded(policy: str, limit: int, queue: int, why: str) -> LimitExceeded:
    return LimitExceeded(f"{why}; the limit adapts", policy=policy, limit=limit)
