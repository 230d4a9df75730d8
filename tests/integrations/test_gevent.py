"""Greenlets of gevent, with an import of the library after `patch_all()` and before it, and gunicorn's worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.callers import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32" or sys.implementation.name != "cpython", reason="no gevent there"),
]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

IN_ORDER = {
    "patched first": "from gevent import monkey; monkey.patch_all()\nimport resilience",
    "patched late": "import resilience\nfrom gevent import monkey; monkey.patch_all()",
    "policies created before the patch": "from resilience import *\nbulkhead = Bulkhead(2, queue=50)\n"
    "from gevent import monkey; monkey.patch_all()",
}

PROGRAM = """
import gevent, json, math, time
from resilience import *
from resilience import current_context
from resilience.work import each

seen = {}
beats = []

def beating():
    while True:
        beats.append(time.monotonic())
        gevent.sleep(0.01)

def all_of(function, *arguments):
    began = time.monotonic()
    jobs = [gevent.spawn(function, it) for it in arguments]
    gevent.joinall(jobs, timeout=20)
    return [it.value for it in jobs], time.monotonic() - began

bulkhead = globals().get("bulkhead") or Bulkhead(2, queue=50)
heart = gevent.spawn(beating)

def queued(number):
    return bulkhead.call(lambda: (time.sleep(0.1), number)[1])

def limited(number):
    try:
        return Timeout(0.2).call(time.sleep, 5)
    except TimeoutExceeded as error:
        return str(error)

def retried(number):
    answers = iter([OSError(), OSError(), number])
    def answer():
        it = next(answers)
        if isinstance(it, Exception):
            raise it
        return it
    return Retry(3, on=OSError, backoff=[0.1]).call(answer)

def context(number):
    def left(ctx):
        gevent.sleep(0.05)
        return 10 * math.ceil(current_context().remaining() / 10)
    return Timeout(number).wrap(Retry(1)).execute(left)

limiter, flight, calls = RateLimiter(Rate(5, per=0.3)), SingleFlight(key=lambda number: "one"), []

def turn(number):
    return limiter.call(lambda: number)

def shared(number):
    return flight.call(lambda number: (calls.append(number), time.sleep(0.1), "shared")[2], number)

def hedged(number):
    delays = iter([5, 0.1])
    return Hedge(0.1).call(lambda: (time.sleep(next(delays)), number)[1])

def crawled(number):
    with each(Retry(), lambda item: (time.sleep(0.1), item)[1], range(4), limit=2, ordered=True) as outcomes:
        return [outcome.unwrap() for item, outcome in outcomes]

seen["queued"] = all_of(queued, *range(10))
seen["limited"] = all_of(limited, *range(10))
seen["retried"] = all_of(retried, *range(10))
seen["contexts"] = all_of(context, 10, 20, 30)
seen["turns"] = all_of(turn, *range(10))
seen["shared"] = all_of(shared, *range(10))
seen["hedged"] = all_of(hedged, *range(5))
seen["crawled"] = all_of(crawled, *range(5))

single = Bulkhead(1, queue=5)
first, second = gevent.spawn(single.call, time.sleep, 5), gevent.spawn(single.call, time.sleep, 5)
gevent.sleep(0.05)
seen["before"] = [single.stats().in_flight, single.stats().queued]
second.kill()
first.kill()
seen["killed"] = [single.stats().in_flight, single.stats().queued]
with gevent.Timeout(0.05, False):
    single.call(time.sleep, 5)
seen["gevent.Timeout"] = [single.stats().in_flight, single.stats().queued]

holder = gevent.spawn(single.call, time.sleep, 0.2)
gevent.sleep(0.01)
seen["native"] = gevent.get_hub().threadpool.spawn(single.call, lambda: "from a native thread").get(timeout=20)

heart.kill()
seen["calls"] = len(calls)
seen["pause"] = max(after - before for before, after in zip(beats, beats[1:]))
print(json.dumps(seen))
"""


@pytest.mark.parametrize("order", IN_ORDER)
def test_policies_work_in_greenlets(order: str) -> None:
    """Queues, limits, waits and contexts are those of a greenlet, and no wait blocks the other greenlets."""
    program = IN_ORDER[order] + "\n" + PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    answers, seconds = seen["queued"]
    assert answers == list(range(10))
    assert seconds >= 0.5  # two at a time
    assert seen["limited"][0] == ["Timeout: no result within 0.2 s"] * 10
    assert seen["limited"][1] < 1.5  # one after another: 2 s
    assert seen["retried"][0] == list(range(10))
    assert 0.2 <= seen["retried"][1] < 1.5  # one after another: 2 s
    assert seen["contexts"][0] == [10, 20, 30]
    assert seen["turns"][0] == list(range(10))
    assert 0.28 <= seen["turns"][1] < 1.5
    assert (seen["shared"][0], seen["calls"]) == (["shared"] * 10, 1)
    assert seen["hedged"][0] == list(range(5))
    assert seen["hedged"][1] < 0.9  # one after another: 1 s
    assert seen["crawled"][0] == [[0, 1, 2, 3]] * 5
    assert seen["crawled"][1] < 0.9  # one after another: 1 s
    assert seen["before"] == [1, 1]
    assert seen["killed"] == seen["gevent.Timeout"] == [0, 0]
    assert seen["native"] == "from a native thread"
    assert seen["pause"] < 0.8  # ten waits that block: 1 s


NATIVE = """
from gevent import monkey; monkey.patch_all()
import gevent, threading
from resilience import Timeout

native, timeout = gevent.get_hub().threadpool, Timeout(2)

def runs_here():
    return timeout.call(threading.get_native_id) == threading.get_native_id()

print(native.spawn(runs_here).get(timeout=20), runs_here(), native.spawn(runs_here).get(timeout=20))
"""


def test_a_function_under_a_timeout_runs_in_the_native_thread_of_its_caller() -> None:
    """A worker is a greenlet: a caller in another thread would wait in vain, or its function would block that one."""
    done = subprocess.run(
        [sys.executable, "-c", NATIVE], env=ENVIRONMENT, capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True True True\n")


APPLICATION = """
import json, threading, time
from resilience import Bulkhead, BulkheadFull, Policy, Retry, Timeout, TimeoutExceeded

bulkhead = Bulkhead(2, queue=20)
pipeline = Policy.wrap(Retry(2, backoff=[0.05]), bulkhead, Timeout(0.5))

def application(environ, start_response):
    seconds = float(environ["PATH_INFO"].strip("/"))
    began = time.monotonic()
    try:
        pipeline.call(time.sleep, seconds)
        answer = "done"
    except TimeoutExceeded as error:
        answer = str(error)
    start_response("200 OK", [("Content-Type", "application/json")])
    took = time.monotonic() - began
    return [json.dumps({"answer": answer, "took": took, "lock": threading.Lock.__module__}).encode()]
"""


def listens(address: str) -> bool:
    with suppress(OSError):
        socket.create_connection(address.split(":"), timeout=1).close()  # type: ignore[arg-type]
        return True
    return False


@contextmanager
def gunicorn(folder: Path, *arguments: str) -> Iterator[str]:
    """Run one gevent worker that listens on a free port."""
    (folder / "application.py").write_text(APPLICATION, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "gunicorn", "-k", "gevent", "-w", "1", "-b", address, *arguments]
    with (folder / "log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen([*command, "application"], cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        wait_until(lambda: listens(address), 60)
        yield f"http://{address}"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


@pytest.mark.parametrize("preload", [[], ["--preload"]], ids=["", "preloaded, and so imported before the patch"])
def test_policies_work_under_gunicorns_gevent_worker(tmp_path: Path, preload: list[str]) -> None:
    """Twelve requests at once in one process and one thread: two in the bulkhead at a time, the others in its queue."""

    def get(seconds: float) -> dict[str, object]:
        with urllib.request.urlopen(f"{url}/{seconds}", timeout=20) as response:
            answer: dict[str, object] = json.loads(response.read())
            return answer

    with gunicorn(tmp_path, *preload) as url, ThreadPoolExecutor(12) as pool:
        began = time.monotonic()
        answers = list(pool.map(get, [0.1] * 12))
        took = time.monotonic() - began
        late = get(5)
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert [it["answer"] for it in answers] == ["done"] * 12, log
    assert took >= 0.6  # two at a time
    assert {str(it["lock"]).partition(".")[0] for it in answers} == {"gevent"}
    assert late["answer"] == "Timeout: no result within 0.5 s"
