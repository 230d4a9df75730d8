"""Shared by the tests of contexts."""

from __future__ import annotations

from typing import Any

from resilience import Context, Policy

INF = float("inf")


class Passing(Policy):
    """A policy that does nothing."""

    async def around(self, call: Any, ctx: Context) -> Any:
        return await call(ctx)


PASSING = Passing()
