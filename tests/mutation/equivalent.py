"""Mutants that no test can kill, because they do what the code does, each with the reason."""

from __future__ import annotations

_FALSE_ANYWAY = "the caller only asks whether it is true, and None is not"
_RETURNS_NONE = "a function that comes to its end returns None"
_FOR_CHECKERS = "the other side of the `or` is for type checkers: it is never reached"
_QUICK_WAY = "a quick way to what the slow way finds as well"
_OF_MEMORY = "how many are made at a time is a matter of memory"
_FLAG_STAYS_UP = "the flag stays up until the next caller, who settles and takes it down"
_ZERO = "a delay of zero is rubbish then, and rubbish is a delay of zero"
_UNTIMED = "nobody looks at it where calls are not timed"

_WINDOW = "window: Window = CountWindow({}) if self.window is None else TimeWindow(self.window)"
_ASKED = "return min(checks.seconds({}), FOREVER)"
_FIRST = "attempt = ctx if ctx.attempt == {} else ctx.child(attempt=1)"
_BUDGET = "if timer is not None and timer.deadline {} budget:"
_FULL = 'raise self._refused(ctx, f"after {{format_number({})}} s in the queue", waited)'
_TIMED = "self._timed = condition.slower_than {} inf # reading the clock costs 50 ns: only where slowness counts"
_BEGAN = "began = clock.now() if self._timed else {}"
_TOOK = "transitions = self._circuit.record(admission, failure, now - began if self._timed else {}, now)"
_PLAIN = "if self._is_plain and not (watched.answers or ctx._info.listeners):"
_VALUE = 'return cast("A_co", self._value)'
_OPEN = "if type(admission) is Open and (now := clock.now()) < admission.until:"
_OURS = 'frame.f_globals.get("__name__", "").startswith("resilience.")'
_REFUSE = "raise self._refusal(admission, now, ctx)"

#: module -> (lines before, lines after, why nobody can tell the difference)
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
        ("break", "continue", "nobody waits any more, so the loop ends"),
        (
            "while waiting and self._made <= self.limit and (free or self._made < self.limit):",
            "while self._made <= self.limit and (free or self._made < self.limit):",
            "where nobody waits the permit is put back at once",
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
        (f"{_PLAIN} {_VALUE}", "pass", _QUICK_WAY),
        (_VALUE, "pass", _QUICK_WAY),
    ],
    "policies/attempts.py": [
        ("return False", "pass", _FALSE_ANYWAY),
        ("return None", "pass", _RETURNS_NONE),
        ("return", "pass", _RETURNS_NONE),
        ("if failed is None or self._course is None:", "if ((failed is None)):", _FOR_CHECKERS),
        (_ASKED.format('"retry_after", asked, zero=True'), _ASKED.format('"retry_after", asked, zero=False'), _ZERO),
        (_ASKED.format('"retry_after", asked, zero=True'), _ASKED.format("'retry_after', asked"), _ZERO),
        ("if asked is None: return 0.0", "pass", _QUICK_WAY),
        (
            "if retry._retry_after and (asked := _asked_delay(carrier)) > delay:",
            "if retry._retry_after and (asked := _asked_delay(carrier)) >= delay:",
            "then they are the same",
        ),
        ("return 0.0", "pass", _QUICK_WAY),
        ("return 0.0", "return -1.0", "the larger of this and a delay counts, and no delay is negative"),
    ],
    "policies/live_permits.py": [
        ("return False", "pass", _FALSE_ANYWAY),
        (
            _BUDGET.format("<="),
            _BUDGET.format("<"),
            "no timer ends after the deadline that it carries, and of two at one instant the outer one rings first",
        ),
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
        (
            f"while frame.f_back is not None and {_OURS}:",
            f"while (({_OURS})):",
            "the outermost frame is never one of ours",
        ),
        ("if clock.now() - deadline > 1.0:", "if clock.now() - deadline > 0.0:", _QUICK_WAY),
        ("if clock.now() - deadline > 1.0:", "if clock.now() - deadline >= 1.0:", _QUICK_WAY),
        ("if clock.now() - deadline > 1.0:", "if clock.now() + deadline > 1.0:", _QUICK_WAY),
    ],
    "policies/circuit_breaker.py": [
        (_TIMED.format("<"), _TIMED.format("<="), "it then measures what is compared with infinity"),
        (_BEGAN.format("0.0"), _BEGAN.format("1.0"), _UNTIMED),
        (_BEGAN.format("0.0"), _BEGAN.format("-1.0"), _UNTIMED),
        (_TOOK.format("0.0"), _TOOK.format("1.0"), _UNTIMED),
        (_TOOK.format("0.0"), _TOOK.format("-1.0"), _UNTIMED),
        (
            "if not failed and self._failures.is_neutral(outcome.error):",
            "if ((self._failures.is_neutral(outcome.error))):",
            "nothing that is ignored is a failure: no need to ask where it is one",
        ),
        (
            "failed = self._on_result is not None and bool(self._on_result(outcome.value))",
            "failed = ((bool(self._on_result(outcome.value))))",
            "a success is judged only where there is an `on_result`",
        ),
        (_REFUSE, "pass", _QUICK_WAY),
        (f"{_OPEN} {_REFUSE}", "pass", _QUICK_WAY),
    ],
}

#: (module, lines before, lines after) -> why
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (module, before, after): why for module, mutants in _EQUIVALENT.items() for before, after, why in mutants
}
