"""Lines in the standard library's `logging` for what policies do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from resilience.checks import Duration
from resilience.integrations.telemetry import Levels, Line, Lines

__all__ = ["log_events"]

Logger: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"


def log_events(
    logger: Logger | None = None,
    *,
    levels: Levels | None = None,
    repeats: int = 5,
    interval: Duration = 10.0,
    messages: bool = False,
) -> Callable[[], None]:
    """Log what happens in all policies of this process, in readable lines.

    :param logger: a logger or an adapter; ``logging.getLogger("resilience.events")`` by default.
    :param levels: kinds of events whose level differs from the usual one; None for no line. An opened circuit is an
        error, and so is a task that a `Supervisor` has given up; timeouts, refusals and retries that give up are
        warnings; retries and fallbacks are infos; how an execution ended, cancelled ones included, is for debugging.
        Whether that is logged is decided when this is called: else each call would pay for it.
    :param repeats: how many lines of one kind, pipeline, policy and operation are written in an interval. The others
        are counted, and the next event after the interval (or the end) says how many there were. Changes of circuits,
        and tasks that are given up, are always written.
    :param interval: its length in seconds.
    :param messages: whether the messages of errors are written, cut to 200 characters; else only their classes. They
        can hold anything that a client puts into them.
    :returns: a function that ends it.
    :raises TypeError: for what is no logger.

    Arguments and results of calls are never written. Each record carries the values of its line as attributes
    (`extra=`): `kind`, `pipeline`, `policy`, `operation`, and those of its kind. A handler that blocks makes the call
    wait: in asyncio and trio use `logging.handlers.QueueHandler`.

    >>> import logging, sys
    >>> from resilience import Context, Retry
    >>> from resilience.integrations.logging import log_events
    >>> from resilience.testing import script
    >>> log = logging.Logger("doc", level=logging.INFO)
    >>> log.addHandler(logging.StreamHandler(sys.stdout))
    >>> end = log_events(log)
    >>> Retry(backoff=[0.01]).execute(script(ConnectionError(), "fine"), Context(operation="get"))
    Retry (get): attempt 1 failed with ConnectionError, the next one is in 0.01 s
    'fine'
    >>> end()
    """
    chosen = logging.getLogger("resilience.events") if logger is None else logger
    if not isinstance(chosen, (logging.Logger, logging.LoggerAdapter)):
        raise TypeError(f"logger must be a logging.Logger or LoggerAdapter, not {logger!r}")

    def write(line: Line) -> None:
        _log(chosen, line.level, line.text, {"kind": line.kind, **line.facts})

    lines = Lines(write, chosen.isEnabledFor, levels=levels, repeats=repeats, interval=interval, messages=messages)
    return lines.begin()


def _log(logger: Logger, level: int, text: str, extra: Mapping[str, object]) -> None:
    """Log with these attributes; an adapter has its own, and would put them in the place of ours."""
    if not isinstance(logger, logging.LoggerAdapter):
        logger.log(level, text, extra=extra)
        return
    text, options = logger.process(text, {"extra": extra})
    options["extra"] = {**extra, **(options.get("extra") or {})}
    logger.logger.log(level, text, **options)
