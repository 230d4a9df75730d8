"""The page on migrating, from asyncio and aiolimiter."""

from __future__ import annotations

import asyncio
import textwrap
from typing import Any

import aiolimiter
import pytest

import resilience
from resilience.testing import virtual_time
from resilience.work import each
from tests.docs.migrating.rows import PAGE, Check, cases, row
from tests.docs.side_by_side import code_in, rows_of

NAMES: dict[str, Any] = {
    **{name: getattr(resilience, name) for name in resilience.__all__},
    "AsyncLimiter": aiolimiter.AsyncLimiter,
    "asyncio": asyncio,
    "each": each,
    "policy": resilience.Retry(1),
}
SETTINGS = {left: right for left, right in rows_of(PAGE, "asyncio").items() if " = " in left}


def run(body: str, **names: Any) -> tuple[object, float]:
    """Run the body of a coroutine function in virtual time, and return its result and the time at its end."""
    names = {**NAMES, **names}
    exec("async def main():\n" + textwrap.indent(body, "    "), names)
    with virtual_time() as clock:
        try:
            end: object = asyncio.run(names["main"]())
        except TimeoutError:
            end = "too late"
        return end, round(clock.now(), 3)


def entries(setting: str, entry: str) -> list[tuple[float, int]]:
    """Let six callers enter a block at once, and return when each of them was inside."""
    block = entry if entry.endswith(":") else f"{entry}\n    if True:"
    seen: list[tuple[float, int]] = []
    run(
        f"{setting}\n"
        "async def caller(number):\n"
        f"    {block}\n"
        "        seen.append((round(asyncio.get_running_loop().time(), 3), number))\n"
        "        await asyncio.sleep(2)\n"
        "await asyncio.gather(*map(caller, range(6)))\n",
        seen=seen,
    )
    assert len({instant for instant, _ in seen}) > 1  # not all of them at once
    return seen


def setting_of(name: str) -> tuple[str, str]:
    """Return how both sides make the first object of this name."""
    return next((code_in(left), code_in(right)) for left, right in SETTINGS.items() if f"`{name} =" in left)


@row("asyncio", "`async with asyncio.timeout(5):`", '`await asyncio.wait_for(fetch("a"), 5)`')
def _(left: str, right: str) -> None:
    def outcome(code: str, seconds: float) -> tuple[object, float]:
        async def fetch(name: str) -> str:
            await asyncio.sleep(seconds)
            return name

        return run(f"{code} return await fetch('a')" if code.endswith(":") else f"return {code}", fetch=fetch)

    for seconds, end in (4, ("a", 4.0)), (6, ("too late", 5.0)):
        assert outcome(code_in(left), seconds) == outcome(code_in(right), seconds) == end


@row("asyncio", *SETTINGS)
def _(left: str, right: str) -> None:
    name = code_in(left).split(" =")[0]
    block = {"semaphore": "slot", "limiter": "turn"}[name]
    assert entries(code_in(left), f"async with {name}:") == entries(code_in(right), f"async with {name}.{block}():")


@row("asyncio", "`async with semaphore:`", "`async with limiter:`", "`await limiter.acquire(2)`")
def _(left: str, right: str) -> None:
    their, our = setting_of("semaphore" if "semaphore" in left else "limiter")
    assert entries(their, code_in(left)) == entries(our, code_in(right))


@row("asyncio", "`await asyncio.gather(")
def _(left: str, right: str) -> None:
    async def fetch(name: str) -> str:
        await asyncio.sleep(3)
        if name == "b":
            raise OSError(name)
        return name

    body = f"async with {code_in(right)} as outcomes: return {{item: outcome async for item, outcome in outcomes}}"
    outcomes: Any
    found: Any
    found, their_end = run(f"return {code_in(left)}", fetch=fetch)
    outcomes, our_end = run(body, fetch=fetch)
    assert [repr(it) for it in found] == ["'a'", "OSError('b')", "'c'"]
    assert [outcomes["a"].value, repr(outcomes["b"].error), outcomes["c"].value] == ["a", "OSError('b')", "c"]
    assert their_end == our_end == 3


@pytest.mark.parametrize(("left", "right", "check"), cases("asyncio"))
def test_both_sides_of_a_row_behave_the_same(left: str, right: str, check: Check) -> None:
    check(left, right)
