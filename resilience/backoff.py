"""How long to wait before the next attempt: schedules of delays, with jitter.

A backoff only describes a schedule; `delays(rng)` starts the schedule of one execution, an endless iterator of seconds.
Executions share only the source of randomness.

Jitter spreads clients that failed together, so that they do not retry together (Marc Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015). The cap bounds the envelope *before* jitter draws inside it: otherwise, all
clients that have reached the cap would wait for exactly the same time. Full jitter draws from 0 to the envelope, equal
jitter keeps half of it, a ratio `r` stays within +-r of it, and decorrelated jitter draws between the base and three
times the last delay. The last one is as published, with the cap after the draw.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, count, repeat
from typing import Literal, Protocol, TypeAlias, final

from typing_extensions import override

from resilience import checks
from resilience.checks import Duration
from resilience.clock import FOREVER
from resilience.formats import format_call

__all__ = ["Backoff", "Constant", "Decorrelated", "Exponential", "Jitter", "Linear", "Randomness"]

#: ``"full"``, ``"equal"``, ``"none"``, or a ratio: ``0.25`` is +-25 %.
Jitter: TypeAlias = Literal["full", "equal", "none"] | float


class Randomness(Protocol):
    """A source of randomness: `random.Random(seed)`, or the module `random` itself."""

    def uniform(self, a: float, b: float, /) -> float:
        """Return a number between a and b."""
        ...


#: The default: Python's own generator, shared by the process and reseeded after a fork.
SHARED_RANDOMNESS: Randomness = random


def happens(share: float, rng: Randomness | None) -> bool:
    """Draw whether something happens that happens in this share of the cases."""
    return (SHARED_RANDOMNESS if rng is None else rng).uniform(0.0, 1.0) < share


class Backoff(ABC):
    """A schedule of delays. Immutable; may be shared by any number of policies and threads."""

    @abstractmethod
    def delays(self, rng: Randomness | None = None) -> Iterator[float]:
        """Start a schedule: a fresh, endless iterator of delays in seconds, none negative, NaN or infinite.

        :param rng: source of randomness, `random` by default.
        """


class _Envelope(Backoff):
    """A backoff whose delays are drawn around or below a known curve."""

    def __init__(self, jitter: Jitter) -> None:
        self.jitter: Jitter = jitter
        self._spread = _jitter_function(jitter)

    @abstractmethod
    def _curve(self) -> Iterator[float]: ...

    @override
    def delays(self, rng: Randomness | None = None) -> Iterator[float]:
        spread, source = self._spread, SHARED_RANDOMNESS if rng is None else rng
        return self._curve() if spread is None else (spread(source, value) for value in self._curve())


@final
class Constant(_Envelope):
    """Wait the same time before every retry.

    :param delay: seconds, zero or more.
    :param jitter: ``"none"`` by default.
    """

    def __init__(self, delay: Duration, jitter: Jitter = "none") -> None:
        self.delay: float = checks.seconds("delay", delay, zero=True)
        super().__init__(jitter)

    def __repr__(self) -> str:
        return format_call("Constant", self.delay, jitter=(self.jitter, "none"))

    @override
    def _curve(self) -> Iterator[float]:
        return repeat(min(self.delay, FOREVER))


@final
class Linear(_Envelope):
    """Wait `step`, twice `step`, three times `step` ... up to `cap`.

    :param step: seconds, zero or more.
    :param cap: the longest delay in seconds, before jitter, more than zero; no limit by default.
    :param jitter: ``"none"`` by default.
    """

    def __init__(self, step: Duration, cap: Duration | None = None, jitter: Jitter = "none") -> None:
        self.step: float = checks.seconds("step", step, zero=True)
        self.cap: float | None = checks.optional_seconds("cap", cap)
        super().__init__(jitter)

    def __repr__(self) -> str:
        return format_call("Linear", self.step, cap=(self.cap, None), jitter=(self.jitter, "none"))

    @override
    def _curve(self) -> Iterator[float]:
        limit = FOREVER if self.cap is None else min(self.cap, FOREVER)
        return (min(limit, self.step * number) for number in count(1))


@final
class Exponential(_Envelope):
    """Wait `base`, then `factor` times as long before each further retry, up to `cap`.

    :param base: the first delay's envelope in seconds, zero or more.
    :param factor: growth per retry, at least 1; 2.0 by default.
    :param cap: the largest envelope in seconds, more than zero; no limit by default.
    :param jitter: ``"full"`` by default, which does the least work under contention.
    """

    def __init__(
        self, base: Duration, factor: float = 2.0, cap: Duration | None = None, jitter: Jitter = "full"
    ) -> None:
        self.base: float = checks.seconds("base", base, zero=True)
        self.factor: float = checks.within("factor", factor, least=1)
        self.cap: float | None = checks.optional_seconds("cap", cap)
        super().__init__(jitter)

    def __repr__(self) -> str:
        factor, cap, jitter = (self.factor, 2.0), (self.cap, None), (self.jitter, "full")
        return format_call("Exponential", self.base, factor=factor, cap=cap, jitter=jitter)

    @override
    def _curve(self) -> Iterator[float]:
        limit = FOREVER if self.cap is None else min(self.cap, FOREVER)
        value = min(self.base, limit)
        while value < limit:
            yield value
            # Not `base * factor**n`, which overflows at the 1024th retry; a zero base stays zero.
            value = min(limit, value * self.factor)
        yield from repeat(limit)


@final
class Decorrelated(Backoff):
    """Draw each delay between `base` and three times the one before.

    :param base: the shortest delay in seconds, zero or more.
    :param cap: the longest delay in seconds, at least `base`; no limit by default.
    """

    def __init__(self, base: Duration, cap: Duration | None = None) -> None:
        self.base: float = checks.seconds("base", base, zero=True)
        self.cap: float | None = checks.optional_seconds("cap", cap)
        if self.cap is not None and self.cap < self.base:
            raise ValueError(f"cap must be at least base ({self.base!r}), not {cap!r}")

    def __repr__(self) -> str:
        return format_call("Decorrelated", self.base, cap=(self.cap, None))

    @override
    def delays(self, rng: Randomness | None = None) -> Iterator[float]:
        source = SHARED_RANDOMNESS if rng is None else rng
        limit = FOREVER if self.cap is None else min(self.cap, FOREVER)
        delay = base = min(self.base, FOREVER)  # so that `3 * delay` does not overflow
        while True:
            delay = min(limit, _draw(source, base, 3 * delay))
            yield delay


@final
class _Given(Backoff):
    """Delays that the user lists or computes; the last one repeats."""

    def __init__(self, source: tuple[float, ...] | Backoff | Callable[[], Iterable[Duration]]) -> None:
        self._source = source

    def __repr__(self) -> str:
        return repr(list(self._source)) if isinstance(self._source, tuple) else repr(self._source)

    @override
    def delays(self, rng: Randomness | None = None) -> Iterator[float]:
        source = self._source
        if isinstance(source, tuple):
            last = repeat(source[-1])
            return last if len(source) == 1 else chain(source, last)
        return _checked(source.delays(rng) if isinstance(source, Backoff) else source())


def _checked(values: Iterable[Duration]) -> Iterator[float]:
    if not isinstance(values, Iterable):
        raise TypeError(f"the backoff must return an iterable of seconds, as [1, 2] is, not {values!r}")
    delay = None
    for value in values:
        delay = min(checks.seconds("a delay from the backoff", value, zero=True), FOREVER)
        yield delay
    if delay is None:
        raise ValueError("the backoff gave no delay at all")
    yield from repeat(delay)


#: What policies accept: a backoff, a sequence of seconds, or a callable that returns an iterable of them.
BackoffLike: TypeAlias = Backoff | Sequence[Duration] | Callable[[], Iterable[Duration]]


def as_backoff(name: str, value: object) -> Backoff:
    """Return `value` as a backoff; raise an error if it is none of the accepted types."""
    if isinstance(value, (_Envelope, Decorrelated, _Given)):
        return value
    if isinstance(value, Backoff):
        checks.plain_function(f"{name}.delays", value.delays, ("rng",))
        return _Given(value)  # a user's own class: each delay is checked when it is drawn, and the last one repeats
    if (listed := listed_delays(name, value)) is not None:
        return _Given(listed)
    if callable(value) and not isinstance(value, type):
        try:
            return _Given(checks.plain_function(name, value, ()))
        except TypeError as error:  # most likely a function of the attempt, as in other libraries
            raise TypeError(f"{error}; it returns the waits of an execution, such as [1, 2, 4]") from None
    raise TypeError(
        f"{name} must be a backoff, a sequence of seconds or a callable that returns one, not {value!r}{_hint(value)}"
    )


def listed_delays(name: str, value: object) -> tuple[float, ...] | None:
    """Return the delays that a sequence lists, at least one; None if `value` is no sequence."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        return None
    if not value:
        raise ValueError(f"{name} must hold at least one delay, not {value!r}")
    return tuple(min(checks.seconds(f"each delay in {name}", it, zero=True), FOREVER) for it in value)


def _hint(value: object) -> str:
    """Return what to write instead of a value that is no backoff, where that can be guessed."""
    if isinstance(value, type) and issubclass(value, Backoff):
        return f"; did you mean {value.__name__}(...)?"
    if isinstance(value, (int, float, timedelta)):
        return f"; did you mean Constant({value!r})?"
    if isinstance(value, Iterator):
        return "; did you mean a list of its items, or a function that returns it?"
    if hasattr(value, "delays"):
        return f"; did you mean to derive {type(value).__name__} from Backoff?"
    return "; did you mean [0], no wait?" if value is None else ""


def _jitter_function(jitter: object) -> Callable[[Randomness, float], float] | None:
    """Return the function that draws a delay for an envelope, or None without jitter."""
    if isinstance(jitter, str):
        if jitter not in _NAMED:
            raise ValueError(f"jitter must be 'full', 'equal', 'none' or a ratio, not {jitter!r}")
        return _NAMED[jitter]
    if isinstance(jitter, bool) or not isinstance(jitter, (int, float)):
        hint = f"; did you mean {'full' if jitter else 'none'!r}?" if jitter is None or isinstance(jitter, bool) else ""
        raise TypeError(f"jitter must be 'full', 'equal', 'none' or a ratio, not {jitter!r}{hint}")
    if jitter == 0:
        raise ValueError(f"jitter must be more than 0 and at most 1, not {jitter!r}; did you mean 'none'?")
    return partial(_ratio, checks.ratio("jitter", jitter))


def _full(rng: Randomness, value: float) -> float:
    return _draw(rng, 0, value)


def _equal(rng: Randomness, value: float) -> float:
    return value / 2 + _draw(rng, 0, value / 2)


def _ratio(share: float, rng: Randomness, value: float) -> float:
    return min(_draw(rng, value * (1 - share), value * (1 + share)), FOREVER)


def _draw(rng: Randomness, low: float, high: float) -> float:
    # A user's source of randomness may return anything, such as NaN.
    return checks.seconds("what rng.uniform() returned", rng.uniform(low, high), zero=True)


_NAMED: dict[str, Callable[[Randomness, float], float] | None] = {"full": _full, "equal": _equal, "none": None}
