"""The examples in the docstrings of the package have the results they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import resilience

ROOT = Path(resilience.__file__).parent
#: Found by their text: importing all modules would take seconds, in each process that collects the tests.
MODULES = [
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(ROOT.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_have_the_results_they_show(name: str) -> None:
    report: list[str] = []
    examples = [found for found in doctest.DocTestFinder().find(importlib.import_module(name)) if found.examples]
    assert examples
    for example in examples:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
    assert report == []


FIRST = """
    resilience  Policy  Policy.execute  Policy.call  Policy.capture  Context  deadline  Retry  Retry.attempts
    Timeout  CircuitBreaker  Bulkhead  Fallback  events.subscribe
""".split()


@pytest.mark.parametrize("what", FIRST)
def test_the_most_important_names_have_an_example(what: str) -> None:
    thing: object = resilience
    for name in what.removeprefix("resilience").split("."):
        thing = getattr(thing, name) if name else thing
    assert ">>>" in (thing.__doc__ or "")
