"""The four states of a circuit, as errors, events and statistics name them."""

from __future__ import annotations

import enum


class CircuitState(enum.Enum):
    """The state of a circuit."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    ISOLATED = "isolated"
