"""Around a call: idempotency keys, calls that are made once, shutdown, many calls at once, supervision.

These features need the context, the deadline or the outcome of a call. Work that must survive its process belongs to an
engine or a broker; the recipes show how to combine the two.
"""

from resilience.events.kinds import Parked
from resilience.work.for_each import Each, each
from resilience.work.gate import Gate, GateStats, ShuttingDown
from resilience.work.idempotency import IdempotencyKey
from resilience.work.once import KeyInUse, KeyMismatch, Once
from resilience.work.supervisor import Supervisor

__all__ = [
    "Each",
    "Gate",
    "GateStats",
    "IdempotencyKey",
    "KeyInUse",
    "KeyMismatch",
    "Once",
    "Parked",
    "ShuttingDown",
    "Supervisor",
    "each",
]
