"""A worker for Redis streams: ack, retry, dead letters, a graceful stop. It may be killed at any moment.

Look at `Worker`, which is the whole worker: Redis redelivers jobs, and policies do the rest. `Once` skips redelivered
jobs that are done or in progress, and `Gate` lets the process end when its jobs are done. A job that is cut off is
repeated (at least once), so the ledger has a unique key for each job, as a table would have. A source for SQS queues is
in `_sqs.py`.

    python examples/worker.py --kills 5            # kills worker processes at random points, then counts
    python examples/worker.py --kills 5 --store    # kills the store as well

It needs `redis-server`, and starts it itself.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import redis

from resilience import Policy, Rejected, Retry, Timeout
from resilience.work import Gate, Once

# --- the worker, which does not depend on Redis ------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """A job from a source. It may be delivered several times, with the same `id`."""

    id: str
    body: Mapping[str, str]
    receipt: str = ""  # which some brokers need for the acknowledgement
    deliveries: int = 1  # how often it was delivered, if the broker counts that


class Source(Protocol):
    """A broker's queue. It redelivers messages that were not acknowledged."""

    @property
    def away(self) -> Any: ...  # the exceptions that it raises if the broker is not available

    def receive(self) -> Message | None: ...
    def ack(self, message: Message) -> None: ...
    def retry(self, message: Message) -> int: ...  # lets it be redelivered; returns how often it has failed
    def dead_letter(self, message: Message, error: Exception) -> None: ...


class Worker:
    """Calls a function with each message, under a policy, until it is stopped."""

    def __init__(
        self, source: Source, handler: Callable[[Message], object], policy: Policy[Any], *, max_failures: int = 3
    ) -> None:
        self.source = source
        self.gate = Gate()
        self._handle = self.gate.wrap(policy)(handler)
        self._max_failures = max_failures
        # The source is a service like any other, and may be unavailable for a while.
        self.ask = Retry(None, on=source.away, backoff=[0.05]).call

    def run(self) -> None:
        while not self.gate.stats().is_shut:
            message = self.ask(self.source.receive)
            if message is not None:
                self._work_on(message)

    def _work_on(self, message: Message) -> None:
        try:
            self._handle(message)
        except (Rejected, *self.source.away):
            return  # another worker has the job, this one stops, or the store is unavailable: it will be redelivered
        except Exception as error:
            if self.ask(self.source.retry, message) >= self._max_failures:
                self.ask(self.source.dead_letter, message, error)
        else:
            self.ask(self.source.ack, message)


# --- a source: a consumer group of Redis -----------------------------------------------------------------------------

STREAM, GROUP, FAILURES, DEAD = "jobs", "workers", "jobs:failures", "jobs:dead"


class RedisStream:
    """A consumer group of a stream. A message not acknowledged within `visible_after` seconds is delivered again."""

    away = (redis.RedisError,)

    def __init__(self, client: Any, consumer: str, visible_after: float) -> None:
        self._client = client
        self._consumer = consumer
        self._idle = round(visible_after * 1000)

    def receive(self) -> Message | None:
        claimed = self._client.xautoclaim(STREAM, GROUP, self._consumer, self._idle, count=1)[1]
        if not claimed:
            [(_, claimed)] = self._client.xreadgroup(GROUP, self._consumer, {STREAM: ">"}, 1, 50) or [("", [])]
        return Message(*claimed[0]) if claimed else None

    def ack(self, message: Message) -> None:
        self._client.xack(STREAM, GROUP, message.id)

    def retry(self, message: Message) -> int:
        return int(self._client.hincrby(FAILURES, message.id, 1))

    def dead_letter(self, message: Message, error: Exception) -> None:
        with self._client.pipeline(transaction=True) as both:  # both steps, or neither
            both.xadd(DEAD, {**message.body, "id": message.id, "error": repr(error)})
            both.xack(STREAM, GROUP, message.id)
            both.execute()


# --- one process ---------------------------------------------------------------------------------------------


def work(port: int) -> None:
    """Work with two threads until SIGTERM; then finish the jobs in progress."""
    logging.disable()  # failures of the store are expected here
    client = connect(port)
    once = Once(client, key=lambda message: message.id, lease=1.5, name="jobs")

    def handle(message: Message) -> None:
        client.hincrby("calls", message.id, 1)
        time.sleep(float(message.body["seconds"]))
        if "poison" in message.body:
            raise ValueError("this job cannot be done")
        client.hsetnx("ledger", message.id, message.body["amount"])  # a unique key: a repeated job counts once

    workers = [
        Worker(RedisStream(client, f"{os.getpid()}-{n}", visible_after=0.3), handle, once.wrap(Timeout(1.0)))
        for n in range(2)
    ]

    def stop(*_: object) -> None:
        for it in workers:
            it.gate.shut()

    signal.signal(signal.SIGTERM, stop)
    threads = [threading.Thread(target=it.run) for it in workers]
    for thread in threads:
        thread.start()
    workers[0].ask(client.sadd, "at work", os.getpid())
    for thread in threads:
        thread.join()
    sys.exit(0 if all(it.gate.drain(5) for it in workers) else 1)


def connect(port: int) -> Any:
    return redis.Redis(port=port, decode_responses=True, socket_timeout=5)


# --- the test: kill, and count ---------------------------------------------------------------------------------


class Store:
    """A redis-server that loses no acknowledged write when it is killed."""

    def __init__(self, folder: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._folder = folder
        self.start()

    def start(self) -> None:
        options = ["--port", str(self.port), "--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        command = [shutil.which("redis-server") or "redis-server", *options, "--dir", self._folder]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        Retry(None, on=redis.RedisError, backoff=[0.02], max_elapsed=20).call(connect(self.port).ping)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def wait_until_at_work(client: Any, process: subprocess.Popen[bytes]) -> None:
    while not client.sismember("at work", process.pid):
        time.sleep(0.01)


def wait_until_done(client: Any) -> None:
    """Wait until all jobs were delivered and none is pending; give up after 30 seconds without progress."""
    seen, patience = None, 0.0
    while True:
        group = client.xinfo_groups(STREAM)[0]
        now = group["pending"], group["last-delivered-id"]
        if now == (0, client.xinfo_stream(STREAM)["last-generated-id"]):
            return
        if now != seen:
            seen, patience = now, time.monotonic() + 30
        elif time.monotonic() > patience:
            return
        time.sleep(0.05)


def kill_and_count(kills: int, seed: int, kills_store: bool) -> bool:
    rng = random.Random(seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        client = connect(store.port)
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        command = [sys.executable, __file__, "--work", str(store.port)]
        processes = [subprocess.Popen(command) for _ in range(2)]
        sent: dict[str, int] = {}
        poison = 0
        killed = {"worker": 0, "store": 0}
        try:
            for _ in range(kills):
                wait_until_at_work(client, processes[0])  # do not kill a worker that has not begun
                for _ in range(15):
                    amount = rng.randrange(1, 100)
                    sent[client.xadd(STREAM, {"amount": amount, "seconds": rng.uniform(0, 0.02)})] = amount
                client.xadd(STREAM, {"seconds": 0, "poison": "yes"})
                poison += 1
                time.sleep(rng.uniform(0, 0.2))
                if kills_store and rng.random() < 0.3:
                    store.kill()
                    store.start()
                    killed["store"] += 1
                else:
                    victim = processes.pop(0)
                    victim.kill()
                    victim.wait()
                    processes.append(subprocess.Popen(command))
                    killed["worker"] += 1
            wait_until_done(client)
            for process in processes:
                wait_until_at_work(client, process)
                process.terminate()
            ended = [process.wait(10) for process in processes]
            ledger, calls = client.hgetall("ledger"), client.hgetall("calls")
            dead = [body for _, body in client.xrange(DEAD)]
            pending = client.xpending(STREAM, GROUP)["pending"]
        finally:
            for process in processes:
                process.kill()
            store.kill()
    again = sum(int(calls[it]) - 1 for it in sent if it in calls)
    lost = [it for it in sent if it not in ledger]
    wrong = [it for it, amount in sent.items() if it in ledger and int(ledger[it]) != amount]
    # The jobs that a kill may cut off: those of two threads of a worker, or of both workers with the store.
    most_again = 2 * killed["worker"] + 4 * killed["store"]
    print(f"killed {killed['worker']} workers and the store {killed['store']} times")
    print(f"{len(sent)} jobs sent, {len(ledger)} in the ledger, {len(lost)} lost, {len(wrong)} wrong")
    print(f"{again} jobs were repeated, at most {most_again} can have been cut off")
    print(f"{len({it['id'] for it in dead})} of {poison} poisonous jobs are dead letters, {pending} are pending")
    print(f"graceful stop: {'yes' if ended == [0, 0] else ended}; {time.monotonic() - began:.1f} s")
    fine = not lost and not wrong and not pending and ended == [0, 0] and again <= most_again
    fine = fine and sum(map(int, ledger.values())) == sum(sent.values()) and len({it["id"] for it in dead}) == poison
    print("nothing lost, nothing twice" if fine else "BROKEN")
    return fine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill workers at random points, and count.")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--store", action="store_true", help="kill the store as well")
    parser.add_argument("--work", type=int, metavar="PORT", help="be a worker process")
    options = parser.parse_args()
    if options.work:
        work(options.work)
    elif not kill_and_count(options.kills, options.seed, options.store):
        sys.exit(f"broken with --seed {options.seed}")
