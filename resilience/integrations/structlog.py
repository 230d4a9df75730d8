"""Events of policies as key-value events of `structlog`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from resilience.integrations.extras import needed_by

with needed_by("structlog"):
    import structlog


from resilience.checks import Duration
from resilience.integrations.telemetry import Levels, Line, Lines

__all__ = ["log_events"]


def log_events(
    logger: Any = None,
    *,
    levels: Levels | None = None,
    repeats: int = 5,
    interval: Duration = 10.0,
    messages: bool = False,
) -> Callable[[], None]:
    """Log what happens in all policies of this process, as events with keys and values.

    :param logger: anything with structlog's methods `debug` to `critical`; ``structlog.get_logger("resilience")`` by
        default, which follows a later `structlog.configure`.
    :param levels: kinds of events whose level differs from the usual one; None for no line. An opened circuit is an
        error; timeouts, refusals and retries that give up are warnings; retries and fallbacks are infos; how an
        execution ended, cancelled ones included, is for debugging.
    :param repeats: how many events of one kind, pipeline, policy and operation are written in an interval. The others
        are counted: the next event after the interval (or the end) tells the latest of them, with `left_out` and
        `seconds`. Changes of circuits are always written.
    :param interval: its length in seconds.
    :param messages: whether the messages of errors are written, cut to 200 characters; else only their classes. They
        can hold anything that a client puts into them.
    :returns: a function that ends it.
    :raises TypeError: for what is no logger.

    The event is named after its kind: ``"resilience.retry_scheduled"``. Arguments and results of calls are never
    written.

    >>> import structlog
    >>> from resilience import Context, Retry
    >>> from resilience.integrations.structlog import log_events
    >>> from resilience.testing import script
    >>> with structlog.testing.capture_logs() as logged:
    ...     end = log_events()
    ...     Retry(backoff=[0.01]).execute(script(ConnectionError(), "fine"), Context(operation="get"))
    ...     end()
    'fine'
    >>> logged[0]["event"], logged[0]["attempt"], logged[0]["error_type"]
    ('resilience.retry_scheduled', 1, 'ConnectionError')
    """
    chosen = structlog.get_logger("resilience") if logger is None else logger
    for method in _METHODS.values():
        if not callable(getattr(chosen, method, None)):
            raise TypeError(f"logger must be a structlog logger, which {logger!r} is not: it has no {method}()")

    def write(line: Line) -> None:
        method = next(name for level, name in _METHODS.items() if line.level >= level)
        getattr(chosen, method)(f"resilience.{line.kind}", **line.facts)

    lines = Lines(write, _enabled_by(chosen), levels=levels, repeats=repeats, interval=interval, messages=messages)
    return lines.begin()


#: Level -> the method that logs at it, from the highest; what is lower than all of them is for debugging.
_METHODS = {
    logging.CRITICAL: "critical",
    logging.ERROR: "error",
    logging.WARNING: "warning",
    logging.INFO: "info",
    0: "debug",
}


def _enabled_by(logger: Any) -> Callable[[int], bool]:
    """Return what says whether a level is wanted: loggers before structlog 25.1 cannot be asked."""

    def is_enabled(level: int) -> bool:
        asked = getattr(logger, "is_enabled_for", None) or getattr(logger, "isEnabledFor", None)
        return bool(asked(level)) if callable(asked) else True

    return is_enabled
