"""AdaptiveThrottle: reject a share of the calls locally, in proportion to those that the service refuses.

Client-side throttling as at Google ("Site Reliability Engineering", 2016, "Handling Overload", eq. 21-1): of the recent
`requests`, including those rejected here, the service has accepted `accepts`. A new request is rejected with the
probability

    max(0, (requests - k * accepts) / (requests + 1))

So the service gets about `k` requests for each one that it accepts, and more as soon as it accepts more.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import inf
from typing import Never, TypeVar, final

from typing_extensions import override

from resilience import checks, forks
from resilience.backoff import Randomness, happens
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.counter import Counter
from resilience.errors import Throttled
from resilience.events.dispatch import report_refusal
from resilience.formats import format_count, format_number, format_percent
from resilience.matching import Matcher, On, OnResult, optional_predicate, rejects
from resilience.network_errors import transient
from resilience.policy import Call, Policy
from resilience.runtimes.tasks import replaces_cancellation
from resilience.state.windows import TimeWindow

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class ThrottleStats:
    """A snapshot of a throttle.

    :param rejection_rate: the share of the calls that is rejected now.
    :param requests: how many calls of the window have ended, or were rejected.
    :param accepts: how many of them the service has accepted.
    :param rejected: how many calls have been rejected so far.
    """

    rejection_rate: float
    requests: int
    accepts: int
    rejected: int


@final
class AdaptiveThrottle(Policy[Never]):
    """Reject a share of the calls while the service refuses some: about as many as it would refuse.

    :param k: how many calls are let through for each accepted one, at least 1; 2 by default. The closer to 1, the fewer
        calls the service has to refuse, and the longer it takes to notice that it has recovered.
    :param window: how many seconds a result counts, 30 by default, in steps of a 32nd of it.
    :param min_calls: how many calls must be in the window before one is rejected; 10 by default.
    :param most: the largest share of the calls that is rejected, at most 1; 0.9 by default. The rest tests whether the
        service has recovered: with 1.0 that takes many minutes after a long outage.
    :param on: which exceptions mean that the service refuses calls or cannot keep up; `transient` by default. After any
        other one, the call counts as accepted. After `Rejected` and `DeadlineExceeded` it is not counted, unless they
        are named here as types: a predicate is not asked about them.
    :param on_result: a predicate over the result; true means that the service has refused the call.
    :param ignore: exceptions that are not counted. A cancellation never is.
    :param observe_only: true for a throttle that rejects nothing: it reports each call that it would have rejected
        (`CallRejected` with `shadow`). The result of such a call is not counted.
    :param name: the name of this policy in errors and events; "AdaptiveThrottle" by default.
    :param rng: source of randomness, `random` by default; `random.Random(seed)` makes it repeatable.
    :raises Throttled: instead of making the call, with `rejection_rate`.

    Share one between all callers of one service. Calls count when they end, not while they run.

    >>> from resilience import AdaptiveThrottle
    >>> throttle = AdaptiveThrottle(k=1.5, name="search")
    >>> throttle.call(str.upper, "hello")
    'HELLO'
    >>> throttle.stats()
    ThrottleStats(rejection_rate=0.0, requests=1, accepts=1, rejected=0)
    """

    _resilience_shares = "counts"

    def __init__(
        self,
        k: float = 2.0,
        *,
        window: Duration = 30.0,
        min_calls: int = 10,
        most: float = 0.9,
        on: On = transient,
        on_result: OnResult | None = None,
        ignore: On = (),
        observe_only: bool = False,
        name: str | None = None,
        rng: Randomness | None = None,
    ) -> None:
        self._resilience_set_up(locals())
        checks.not_bare("@AdaptiveThrottle()", k)
        self._k = checks.within("k", k, 1)
        self._seconds = checks.seconds("window", window)
        self._min_calls = checks.whole("min_calls", min_calls)
        self._most = checks.ratio("most", most)
        self._failures = Matcher(on, ignore)
        self._on_result = optional_predicate("on_result", on_result)
        self._observe_only = checks.flag("observe_only", observe_only)
        self._rng = checks.optional_randomness("rng", rng)
        self._reset()
        forks.reset_after_fork(self, AdaptiveThrottle._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._rejected = 0
        self._forget_locked()

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        if self._rate and (rate := self._draw()):
            if not self._observe_only:
                raise self._refusal(rate, ctx)  # in no variable: a frame that held it would be a cycle
            self._refusal(rate, ctx)
            return await call(ctx)
        try:
            result = await call(ctx)
        except Exception as error:
            self._count_error(error)
            raise
        try:
            if self._on_result is not None and rejects(self._on_result, result):
                self._count_refused()
                return result
        except BaseException:  # no caller will see the result
            await ctx.runtime.close(result)
            raise
        if clock.now() >= self._next_update:
            self._update_window()
        self._accepted.add()  # no lock: `_update_window` adds them to the window, once in each of its steps
        return result

    def stats(self) -> ThrottleStats:
        """Return a snapshot of the throttle."""
        with self._lock:
            self._update_window()
            window = self._window
            return ThrottleStats(self._rate, window.total, window.total - window.bad, self._rejected)

    def reset(self) -> None:
        """Discard all results: no call is rejected until there are new ones."""
        with self._lock:
            self._forget_locked()

    @override
    def describe(self) -> str:
        text = (
            f"{self.name}: lets {format_count(self._k, 'call')} through for each that was accepted in the last "
            f"{format_number(self._seconds)} s, and rejects at most {format_percent(self._most)}"
        )
        if self._min_calls != 10:
            text += f", from {format_count(self._min_calls, 'call')} on"
        return f"{text}; only observes" if self._observe_only else text

    # --- private ---

    def _forget_locked(self) -> None:
        self._window = TimeWindow(self._seconds)
        self._accepted = Counter()
        self._added = 0  # how many of the accepted calls are in the window
        self._updated_at = self._next_update = -inf  # accepted calls that are not in the window ended between these
        self._rate = 0.0

    def _update_window(self) -> None:
        """Add the calls that were accepted since the last update to the window, and compute the rejection rate."""
        with self._lock:
            now = clock.now()
            accepted = self._accepted.value() - self._added
            self._added += accepted
            if accepted:  # they ended before `_next_update`: a call that ends later updates the window first
                self._window.add_good(accepted, self._updated_at)
            self._window.add_good(0, now)
            self._updated_at = now
            self._compute_rate_locked()

    def _compute_rate_locked(self) -> None:
        requests, refused = self._window.total, self._window.bad
        share = (requests - self._k * (requests - refused)) / (requests + 1)
        self._rate = min(self._most, max(0.0, share)) if requests >= self._min_calls else 0.0
        # While calls are rejected, each call that ends may change the rate.
        self._next_update = -inf if self._rate else self._updated_at + self._seconds / TimeWindow.STEPS

    def _count_error(self, error: Exception) -> None:
        """Count a call that raised, unless its error is neutral."""
        was_refused = None if replaces_cancellation(error) else self._failures.judge(error)
        if was_refused:
            self._count_refused()
        elif was_refused is not None:
            self._update_window()
            self._accepted.add()

    def _count_refused(self) -> None:
        """Count a call that the service has refused, or that was rejected locally."""
        with self._lock:
            self._update_window()
            self._window.add(True, self._updated_at)
            self._compute_rate_locked()

    def _draw(self) -> float:
        """Draw whether to reject this call. If so, count it and return the rejection rate; otherwise return 0."""
        self._update_window()
        rate = self._rate
        if not rate or not happens(rate, self._rng):
            return 0.0
        with self._lock:
            self._rejected += 1
        self._count_refused()
        return rate

    def _refusal(self, rate: float, ctx: Context) -> Throttled:
        why = f"{100 * rate:.0f} % of the calls are held back, as too many were refused"
        error = Throttled(why, policy=self.name, rejection_rate=rate)
        return report_refusal(error, ctx, shadow=self._observe_only)
