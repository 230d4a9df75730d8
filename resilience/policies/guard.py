"""The block form of a CircuitBreaker: `with breaker.guard():`. A part of CircuitBreaker's room."""

from __future__ import annotations

from types import TracebackType
from typing import final

from resilience.ambient import block_context
from resilience.clock import clock
from resilience.outcome import Failure
from resilience.policies.live_circuit import DONE, Admitted, LiveCircuit
from resilience.state.circuit import Admission


@final
class Guard:
    """A block under a circuit breaker."""

    def __init__(self, circuit: LiveCircuit) -> None:
        self._circuit = circuit
        self._admission: Admission | None = None
        self._noted: Admitted | None = None
        self._began: float

    def __enter__(self) -> None:
        if self._admission is not None:
            raise RuntimeError("this guard is in use: ask for another one")
        if self._circuit.is_around():
            return  # the block belongs to a call that was admitted
        self._began = clock.now()
        self._admission = self._circuit.admit(block_context())  # nothing fails once it is admitted
        self._noted = Admitted(self._circuit)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        admission, self._admission = self._admission, None
        noted, self._noted = self._noted, None
        if noted is not None:
            noted.leave()
        if admission is None:
            return
        try:
            if error is None and not admission.quiet:
                self._circuit.settle(admission, DONE, self._began, block_context())
            elif isinstance(error, Exception):
                self._circuit.settle(admission, Failure(error), self._began, block_context())
        finally:
            self._circuit.release(admission)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)
