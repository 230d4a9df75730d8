"""Events of policies as key-value events of `structlog`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from resilience.integrations._extras import needed_by

with needed_by("structlog"):
    import structlog


from resilience import checks
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
    """Log the events of all policies in this process, as key-value events.

    :param logger: anything with structlog's methods `debug` to `critical`; ``structlog.get_logger("resilience")`` by
        default, which follows a later `structlog.configure`.
    :param levels: this and all further parameters: see `resilience.integrations.logging.log_events`. The latest
        repeat that was left out is logged with the number of them, `left_out`, and the time that they took, `seconds`.
    :returns: a function that ends it.
    :raises TypeError: if `logger` lacks one of the methods, or one is asynchronous.

    The event is named after its kind: ``"resilience.retry_scheduled"``. Arguments and results of calls are never
    logged.

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
    if isinstance(chosen, logging.Logger):
        raise TypeError(f"logger must be a structlog logger; for {logger!r}, use resilience.integrations.logging")
    for name in _METHODS.values():
        method = getattr(chosen, name, None)
        if not callable(method):
            raise TypeError(f"logger must be a structlog logger, which {logger!r} is not: it has no {name}()")
        checks.plain_function(f"logger.{name}", method)

    def write(line: Line) -> None:
        method = next(name for level, name in _METHODS.items() if line.level >= level)
        getattr(chosen, method)(f"resilience.{line.kind}", **line.facts)

    def is_enabled(level: int) -> bool:  # the loggers of structlog have such a method since version 25.1
        check = getattr(chosen, "is_enabled_for", None) or getattr(chosen, "isEnabledFor", None)
        return bool(check(level)) if callable(check) else True

    return Lines(write, is_enabled, levels=levels, repeats=repeats, interval=interval, messages=messages).begin()


#: Level -> the method that logs at this level and above, highest first.
_METHODS = {
    logging.CRITICAL: "critical",
    logging.ERROR: "error",
    logging.WARNING: "warning",
    logging.INFO: "info",
    0: "debug",
}
