"""A common combination: tenacity, a breaker (pybreaker, or aiobreaker for tasks), a semaphore, a timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.libraries import STACK, Library, aiobreaker, hand_written, hand_written_tasks, pybreaker, tenacity
from benchmarks.timing import ASYNCIO, SYNC

library = Library(
    STACK, packages=("tenacity", "pybreaker", "aiobreaker"), imports=("tenacity", "pybreaker", "aiobreaker")
)


@library.enters("four", SYNC)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return hand_written.fallback(tenacity.retry(pybreaker.breaker(hand_written.bulkhead(fn))))


@library.enters("five, deadline", SYNC)
def five_deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    return four(hand_written.deadline(fn))


@library.enters("five, timeout", SYNC)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return four(hand_written.timeout(fn))


@library.enters("four", ASYNCIO)
def four_task(fn: Callable[..., Any]) -> Callable[..., Any]:
    return hand_written_tasks.fallback(tenacity.retry(aiobreaker.breaker(hand_written_tasks.bulkhead(fn))))


@library.enters("five, deadline", ASYNCIO)
def five_deadline_task(fn: Callable[..., Any]) -> Callable[..., Any]:
    return four_task(hand_written_tasks.deadline(fn))


@library.enters("five, timeout", ASYNCIO)
def five_timeout_task(fn: Callable[..., Any]) -> Callable[..., Any]:
    return four_task(hand_written_tasks.timeout(fn))
