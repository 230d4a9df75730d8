"""The ends of calls and of whole executions: kept in the record, and reported to listeners."""

from __future__ import annotations

from typing import Any

from resilience.clock import clock
from resilience.context import Context
from resilience.events.dispatch import announce, subscribers
from resilience.events.kinds import CallFinished, Canceller, ExecutionFinished
from resilience.outcome import Failure, Outcome, Success, unwrap_stop_iteration
from resilience.record import Record
from resilience.runtimes.base import has_come
from resilience.runtimes.driving import Suspended


def end_attempt(record: Record, ctx: Context, began: float | None, value: object, error: BaseException | None) -> None:
    """Record how a call of the function ended, and report it to the listeners to `CallFinished`.

    :param began: the instant at which it began; None if there was no such listener at that time.
    """
    if isinstance(error, Exception):
        record.add_failure(unwrap_stop_iteration(error))
    elif error is not None:
        record.was_cut_off = True
    if began is not None:
        now = clock.now()
        outcome, cancelled_by = _how_it_ended(value, error, ctx)
        announce(
            subscribers.by_kind[CallFinished],
            CallFinished,
            record.policy,
            ctx,
            time=now,
            attempt=ctx.attempt,
            elapsed=now - began,
            remaining=max(0.0, ctx.deadline - began),
            outcome=outcome,
            cancelled_by=cancelled_by,
        )


def end_execution(
    record: Record, ctx: Context, value: object, error: BaseException | None, items: int | None = None
) -> None:
    """Close the record, and report how the execution ended: with a value, or with an error.

    :param items: how many items a stream has delivered; None for a call that is not a stream.
    """
    record.end()
    listeners = ctx._info.listeners + subscribers.by_kind[ExecutionFinished]
    if listeners:
        outcome, cancelled_by = _how_it_ended(value, error, ctx)
        announce(
            listeners,
            ExecutionFinished,
            record.policy,
            ctx,
            time=record.ended,
            attempts=record.attempts,
            elapsed=record.elapsed,
            outcome=outcome,
            cancelled_by=cancelled_by,
            items=items,
        )


def _how_it_ended(
    value: object, error: BaseException | None, ctx: Context
) -> tuple[Outcome[Any] | None, Canceller | None]:
    """Return the outcome; if there is none because of a cancellation, return the canceller instead."""
    if error is None:
        return Success(value), None
    if isinstance(error, Suspended):
        error = error.error
    if isinstance(error, Exception):
        return Failure(unwrap_stop_iteration(error)), None
    return None, canceller(error, ctx)


def canceller(error: BaseException, ctx: Context) -> Canceller:
    """Return what cancelled the code under this context, as far as the exception and the deadline show it."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "interrupt"
    if isinstance(error, GeneratorExit):
        return "closed"
    if ctx._info.record is not None and ctx._info.record.decided_races:
        return "hedge"
    return "deadline" if has_come(ctx.deadline) else "caller"
