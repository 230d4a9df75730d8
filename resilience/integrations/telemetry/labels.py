"""How many different texts a label has: each makes a time series of its own, which is kept for good.

A name may hold a host, and who can choose a URL chooses that. So names lose their host, unless it is asked for, and
there is a bound for all of them, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Final, final

from resilience import checks, forks
from resilience.clock import clock
from resilience.integrations.wire import OfHost

#: The labels that are names, and the text for those that are too many.
NAMES: Final = ("pipeline", "policy", "operation")
OTHER: Final = "other"

#: Seconds after which a name that has not been seen makes room for a new one.
IDLE: Final = 600.0


@final
class Labels:
    """Bounds the different texts of each label.

    :param hosts: whether names keep the host that they hold.
    :param max_names: how many different texts each label has. Further ones are ``"other"``.
    :param forget: called with a label and its text where a name that was not seen for long makes room; None where what
        was once recorded cannot be taken back.
    """

    def __init__(
        self, *, hosts: bool = False, max_names: int = 200, forget: Callable[[str, str], object] | None = None
    ) -> None:
        self._hosts = checks.flag("hosts", hosts)
        self._most = checks.whole("max_names", max_names)
        self._forget = forget
        self._lock = forks.lock_of(self)
        self._seen: dict[str, dict[str, float]] = {label: {"": inf} for label in NAMES}  # and when it was last

    def refuse_others(self, hosts: bool, max_names: int) -> None:
        """Refuse other settings: a series has one meaning for as long as it is there."""
        Labels(hosts=hosts, max_names=max_names)
        if (hosts, max_names) != (self._hosts, self._most):
            raise ValueError(
                f"hosts and max_names of these metrics are {self._hosts} and {self._most} already, "
                f"not {hosts} and {max_names}"
            )

    def bounded(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return labels with names that are few."""
        now = clock.now()
        return {label: self._name(label, text, now) if label in self._seen else text for label, text in labels.items()}

    def _name(self, label: str, text: str, now: float) -> str:
        if isinstance(text, OfHost):
            text = str(text) if self._hosts else text.common
        seen = self._seen[label]
        if text in seen or self._admits(label, text, now):
            seen[text] = now
            return text
        return OTHER

    def _admits(self, label: str, text: str, now: float) -> bool:
        """Whether there is room for one more name, or one that was not seen for long makes room."""
        seen = self._seen[label]
        with self._lock:
            if len(seen) <= self._most:  # with the empty one
                return True
            oldest = min(seen, key=seen.__getitem__)
            if self._forget is None or now - seen[oldest] < IDLE:
                return False
            del seen[oldest]
        self._forget(label, oldest)
        return True
