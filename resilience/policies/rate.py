"""A rate as a value: units per time, and how many of them a call uses. Part of RateLimiter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isinf
from typing import Any, TypeAlias, final

from resilience import checks
from resilience.checks import Duration
from resilience.context import Context
from resilience.formats import format_call, format_count, format_number
from resilience.state.rates import SlidingLog, Spread

#: How many units of a rate a call uses: a number, or a function of its context that returns it.
Cost: TypeAlias = float | Callable[[Context], float]


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Rate:
    """At most `limit` units in `per` seconds.

    :param limit: how many units, more than 0.
    :param per: the period in seconds, 1 by default.
    :param burst: None, the default: at most `limit` in *any* period of `per` seconds, exactly. A number: evenly spread,
        and at most that many at once after a quiet time; 1 is one after another (GCRA, ITU-T I.371). A call that costs
        more than the burst begins when the whole burst is available, and leaves a debt.
    :param cost: how many units a call uses: a number more than 0, 1 by default; or a function of the context, called
        for each call, which may return 0.
    :param actual: a function of the result that returns how many units the call has actually used. The difference is
        charged or refunded to later calls.
    :raises ValueError: for a cost that is more than the limit, if there is no burst. A computed cost that is too high
        is refused in the call, with `RateLimited`.

    Immutable. May be used by several limiters, which then share nothing.

    >>> from resilience import Rate
    >>> Rate(60, per=60)
    Rate(60, per=60)
    """

    limit: float
    per: float
    burst: float | None
    cost: Cost
    actual: Callable[[Any], float] | None

    def __init__(
        self,
        limit: float,
        per: Duration = 1.0,
        *,
        burst: float | None = None,
        cost: Cost = 1,
        actual: Callable[[Any], float] | None = None,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "limit", checks.positive("limit", limit))
        set_field(self, "per", checks.seconds("per", per))
        if isinf(self.per / self.limit):
            raise ValueError(f"limit={limit!r} is too small: one unit would take for ever")
        set_field(self, "burst", None if burst is None else checks.positive("burst", burst))
        set_field(self, "cost", _as_cost(cost, most=self.limit if burst is None else inf))
        set_field(self, "actual", checks.optional_function("actual", actual, ("result",)))

    def __repr__(self) -> str:
        burst, cost, actual = (self.burst, None), (self.cost, 1), (self.actual, None)
        return format_call("Rate", self.limit, per=(self.per, 1), burst=burst, cost=cost, actual=actual)


def meter_of(rate: Rate) -> Spread | SlidingLog:
    """Return the machine that counts the uses of a rate."""
    if rate.burst is None:
        return SlidingLog(rate.limit, rate.per)
    usual = None if rate.actual is not None or callable(rate.cost) else rate.cost
    return Spread(rate.limit, rate.per, rate.burst, usual)


def in_words(rate: Rate) -> str:
    """Return what a rate allows, in words."""
    unit = "unit" if callable(rate.cost) or rate.actual is not None or rate.cost != 1 else "call"
    limit, seconds = format_count(rate.limit, unit), "second" if rate.per == 1 else f"{format_number(rate.per)} s"
    used = "" if callable(rate.cost) or rate.cost == 1 else f", {format_number(rate.cost)} for each call"
    if rate.burst is None:
        return f"{limit} in any {seconds}{used}"
    each = "a" if rate.per == 1 else "in"
    return f"{limit} {each} {seconds}{used}, spread, {format_number(rate.burst)} at once"


def _as_cost(cost: object, most: float) -> Cost:
    if callable(cost):
        return checks.plain_function("cost", cost, ("ctx",))
    units = checks.positive("cost", cost)
    if units > most:
        raise ValueError(
            f"cost={cost!r} is more than the limit of {format_number(most)}, so no call would ever begin: "
            "give more units in more seconds, or a burst"
        )
    return units
