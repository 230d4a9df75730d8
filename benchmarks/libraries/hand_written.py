"""Hand-written code for threads, without a library: nested `try`, and the primitives of the standard library.

It takes no shortcut that careful code would not take: the breaker, which threads share, counts under a lock, a permit
is released in a `finally`, and the called function can read the deadline.

There are two versions, because `threading.Semaphore` is a condition variable written in Python. In the second one, the
bulkhead is a counter under a lock, which is faster, and sufficient if no call has to wait.
"""

from __future__ import annotations

import contextvars
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from time import monotonic, sleep
from typing import Any

from benchmarks.functions import ATTEMPTS, BASE, CAP, FAILURE, FAILURES, LIMIT, OPEN_FOR, SECONDS
from benchmarks.libraries import HAND_WRITTEN, HAND_WRITTEN_COUNTING, Library
from benchmarks.timing import SYNC

library = Library(HAND_WRITTEN)
counting = Library(HAND_WRITTEN_COUNTING)

deadline_of_call: ContextVar[float | None] = ContextVar("deadline", default=None)


class Refused(Exception):
    """The circuit is open, or the bulkhead is full."""


class Breaker:
    """Opens after some failures in a row. Later, it lets one call through as a probe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    def admit(self) -> None:
        with self._lock:
            if self._opened_at is not None:
                if self._probing or monotonic() - self._opened_at < OPEN_FOR:
                    raise Refused("the circuit is open")
                self._probing = True

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._opened_at = None
            self._probing = False

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._probing or self._failures >= FAILURES:
                self._opened_at = monotonic()
                self._probing = False


class Counter:
    """A semaphore without a queue."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._left = limit

    def acquire(self, *, blocking: bool) -> bool:
        assert not blocking
        with self._lock:
            if not self._left:
                return False
            self._left -= 1
            return True

    def release(self) -> None:
        with self._lock:
            self._left += 1


def delay_after(attempt: int) -> float:
    return random.uniform(0, min(CAP, BASE * 2 ** (attempt - 1)))


@library.enters("retry", SYNC)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    def protected() -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return fn()
            except FAILURE:
                if attempt == ATTEMPTS:
                    raise
                sleep(delay_after(attempt))
        return None

    return protected


@library.enters("retry at once", SYNC)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    def protected() -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return fn()
            except FAILURE:
                if attempt == ATTEMPTS:
                    raise
        return None

    return protected


@library.enters("breaker", SYNC)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    breaker = Breaker()

    def protected() -> Any:
        breaker.admit()
        try:
            result = fn()
        except Exception:
            breaker.failed()
            raise
        breaker.succeeded()
        return result

    return protected


@library.enters("bulkhead", SYNC)
def bulkhead(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _bulkhead(fn, threading.Semaphore(LIMIT))


@library.enters("bulkhead of one", SYNC)
def bulkhead_of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _bulkhead(fn, threading.Semaphore(1))


@counting.enters("bulkhead", SYNC)
def bulkhead_counting(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _bulkhead(fn, Counter(LIMIT))


@counting.enters("bulkhead of one", SYNC)
def bulkhead_of_one_counting(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _bulkhead(fn, Counter(1))


def _bulkhead(fn: Callable[..., Any], permits: threading.Semaphore | Counter) -> Callable[..., Any]:
    def protected() -> Any:
        if not permits.acquire(blocking=False):
            raise Refused("the bulkhead is full")
        try:
            return fn()
        finally:
            permits.release()

    return protected


@library.enters("fallback", SYNC)
def fallback(fn: Callable[..., Any]) -> Callable[..., Any]:
    def protected() -> Any:
        try:
            return fn()
        except Exception:
            return None

    return protected


@library.enters("deadline", SYNC)
def deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    def protected() -> Any:
        token = deadline_of_call.set(monotonic() + SECONDS)
        try:
            return fn()
        finally:
            deadline_of_call.reset(token)

    return protected


@library.enters("timeout", SYNC)
def timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    workers = ThreadPoolExecutor(LIMIT)

    def protected() -> Any:
        return workers.submit(contextvars.copy_context().run, fn).result(SECONDS)

    return protected


@library.enters("four", SYNC)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _four(fn, threading.Semaphore(LIMIT))


@counting.enters("four", SYNC)
def four_counting(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _four(fn, Counter(LIMIT))


def _four(fn: Callable[..., Any], permits: threading.Semaphore | Counter) -> Callable[..., Any]:
    breaker = Breaker()

    def protected() -> Any:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    breaker.admit()
                    if not permits.acquire(blocking=False):
                        raise Refused("the bulkhead is full")
                    try:
                        result = fn()
                    except Exception:
                        breaker.failed()
                        raise
                    finally:
                        permits.release()
                    breaker.succeeded()
                    return result
                except FAILURE:
                    if attempt == ATTEMPTS:
                        raise
                    sleep(delay_after(attempt))
        except Exception:
            return None

    return protected


@library.enters("five, deadline", SYNC)
def five_deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _five_deadline(fn, threading.Semaphore(LIMIT))


@counting.enters("five, deadline", SYNC)
def five_deadline_counting(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _five_deadline(fn, Counter(LIMIT))


def _five_deadline(fn: Callable[..., Any], permits: threading.Semaphore | Counter) -> Callable[..., Any]:
    breaker = Breaker()

    def protected() -> Any:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    breaker.admit()
                    if not permits.acquire(blocking=False):
                        raise Refused("the bulkhead is full")
                    try:
                        token = deadline_of_call.set(monotonic() + SECONDS)
                        try:
                            result = fn()
                        finally:
                            deadline_of_call.reset(token)
                    except Exception:
                        breaker.failed()
                        raise
                    finally:
                        permits.release()
                    breaker.succeeded()
                    return result
                except FAILURE:
                    if attempt == ATTEMPTS:
                        raise
                    sleep(delay_after(attempt))
        except Exception:
            return None

    return protected


@library.enters("five, timeout", SYNC)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return four(timeout(fn))
