"""The base class of the state machines of policies that wait: tasks of one loop, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from resilience.testing import virtual_time


class TasksInVirtualTime(RuleBasedStateMachine):
    """Its first rule must call `open`."""

    def open(self) -> None:
        """Enter virtual time, and create the event loop."""
        self.virtual = virtual_time()
        self.clock = self.virtual.__enter__()
        self.loop = asyncio.new_event_loop()
        self.tasks: dict[int, asyncio.Task[Any]] = {}

    @property
    def is_open(self) -> bool:
        return hasattr(self, "tasks")

    def turn(self, seconds: float = 0.0) -> None:
        """Let `seconds` pass, and then let the tasks run until all of them wait."""

        async def turns() -> None:
            await asyncio.sleep(seconds)
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def teardown(self) -> None:
        if not self.is_open:
            return

        async def end() -> None:
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

        try:
            self.loop.run_until_complete(end())
        finally:
            self.loop.close()
            self.virtual.__exit__(None, None, None)
