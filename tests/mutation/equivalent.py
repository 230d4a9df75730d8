"""Mutants that no test can kill, because they do what the code does, each with the reason."""

from __future__ import annotations

_FALSE_ANYWAY = "the caller only asks whether it is true, and None is not"
_RETURNS_NONE = "a function that comes to its end returns None"
_FOR_CHECKERS = "the other side of the `or` is for type checkers: it is never reached"
_QUICK_WAY = "a quick way to what the slow way finds as well"
_OF_MEMORY = "how many are made at a time is a matter of memory"
_FLAG_STAYS_UP = "the flag stays up until the next caller, who settles and takes it down"

_WINDOW = "window: Window = CountWindow({}) if self.window is None else TimeWindow(self.window)"
_FIRST = "attempt = ctx if ctx.attempt == {} else ctx.child(attempt=1)"
_FULL = 'raise self._refused(ctx, f"after {{format_number({})}} s in the queue", waited)'
_VALUE = 'return cast("A_co", self._value)'

#: module -> (lines before, lines after, why there is no difference)
_EQUIVALENT: dict[str, list[tuple[str, str, str]]] = {
    "state/trips.py": [
        (_WINDOW.format("self.last or 1"), _WINDOW.format("self.last or 2"), _FOR_CHECKERS),
        (_WINDOW.format("self.last or 1"), _WINDOW.format("self.last or 0"), _FOR_CHECKERS),
        (_WINDOW.format("self.last or 1"), _WINDOW.format("((self.last))"), _FOR_CHECKERS),
    ],
    "state/permits.py": [
        ("BATCH = 16", "BATCH = 17", _OF_MEMORY),
        ("BATCH = 16", "BATCH = 15", _OF_MEMORY),
        ("return False", "pass", _FALSE_ANYWAY),
        ("break", "continue", "no one waits any more, so the loop ends"),
        (
            "while waiting and self._made <= self.limit and (free or self._made < self.limit):",
            "while self._made <= self.limit and (free or self._made < self.limit):",
            "where no one waits the permit is put back at once",
        ),
        (
            "granted = self.settle() if self.free or self._made < self.limit else None",
            "granted = self.settle()",
            _QUICK_WAY,
        ),
        ("if missing > self.BATCH:", "if missing >= self.BATCH:", "then they are the same"),
        (
            "self.busy = bool(waiting) or self._made > self.limit",
            "self.busy = bool(waiting) or self._made >= self.limit",
            _FLAG_STAYS_UP,
        ),
        (
            "self.busy = bool(self._waiting) or self._made > self.limit",
            "pass",
            _FLAG_STAYS_UP,
        ),
        (
            "self.busy = bool(self._waiting) or self._made > self.limit",
            "self.busy = bool(self._waiting) or self._made >= self.limit",
            _FLAG_STAYS_UP,
        ),
    ],
    "policies/retry.py": [
        (
            _FIRST.format(1),
            _FIRST.format(0),
            "the first attempt may have a context of its own, too",
        ),
    ],
    "policies/fallback.py": [
        ("@overload", "", "the definition that follows takes its place"),
        (_VALUE, "pass", _QUICK_WAY),
    ],
    "policies/attempts.py": [
        ("return False", "pass", _FALSE_ANYWAY),
        ("return None", "pass", _RETURNS_NONE),
        ("return", "pass", _RETURNS_NONE),
    ],
    "policies/live_permits.py": [
        ("return False", "pass", _FALSE_ANYWAY),
        (_FULL.format("self.max_wait or 0.0"), _FULL.format("self.max_wait or 1.0"), _FOR_CHECKERS),
        (_FULL.format("self.max_wait or 0.0"), _FULL.format("self.max_wait or -1.0"), _FOR_CHECKERS),
        (_FULL.format("self.max_wait or 0.0"), _FULL.format("((self.max_wait))"), _FOR_CHECKERS),
    ],
    "policies/timeout.py": [
        (
            "deadline = own if own < ctx.deadline else ctx.deadline",
            "deadline = own if own <= ctx.deadline else ctx.deadline",
            "the two are the same instant",
        ),
        ("if clock.now() - deadline > 1.0:", "if clock.now() - deadline > 0.0:", _QUICK_WAY),
        ("if clock.now() - deadline > 1.0:", "if clock.now() - deadline >= 1.0:", _QUICK_WAY),
        ("if clock.now() - deadline > 1.0:", "if clock.now() + deadline > 1.0:", _QUICK_WAY),
    ],
}

#: (module, lines before, lines after) -> why
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (module, before, after): why for module, mutants in _EQUIVALENT.items() for before, after, why in mutants
}
