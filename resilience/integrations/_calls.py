"""A call of a client under a policy, written once for blocking clients and for asynchronous ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from resilience.context import NO_KEYWORDS, Context
from resilience.execution import arun, run
from resilience.policy import Policy
from resilience.runtimes.driving import drive


class ClientCall:
    """One call of a client, and the function that the policy calls for each of its attempts.

    A subclass writes both as coroutines: `_run`, in which `_execute` lets the policy make the attempts, and `_attempt`.
    For a blocking client they are driven: everything that they await has already finished.
    """

    #: Whether the client is asynchronous.
    in_tasks: bool = False

    def run(self) -> Any:
        """Make the call, and return its result. In tasks, the result is awaited."""
        call = self._run()
        return call if self.in_tasks else drive(call)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make one attempt, with the context or the arguments that `_execute` passes. In tasks, await the result."""
        attempt = self._attempt(*args, **kwargs)
        return attempt if self.in_tasks else drive(attempt)

    @abstractmethod
    async def _run(self) -> Any: ...

    @abstractmethod
    async def _attempt(self, *args: Any, **kwargs: Any) -> Any: ...

    def _execute(
        self,
        policy: Policy[Any],
        arguments: tuple[Any, ...] | None = None,
        keywords: Mapping[str, Any] = NO_KEYWORDS,
        ctx: Context | None = None,
    ) -> Any:
        """Let the policy make the attempts. By default, each gets its context. In tasks, the result is awaited.

        `Policy.execute` would examine for each call how this object is called.
        """
        return (arun if self.in_tasks else run)(policy, self, arguments, keywords, ctx)
