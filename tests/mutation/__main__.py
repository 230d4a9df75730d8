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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TextIO

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import Mutant, mutants
from tests.mutation.trial import ROOT, Report, Trials, run

#: The tests that should notice a fault in a module: `modules: tests`. A name such as `state/windows` is the module
#: `state/windows.py`, or the test `state/test_windows.py`; `streams/` is a folder; words in capitals are below.
_TESTS = """
state/windows: state/windows state/trips policies/machines policies/adaptive_throttle
state/trips: state/trips policies/machines misuse pipeline BREAKER
state/circuit: state/circuit policies/machines BREAKER
state/permits: state/permits BULKHEAD policies/machines
state/rates: state/rates RATES
state/turns: state/turns RATES
policies/rate: RATES bad_input
policies/rate_limiter: RATES integrations/limits EVERY_POLICY
policies/bulkhead: BULKHEAD policies/machines EVERY_POLICY
policies/live_permits: BULKHEAD policies/{observe_only,machines} EVERY_POLICY
state/concurrency: state/concurrency policies/adaptive_limit
policies/adaptive_limit: policies/adaptive_limit EVERY_POLICY
policies/adaptive_throttle: policies/adaptive_throttle EVERY_POLICY
policies/chaos: policies/chaos EVERY_POLICY
policies/fallback: policies/fallback EVERY_POLICY
policies/circuit_breaker: BREAKER policies/machines composition/{nested_calls,nested_trees,signals} EVERY_POLICY
policies/live_circuit: BREAKER policies/{machines,observe_only} composition/{nested_calls,nested_trees}
policies/marks: BREAKER composition/{nested_calls,nested_trees}
policies/{retry_state,attempts,retry}: RETRY context EVERY_POLICY
state/quantiles: state/quantiles policies/hedge_delay
policies/hedge: HEDGE policies/repeat_cap EVERY_POLICY
policies/latencies: policies/hedge_delay bad_input
policies/repeat_cap: policies/repeat_cap EVERY_POLICY
policies/keys: FLIGHTS policies/keyed
policies/{flights,copies}: FLIGHTS
policies/single_flight: FLIGHTS policies/keys EVERY_POLICY
policies/cache: policies/{cache,cache_machine} EVERY_POLICY
policies/keyed: policies/keyed integrations/{standard,limits} EVERY_POLICY
policies/timeout: TIMEOUT runtimes/{workers,abandoned,tasks} context EVERY_POLICY
streams/{driver,iterators,pulls,runtime,source,streaming}: STREAMS
execution: called context ambient_context deadlines mismatch decorator own_policy find_policies
    runtimes/{driven,driving,lowering,tasks} streams/usage composition/outer_limits EVERY_POLICY
repeats: repeats policies/{retry_budget,repeat_cap} bad_input misuse composition/copies
integrations/{answers,asgi,wsgi}: integrations/{answers,deadline_middlewares}
integrations/{wire,_serving}: integrations/{wire,serving,deadline_middlewares,wrong_arguments}
integrations/http/{bodies,exchange,repeatable,rules,perhost,standard_pipeline}: HTTP
integrations/http/limits: integrations/{limits,standard}
integrations/{http/sdk,openai,anthropic}: integrations/{sdks,openai,limits,wrong_arguments}
integrations/httpx/{bodies,pools,sending,transports}: integrations/{httpx/,pools,http_clients}
integrations/requests: integrations/{requests,http_clients}
integrations/urllib3: integrations/{urllib3,requests,http_clients}
integrations/aiohttp: integrations/{aiohttp,http_clients}
integrations/grpc/{answers,client,server}: integrations/{grpc/,wrong_arguments}
integrations/redis/{commands,protection,retrying}: integrations/redis/
integrations/{dbapi/cleanup,dbapi/errors,dbapi/limits,dbapi/units,sqlalchemy}: integrations/{databases/,wrong_arguments}
integrations/telemetry/{feed,instruments,labels,lines,observed,repeats,sentences,words}: TELEMETRY
integrations/{logging,opentelemetry,prometheus}: TELEMETRY
hints: policies/{retry_time,hedge} integrations/http_clients
matching: groups policies/{retry_foresight,fallback} integrations/sdks bad_input EVERY_POLICY
proxy: proxy aproxy proxy_operators called misuse streams/usage composition/copies public_api
callables: callables mismatch no_outcome misuse policy
policy: policy own_policy find_policies called context composition/nested_calls policies/{retry_foresight,keyed,cache}
    work/{idempotency,once} EVERY_POLICY
checks: callables mismatch policy state/trips integrations/wrong_arguments EVERY_POLICY
events/kinds: called EVERY_POLICY
events/dispatch: events listeners called bad_input
runtimes/blocking: runtimes/{blocking,abandoned,races} streams/time policies/circuit_breaker_probe
    composition/outer_limits own_policy TIMEOUT BULKHEAD RETRY EVERY_POLICY
runtimes/races/{__init__,asyncio_race,threads,trio_race}: HEDGE own_policy context runtimes/{virtual,workers,abandoned}
    policies/circuit_breaker_probe streams/usage composition/cancellation
network_errors: matching transient_for_real integrations/sdks
work/claims: work/once integrations/redis/once
work/each_tasks: work/each
work/each_threads: work/each
work/for_each: work/each bad_input
work/gate: work/gate composition/cancellation
work/idempotency: work/idempotency
work/once: work/once
work/supervisor: work/supervisor
"""

_GROUPS = {
    "EVERY_POLICY": "bad_input matching no_outcome events listeners pipeline misuse COMPOSED",
    "COMPOSED": "composition/{order,any_pipeline,copies}",
    "BREAKER": "policies/circuit_breaker{,_blocks,_telemetry,_probe}",
    "BULKHEAD": "policies/bulkhead{,_leaving,_blocks}",
    "RETRY": "policies/retry{,_time,_telemetry,_blocks,_foresight,_budget}",
    "HEDGE": "policies/hedge{,_delay,_leaving,_model} runtimes/races",
    "RATES": "policies/rate_limiter{,_machine}",
    "FLIGHTS": "policies/{single_flight,cache} composition/processes",
    "STREAMS": "streams/ testing/scripts runtimes/abandoned policies/circuit_breaker_probe",
    "TIMEOUT": "policies/timeout{,_tasks,_cooperative}",
    "HTTP": "integrations/{http_clients,http,httpx/,standard,sdks,wrong_arguments}",
    "TELEMETRY": "integrations/{telemetry,metrics,logging,structlog,opentelemetry,prometheus,wrong_arguments}",
}

#: Tests that use a tracer or start other processes, so that the lines that they run cannot be recorded. They run for
#: mutants that have survived the other tests.
_APART = """
state/permits: state/permits_steps
repeats: composition/processes
policies/live_permits: composition/{processes,signals}
policies/live_circuit: composition/interrupts
runtimes/races/{__init__,asyncio_race,threads,trio_race}: composition/interrupts
policies/circuit_breaker: composition/{processes,interrupts} contention/contention
policies/fallback: composition/{memory,interrupts}
"""


def _names(text: str) -> Iterator[str]:
    for word in text.split():
        head, _, rest = word.partition("{")
        for it in rest.removesuffix("}").split(","):
            yield from _names(_GROUPS[word]) if word in _GROUPS else [head + it]


def _test(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}test_{last}.py" if last else folder


def _read(table: str) -> dict[str, list[str]]:
    """Return the files of tests for each module."""
    rows = [row.split(": ") for row in table.strip().replace("\n    ", " ").splitlines()]
    return {f"{module}.py": [*map(_test, _names(tests))] for modules, tests in rows for module in _names(modules)}


TESTS, APART = _read(_TESTS), _read(_APART)


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
