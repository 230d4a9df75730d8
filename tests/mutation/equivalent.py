"""Mutants that no test can kill, because they are equivalent to the code, each with the reason."""

from __future__ import annotations

_FALSE_ANYWAY = "the caller only checks whether it is true, and None is false"
_RETURNS_NONE = "a function that reaches its end returns None"
_FOR_CHECKERS = "the other operand of the `or` is for type checkers, and is never evaluated"
_QUICK_WAY = "a fast path to the result that the slow path finds as well"
_OF_ROUNDING = "the instants differ by the tolerance for rounded sums"
_NOTED_ONLY = "the only check is whether a later number is larger"
_NOT_HEDGED = "only a call of at least two attempts is reported"
_OF_EPOCHS = "epochs are only compared with one another"
_EQUAL = "the two are equal then"
_OF_MEMORY = "how many are made at a time affects only memory"
_NO_IMPORT = f"{_QUICK_WAY}, without an import of the ORM"
_KEPT_CHAIN = f"{_QUICK_WAY}: a pipeline keeps its chain, which is otherwise composed for each call"
_QUICKLY = (
    "try: del fast_path[-1] # no lock: a third of the time (see `Turns.fast_path`). No call until `append` "
    "bucket = turns.bucket if bucket is not None and (full_at := bucket.full_at) <= began + "
    "bucket.tolerance: # GCRA bucket.full_at = (full_at if full_at > began else began) + bucket.increment "
    "has_turn = True fast_path.append(None) except IndexError: # pragma: no cover (another thread was "
    "faster: never under the GIL) pass"
)

#: module -> why there is no difference -> the lines of the mutants: `<[before||after||another]>` marks the part that
#: differs. A line without a mark is left out.
_EQUIVALENT: dict[str, dict[str, list[str]]] = {
    "state/rates.py": {
        "at equality, nothing of the bucket is used": ["if self.full_at <[>||>=]> now:"],
        "there is one cost for each meter": [
            "for meter, cost in zip(self._meters, costs, <[strict=True||strict=False]>):"
        ],
    },
    "state/concurrency.py": {"the larger of the two latencies counts": ["latency_of_all: float = <[0.0||-1.0]>"]},
    "state/turns.py": {
        "it is set again before it is read": ["self._plan: Together | None = None"],
        _OF_ROUNDING: [
            "if rates.ready(costs, now) <[>||>=]> now + EPSILON:",
            "if turn.instant <[>||>=]> now + EPSILON:",
        ],
        "at exactly this lateness it may be woken or not": [
            "return [first.woken(now)] if due <[<||<=]> first.due - WAKE_TOLERANCE else []"
        ],
        _QUICK_WAY: ["if it.is_late and not it.grace: continue"],
    },
    "policies/rate_limiter.py": {
        _QUICK_WAY: [
            "if <[fast_path||not fast_path]>:",
            f"if fast_path: {_QUICKLY}",
            _QUICKLY,
            "del fast_path[<[-1||- 2]>] # no lock: a third of the time (see `Turns.fast_path`). No call until `append`",
            "del fast_path[<[-1||1]>] # no lock: a third of the time (see `Turns.fast_path`). No call until `append`",
            "if bucket is not None and (full_at := bucket.full_at) <[<=||<]> began + bucket.tolerance: # GCRA",
            "if bucket is not None and (full_at := bucket.full_at) <= began <[+||-]> bucket.tolerance: # GCRA",
            "if bucket is not None and (full_at := bucket.full_at) <= began + bucket.tolerance: # GCRA "
            "bucket.full_at = (full_at if full_at > began else began) + bucket.increment has_turn = True",
        ],
        "it holds at most one entry": [
            "del fast_path[<[-1||- 0]>] # no lock: a third of the time (see `Turns.fast_path`). No call until `append`"
        ],
        "the two are the same instant": [
            "bucket.full_at = (full_at if full_at <[>||>=]> began else began) + bucket.increment"
        ],
        "that is the default": ["for rate, cost in zip(self._rates, <[costs, strict=False||costs]>)"],
    },
    "policies/flights.py": {
        f"{_QUICK_WAY}: a call encloses itself; without it, a call takes 3 % more": [
            "self.leads = <[lead is self._lead or lead in _enclosing.get(||((lead in _enclosing.get())]>) # nested "
            "in the leader's call"
        ],
        "without a token, the end of a flight does not read it": ["self.leads: bool = <[False||True]>"],
        f"{_QUICK_WAY}: ended calls in it are ignored": ["_enclosing.reset(self._token)"],
        _FOR_CHECKERS: ["assert self._found"],
        "if two callers have shared an outcome, each of the two is right": [
            "(outcome, traceback), self._found = self._found[<[0|| -1]>], None"
        ],
    },
    "policies/single_flight.py": {
        f"{_QUICK_WAY}: `follows` returns false for a leader": [
            "if <[not flight.leads and await flight.follows(||((await flight.follows())]>):"
        ]
    },
    "policies/hedge.py": {
        _FOR_CHECKERS: [
            "<[assert answer is not None||pass]> # an attempt that is cut off while no other runs raises out of `race`"
        ],
        _NOT_HEDGED: ["attempts, self.attempts = self.attempts, <[0||1||-1]>"],
    },
    "policies/chaos.py": {
        _OF_EPOCHS: [
            "_epoch: ClassVar[int] = <[0||1||-1]> # incremented by `stop_all`, which ends all earlier switches",
            "Chaos._epoch += <[1||2]>",
        ],
        "the definition below replaces it": ["<[@overload||]>"],
        _QUICK_WAY: ["if <[not self._switches or not self._draw(ctx||((not self._draw(ctx))]>):"],
        "only if the thread is interrupted between two lines": [
            'state = "off" if switch is None else f"on for {max(<[0.0|| -1.0]>, switch.until - clock.now()):.0f} s '
            'more"'
        ],
    },
    "policies/live_circuit.py": {
        _FOR_CHECKERS: ["assert self.rules.probe is not None"],
        _FALSE_ANYWAY: ["return False"],
        _NOTED_ONLY: ["self.failures: int = <[0||1]>"],
        f"{_QUICK_WAY}: no duration is longer than infinity": [
            "self.is_timed: bool = rules.trip.slower_than <[<||<=]> inf"
        ],
    },
    "repeats.py": {
        "at exactly the tolerance it may be allowed or not": ["if self._balance <[>=||>]> -_ROUNDING:"],
        "a full budget earns nothing, so it is not read": [
            "self._as_of = clock.now() if <[self._per_second else 0.0||not self._per_second else "
            "0.0||self._per_second else 1.0||self._per_second else -1.0]>"
        ],
        f"{_QUICK_WAY}: it has the methods": [
            "if <[value is None or isinstance(value, RetryBudget||((value is None)]>):"
        ],
    },
    "proxy.py": {
        "only a metaclass could have a `__get__`": [
            'return <[callable(member) and hasattr(type(member), "__get__") and not isinstance(member, '
            'type||((callable(member)) and (hasattr(type(member), "__get__"))]>)'
        ],
        _OF_MEMORY: [
            "<[@functools.lru_cache(maxsize=256)||||@functools.lru_cache(maxsize= "
            "257)||@functools.lru_cache(maxsize= 255)||@functools.lru_cache()]>"
        ],
    },
    "state/permits.py": {
        _OF_MEMORY: ["BATCH = <[16||17||15]>"],
        _FALSE_ANYWAY: ["return False"],
        "at equality, both give the same result": ["if missing <[>||>=]> self.BATCH:"],
        "all free permits are alike": ["del free[<[-1||- 0]>]"],
        _RETURNS_NONE: ["return None"],
    },
    "policies/retry.py": {
        "the first attempt may have its own context, too": [
            "attempt = ctx if ctx.attempt == <[1||0]> else ctx.child(attempt=1)"
        ],
    },
    "policies/attempts.py": {
        _FOR_CHECKERS: ["if <[error is None or self._state is None||((error is None))]>:"],
        _FALSE_ANYWAY: ["return False"],
        _RETURNS_NONE: ["return None"],
    },
    "policies/fallback.py": {
        "the definition below replaces it": ["<[@overload||]>"],
        _QUICK_WAY: ["if self._handler is None and not is_observed and closable(error) is None: return self._value"],
    },
    "policies/live_permits.py": {
        _FALSE_ANYWAY: ["return False"],
        "the queue is not too long then": ["if len(machine.waiting) <[>||>=]> machine.queue:"],
    },
    "integrations/http/exchange.py": {_RETURNS_NONE: ["return None"]},
    "integrations/http/rules.py": {_RETURNS_NONE: ["return None"]},
    "integrations/http/bodies.py": {
        _RETURNS_NONE: ["return None"],
        _QUICK_WAY: [
            "elif <[not isinstance(source, _PLAIN) and any(hasattr(source, name) for name in "
            "_STREAM_METHODS||((any(hasattr(source, name) for name in _STREAM_METHODS))]>):"
        ],
        "only the start of a body of one part is read": ["return self._files[<[0|| -1]>][1] if self._files else None"],
        _OF_MEMORY: ['yield from source if read is None else iter(partial(read, <[65536||65537||65535]>), b"")'],
    },
    "integrations/httpx/bodies.py": {
        _QUICK_WAY: ["if isinstance(stream, BYTES): return IN_MEMORY", "return IN_MEMORY"]
    },
    "integrations/redis/protection.py": {
        "connecting does nothing if it is connected": [
            'if <["timeout" in kwargs and not self.is_connected||(("timeout" in kwargs))]>: # a subscriber only reads'
        ]
    },
    "runtimes/blocking.py": {
        _RETURNS_NONE: ["return None"],
        _FALSE_ANYWAY: ["return False"],
        "no sleep is that short": ["if seconds > <[0||-1]>: # `time.sleep(0)` takes 50 us"],
    },
    "network_errors.py": {
        _QUICK_WAY: ["if error.__cause__ is None and error.__context__ is None: return True", "return True"],
        _FALSE_ANYWAY: ["return False"],
        _RETURNS_NONE: ["return None"],
        "a ring contains both": [
            "return all(it is not error for it in _related(causes[<[0|| -1]>])) and transient(causes[0])"
        ],
        "so many causes count as too many in any case": [
            "while isinstance(cause := error.__cause__, Exception) and len(found) <[<||<=]> _MAX_CAUSES:"
        ],
        f"{_QUICK_WAY}: a cause is looked at in any case": [
            "if <[context is not None and context is not cause and is_handled_outside(context||((context is not "
            "None) and (is_handled_outside(context))]>):"
        ],
        _FOR_CHECKERS: [
            'return <[isinstance(sqlstate, str) and sqlstate.startswith("08"||((sqlstate.startswith("08"))]>)'
        ],
    },
    "checks.py": {
        _QUICK_WAY: [
            "if type(value) is float and <[0.0||1.0]> < value < math.inf:",
            "<[if type(value) is float and 0.0 < value < math.inf: return value||pass]> # always valid; this saves "
            "350 ns for each delay that a backoff draws",
            "<[return value||pass]> # always valid; this saves 350 ns for each delay that a backoff draws",
            "if type(value) is float and value <[>=||>]> 0.0:",
            "if type(value) is float and value >= <[0.0||1.0]>:",
            "return float(value)",
            "return value",
            "return",
            "if type(value) is tuple: return value",
        ],
        "it is not equal, as it is outside of the bounds": [
            'limit = f"at least {least}" if value <[<||<=]> least else f"at most {most}"'
        ],
        "what is at most 1 is valid, or negative": [
            'hint = f"; did you mean {converted / 100:g}?" if <[1 <||0 <||1 <=]> converted <= 100 else ""'
        ],
    },
    "policy.py": {
        _QUICK_WAY: [
            "if <[Policy not in type(policy).__mro__ and not isinstance(policy, Policy||((not isinstance(policy, "
            "Policy))]>):",
            "if <[self._resilience_foresees and any(it.races for it in chain||((self._resilience_foresees)]>):",
        ],
        "there is one": ["return found[<[0|| -1]>]"],
        _KEPT_CHAIN: [
            "if <[type(policy) is||not type(policy) is||type(policy) is not]> Pipeline:",
            "if type(policy) is Pipeline: return policy",
            "return policy",
        ],
    },
    "integrations/prometheus.py": {
        "both have one for each": [
            "if (label, text) in zip(it.labels, <[texts, strict=True||texts||texts, strict=False]>):",
        ]
    },
    "integrations/dbapi/limits.py": {
        "without an error, all three are None": [
            "with nullcontext() if error[<[0|| 1|| -1]>] is None else suppress(Exception): # keep the error of the "
            "block"
        ],
        _EQUAL: ["if own <[>||>=]> milliseconds:"],
        "the thread does not wait yet": ["self._wakes_at = <[-inf||inf]>"],
        "it wakes at this instant anyway": ["elif deadline <[<||<=]> self._wakes_at:"],
        _FOR_CHECKERS: [
            "return max(1, int((<[ctx.timeout() or 0||ctx.timeout() or 1||ctx.timeout() or -1||((ctx.timeout()))]>) "
            "* 1000))"
        ],
        "CPython closes it when it frees it": ["await maybe_await(cursor.close())"],
    },
    "integrations/sqlalchemy.py": {_NO_IMPORT: ["return False"]},
    "integrations/telemetry/lines.py": {
        "`begin` sets it": [
            "<[self._follows_endings = False||self._follows_endings = True||pass]> # whether each execution has a line"
        ],
        _QUICK_WAY: [
            "if <[not self._follows_endings and self._repeats.has_open != (self._unsubscribe is not None||((not "
            "self._follows_endings)]>):"
        ],
    },
    "integrations/urllib3.py": {
        "a pool without retries follows no redirect": [
            'self._options = {**options, "retries": False, "redirect": <[False||True]>, "preload_content": False}'
        ]
    },
    "integrations/asgi.py": {_RETURNS_NONE: ["return None"]},
    "integrations/httpx/sending.py": {
        _EQUAL: [
            "self[name] = left if limit is None or limit <[>||>=]> left else limit",
            "return left if limit is None or limit <[>||>=]> left else limit",
        ],
        f"{_QUICK_WAY}: without the trace, a request without a limit, or one that may be repeated, is cheaper": [
            "if <[left is not None and self.why_not_once_sent is not None||left is not None or "
            "self.why_not_once_sent is not None||((self.why_not_once_sent is not None))||((left is not None))]>:"
        ],
    },
    "integrations/telemetry/repeats.py": {
        _QUICK_WAY: ["if line is None and not self._intervals: return []", "return []"]
    },
    "integrations/wire.py": {
        _QUICK_WAY: [
            "if <[not self._patterns or ctx.deadline == inf or not self.reaches(url)||((ctx.deadline == inf) or "
            "(not self.reaches(url)))]>:",
        ],
        "both are valid ports": [
            'if match is None or (wildcard and match["host"] == "*") or int(match["port"] or <[1||2]>) not in _PORTS:'
        ],
        "there is one text": [
            "parsed = [parse_timeout(name, texts[<[0|| -1]>]) for name, texts in found.items() if len(texts) == 1]"
        ],
    },
    "work/for_each.py": {
        "only the reader may raise, so the group has one error": ["raise group.exceptions[<[0|| -1]>] from None"]
    },
    "policies/timeout.py": {
        _QUICK_WAY: [
            "if clock.now() - deadline > <[1.0||0.0]>:",
            "if clock.now() - deadline <[>||>=]> 1.0:",
            "if clock.now() <[-||+]> deadline > 1.0:",
        ]
    },
}


def _mutants_of(line: str) -> tuple[str, list[str]]:
    """Return the line before, and those after."""
    head, mark, rest = line.partition("<[")
    parts, _, tail = rest.rpartition("]>")
    before, *afters = [head + part + tail for part in parts.split("||")]
    return (before, afters) if mark else (line, ["pass"])


#: (module, lines before, lines after) -> why
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (module, before, after): why
    for module, reasons in _EQUIVALENT.items()
    for why, lines in reasons.items()
    for before, afters in map(_mutants_of, lines)
    for after in afters
}
