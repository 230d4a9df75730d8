"""The examples in the docstrings of the package do what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import resilience

MODULES = ["resilience", *(it.name for it in pkgutil.walk_packages(resilience.__path__, "resilience."))]
EXAMPLES = {
    example.name: example
    for module in MODULES
    for example in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module))
    if example.examples
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_a_docstring_does_what_it_shows(name: str) -> None:
    """Typed in as it stands, it prints what it says."""
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(EXAMPLES[name], out=report.append)
    assert not failed, "".join(report)


FIRST = """
    resilience  Policy  Policy.execute  Policy.call  Policy.capture  Context  deadline  Retry  Retry.attempts
    Timeout  CircuitBreaker  Bulkhead  Fallback  events.subscribe
""".split()


@pytest.mark.parametrize("what", FIRST)
def test_what_a_newcomer_meets_first_has_an_example(what: str) -> None:
    """The front door, the policies and the ways to call each show one."""
    thing: object = resilience
    for name in what.removeprefix("resilience").split("."):
        thing = getattr(thing, name) if name else thing
    assert ">>>" in (thing.__doc__ or "")
