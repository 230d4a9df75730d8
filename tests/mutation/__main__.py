"""`python -m tests.mutation`: put small faults into the code, one at a time, and print those that no test notices.

    pip install cosmic-ray
    python -m tests.mutation                                      # all modules below; some hours
    python -m tests.mutation state/windows.py policies/retry.py   # some of them
    python -m tests.mutation --sample 100                         # 100 mutants, chosen at random

A mutant is killed if a test fails, if there is an error, or if the tests take much longer than without a fault.
Survivors are printed; those that `equivalent.py` explains are counted separately. Exit status 0 if there are no others.

Do not change the files during a run: some mutants run in a copy of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import dataclass, field
from typing import TextIO

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import Mutant, mutants
from tests.mutation.trial import ROOT, Report, Trials, run

_EVERY_POLICY = ["test_bad_input.py", "test_matching.py", "test_no_outcome.py", "test_events.py", "test_listeners.py"]
_EVERY_POLICY += ["test_pipeline.py", "test_misuse.py"]
_EVERY_POLICY += [f"composition/test_{it}.py" for it in ("order", "any_pipeline", "copies")]

_BREAKER = [f"policies/test_circuit_breaker{part}.py" for part in ("", "_blocks", "_telemetry", "_probe")]
_BULKHEAD = [f"policies/test_bulkhead{part}.py" for part in ("", "_leaving", "_blocks")]
_RETRY = [f"policies/test_retry{part}.py" for part in ("", "_time", "_telemetry", "_blocks", "_foresight", "_budget")]
_HEDGE = [*(f"policies/test_hedge{part}.py" for part in ("", "_delay", "_leaving", "_model")), "runtimes/test_races.py"]
_RATES = ["policies/test_rate_limiter.py", "policies/test_rate_limiter_machine.py"]
_FLIGHTS = ["policies/test_single_flight.py", "policies/test_cache.py", "composition/test_processes.py"]
_STREAMS = [
    "streams",
    "testing/test_scripts.py",
    "runtimes/test_abandoned.py",
    "policies/test_circuit_breaker_probe.py",
]
_HTTP = ["test_http_clients.py", "test_http.py", "httpx", "test_standard.py", "test_sdks.py", "test_wrong_arguments.py"]
_TELEMETRY = [f"test_{it}.py" for it in ("telemetry", "metrics", "logging", "structlog", "opentelemetry", "prometheus")]
_TELEMETRY += ["test_wrong_arguments.py"]

#: The modules of `integrations`, and the tests there that should notice a fault in them.
_INTEGRATIONS = {
    "test_answers.py test_deadline_middlewares.py": "answers asgi wsgi",
    "test_wire.py test_serving.py test_deadline_middlewares.py test_wrong_arguments.py": "wire _serving",
    " ".join(_HTTP): "http/bodies http/exchange http/repeatable http/rules http/perhost http/standard_pipeline",
    "test_limits.py test_standard.py": "http/limits",
    "test_sdks.py test_openai.py test_limits.py test_wrong_arguments.py": "http/sdk openai anthropic",
    "httpx test_pools.py test_http_clients.py": "httpx/bodies httpx/pools httpx/sending httpx/transports",
    "test_requests.py test_http_clients.py": "requests",
    "test_urllib3.py test_requests.py test_http_clients.py": "urllib3",
    "test_aiohttp.py test_http_clients.py": "aiohttp",
    "grpc test_wrong_arguments.py": "grpc/answers grpc/client grpc/server",
    "redis": "redis/commands redis/protection redis/retrying",
    "databases test_wrong_arguments.py": "dbapi/cleanup dbapi/errors dbapi/limits dbapi/units sqlalchemy",
    " ".join(_TELEMETRY): (
        "telemetry/feed telemetry/instruments telemetry/labels telemetry/lines telemetry/observed telemetry/repeats "
        "telemetry/sentences telemetry/words logging opentelemetry prometheus"
    ),
}

_TIMEOUT = [f"policies/test_timeout{part}.py" for part in ("", "_tasks", "_cooperative")]

#: The tests that should notice a fault in a module.
TESTS = {
    "state/windows.py": [
        *(
            "state/test_windows.py",
            "state/test_trips.py",
            "policies/test_machines.py",
            "policies/test_adaptive_throttle.py",
        ),
    ],
    "state/trips.py": [
        *("state/test_trips.py", "policies/test_machines.py", "test_misuse.py", "test_pipeline.py", *_BREAKER),
    ],
    "state/circuit.py": ["state/test_circuit.py", "policies/test_machines.py", *_BREAKER],
    "state/permits.py": ["state/test_permits.py", *_BULKHEAD, "policies/test_machines.py"],
    "state/rates.py": ["state/test_rates.py", *_RATES],
    "state/turns.py": ["state/test_turns.py", *_RATES],
    "policies/rate.py": [*_RATES, "test_bad_input.py"],
    "policies/rate_limiter.py": [*_RATES, "integrations/test_limits.py", *_EVERY_POLICY],
    "policies/bulkhead.py": [*_BULKHEAD, "policies/test_machines.py", *_EVERY_POLICY],
    "policies/live_permits.py": [
        *(*_BULKHEAD, "policies/test_observe_only.py", "policies/test_machines.py", *_EVERY_POLICY),
    ],
    "state/concurrency.py": ["state/test_concurrency.py", "policies/test_adaptive_limit.py"],
    "policies/adaptive_limit.py": ["policies/test_adaptive_limit.py", *_EVERY_POLICY],
    "policies/adaptive_throttle.py": ["policies/test_adaptive_throttle.py", *_EVERY_POLICY],
    "policies/chaos.py": ["policies/test_chaos.py", *_EVERY_POLICY],
    "policies/fallback.py": ["policies/test_fallback.py", *_EVERY_POLICY],
    "policies/circuit_breaker.py": [
        *(
            *_BREAKER,
            "policies/test_machines.py",
            "composition/test_nested_calls.py",
            "composition/test_nested_trees.py",
            "composition/test_signals.py",
            *_EVERY_POLICY,
        ),
    ],
    "policies/live_circuit.py": [
        *(
            *_BREAKER,
            "policies/test_machines.py",
            "policies/test_observe_only.py",
            "composition/test_nested_calls.py",
            "composition/test_nested_trees.py",
        ),
    ],
    "policies/marks.py": [*_BREAKER, "composition/test_nested_calls.py", "composition/test_nested_trees.py"],
    "policies/retry_state.py": [*_RETRY, "test_context.py", *_EVERY_POLICY],
    "policies/retry.py": [*_RETRY, "test_context.py", *_EVERY_POLICY],
    "state/quantiles.py": ["state/test_quantiles.py", "policies/test_hedge_delay.py"],
    "policies/hedge.py": [*_HEDGE, "policies/test_repeat_cap.py", *_EVERY_POLICY],
    "policies/latencies.py": ["policies/test_hedge_delay.py", "test_bad_input.py"],
    "policies/repeat_cap.py": ["policies/test_repeat_cap.py", *_EVERY_POLICY],
    "policies/keys.py": [*_FLIGHTS, "policies/test_keyed.py"],
    "policies/flights.py": _FLIGHTS,
    "policies/copies.py": _FLIGHTS,
    "policies/single_flight.py": [*_FLIGHTS, "policies/test_keys.py", *_EVERY_POLICY],
    "policies/cache.py": ["policies/test_cache.py", "policies/test_cache_machine.py", *_EVERY_POLICY],
    "policies/keyed.py": [
        *("policies/test_keyed.py", "integrations/test_standard.py", "integrations/test_limits.py", *_EVERY_POLICY),
    ],
    **{
        f"streams/{it}.py": _STREAMS
        for it in ("driver", "execution", "items", "pulls", "runtime", "source", "streaming")
    },
    "repeats.py": [
        "test_repeats.py",
        "policies/test_retry_budget.py",
        "policies/test_repeat_cap.py",
        "test_bad_input.py",
        "test_misuse.py",
        "composition/test_copies.py",
    ],
    **{
        f"integrations/{module}.py": [f"integrations/{it}" for it in tests.split()]
        for tests, modules in _INTEGRATIONS.items()
        for module in modules.split()
    },
    "hints.py": ["policies/test_retry_time.py", "policies/test_hedge.py", "integrations/test_http_clients.py"],
    "matching.py": [
        *("test_groups.py", "policies/test_retry_foresight.py", "policies/test_fallback.py"),
        *("integrations/test_sdks.py", "test_bad_input.py", *_EVERY_POLICY),
    ],
    "proxy.py": [
        *("test_proxy.py", "test_aproxy.py", "test_proxy_operators.py", "test_called.py", "test_misuse.py"),
        *("streams/test_usage.py", "composition/test_copies.py", "test_public_api.py"),
    ],
    "callables.py": ["test_callables.py", "test_mismatch.py", "test_no_outcome.py", "test_misuse.py", "test_policy.py"],
    "policy.py": [
        *("test_policy.py", "test_own_policy.py", "test_find_policies.py", "test_called.py", "test_context.py"),
        *("composition/test_nested_calls.py", "policies/test_retry_foresight.py", "policies/test_keyed.py"),
        *("policies/test_cache.py", "work/test_idempotency.py", "work/test_once.py", *_EVERY_POLICY),
    ],
    "checks.py": [
        *("test_callables.py", "test_mismatch.py", "test_policy.py", "state/test_trips.py"),
        *("integrations/test_wrong_arguments.py", *_EVERY_POLICY),
    ],
    "events/kinds.py": ["test_called.py", *_EVERY_POLICY],
    "runtimes/blocking.py": [
        *("runtimes/test_blocking.py", "runtimes/test_abandoned.py", "runtimes/test_races.py", "streams/test_time.py"),
        *("policies/test_circuit_breaker_probe.py", "composition/test_outer_limits.py", "test_own_policy.py"),
        *(*_TIMEOUT, *_BULKHEAD, *_RETRY, *_EVERY_POLICY),
    ],
    "network_errors.py": ["test_matching.py", "test_transient_for_real.py", "integrations/test_sdks.py"],
    "events/dispatch.py": ["test_events.py", "test_listeners.py", "test_called.py", "test_bad_input.py"],
    "work/claims.py": ["work/test_once.py", "integrations/redis/test_once.py"],
    "work/for_each.py": ["work/test_each.py", "test_bad_input.py"],
    "work/gate.py": ["work/test_gate.py", "composition/test_cancellation.py"],
    "work/idempotency.py": ["work/test_idempotency.py"],
    "work/once.py": ["work/test_once.py"],
    "work/supervisor.py": ["work/test_supervisor.py"],
    "policies/timeout.py": [
        *(*_TIMEOUT, "runtimes/test_workers.py", "runtimes/test_abandoned.py"),
        *("runtimes/test_tasks.py", "test_context.py", *_EVERY_POLICY),
    ],
}

#: Tests that use a tracer or start other processes, so that the lines that they run cannot be recorded. They run for
#: mutants that have survived the other tests.
APART = {
    "state/permits.py": ["state/test_permits_steps.py"],
    "repeats.py": ["composition/test_processes.py"],
    "policies/live_permits.py": ["composition/test_processes.py", "composition/test_signals.py"],
    "policies/live_circuit.py": ["composition/test_interrupts.py"],
    "policies/circuit_breaker.py": [
        *("composition/test_processes.py", "composition/test_interrupts.py", "contention/test_contention.py"),
    ],
    "policies/fallback.py": ["composition/test_memory.py", "composition/test_interrupts.py"],
}


@dataclass
class Score:
    """The results of the mutants of one module."""

    killed: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    def __str__(self) -> str:
        faults = self.killed + len(self.survivors)
        share = f"{100 * self.killed / faults:.1f} %" if faults else "-"
        return f"{faults + self.equivalent:7} {self.killed:7} {self.equivalent:11} {len(self.survivors):9} {share:>8}"

    def count(self, module: str, mutant: Mutant, killed: bool) -> None:
        """Count a mutant; print it if it has survived and is not equivalent."""
        if killed:
            self.killed += 1
        elif (module, mutant.before, mutant.after) in EQUIVALENT:
            self.equivalent += 1
        else:
            self.survivors.append(mutant)
            print(f"  {module}:{mutant.line} {mutant.operator}")
            print(f"    - {mutant.before}\n    + {mutant.after}", flush=True)


def try_all(module: str, faults: list[Mutant], workers: int) -> Score:
    """Try the mutants of a module in a new process, so that other modules are imported without a fault."""
    score = Score()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            trials = Trials(module, faults, tests_of(module, APART), workers, reporter(pipe, faults))
            run(trials, tests_of(module, TESTS))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        for line in pipe:
            number, killed = json.loads(line)
            score.count(module, faults[number], killed)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"not all mutants of {module} could be tried")
    return score


def tests_of(module: str, which: dict[str, list[str]]) -> list[str]:
    return [f"tests/{name}" for name in which.get(module, [])]


def reporter(pipe: TextIO, faults: list[Mutant]) -> Report:
    """Return a function that writes the result of a mutant to a pipe."""

    def report(mutant: Mutant, killed: bool) -> None:
        print(json.dumps([faults.index(mutant), killed]), file=pipe, flush=True)

    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="mutation testing")
    parser.add_argument("modules", nargs="*", metavar="module", help=f"of {', '.join(TESTS)}")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--sample", type=int, help="try only this number of mutants, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faults = [
        (module, mutant)
        for module in options.modules or TESTS
        for mutant in mutants((ROOT / "resilience" / module).read_text(encoding="utf-8"))
    ]
    if options.sample:
        faults = random.Random(options.seed).sample(faults, min(options.sample, len(faults)))
    scores: dict[str, Score] = {}
    for module in TESTS:
        if chosen := [mutant for name, mutant in faults if name == module]:
            scores[module] = try_all(module, chosen, options.workers)
    survivors = [mutant for score in scores.values() for mutant in score.survivors]
    total = Score(sum(it.killed for it in scores.values()), sum(it.equivalent for it in scores.values()), survivors)
    print(f"\n{'':28} mutants  killed  equivalent  survived    score")
    for name, score in [*scores.items(), ("all", total)]:
        print(f"{name:28} {score}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
