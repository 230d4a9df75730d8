"""`python -m tests.mutation`: put one small fault after the other into the code, and see which ones no test notices.

    pip install cosmic-ray
    python -m tests.mutation                                      # all modules below; an hour or so
    python -m tests.mutation state/windows.py policies/retry.py   # some of them
    python -m tests.mutation --sample 100                         # so many mutants, chosen at random

A mutant is killed by a test that fails, by an error, or by running on for much longer than the tests do without a
fault. Survivors are printed; those that `equivalent.py` explains are counted apart. Exit status 0 if there is no other.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import Mutant, mutants
from tests.mutation.trial import ROOT, Copy

_EVERY_POLICY = ["test_bad_input.py", "test_events.py", "test_pipeline.py"]
_EVERY_POLICY += ["composition/test_order.py", "composition/test_any_pipeline.py"]

#: What should see a fault in a module.
TESTS = {
    "state/windows.py": ["state/test_windows.py", "state/test_trips.py", "state/test_circuit.py"],
    "state/trips.py": ["state/test_trips.py", "state/test_circuit.py", "policies/test_circuit_breaker.py"],
    "state/circuit.py": ["state/test_circuit.py", "policies/test_circuit_breaker.py", "issues"],
    "state/permits.py": ["state/test_permits.py", "policies/test_bulkhead.py", "policies/test_machines.py", "issues"],
    "policies/attempts.py": ["policies/test_retry.py", "policies/test_retry_blocks.py", *_EVERY_POLICY],
    "policies/bulkhead.py": ["policies/test_bulkhead.py", "policies/test_machines.py", *_EVERY_POLICY],
    "policies/circuit_breaker.py": ["policies/test_circuit_breaker.py", "policies/test_machines.py", *_EVERY_POLICY],
    "policies/fallback.py": ["policies/test_fallback.py", *_EVERY_POLICY],
    "policies/retry.py": ["policies/test_retry.py", "policies/test_retry_blocks.py", *_EVERY_POLICY],
    "policies/timeout.py": ["policies/test_timeout.py", "runtimes/test_workers.py", *_EVERY_POLICY],
}

#: Tests that trace on their own, so that nobody can note what they come by: they see what survived the others.
TRACING = {"state/permits.py": ["state/test_permits_steps.py"]}


@dataclass
class Score:
    """How the mutants of one module ended."""

    killed: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    def __str__(self) -> str:
        faults = self.killed + len(self.survivors)
        share = f"{100 * self.killed / faults:.1f} %" if faults else "-"
        return f"{faults + self.equivalent:7} {self.killed:7} {self.equivalent:11} {len(self.survivors):9} {share:>8}"

    def count(self, module: str, mutant: Mutant, killed: bool) -> None:
        """Count a mutant; tell of one that should not have survived."""
        if killed:
            self.killed += 1
        elif (module, mutant.before, mutant.after) in EQUIVALENT:
            self.equivalent += 1
        else:
            self.survivors.append(mutant)
            print(f"  {module}:{mutant.line} {mutant.operator}")
            print(f"    - {mutant.before}\n    + {mutant.after}", flush=True)


def try_all(copies: list[Copy], module: str, faults: list[Mutant]) -> Score:
    """Try the mutants of a module, as many at a time as there are copies."""
    files, tracing = ([f"tests/{name}" for name in names] for names in (TESTS[module], TRACING.get(module, [])))
    survey = copies[0].survey(module, files)
    for copy in copies:
        copy.warm([*files, *tracing])
    seconds = survey.all_seconds
    print(f"\n{module}: {len(faults)} mutants, {len(survey.seconds)} tests in {seconds:.0f} s", flush=True)
    score, idle = Score(), list(copies)
    running: dict[int, tuple[Mutant, Copy, bool]] = {}
    todo = [(mutant, False) for mutant in reversed(faults)]
    while todo or running:
        while todo and idle:
            (mutant, again), copy = todo.pop(), idle.pop()
            where, tests = (tracing, []) if again else (files, survey.coming_by(mutant.line))
            running[copy.start(module, mutant.source, where, tests, max(seconds, 30.0))] = mutant, copy, again
        pid, status = os.waitpid(-1, 0)
        mutant, copy, again = running.pop(pid)
        idle.append(copy)
        if not status and tracing and not again:
            todo.append((mutant, True))
        else:
            score.count(module, mutant, killed=bool(status))
    for copy in copies:
        copy.restore(module)
    return score


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="mutation testing")
    parser.add_argument("modules", nargs="*", metavar="module", help=f"of {', '.join(TESTS)}")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--sample", type=int, help="try only so many mutants, chosen at random")
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
    with tempfile.TemporaryDirectory() as scratch:
        copies = [Copy(Path(scratch, str(number))) for number in range(options.workers)]
        for module in TESTS:
            if chosen := [mutant for name, mutant in faults if name == module]:
                scores[module] = try_all(copies, module, chosen)
    survivors = [mutant for score in scores.values() for mutant in score.survivors]
    total = Score(sum(it.killed for it in scores.values()), sum(it.equivalent for it in scores.values()), survivors)
    print(f"\n{'':28} mutants  killed  equivalent  survived    score")
    for name, score in [*scores.items(), ("all", total)]:
        print(f"{name:28} {score}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
