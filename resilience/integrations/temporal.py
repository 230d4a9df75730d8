"""Conversion of a `Retry` to a retry policy of Temporal, and back.

Temporal itself retries activities, and its retries survive the process. Let one of the two retry, not both: pass the
numbers of your `Retry` to Temporal, or let Temporal make one attempt (`RetryPolicy(maximum_attempts=1)`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, final

from resilience.integrations._extras import needed_by

with needed_by("temporal"):
    import temporalio  # noqa: F401  # so that the error names this package, if it is missing
    from temporalio.common import RetryPolicy

from resilience import checks
from resilience.backoff import Constant, Exponential
from resilience.network_errors import transient
from resilience.policies.retry import Retry

__all__ = ["from_retry_policy", "to_retry_policy"]


def to_retry_policy(retry: Retry) -> RetryPolicy:
    """Return Temporal's retry policy with the numbers of a `Retry`.

    `attempts=None` means as many attempts as time allows in both. Jitter is dropped, because Temporal has none; so are
    `retry_after`, `on_retry` and `wrap`. Types in `ignore` are passed by name: Temporal compares names, so it retries
    their subclasses. `on` may be `transient` or `Exception`: Temporal retries every error whose type is not named.

    :raises TypeError: if `retry` is no `Retry`.
    :raises ValueError: for settings that Temporal does not have: a backoff that is not `Constant` or `Exponential`, no
        delay at all, an `Exponential` without a `cap` (Temporal would cap it at 100 times the base), another `on`,
        a predicate as `ignore`, `on_result`, `max_elapsed` (set a timeout in Temporal instead), a budget.

    >>> from resilience import Retry
    >>> from resilience.backoff import Exponential
    >>> from resilience.integrations.temporal import to_retry_policy
    >>> policy = to_retry_policy(Retry(5, ignore=KeyError, backoff=Exponential(0.5, cap=30)))
    >>> policy.maximum_attempts, policy.maximum_interval.total_seconds(), policy.non_retryable_error_types
    (5, 30.0, ['KeyError'])
    """
    settings = checks.instance("retry", retry, Retry, "a Retry").settings()
    for name in ("on_result", "max_elapsed", "budget"):
        if settings[name] is not None:
            raise ValueError(f"Temporal has no equivalent of {name}, which is {settings[name]!r}")
    if settings["on"] not in (transient, Exception):
        raise ValueError(
            f"on must be transient or Exception for Temporal, which compares no types, not {settings['on']!r}"
        )
    first, factor, cap = _curve_of(settings["backoff"])
    attempts: Any = settings["attempts"]
    return RetryPolicy(
        initial_interval=timedelta(seconds=first),
        backoff_coefficient=factor,
        maximum_interval=timedelta(seconds=cap),
        maximum_attempts=attempts or 0,
        non_retryable_error_types=_names_of(settings["ignore"]),
    )


def from_retry_policy(policy: RetryPolicy) -> Retry:
    """Return a `Retry` that behaves like a retry policy of Temporal, without jitter.

    It retries every `Exception`, except those whose exact type name the policy lists, and Temporal's own errors that
    are marked `non_retryable`. A policy without a maximum interval has 100 times the first, as in Temporal.

    :raises TypeError: if `policy` is no `RetryPolicy`.

    >>> from datetime import timedelta
    >>> from temporalio.common import RetryPolicy
    >>> from resilience.integrations.temporal import from_retry_policy
    >>> from_retry_policy(RetryPolicy(initial_interval=timedelta(seconds=2), maximum_attempts=4)).describe()
    "Retry: up to 4 attempts, waiting Exponential(2, cap=200, jitter='none')"
    """
    checks.instance("policy", policy, RetryPolicy, "a RetryPolicy of temporalio")
    first = policy.initial_interval or timedelta(seconds=1)  # to Temporal, 0 means the default
    cap = policy.maximum_interval or 100 * first
    return Retry(
        policy.maximum_attempts or None,
        on=Exception,
        ignore=_Named(policy.non_retryable_error_types or ()),
        backoff=Exponential(first, policy.backoff_coefficient, cap, jitter="none"),
    )


def _curve_of(backoff: object) -> tuple[float, float, float]:
    """Return the first delay in seconds, the factor by which it grows, and the longest delay in seconds."""
    match backoff:
        case Constant(delay=delay):
            curve = delay, 1.0, delay
        case Exponential(base=base, factor=factor, cap=cap) if cap is not None:
            curve = min(base, cap), factor, cap
        case Exponential():
            raise ValueError(f"backoff must have a cap: Temporal would cap {backoff!r} at 100 times its first delay")
        case _:
            raise ValueError(f"backoff must be Exponential or Constant for Temporal, not {backoff!r}")
    if curve[0] < 1e-6:  # a timedelta has a resolution of microseconds
        raise ValueError(f"backoff must wait more than 0 s for Temporal, which takes 0 for 1 s, not {backoff!r}")
    return curve


def _names_of(ignore: Any) -> Sequence[str] | None:
    if isinstance(ignore, _Named):
        return list(ignore.names) or None
    types = ignore if isinstance(ignore, tuple) else (ignore,)
    if not all(isinstance(it, type) for it in types):
        raise ValueError(f"ignore must name exception types for Temporal, not {ignore!r}")
    return [it.__name__ for it in types] or None


@final
class _Named:
    """A predicate: whether Temporal would not retry this error."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = tuple(names)

    def __repr__(self) -> str:
        return f"<errors named {', '.join(self.names)}>" if self.names else "<errors that are not retryable>"

    def __call__(self, error: Exception) -> bool:
        if getattr(error, "non_retryable", False) is True:  # an ApplicationError
            return True
        return type(error).__name__ in self.names or getattr(error, "type", None) in self.names
