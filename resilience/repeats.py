"""Limits on retries and hedges: over all calls (a budget), and in one execution (a cap).

A limit on the attempts of each call does not bound the load of all calls together: if a service fails for all callers,
three attempts triple the load on a service that already fails, and that load can keep it down after the cause is gone
(Bronson et al., "Metastable Failures in Distributed Systems", HotOS 2021). Nor does it bound layers: three attempts in
each of three layers are 27 calls at the bottom.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any, Final, Literal, Protocol, TypeAlias, final

from resilience import checks, forks
from resilience.clock import clock
from resilience.counter import Counter
from resilience.formats import format_call
from resilience.notes import is_annotated

#: What tells the note that a Retry adds to the last failure from the other notes of the library.
RETRY_NOTE: Final = ", failed with "

#: Ten successes at 0.1 must pay for one repeat, although the sum of ten times 0.1 is slightly less than 1.
_ROUNDING = 1e-9

_METHODS = ("succeeded", "withdraw", "give_back")


class Budget(Protocol):
    """What retries and hedges are paid from. Its methods are called from any thread, and are not awaited."""

    def succeeded(self) -> object:
        """Note that a call succeeded. Called for each success, so it has to be fast."""
        ...

    def withdraw(self) -> bool:
        """Take a repeat; return false if there is none."""
        ...

    def give_back(self) -> object:
        """Return a repeat that was taken and not made."""
        ...


@final
class RetryBudget:
    """A budget of repeats that successful calls pay for: `Retry(budget=...)`, `Hedge(budget=...)`.

    Share one among all policies that call the same service. Each of these policies pays in for its own calls, so a
    call through a Retry and a Hedge inside it earns twice: give these half the ratio.

    :param ratio: how much of a repeat each successful call earns, from 0 to 1000. 0.1 by default: in the long run, the
        retries of a single policy add at most a tenth to the load.
    :param saved: how many repeats can be saved up, at least 1; 10 by default. A new budget is full, and so is its copy
        in the child of a fork.
    :param per_second: how many more repeats are earned each second, for clients that call rarely; none by default.

    At any time, repeats <= saved + ratio * successes + per_second * seconds. Only successes pay, not all requests (as
    in Finagle and the SRE book). That ends a retry storm: if no call succeeds, none is repeated. The token buckets of
    the AWS SDKs and of gRPC (gRFC A6) are filled in the same way.

    >>> from resilience import Retry, RetryBudget
    >>> budget = RetryBudget(0.1, saved=10)
    >>> users, orders = Retry(budget=budget), Retry(5, budget=budget)
    >>> budget.balance
    10.0
    """

    def __init__(self, ratio: float = 0.1, *, saved: float = 10.0, per_second: float = 0.0) -> None:
        self._ratio = checks.within("ratio", ratio, 0, 1000)
        self._saved = checks.within("saved", saved, 1)
        self._per_second = checks.within("per_second", per_second, 0)
        self._successes = Counter()
        self.succeeded: Callable[[], object] = self._successes.add
        """Note that a call succeeded. It takes no lock: the earnings are added up when the balance is next used."""
        self._lock: threading.RLock
        self._balance: float
        self._refused: int
        self._reset()
        forks.reset_after_fork(self, RetryBudget._reset)

    def withdraw(self) -> bool:
        """Take a repeat; return false if there is none."""
        with self._lock:
            self._add_earnings_locked()
            self._balance -= 1.0  # before the check, because a finalizer may call this method in between
            if self._balance >= -_ROUNDING:
                return True
            self._balance += 1.0
            self._refused += 1
            return False

    def give_back(self) -> None:
        """Return a repeat that was taken and not made."""
        with self._lock:
            self._balance = min(self._saved, self._balance + 1.0)

    @property
    def balance(self) -> float:
        """How many repeats are available now."""
        with self._lock:
            self._add_earnings_locked()
            return max(0.0, self._balance)

    @property
    def refused(self) -> int:
        """How many repeats were refused since it was built, or since the fork that made this process."""
        return self._refused

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._balance = self._saved
        self._refused = 0
        self._counted = self._successes.value()
        self._as_of = clock.now() if self._per_second else 0.0

    def _add_earnings_locked(self) -> None:
        successes = self._successes.value()
        earned = (successes - self._counted) * self._ratio
        self._counted = successes
        if self._per_second:
            now = clock.now()
            earned += max(0.0, now - self._as_of) * self._per_second
            self._as_of = now
        self._balance = min(self._saved, self._balance + earned)

    def __reduce__(self) -> Any:
        """Refuse to be copied: two budgets would allow twice as many repeats."""
        raise TypeError(f"{self!r} is shared by all that hold it; it cannot be copied or pickled")

    def __repr__(self) -> str:
        return format_call("RetryBudget", self._ratio, saved=(self._saved, None), per_second=(self._per_second, 0))


def as_budget(name: str, value: Budget | float | None) -> Budget | None:
    """Return a budget: the given one, a new one for a ratio, or None."""
    if value is None or isinstance(value, RetryBudget):
        return value
    if isinstance(value, (int, float)):
        return RetryBudget(checks.within(name, value, 0, 1000))
    missing = [it for it in _METHODS if not callable(getattr(value, it, None))]
    if missing or isinstance(value, type):
        lacking = f"; it has no method {missing[0]}()" if missing else ", and not a class"
        raise TypeError(f"{name} must be a RetryBudget, a ratio or None, not {value!r}{lacking}")
    for method in _METHODS:
        checks.plain_function(f"{name}.{method}", getattr(value, method), ())
    return value


# --- in one execution ---


@final
class Cap:
    """A number of repeats for an execution and all executions inside it, in any thread or task.

    :param outer: the cap around it; each repeat is taken from both.
    """

    __slots__ = ("_numbers", "_outer", "_repeats", "_returned")

    def __init__(self, repeats: int, outer: Cap | None = None) -> None:
        self._repeats = repeats
        self._outer = outer
        self._numbers = count()  # as `next` is atomic, and so are `pop` and `append`, no lock is needed
        self._returned: list[None] = []

    def take(self) -> bool:
        """Take a repeat; return false if there is none."""
        if self._outer is not None and not self._outer.take():
            return False
        try:
            self._returned.pop()
            return True
        except IndexError:
            if next(self._numbers) < self._repeats:
                return True
        if self._outer is not None:
            self._outer.give_back()
        return False

    def give_back(self) -> None:
        """Return a repeat that was taken and not made."""
        self._returned.append(None)
        if self._outer is not None:
            self._outer.give_back()


Refuser: TypeAlias = Literal["cap", "budget"]


def take_repeat(cap: Cap | None, budget: Budget | None) -> Refuser | None:
    """Take a repeat from both, or else from neither; in that case, return which of them refused it."""
    if cap is not None and not cap.take():
        return "cap"
    allowed = False
    try:
        allowed = budget is None or budget.withdraw()
    finally:  # even if a user's budget raises
        if not allowed and cap is not None:
            cap.give_back()
    return None if allowed else "budget"


def give_back_repeat(cap: Cap | None, budget: Budget | None) -> None:
    """Return a repeat that was taken and not made."""
    if cap is not None:
        cap.give_back()
    if budget is not None:
        budget.give_back()


def give_back_refused(refusal: Exception, cap: Cap | None, budget: Budget | None) -> None:
    """Return a repeat that a policy inside has refused, unless a Retry inside says that it has made calls before."""
    if not is_annotated(refusal, RETRY_NOTE):
        give_back_repeat(cap, budget)
