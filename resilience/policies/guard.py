"""The block form of a CircuitBreaker: `with breaker.guard():`. A part of CircuitBreaker's room."""

from __future__ import annotations

from types import TracebackType
from typing import final

from resilience.ambient import block_context
from resilience.clock import clock
from resilience.outcome import Failure
from resilience.policies.live_circuit import DONE, Admitted, LiveCircuit
from resilience.state.circuit import Closed


@final
class Guard:
    """A block under a circuit breaker."""

    def __init__(self, circuit: LiveCircuit) -> None:
        self._circuit = circuit
        self._noted: Admitted | None = None
        self._began: float
        self._since: int

    def __enter__(self) -> None:
        if self._noted is not None and self._noted.admission is not None:
            raise RuntimeError("this guard is in use: ask for another one")
        circuit = self._circuit
        if circuit.is_around():
            return  # the block belongs to a call that was admitted
        self._began = clock.now() if circuit.is_timed else 0.0
        self._since = circuit.failures
        self._noted = noted = Admitted(circuit)  # should the next lines raise, it counts for nothing
        period = circuit.machine.period
        noted.admission = period if type(period) is Closed else circuit.admit(block_context())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        noted, self._noted = self._noted, None
        admission = None if noted is None else noted.admission
        if noted is None or admission is None:
            return
        try:
            noted.leave()
            if error is None and not admission.quiet:
                self._circuit.settle(admission, DONE, self._began, block_context())
            elif isinstance(error, Exception) and not self._circuit.has_counted(error, self._since):
                self._circuit.settle(admission, Failure(error), self._began, block_context())
        finally:
            self._circuit.release(admission)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)
