"""Worker threads, whose jobs a caller can abandon.

Python cannot stop a thread, so the function under an enforced `Timeout` runs on a worker while the caller waits. If the
time is over first, the job is *abandoned*: the worker runs it to its end, drops its outcome, and can be used again.
Whether a job was finished or abandoned is decided once, by the side that acquires its lock `_claim` first.

Workers are daemon threads, so the process can end while one hangs. They are started on demand, so no job waits for a
worker, and reused in last-in, first-out order. `FEW` idle workers stay for `IDLE` seconds; the others, which only a
burst needed, end after `IDLE_IN_EXCESS`. While the interpreter shuts down, there may be no worker: the caller then runs
its function itself.

If gevent or eventlet has patched threads, a worker is a greenlet, which runs only while the system's thread that
started it waits. A caller in another of those threads would wait for it in vain, so it is not used again.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count, islice
from math import inf
from typing import Any, ClassVar, final

from resilience import forks
from resilience.callables import close_coroutine
from resilience.clock import clock
from resilience.errors import ArgumentMisuse, WorkersExhausted
from resilience.log import logger

#: How many abandoned functions may be running in the process before another call is refused.
DEFAULT_MAX_ABANDONED = 128

#: Seconds after which an idle worker ends: if no more than `FEW` workers are idle, and if more are.
IDLE = 30.0
IDLE_IN_EXCESS = 2.0
FEW = 4


class Job:
    """The call of a function on a worker, in a copy of the caller's `contextvars`."""

    __slots__ = (
        "_arguments",
        "_claim",
        "_done",
        "_error",
        "_function",
        "_keywords",
        "_value",
        "has_ended",
        "returned_at",
        "variables",
    )

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._keywords = keywords
        #: The copy of the caller's variables, in which the function runs.
        self.variables: contextvars.Context = contextvars.copy_context()
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._value: Any = None
        self._error: BaseException | None = None
        #: The instant at which the function returned, on the process clock.
        self.returned_at: float = -inf
        #: Whether the job, once abandoned, has ended.
        self.has_ended: bool = False

    # --- the caller's side ---

    def wait(self, seconds: float) -> bool:
        """Wait until the job has ended (true); after `seconds` abandon it (false). An interrupt abandons it, too."""
        try:
            finished = clock.wait(self._done, max(0.0, seconds))
        except BaseException:  # Ctrl-C in the main thread: the caller does not need the result
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
        """Give up the result; false if the job has ended already."""
        if not self._claim.acquire(blocking=False):
            return False
        pool.abandoned.add(self)
        if self.has_ended:  # perhaps before it was added; `drop` sets this first, and then removes the job
            pool.abandoned.discard(self)
        return True

    # --- the worker's side ---

    def run(self) -> None:
        """Run the function, and keep its outcome."""
        try:
            self._value = self.variables.run(self._function, *self._arguments, **self._keywords)
            self.returned_at = clock.now()
        except BaseException as error:  # the caller raises it, whatever it is
            self._error = error

    def claim(self) -> bool:
        """Claim the job, so that its outcome will be delivered; false if the caller has abandoned it."""
        return self._claim.acquire(blocking=False)

    def deliver(self) -> None:
        """Wake the caller."""
        self._done.release()

    def drop(self) -> None:
        """Drop the outcome of an abandoned job."""
        value, self._value, self._error = self._value, None, None
        try:
            close_coroutine(value)
        except Exception:
            logger.exception("closing the result of an abandoned call raised")
        finally:
            self.has_ended = True
            pool.abandoned.discard(self)


@final
class Worker(threading.Thread):
    """A daemon thread that runs one job after another.

    :param job: the first one.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(name=f"resilience-worker-{next(_numbers)}", daemon=True)
        self._job: Job | None = job
        self._wake = threading.Lock()  # released when there is a job to begin
        self._starter = _system_thread()
        #: The process in which its thread is.
        self.process_id: int = os.getpid()

    @property
    def has_new_job(self) -> bool:
        """Whether the worker has a job that it has not begun."""
        return self._job is not None

    def wait(self) -> bool:
        """Wait for a job; false if none has arrived for the idle time. Idle workers do nothing else."""
        if self._wake.acquire(timeout=pool.idle_timeout()):
            return True
        # If it has just been taken, its job may not have arrived. Each job wakes it once, and is begun only then.
        return not pool.retire(self) and self._wake.acquire()

    def run(self) -> None:
        """Run jobs until none has arrived for the idle time."""
        is_greenlet = _system_thread() == self._starter
        try:
            while self.wait():
                job, self._job = self._job, None
                assert job is not None
                job.run()
                if os.getpid() != self.process_id:  # pragma: no cover (in the child of a fork)
                    return  # the job forked, and its caller is in the parent
                is_wanted = job.claim()
                if not is_wanted:
                    job.drop()
                if not is_greenlet:
                    pool.idle.append(self)  # before the caller wakes, so that its next call finds this worker
                if is_wanted:
                    job.deliver()
                if is_greenlet:
                    return
                del job  # an idle worker keeps no result alive
        finally:  # also if no memory is left, or a trace function raises: nothing would run a job that it was given
            pool.retire(self)


@final
class Pool:
    """The idle workers, and the abandoned jobs that still run."""

    max_abandoned: ClassVar[int] = DEFAULT_MAX_ABANDONED

    def __init__(self) -> None:
        #: The class whose `max_abandoned` is the limit: `Timeout`, where users set it, once it is imported.
        self.limited_by: Any = Pool
        self.reset()

    def reset(self) -> None:
        """Forget all workers and jobs, as in the child of a fork, which has none of its parent's threads."""
        self.idle: deque[Worker] = deque()
        self.abandoned: set[Job] = set()

    def is_exhausted(self) -> bool:
        """Whether too many abandoned jobs still run."""
        most = self.limited_by.max_abandoned
        try:
            return bool(len(self.abandoned) >= most)
        except TypeError:
            raise ArgumentMisuse(f"Timeout.max_abandoned must be a whole number, not {most!r}") from None

    def refuse_if_exhausted(self, policy: str) -> None:
        """Raise `WorkersExhausted` if too many abandoned jobs still run."""
        if self.is_exhausted():
            running = f"{len(self.abandoned)} abandoned calls are still running"
            raise WorkersExhausted(f"{running}, at most {self.limited_by.max_abandoned} may", policy=policy)

    def begin(self, job: Job, policy: str | None = None) -> bool:
        """Begin a job on a worker; false if the interpreter is shutting down, and no worker can run.

        :raises WorkersExhausted: if no thread can be started, because the system has none left or supports none.
        """
        if sys.is_finalizing():  # daemon threads have ended by then
            return False
        process_id = os.getpid()
        try:
            # The unpacking pops the worker. After a call (of `idle.pop`, or `os.getpid`), Ctrl-C would lose it.
            (worker,) = islice(iter(self.idle.pop, None), 1)
            while worker.process_id != process_id:  # uWSGI forks without the hooks of Python
                (worker,) = islice(iter(self.idle.pop, None), 1)
        except IndexError:
            return _start_worker(job, policy)
        # Inline, because Ctrl-C at the start of a function of ours would leave a worker without a job.
        worker._job = job
        worker._wake.release()
        return True

    def idle_timeout(self) -> float:
        """Return how many seconds a worker that has just become idle waits for a job."""
        return IDLE if len(self.idle) <= FEW else IDLE_IN_EXCESS

    def retire(self, worker: Worker) -> bool:
        """Remove an idle worker, which ends; false if it has just been given a job."""
        try:
            self.idle.remove(worker)
        except ValueError:
            return False
        return True


def _start_worker(job: Job, policy: str | None) -> bool:
    try:
        worker = Worker(job)  # inside the `try`, because a subinterpreter may refuse to make a daemon thread
        contextvars.Context().run(worker.start)  # empty: a worker outlives the call whose variables it would inherit
    except RecursionError:  # of the caller, who has left no stack for it
        raise
    except RuntimeError as error:
        # Since CPython 3.12, no thread can start after the main thread has ended, so none in an `atexit` function.
        # Later versions raise a subclass of this error, with the same words.
        if "interpreter shutdown" in str(error):
            return False
        remedy = "`Timeout(..., cooperative=True)` needs none"
        raise WorkersExhausted(f"no thread for the call: {error}; {remedy}", policy=policy) from error
    return True


#: The number of the current thread of the operating system. Where there is none, there are no threads either.
_system_thread: Callable[[], int] = getattr(threading, "get_native_id", threading.get_ident)

_numbers = count(1)
pool: Pool = Pool()
forks.reset_after_fork(pool, Pool.reset)
