"""The page on migrating, from asyncio and aiolimiter."""

from __future__ import annotations

import asyncio
import math
import textwrap
from contextlib import suppress
from typing import Any

import aiolimiter
import anyio
import pytest

import resilience
from resilience.testing import virtual_time
from resilience.work import each
from tests.docs.migrating.rows import PAGE, Check, cases, row
from tests.docs.side_by_side import code_in, rows_of

NAMES: dict[str, Any] = {
    **{name: getattr(resilience, name) for name in resilience.__all__},
    "AsyncLimiter": aiolimiter.AsyncLimiter,
    "anyio": anyio,
    "asyncio": asyncio,
    "each": each,
    "math": math,
    "suppress": suppress,
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
        for code in (*left.split("`")[1::2], code_in(right)):
            assert outcome(code, seconds) == end


@row(
    "asyncio",
    "`async with asyncio.timeout(None):`",
    "`with anyio.move_on_after(5):`",
    "`with anyio.move_on_after(5, shield=True):`",
    "`await asyncio.wait_for(asyncio.shield(task), 5)`",
)
def _(left: str, right: str) -> None:
    """Whether the block, or the task, has ended; and when the caller goes on."""

    def ended(code: str, seconds: float, outer: str = "if True:") -> tuple[object, float]:
        block = f"{code}\n            await task" if code.endswith(":") else code
        body = (
            "async def work():\n"
            f"    await asyncio.sleep({seconds})\n"
            "    done.append(1)\n"
            "done = []\n"
            f"task = {'asyncio.create_task(work())' if 'shield(task)' in code else 'work()'}\n"
            "try:\n"
            f"    {outer}\n"
            f"        {block}\n"
            "except TimeoutError:\n"
            f"    {'pass' if 'shield=True' in left else 'done.append(0)'}\n"
            "return done"
        )
        return run(body)

    outer, our = (right.split("`")[1], right.split("`")[3]) if "suppress" in right else ("if True:", code_in(right))
    for seconds, done in (
        (4, ([1], 4.0)),
        (6, ([1], 6.0) if "None" in left else ([0] if "wait_for" in left else [], 5.0)),
    ):
        assert ended(code_in(left), seconds) == ended(our, seconds, outer) == done


@row("asyncio", "`asyncio.timeout_at(when)`")
def _(left: str, right: str) -> None:
    """Both end the second step, after three seconds of the five."""
    steps = "    await asyncio.sleep(3)\n    {block}\n        await asyncio.sleep(3)"
    assert code_in(right) == "async with deadline(5):"
    body = "when = asyncio.get_running_loop().time() + 5\nif True:\n"
    their = run(body + steps.format(block=f"async with {code_in(left)}:"))
    our = run(f"{code_in(right)}\n{steps.format(block='if True:')}")
    assert their == our == ("too late", 5.0)


@row("asyncio", "`limiter.has_capacity()`")
def _(left: str, right: str) -> None:
    their, our = setting_of("limiter")
    answers = [
        run(f"{setting}\nfound = []\nfor _ in range(5):\n    found.append({code})\n    {take}\nreturn found")[0]
        for setting, code, take in (
            (their, code_in(left), "await limiter.acquire()"),
            (our, code_in(right), "limiter.try_take()"),
        )
    ]
    assert answers == [[True, True, True, True, False]] * 2


def test_a_deadline_inside_an_attempt_is_not_retried() -> None:
    """It means that the time for everything is up; a `Timeout`, and asyncio's, are the failure of one attempt."""
    loop = (
        "async for attempt in Retry(3, backoff=[1]).attempts():\n"
        "    with attempt:\n"
        "        {block}\n"
        "            await hang()"
    )
    tries: list[int] = []

    async def hang() -> None:
        tries.append(1)
        await asyncio.sleep(10)

    for body, end, count in (
        (loop.format(block="async with deadline(2):"), 2.0, 1),
        (loop.format(block="async with asyncio.timeout(2):"), 8.0, 3),
        ("await Retry(3, backoff=[1]).wrap(Timeout(2)).acall(hang)", 8.0, 3),
    ):
        tries.clear()
        assert run(body, hang=hang) == ("too late", end)
        assert len(tries) == count


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
