"""Bounds for the values of labels: each value creates a time series of its own, which is kept forever.

A name may contain a host, and a user who can choose a URL chooses its host. So hosts are removed from names, unless
they are wanted, and the number of names is bounded in any case. So is that of error types, because a program may make
classes while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Final, final

from resilience import checks, forks
from resilience.clock import clock
from resilience.integrations.wire import OfHost

#: The labels that contain names (`error_type` those of classes).
NAMES: Final = ("pipeline", "policy", "operation", "error_type")
#: The value of a label for names beyond the bound.
OTHER: Final = "other"

#: Seconds after which a name that has not been seen may be replaced by a new one.
IDLE: Final = 600.0


@final
class Labels:
    """Limits how many different values each label has.

    :param hosts: whether names keep the host that they contain.
    :param max_names: how many different names each label has. Further ones are ``"other"``.
    :param forget: called with a label and a name, when the name is replaced after `IDLE` seconds; None if a series
        cannot be removed, and so no name is replaced.
    """

    def __init__(
        self, *, hosts: bool = False, max_names: int = 200, forget: Callable[[str, str], object] | None = None
    ) -> None:
        self.hosts: bool = checks.flag("hosts", hosts)
        self.max_names: int = checks.whole("max_names", max_names)
        self._forget = forget
        self._lock = forks.lock_of(self)
        self._seen: dict[str, dict[str, float]] = {label: {"": inf} for label in NAMES}  # name -> when it was last seen

    def bounded(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the labels with their names within the bound."""
        now = clock.now()
        return {label: self._name(label, text, now) if label in self._seen else text for label, text in labels.items()}

    def _name(self, label: str, text: str, now: float) -> str:
        if isinstance(text, OfHost):
            text = str(text) if self.hosts else text.common
        text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate would make each export fail
        seen = self._seen[label]
        with self._lock:
            if text not in seen and len(seen) > self.max_names:  # `seen` includes the empty name
                oldest = min(seen, key=seen.__getitem__)
                if self._forget is None or now - seen[oldest] < IDLE:
                    return OTHER
                del seen[oldest]
                self._forget(label, oldest)
            seen[text] = now
        return text
