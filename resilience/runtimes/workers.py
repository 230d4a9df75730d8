"""Threads that a caller can walk away from.

Python cannot stop a thread, so the function under an enforced `Timeout` runs on one of these while
the caller waits. When the wait is over first, the job is *abandoned*: the worker finishes it in its
own time, drops what came out, and can be used again. Whether a job was finished or abandoned is
decided once, by the side that takes its claim first.

Workers are daemon threads (the process can end while one hangs), started on demand (no job queues
for one), reused last in, first out. A few stay for `IDLE` seconds without work; the others, which only a burst has
needed, go after `IDLE_IN_EXCESS`. While the interpreter shuts down there may be none: the caller then runs its function
itself.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, final

from resilience import forks
from resilience.callables import close_coroutine
from resilience.clock import clock
from resilience.errors import WorkersExhausted
from resilience.runtimes.base import DEFAULT_MAX_ABANDONED

logger: logging.Logger = logging.getLogger("resilience")

#: Seconds after which a worker without work ends: where no more than `FEW` have none, and where more have.
IDLE = 30.0
IDLE_IN_EXCESS = 2.0
FEW = 4


class Job:
    """One function on one worker, in a copy of its caller's `contextvars`."""

    __slots__ = (
        "_arguments",
        "_claim",
        "_context",
        "_done",
        "_error",
        "_function",
        "_keywords",
        "_value",
        "is_counted",
        "is_over",
    )

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._keywords = keywords
        self._context = contextvars.copy_context()
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._value: Any = None
        self._error: BaseException | None = None
        #: Whether it counts as one that was walked away from, and whether it has come to its end after that.
        self.is_counted: bool = False
        self.is_over: bool = False

    # --- the caller's side ---

    def wait(self, seconds: float) -> bool:
        """Wait for the end (true); after `seconds`, or when interrupted, abandon the job (false)."""
        try:
            finished = clock.wait(self._done, max(0.0, seconds))
        except BaseException:  # Ctrl-C in the main thread: the caller leaves, and wants no result
            self.abandon()
            raise
        return finished or not self.abandon()

    def result(self) -> Any:
        """Return what the function returned, or raise what it raised."""
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error  # no cycle: error -> traceback -> this frame -> error

    def abandon(self) -> bool:
        """Say that the result is not wanted any more; false if it is there already."""
        if not self._claim.acquire(blocking=False):
            return False
        pool.count_abandoned(self)
        return True

    # --- the worker's side ---

    def run(self) -> None:
        """Run the function, and keep its outcome."""
        try:
            self._value = self._context.run(self._function, *self._arguments, **self._keywords)
        except BaseException as error:  # whatever it is belongs to the caller
            self._error = error

    def is_wanted(self) -> bool:
        """Decide that the outcome will be delivered; false if the caller has left."""
        return self._claim.acquire(blocking=False)

    def deliver(self) -> None:
        """Let the caller have the outcome."""
        self._done.release()

    def drop(self) -> None:
        """Let go of an outcome that no caller wants."""
        value, self._value, self._error = self._value, None, None
        try:
            close_coroutine(value)
        except Exception:
            logger.exception("closing what an abandoned call returned raised")
        finally:
            pool.count_over(self)


@final
class Worker(threading.Thread):
    """A daemon thread that runs one job after another.

    :param job: the first one.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(name=f"resilience-worker-{next(_numbers)}", daemon=True)
        self._job: Job | None = job
        self._wake = threading.Lock()  # free where there is a job to begin

    @property
    def has_new_job(self) -> bool:
        """Whether it has been handed a job that it has not begun."""
        return self._job is not None

    def run(self) -> None:
        """Wait for work and do it, until none has come for a while."""
        while self._wake.acquire(timeout=pool.patience()) or not pool.retire(self):
            job, self._job = self._job, None
            if job is None:
                continue
            job.run()
            if job.is_wanted():
                pool.idle.append(self)  # before the caller hears of it, so that its next call finds this worker
                job.deliver()
            else:
                job.drop()
                pool.idle.append(self)
            del job  # an idle worker keeps no result alive


@final
class Pool:
    """The idle workers, and the number of abandoned jobs that still run."""

    def __init__(self) -> None:
        #: How many may be abandoned, for what has no limit at hand. `Timeout` says it.
        self.most: Callable[[], int] = _default_most
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in the child of a fork, which has none of its parent's threads."""
        self.idle: deque[Worker] = deque()
        self.abandoned: int = 0
        self._counting = threading.RLock()  # a finalizer may come here in the middle of it

    def is_exhausted(self) -> bool:
        """Whether too many hang already."""
        return self.abandoned >= self.most()

    def refuse_if_exhausted(self, policy: str, max_abandoned: int) -> None:
        """Raise `WorkersExhausted` if too many hang already."""
        if self.abandoned >= max_abandoned:
            raise WorkersExhausted(
                f"{self.abandoned} abandoned calls are still running, at most {max_abandoned} may", policy=policy
            )

    def begin(self, job: Job, policy: str | None = None) -> bool:
        """Have a worker do a job; false where the interpreter shuts down and there can be none any more.

        :raises WorkersExhausted: if the system has no thread left, or none at all.
        """
        if sys.is_finalizing():  # daemon threads are gone by then, and none would answer
            return False
        try:
            worker = self.idle.pop()
        except IndexError:
            return _start_worker(job, policy)
        # Handed over here, where no function of ours begins: Ctrl-C in between would leave a worker without a job.
        worker._job = job
        worker._wake.release()
        return True

    def patience(self) -> float:
        """Return the seconds for which a worker that has just become idle waits for work."""
        return IDLE if len(self.idle) <= FEW else IDLE_IN_EXCESS

    def retire(self, worker: Worker) -> bool:
        """Let a worker go; false if it has just been taken."""
        try:
            self.idle.remove(worker)
        except ValueError:
            return False
        return True

    def count_abandoned(self, job: Job) -> None:
        """Count an abandoned job."""
        with self._counting:
            if not job.is_over:
                job.is_counted = True
                self.abandoned += 1

    def count_over(self, job: Job) -> None:
        """Count it no more: it has come to its end after all, perhaps before its caller came to count it."""
        with self._counting:
            job.is_over = True
            if job.is_counted:
                self.abandoned -= 1


def _start_worker(job: Job, policy: str | None) -> bool:
    worker = Worker(job)
    try:
        contextvars.Context().run(worker.start)  # where threads inherit variables, it would keep those of one call
    except RuntimeError as error:
        # CPython 3.12 starts no thread from the end of the main one on, so none in an `atexit` function. Later
        # versions have an error of its own for it, with the same words.
        if "interpreter shutdown" in str(error):
            return False
        remedy = "`Timeout(..., cooperative=True)` needs none"
        raise WorkersExhausted(f"no thread for the call: {error}; {remedy}", policy=policy) from error
    return True


def _default_most() -> int:
    return DEFAULT_MAX_ABANDONED


_numbers = count(1)
pool: Pool = Pool()
forks.reset_after_fork(pool, Pool.reset)
