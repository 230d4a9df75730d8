"""The rows of the page, which are looked up by the beginning of their text, and names that their code uses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tenacity

import resilience
from resilience import backoff as backoffs
from tests.docs.side_by_side import rows_of

PAGE = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text(encoding="utf-8")
ROWS = {library: rows_of(PAGE, library) for library in ("tenacity", "stamina", "backoff", "pybreaker", "asyncio")}
TESTED: dict[tuple[str, str], Callable[[str, str], None]] = {}

Check = Callable[[str, str], None]


def row(library: str, *lefts: str) -> Callable[[Check], Check]:
    """Mark the test of rows, which are named by the beginning of their text."""

    def mark(check: Check) -> Check:
        TESTED.update({(library, left): check for left in lefts})
        return check

    return mark


def cases(library: str) -> list[Any]:
    """Return the rows of a library, each with its test. A row without a test is an error."""
    rows, found = ROWS[library], {}
    for (of, left), check in TESTED.items():
        if of == library:
            cells = [cell for cell in rows if cell.startswith(left)]
            cell = left if left in cells else cells[0]
            found[cell] = pytest.param(cell, rows[cell], check, id=cell)
    assert rows
    assert found.keys() == rows.keys()
    return list(found.values())


class Asks(Exception):
    """An error that carries a delay."""

    seconds = 7.0


def predicate(value: object) -> bool:
    return value in (None, "bad") or (isinstance(value, Exception) and "busy" in str(value))


FAILS = (OSError("busy"), ...)
CAUSED = OSError("idle")
CAUSED.__cause__ = KeyError()
ANSWERS = (
    [OSError("busy"), "fine"],
    [OSError("idle"), "fine"],
    [ValueError("busy"), "fine"],
    [ValueError("very busy"), "fine"],
    [KeyError("idle"), "fine"],
    [CAUSED, "fine"],
    ["bad", OSError("busy"), "fine"],
    [None, ValueError("busy"), "fine"],
    ["fine"],
)
NAMES: dict[str, Any] = {
    **vars(tenacity),
    **{name: getattr(backoffs, name) for name in backoffs.__all__},
    **{name: getattr(resilience, name) for name in resilience.__all__},
    "predicate": predicate,
    "random": random,
    "re": re,
}


def written(code: str, names: dict[str, Any] = NAMES) -> Any:
    """Evaluate a piece of code from the page."""
    return eval(code, dict(names))
