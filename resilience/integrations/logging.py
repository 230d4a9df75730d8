"""Events of policies as lines of the standard library's `logging`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

from resilience import checks
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
    """Log the events of all policies in this process as readable lines.

    :param logger: a logger or an adapter; ``logging.getLogger("resilience.events")`` by default.
    :param levels: levels for kinds of events, instead of the defaults; None for no line. By default, an opened circuit
        is an error, and so is a task that a `Supervisor` has given up; timeouts, refusals and retries that give up are
        warnings; retries and fallbacks are infos; the end of an execution is for debugging. Whether that is logged is
        decided when this function is called, because listening to it costs every call.
    :param repeats: how many lines of one kind, pipeline, policy and operation are written in an interval. The others
        are counted, and the next event after the interval (or the returned function) logs the count. Changes of
        circuits, and tasks that are given up, are always logged.
    :param interval: the length of the interval in seconds.
    :param messages: whether the messages of errors are logged, cut to 200 characters, or only their classes, the
        default. Messages can contain anything that a client puts into them.
    :returns: a function that ends it.
    :raises TypeError: if `logger` is neither a logger nor an adapter.

    Arguments and results of calls are never logged. Each record has the values of its line as attributes (`extra=`):
    `kind`, `pipeline`, `policy`, `operation`, and those of its kind. A handler that blocks makes the call wait: in
    asyncio and trio, use `logging.handlers.QueueHandler`.

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
    checks.instance("logger", chosen, (logging.Logger, logging.LoggerAdapter), "a logging.Logger or LoggerAdapter")

    def write(line: Line) -> None:
        target, text, extra = chosen, line.text, {"kind": line.kind, **line.facts}
        options: Any = {"extra": extra}
        while isinstance(target, logging.LoggerAdapter):  # its own values would replace ours
            text, options = target.process(text, options)
            options["extra"] = extra = {**extra, **(options.get("extra") or {})}
            target = target.logger
        target.log(line.level, text, **options)

    lines = Lines(write, chosen.isEnabledFor, levels=levels, repeats=repeats, interval=interval, messages=messages)
    return lines.begin()
