"""What is put together today: tenacity, a breaker (pybreaker, or aiobreaker for tasks), a semaphore, a timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.libraries import STACK, Library, aiobreaker, by_hand, by_hand_tasks, pybreaker, tenacity
from benchmarks.timing import ASYNCIO, SYNC

library = Library(
    STACK, packages=("tenacity", "pybreaker", "aiobreaker"), imports=("tenacity", "pybreaker", "aiobreaker")
)


@library.enters("four", SYNC)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return by_hand.fallback(tenacity.retry(pybreaker.breaker(by_hand.bulkhead(fn))))


@library.enters("five, deadline", SYNC)
def five_deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    return four(by_hand.deadline(fn))


@library.enters("five, timeout", SYNC)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return four(by_hand.timeout(fn))


@library.enters("four", ASYNCIO)
def four_task(fn: Callable[..., Any]) -> Callable[..., Any]:
    return by_hand_tasks.fallback(tenacity.retry(aiobreaker.breaker(by_hand_tasks.bulkhead(fn))))


@library.enters("five, deadline", ASYNCIO)
def five_deadline_task(fn: Callable[..., Any]) -> Callable[..., Any]:
    return four_task(by_hand_tasks.deadline(fn))


@library.enters("five, timeout", ASYNCIO)
def five_timeout_task(fn: Callable[..., Any]) -> Callable[..., Any]:
    return four_task(by_hand_tasks.timeout(fn))
