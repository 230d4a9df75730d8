"""The events of executions, which are reported to listeners.

AttemptFailed       an attempt under a Retry was not good enough
RetryScheduled      ... and another one will be made after `delay`
RetryGaveUp         ... and no other one will be made
HedgeStarted        a Hedge began another attempt beside one that takes long
HedgeFinished       ... and that call is over
BudgetSpent         a retry or a hedge was not made, because its budget is used up
TimedOut            a Timeout cut a call off, or found the budget used up
CallRejected        a policy, such as a CircuitBreaker or a Bulkhead, did not let a call through;
                    with `shadow`, a policy that only observes would not have let it through
CircuitChanged      the state of a circuit changed
FallbackUsed        a Fallback answered instead of the call
LimitChanged        the limit of an AdaptiveLimit went up or down
ChaosInjected       a Chaos injects a fault into a call
CacheUsed           a Cache or SingleFlight answered without making a call
StreamOpened        a stream has delivered its first item
Parked              a task of a Supervisor has failed too often
ExecutionFinished   a whole execution is over, with any outcome
CallFinished        one call of the function is over; reported only to listeners that ask for it by name
"""

from resilience.circuit_state import TripCount
from resilience.events.dispatch import subscribe
from resilience.events.kinds import (
    AttemptFailed,
    BudgetSpent,
    CacheUsed,
    CallFinished,
    CallRejected,
    Canceller,
    ChaosInjected,
    CircuitChanged,
    Event,
    ExecutionFinished,
    FallbackUsed,
    HedgeFinished,
    HedgeStarted,
    LimitChanged,
    Parked,
    RetryGaveUp,
    RetryScheduled,
    StreamOpened,
    TimedOut,
)
from resilience.info import Called, Listener

__all__ = [
    "AttemptFailed",
    "BudgetSpent",
    "CacheUsed",
    "CallFinished",
    "CallRejected",
    "Called",
    "Canceller",
    "ChaosInjected",
    "CircuitChanged",
    "Event",
    "ExecutionFinished",
    "FallbackUsed",
    "HedgeFinished",
    "HedgeStarted",
    "LimitChanged",
    "Listener",
    "Parked",
    "RetryGaveUp",
    "RetryScheduled",
    "StreamOpened",
    "TimedOut",
    "TripCount",
    "subscribe",
]
