"""The block form of a CircuitBreaker: `with breaker.guard():`. Part of CircuitBreaker."""

from __future__ import annotations

from types import TracebackType
from typing import final

from resilience.ambient import block_context
from resilience.clock import clock
from resilience.errors import BlockMisuse
from resilience.policies.live_circuit import DONE, Admitted, LiveCircuit, get_enclosing
from resilience.runtimes.base import Runtime
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS
from resilience.state.circuit import Closed


@final
class Guard:
    """A block under a circuit breaker."""

    __slots__ = ("_began", "_circuit", "_noted", "_since")

    def __init__(self, circuit: LiveCircuit) -> None:
        self._noted: Admitted | None = None
        self._circuit = circuit

    def __enter__(self) -> None:
        if self._begin():
            drive(self._admit(BLOCKING))

    def _begin(self) -> bool:
        """Begin the block; true if the circuit must admit it first."""
        if self._noted is not None and self._noted.admission is not None:
            raise BlockMisuse("this guard is in use: ask for another one")
        circuit = self._circuit
        if get_enclosing() and circuit.encloses_caller():
            return False  # the block is nested in an admitted call, and belongs to it
        self._began = clock.now() if circuit.is_timed else 0.0
        self._since = circuit.failures
        self._noted = noted = Admitted(circuit)  # no effect if the next lines raise: it has no admission yet
        period = circuit.machine.period
        if type(period) is not Closed:
            return True
        noted.admission = period
        return False

    async def _admit(self, runtime: Runtime) -> None:
        assert self._noted is not None
        await self._circuit.admit(block_context(), self._noted, runtime)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        circuit, noted = self._circuit, self._noted
        self._noted = None
        if noted is None or (admission := noted.admission) is None:
            return
        try:
            noted.admission = None  # not in `leave`, at whose beginning an interrupt may come
            noted.leave()
            if error is None:
                if not admission.quiet:
                    circuit.settle(admission, DONE, self._began, block_context())
            elif isinstance(error, Exception) and not circuit.has_counted(error, self._since):
                circuit.settle(admission, error, self._began, block_context())
        finally:
            if type(admission) is not Closed:
                circuit.release(admission)

    def __del__(self) -> None:
        try:
            noted = self._noted
        except AttributeError:  # a signal handler raised before `_noted` was set
            return
        if noted is not None:  # one raised before the first line of `__exit__`: record nothing
            self.__exit__(GeneratorExit, GeneratorExit(), None)

    async def __aenter__(self) -> None:
        if self._begin():
            await self._admit(TASKS)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)
