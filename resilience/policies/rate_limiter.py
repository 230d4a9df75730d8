"""RateLimiter: a limit on calls, or units of something, per time, across all threads, tasks and loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nextafter
from typing import Any, Never, TypeVar, final

from typing_extensions import override

from resilience import checks, forks
from resilience.ambient import block_context
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import RateLimited, is_refusal
from resilience.events.dispatch import report_refusal
from resilience.formats import format_count, format_number, format_seconds
from resilience.hints import asked_delay
from resilience.info import BARE
from resilience.outcome import ErrorAnswer
from resilience.policies.rate import Rate, in_words, meter_of
from resilience.policy import Call, Policy
from resilience.runtimes.base import Runtime, Waiter
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS
from resilience.state.rates import EPSILON, Quota, Units
from resilience.state.turns import Turn, Turns, Woken

T = TypeVar("T")

#: The units that a call uses of the quota that the service reports.
_ONE_CALL = 1.0


@final
@dataclass(frozen=True, slots=True)
class RateLimiterStats:
    """A snapshot of a rate limiter.

    :param queued: how many calls wait for their turn.
    :param next_turn: seconds until a new call of the usual cost (1 if the cost is computed) would begin; 0 for at once.
    :param rejected: how many calls have been refused so far.
    """

    queued: int
    next_turn: float
    rejected: int


@final
class RateLimiter(Policy[Never]):
    """Let calls begin at a limited rate; the others wait for their turn, in the order of arrival.

    All threads, tasks and event loops that share this object share one queue. When a call gives up, all behind it move
    up.

    :param rate: a `Rate`; or a number of at least 1, which means at most that many calls in any second.
    :param more: further rates. A call begins when all of them allow it, and is charged to all of them.
    :param max_wait: how many seconds a call may wait; 0 refuses calls that have no turn now. By default as long as its
        deadline allows: without one, until its turn comes, however many calls wait before it. Only this and deadlines
        bound the queue.
    :param retry_after: whether an error of the call that carries a delay (`.retry_after`, in seconds) closes the
        limiter to all callers for that time; it does by default.
    :param longest_pause: the longest time in seconds for which such an error can close it, 60 by default. With the HTTP
        integrations, the headers of a response can also close it, for at most the same time.
    :param told: a function of the result, which returns how many calls the service still allows and for how many
        seconds, `(remaining, seconds)`; or None, if it does not report that. See `learn`.
    :param observe_only: let all calls through at once; only report, as a `CallRejected` with `shadow=True`, those that
        have no turn. Not by default.
    :param name: the name of this policy in errors and events; "RateLimiter" by default.
    :raises RateLimited: at once if the turn would come after `max_wait` or the deadline, with the seconds until then as
        `retry_after`. Also later, if a pause or a correction moves the turn of a waiting call that far.

    The instant of a turn is the latest one that any rate, pause or quota requires. Evenly spread turns follow this
    schedule, so that late timers do not lower the rate; at most 0.25 s, or a burst, is made up for.

    >>> from resilience import Rate, RateLimiter
    >>> limiter = RateLimiter(Rate(2, per=60), max_wait=0)
    >>> [limiter.call(int), limiter.call(int)]
    [0, 0]
    >>> limiter.capture(lambda ctx: "one more").error.retry_after > 59
    True
    """

    _resilience_shares = "turns"
    _resilience_blocks = ("with limiter.turn():", "async with limiter.turn():")

    def __init__(
        self,
        rate: Rate | float,
        *more: Rate,
        max_wait: Duration | None = None,
        retry_after: bool = True,
        longest_pause: Duration = 60.0,
        told: Callable[[Any], tuple[float, float] | None] | None = None,
        observe_only: bool = False,
        name: str | None = None,
    ) -> None:
        self._resilience_set_up(locals())
        checks.not_bare("@RateLimiter(10)", rate)
        self._max_wait = checks.optional_seconds("max_wait", max_wait, zero=True)
        self._retry_after = checks.flag("retry_after", retry_after)
        self._longest_pause = checks.seconds("longest_pause", longest_pause, infinite=True)
        self._told = checks.optional_function("told", told, ("result",))
        self._observe_only = checks.flag("observe_only", observe_only)
        first = _as_rate(rate)
        self._set_rates((first, *(_as_further_rate(it, first) for it in more)))
        self._reset()
        forks.reset_after_fork(self, RateLimiter._reset)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        turns, has_turn = self._turns, False
        began, fast_path = clock.now(), turns.fast_path
        if fast_path:
            try:
                del fast_path[-1]  # no lock: a third of the time (see `Turns.fast_path`). No call until `append`
                bucket = turns.bucket
                if bucket is not None and (full_at := bucket.full_at) <= began + bucket.tolerance:  # GCRA
                    bucket.full_at = (full_at if full_at > began else began) + bucket.increment
                    has_turn = True
                fast_path.append(None)
            except IndexError:  # pragma: no cover (another thread was faster: never under the GIL)
                pass
        costs = self._fixed_costs or self._costs(ctx)
        if not has_turn and not turns.take(costs, began):
            if self._observe_only:
                self._refusal(ctx, turns.refuse(costs, began), 0.0)
                return await call(ctx)
            began = await self._wait(costs, ctx, ctx.runtime)
        if ctx._info is not BARE and getattr(type(ctx._function), "_resilience_asks_for_limiters", False):
            ctx = ctx._with(limiters=(*ctx._info.limiters, self))
        try:
            result = await call(ctx)
        except Exception as error:
            if self._retry_after:
                self._pause_after(error)
            raise
        if self._reads_results:
            try:
                self._read_result(result, costs, began)
            except BaseException:  # no caller will see the result
                await ctx.runtime.close(result)
                raise
        return result

    def turn(self, *costs: float) -> TurnBlock:
        """Return a block that begins when its turn comes: `with limiter.turn():` or `async with limiter.turn():`.

        :param costs: how many units of each rate the block uses; by default the cost of a call.

        It waits no longer than the deadline of the ambient context.
        """
        return TurnBlock(self, self._given_costs(costs) if costs else None)

    def try_take(self, *costs: float) -> float:
        """Take a turn if there is one now and return 0; otherwise return the seconds until the next one.

        No turn is taken while any caller waits. The result is infinity for a cost that is never allowed.

        :param costs: how many units of each rate; by default the cost of a call.
        """
        units = self._given_costs(costs) if costs else self._fixed_costs or self._costs(block_context())
        turns, now = self._turns, clock.now()
        self._drop_dead_waiters(now)
        return 0.0 if turns.take(units, now) else max(EPSILON, turns.seconds(units, now))

    def learn(self, remaining: float, reset_after: Duration) -> None:
        """Obey a limit that the service reports: `remaining` calls (zero or more) for the next `reset_after` seconds.

        It can only narrow the limit. Within one window (resets within 1 s of each other) the smallest number counts,
        because other calls are in flight. It is discarded at the reset.
        """
        left = checks.within("remaining", remaining, 0)
        seconds, now = checks.seconds("reset_after", reset_after, zero=True), clock.now()
        self._change(lambda: self._turns.quota.learn(left, now + seconds, now), now)

    def pause(self, seconds: Duration) -> None:
        """Let no call begin for that many seconds. The later end of two pauses counts."""
        self.learn(0, checks.seconds("seconds", seconds, zero=True))

    def resize(self, limit: float) -> None:
        """Change the limit of the only rate. Past use still counts, and waiting calls get new turns.

        :raises TypeError: if there are several rates.
        """
        if len(self._rates) > 1:
            many = len(self._rates)
            raise TypeError(f"{self.name} has {many} rates, and resize() is for a single one: build another limiter")
        rate, now = replace(self._rates[0], limit=limit), clock.now()

        def change() -> None:
            self._set_rates((rate,))
            self._turns.rates[0].resize(rate.limit, rate.per, now)

        self._change(change, now)

    def reset(self) -> None:
        """Discard the past use, and what the service has reported. Waiting calls keep their places."""
        turns, now = self._turns, clock.now()
        self._change(lambda: turns.replace(tuple(map(meter_of, self._rates)), Quota(), now), now)

    def stats(self) -> RateLimiterStats:
        """Return a snapshot of the limiter."""
        return RateLimiterStats(*self._turns.counts(self._usual_costs, clock.now()))

    @override
    def describe(self) -> str:
        rates = " and ".join(in_words(rate) for rate in self._rates)
        if self._observe_only:
            waiting = "only observes"
        elif self._max_wait is None:
            waiting = "the others wait for their turn"
        else:
            waiting = f"the others wait at most {format_number(self._max_wait)} s" if self._max_wait else "none waits"
        text = f"{self.name}: at most {rates}; {waiting}"
        if 60 != self._longest_pause < inf:
            text += f"; an error closes it for at most {format_number(self._longest_pause)} s"
        return text

    @override
    def __repr__(self) -> str:
        defaults = inspect.signature(RateLimiter).parameters
        named = dict(self.settings())
        rates = [repr(named.pop("rate")), *map(repr, self._rates[1:])]
        del named["more"]
        changed = [f"{name}={value!r}" for name, value in named.items() if value != defaults[name].default]
        return f"RateLimiter({', '.join(rates + changed)})"

    # --- private ---

    def _set_rates(self, rates: tuple[Rate, ...]) -> None:
        self._rates = rates
        self._resilience_settings = {**self.settings(), "rate": rates[0]}
        #: The usual costs of a call, with 1 for a computed one; and the fixed costs, None if any is computed.
        self._usual_costs: Units = (*(1.0 if callable(it.cost) else it.cost for it in rates), _ONE_CALL)
        self._fixed_costs = None if any(callable(it.cost) for it in rates) else self._usual_costs
        self._reads_results = self._told is not None or any(it.actual is not None for it in rates)

    def _reset(self) -> None:
        """Discard all uses and waiters, as in the child of a fork."""
        self._turns: Turns[Waiter] = Turns(tuple(map(meter_of, self._rates)), Quota())

    def _costs(self, ctx: Context) -> Units:
        """Return the costs of this call."""
        costs = [checks.within("cost", rate.cost(ctx), 0) if callable(rate.cost) else rate.cost for rate in self._rates]
        return (*costs, _ONE_CALL)

    def _given_costs(self, costs: tuple[float, ...]) -> Units:
        """Return the costs that a caller has passed, one for each rate."""
        if len(costs) != len(self._rates):
            rates = format_count(len(self._rates), "rate")
            raise TypeError(f"{self.name} has {rates} and takes a cost for each, not {costs!r}")
        return (*(checks.within("cost", it, 0) for it in costs), _ONE_CALL)

    async def _wait(self, costs: Units, ctx: Context, runtime: Runtime) -> float:
        """Wait for a turn, and return the instant at which it was taken; or raise the refusal."""
        turns, joined = self._turns, clock.now()
        self._drop_dead_waiters(joined)
        gives_up_at = inf if self._max_wait is None else joined + self._max_wait + EPSILON
        turn = Turn(costs, min(gives_up_at, nextafter(ctx.deadline, -inf)), runtime.waiter())
        now = joined
        try:
            turns.join(turn, now)
            while turn.waits:
                await turn.waiter.wait(turn.due, ctx._timer)
                turn.waiter = runtime.waiter()  # one for each wait; replaced before `go`, after which it may be woken
                now = clock.now()
                self._act(partial(turns.go, turn, now))
        except BaseException:  # cancelled, cut off or interrupted
            if turns is self._turns:  # pragma: no branch (not in the child of a fork, where their lock may be held)
                self._act(partial(turns.leave, turn, clock.now()))
            raise
        if not turn.has_begun:
            raise self._refusal(ctx, turn.instant - now, now - joined)
        return now

    def _drop_dead_waiters(self, now: float) -> None:
        """Remove the first callers from the queue if their event loops have ended, so that they never come."""
        while (first := self._turns.first()) is not None and not first.waiter.is_alive():
            self._act(partial(self._turns.leave, first, now))

    def _refusal(self, ctx: Context, seconds: float, waited: float) -> RateLimited:
        retry_after = None if seconds == inf else max(0.0, seconds)
        why = "it costs more than the limit"
        if retry_after is not None:
            why = f"its turn comes in {format_seconds(retry_after)}"
        error = RateLimited(why, policy=self.name, retry_after=retry_after)
        return report_refusal(error, ctx, waited, shadow=self._observe_only)

    def _pause_after(self, error: Exception) -> None:
        """Close for as long as an error of the service asks for; not for infinity, or a refusal by a policy of ours."""
        asked = 0.0 if is_refusal(error) else asked_delay(error)
        if 0 < asked < inf:
            self.pause(min(asked, self._longest_pause))

    def _learn_from_headers(self, remaining: float, seconds: float) -> None:
        """Apply the limit that an integration has read from the headers of a response."""
        if self._retry_after:
            self.learn(remaining, min(seconds, self._longest_pause))

    def _read_result(self, result: Any, costs: Units, began: float) -> None:
        """Apply what a result reports: the remaining calls, and the units actually used."""
        if type(result) is ErrorAnswer:
            return
        if self._told is not None and (said := self._told(result)) is not None:
            if not (isinstance(said, (tuple, list)) and len(said) == 2):
                raise TypeError(f"told(result) must return (remaining, seconds) or None, not {said!r}")
            self.learn(*said)
        more = [
            0.0 if rate.actual is None else checks.within("actual", rate.actual(result), 0) - cost
            for rate, cost in zip(self._rates, costs, strict=False)
        ]
        if any(more):
            now = clock.now()
            self._change(lambda: self._turns.correct(more, began, now), now)

    def _change(self, change: Callable[[], None], now: float) -> None:
        """Apply a change of the rates."""
        self._act(lambda: self._turns.change(change, now))

    def _act(self, step: Callable[[], Woken[Waiter]]) -> None:
        """Make a step, and wake its turns. Those whose event loop has ended leave the queue, and others are woken."""
        try:
            woken = step()
            for turn, waiter in woken:  # also those that are added meanwhile
                if not waiter.wake():
                    woken += self._turns.leave(turn, clock.now())
        except BaseException:  # a signal handler has raised in between: a turn may be noted as woken, and sleep
            for waiter in self._turns.waiters():
                waiter.wake()
            raise


@final
class TurnBlock:
    """A block that begins when its turn comes. It may be entered several times; each entry takes a turn."""

    def __init__(self, limiter: RateLimiter, costs: Units | None) -> None:
        self._limiter = limiter
        self._costs = costs
        self._is_shadow = False  # whether it has no turn, and is only observed

    def __enter__(self) -> None:
        drive(self._take(BLOCKING))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and self._limiter._retry_after and not self._is_shadow:
            self._limiter._pause_after(error)

    async def __aenter__(self) -> None:
        await self._take(TASKS)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)

    async def _take(self, runtime: Runtime) -> None:
        limiter, ctx, now = self._limiter, block_context(), clock.now()
        costs = self._costs or limiter._fixed_costs or limiter._costs(ctx)
        has_turn = limiter._turns.take(costs, now)
        self._is_shadow = limiter._observe_only and not has_turn
        if self._is_shadow:
            limiter._refusal(ctx, limiter._turns.refuse(costs, now), 0.0)
        elif not has_turn:
            await limiter._wait(costs, ctx, runtime)


def _as_rate(rate: object) -> Rate:
    if isinstance(rate, Rate):
        return rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise TypeError(f"rate must be a Rate, or a number of calls in a second, not {rate!r}")
    limit = checks.positive("rate", rate)
    if limit < 1:
        raise ValueError(
            f"rate must be at least 1 call in a second, not {rate!r}; did you mean Rate(1, per={1 / limit:g})?"
        )
    return Rate(limit)


def _as_further_rate(rate: object, first: Rate) -> Rate:
    if not isinstance(rate, Rate):
        hint = f"; did you mean Rate({first.limit:g}, per={rate!r})?" if isinstance(rate, (int, float)) else ""
        raise TypeError(f"more rates must be a Rate(limit, per=seconds) each, not {rate!r}{hint}")
    return rate
