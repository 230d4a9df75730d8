"""Hand-written code for tasks, without a library: nested `try`, and the primitives of asyncio or trio.

No other task runs between two awaits, so the breaker needs no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

from benchmarks.functions import ATTEMPTS, FAILURE, FAILURES, LIMIT, OPEN_FOR, SECONDS, TOO_SHORT
from benchmarks.libraries.hand_written import Refused, deadline_of_call, delay_after, library
from benchmarks.timing import ASYNCIO, TRIO

__all__ = ["library"]


class Breaker:
    """Opens after some failures in a row. Later, it lets one call through as a probe."""

    def __init__(self) -> None:
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    def admit(self) -> None:
        if self._opened_at is not None:
            if self._probing or monotonic() - self._opened_at < OPEN_FOR:
                raise Refused("the circuit is open")
            self._probing = True

    def succeeded(self) -> None:
        self._failures = 0
        self._opened_at = None
        self._probing = False

    def failed(self) -> None:
        self._failures += 1
        if self._probing or self._failures >= FAILURES:
            self._opened_at = monotonic()
            self._probing = False


@library.enters("retry", ASYNCIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def protected() -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await fn()
            except FAILURE:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(delay_after(attempt))
        return None

    return protected


@library.enters("retry at once", ASYNCIO, TRIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def protected() -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await fn()
            except FAILURE:
                if attempt == ATTEMPTS:
                    raise
        return None

    return protected


@library.enters("breaker", ASYNCIO, TRIO)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    breaker = Breaker()

    async def protected() -> Any:
        breaker.admit()
        try:
            result = await fn()
        except Exception:
            breaker.failed()
            raise
        breaker.succeeded()
        return result

    return protected


@library.enters("fallback", ASYNCIO, TRIO)
def fallback(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def protected() -> Any:
        try:
            return await fn()
        except Exception:
            return None

    return protected


@library.enters("deadline", ASYNCIO, TRIO)
def deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def protected() -> Any:
        token = deadline_of_call.set(monotonic() + SECONDS)
        try:
            return await fn()
        finally:
            deadline_of_call.reset(token)

    return protected


# --- asyncio ---


@library.enters("bulkhead", ASYNCIO)
def bulkhead(fn: Callable[..., Any], limit: int = LIMIT) -> Callable[..., Any]:
    permits = asyncio.Semaphore(limit)

    async def protected() -> Any:
        if permits.locked():
            raise Refused("the bulkhead is full")
        async with permits:
            return await fn()

    return protected


@library.enters("bulkhead of one", ASYNCIO)
def bulkhead_of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return bulkhead(fn, 1)


@library.enters("timeout", ASYNCIO)
def timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def protected() -> Any:
        async with asyncio.timeout(SECONDS):
            return await fn()

    return protected


@library.enters("short timeout", ASYNCIO)
def short_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        async with asyncio.timeout(TOO_SHORT):
            return await fn(*args, **kwargs)

    return call


@library.enters("deadline, block", ASYNCIO)
def deadline_block(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def block() -> Any:
        async with asyncio.timeout(SECONDS):
            return await fn()

    return block


@library.enters("four", ASYNCIO)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    breaker = Breaker()
    permits = asyncio.Semaphore(LIMIT)

    async def protected() -> Any:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    breaker.admit()
                    if permits.locked():
                        raise Refused("the bulkhead is full")
                    async with permits:
                        try:
                            result = await fn()
                        except Exception:
                            breaker.failed()
                            raise
                    breaker.succeeded()
                    return result
                except FAILURE:
                    if attempt == ATTEMPTS:
                        raise
                    await asyncio.sleep(delay_after(attempt))
        except Exception:
            return None

    return protected


@library.enters("five, deadline", ASYNCIO)
def five_deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    breaker = Breaker()
    permits = asyncio.Semaphore(LIMIT)

    async def protected() -> Any:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    breaker.admit()
                    if permits.locked():
                        raise Refused("the bulkhead is full")
                    async with permits:
                        token = deadline_of_call.set(monotonic() + SECONDS)
                        try:
                            result = await fn()
                        except Exception:
                            breaker.failed()
                            raise
                        finally:
                            deadline_of_call.reset(token)
                    breaker.succeeded()
                    return result
                except FAILURE:
                    if attempt == ATTEMPTS:
                        raise
                    await asyncio.sleep(delay_after(attempt))
        except Exception:
            return None

    return protected


@library.enters("five, timeout", ASYNCIO)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    breaker = Breaker()
    permits = asyncio.Semaphore(LIMIT)

    async def protected() -> Any:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    breaker.admit()
                    if permits.locked():
                        raise Refused("the bulkhead is full")
                    async with permits:
                        try:
                            async with asyncio.timeout(SECONDS):
                                result = await fn()
                        except Exception:
                            breaker.failed()
                            raise
                    breaker.succeeded()
                    return result
                except FAILURE:
                    if attempt == ATTEMPTS:
                        raise
                    await asyncio.sleep(delay_after(attempt))
        except Exception:
            return None

    return protected


# --- trio ---


@library.enters("retry", TRIO)
def retry_trio(fn: Callable[..., Any]) -> Callable[..., Any]:
    import trio

    async def protected() -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await fn()
            except FAILURE:
                if attempt == ATTEMPTS:
                    raise
                await trio.sleep(delay_after(attempt))
        return None

    return protected


@library.enters("bulkhead", TRIO)
def bulkhead_trio(fn: Callable[..., Any], limit: int = LIMIT) -> Callable[..., Any]:
    import trio

    permits = trio.Semaphore(limit)

    async def protected() -> Any:
        try:
            permits.acquire_nowait()
        except trio.WouldBlock:
            raise Refused("the bulkhead is full") from None
        try:
            return await fn()
        finally:
            permits.release()

    return protected


@library.enters("bulkhead of one", TRIO)
def bulkhead_of_one_trio(fn: Callable[..., Any]) -> Callable[..., Any]:
    return bulkhead_trio(fn, 1)


@library.enters("timeout", TRIO)
def timeout_trio(fn: Callable[..., Any]) -> Callable[..., Any]:
    import trio

    async def protected() -> Any:
        with trio.fail_after(SECONDS):
            return await fn()

    return protected


@library.enters("four", TRIO)
def four_trio(fn: Callable[..., Any]) -> Callable[..., Any]:
    import trio

    breaker = Breaker()
    permits = trio.Semaphore(LIMIT)

    async def protected() -> Any:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    breaker.admit()
                    permits.acquire_nowait()  # raises trio.WouldBlock
                    try:
                        result = await fn()
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
                    await trio.sleep(delay_after(attempt))
        except Exception:
            return None

    return protected


@library.enters("five, timeout", TRIO)
def five_timeout_trio(fn: Callable[..., Any]) -> Callable[..., Any]:
    import trio

    breaker = Breaker()
    permits = trio.Semaphore(LIMIT)

    async def protected() -> Any:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    breaker.admit()
                    permits.acquire_nowait()  # raises trio.WouldBlock
                    try:
                        with trio.fail_after(SECONDS):
                            result = await fn()
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
                    await trio.sleep(delay_after(attempt))
        except Exception:
            return None

    return protected
