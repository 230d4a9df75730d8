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
_ENDINGS = "self._follows_endings = {} # whether each execution has a line"
_LEFT = "return max(1, int({} * 1000))"
_ANY_TIMEOUT = "(ctx.timeout() or 1)", "(ctx.timeout() or -1)", "(((ctx.timeout())))"
_ATTEMPTS = "attempts, self.attempts = self.attempts, {}"
_CACHED = "@functools.lru_cache({})"
_EPOCH = "_epoch: ClassVar[int] = {} # incremented by `stop_all`, which ends all earlier switches"
_PARTS = 'yield from source if read is None else iter(partial(read, {}), b"")'
_OTHERS = ["if not type(policy) is Pipeline:", "if type(policy) is not Pipeline:"]
_NO_SLEEP = "if seconds {}: # `time.sleep(0)` takes 50 us"
_VALID = "if type(value) is float and {} < value < math.inf:"
_SAVES = "# always valid; this saves 350 ns for each delay that a backoff draws"
_TOO_SMALL = 'limit = f"at least {{least}}" if value {} least else f"at most {{most}}"'
_HINT = 'hint = f"; did you mean {{converted / 100:g}}?" if {} converted <= 100 else ""'
_OF_BLOCK = "with nullcontext() if error[{}] is None else suppress(Exception): # keep the error of the block"
_FIRST = "attempt = ctx if ctx.attempt == {} else ctx.child(attempt=1)"
_TAKEN = "{} # no lock: a third of the time (see `Turns.fast_path`). No call until `append`"
_ROOM = "if bucket is not None and (full_at := bucket.full_at) {} began {} bucket.tolerance: # GCRA"
_CHARGED = "bucket.full_at = (full_at if full_at {} began else began) + bucket.increment"
_QUICKLY = (
    f"try: {_TAKEN.format('del fast_path[-1]')} bucket = turns.bucket {_ROOM.format('<=', '+')} {_CHARGED.format('>')} "
    "has_turn = True fast_path.append(None) "
    "except IndexError: # pragma: no cover (another thread was faster: never under the GIL) pass"
)

#: module -> (lines before, lines after or several alternatives, why there is no difference)
_EQUIVALENT: dict[str, list[tuple[str, str | list[str], str]]] = {
    "state/rates.py": [
        ("if self.full_at > now:", "if self.full_at >= now:", "at equality, nothing of the bucket is used"),
        (
            "for meter, cost in zip(self._meters, costs, strict=True):",
            "for meter, cost in zip(self._meters, costs, strict=False):",
            "there is one cost for each meter",
        ),
    ],
    "state/concurrency.py": [
        ("latency_of_all: float = 0.0", "latency_of_all: float = -1.0", "the larger of the two latencies counts"),
    ],
    "state/turns.py": [
        ("self._plan: Together | None = None", "pass", "it is set again before it is read"),
        ("if rates.ready(costs, now) > now + EPSILON:", "if rates.ready(costs, now) >= now + EPSILON:", _OF_ROUNDING),
        (
            "return [first.woken(now)] if due < first.due - WAKE_TOLERANCE else []",
            "return [first.woken(now)] if due <= first.due - WAKE_TOLERANCE else []",
            "at exactly this lateness it may be woken or not",
        ),
        ("if it.is_late and not it.grace: continue", "pass", _QUICK_WAY),
        ("if turn.instant > now + EPSILON:", "if turn.instant >= now + EPSILON:", _OF_ROUNDING),
    ],
    "policies/rate_limiter.py": [
        ("if fast_path:", "if not fast_path:", _QUICK_WAY),
        (f"if fast_path: {_QUICKLY}", "pass", _QUICK_WAY),
        (_QUICKLY, "pass", _QUICK_WAY),
        (_TAKEN.format("del fast_path[-1]"), _TAKEN.format("del fast_path[- 2]"), _QUICK_WAY),
        (_TAKEN.format("del fast_path[-1]"), _TAKEN.format("del fast_path[1]"), _QUICK_WAY),
        (_TAKEN.format("del fast_path[-1]"), _TAKEN.format("del fast_path[- 0]"), "it holds at most one entry"),
        (_ROOM.format("<=", "+"), _ROOM.format("<", "+"), _QUICK_WAY),
        (_ROOM.format("<=", "+"), _ROOM.format("<=", "-"), _QUICK_WAY),
        (f"{_ROOM.format('<=', '+')} {_CHARGED.format('>')} has_turn = True", "pass", _QUICK_WAY),
        (_CHARGED.format(">"), _CHARGED.format(">="), "the two are the same instant"),
        (
            "for rate, cost in zip(self._rates, costs, strict=False)",
            "for rate, cost in zip(self._rates, costs)",
            "that is the default",
        ),
    ],
    "policies/flights.py": [
        (
            "self.leads = lead is self._lead or lead in _enclosing.get() # nested in the leader's call",
            "self.leads = ((lead in _enclosing.get())) # nested in the leader's call",
            f"{_QUICK_WAY}: a call encloses itself; without it, a call takes 3 % more",
        ),
        (
            "self.leads: bool = False",
            "self.leads: bool = True",
            "without a token, the end of a flight does not read it",
        ),
        ("_enclosing.reset(self._token)", "pass", f"{_QUICK_WAY}: ended calls in it are ignored"),
        ("assert self._found", "pass", _FOR_CHECKERS),
        (
            "(outcome, traceback), self._found = self._found[0], None",
            "(outcome, traceback), self._found = self._found[ -1], None",
            "if two callers have shared an outcome, each of the two is right",
        ),
    ],
    "policies/single_flight.py": [
        (
            "if not flight.leads and await flight.follows():",
            "if ((await flight.follows())):",
            f"{_QUICK_WAY}: `follows` returns false for a leader",
        ),
    ],
    "policies/hedge.py": [
        (
            "assert answer is not None # an attempt that is cut off while no other runs raises out of `race`",
            "pass # an attempt that is cut off while no other runs raises out of `race`",
            _FOR_CHECKERS,
        ),
        ("if not plan.discarded: return", "pass", _QUICK_WAY),
        ("return", "pass", _QUICK_WAY),
        (_ATTEMPTS.format("0"), [_ATTEMPTS.format(it) for it in ("1", "-1")], _NOT_HEDGED),
    ],
    "policies/chaos.py": [
        (_EPOCH.format("0"), [_EPOCH.format(it) for it in ("1", "-1")], _OF_EPOCHS),
        ("@overload", "", "the definition below replaces it"),
        ("Chaos._epoch += 1", "Chaos._epoch += 2", _OF_EPOCHS),
        ("if not self._switches or not self._draw(ctx):", "if ((not self._draw(ctx))):", _QUICK_WAY),
        (
            'state = "off" if switch is None else f"on for {max(0.0, switch.until - clock.now()):.0f} s more"',
            'state = "off" if switch is None else f"on for {max( -1.0, switch.until - clock.now()):.0f} s more"',
            "only if the thread is interrupted between two lines",
        ),
    ],
    "policies/live_circuit.py": [
        ("assert self.rules.probe is not None", "pass", _FOR_CHECKERS),
        ("return False", "pass", _FALSE_ANYWAY),
        ("self.failures: int = 0", "self.failures: int = 1", _NOTED_ONLY),
        (
            "self.is_timed: bool = rules.trip.slower_than < inf",
            "self.is_timed: bool = rules.trip.slower_than <= inf",
            f"{_QUICK_WAY}: no duration is longer than infinity",
        ),
    ],
    "repeats.py": [
        (
            "if self._balance >= -_ROUNDING:",
            "if self._balance > -_ROUNDING:",
            "at exactly the tolerance it may be allowed or not",
        ),
        (
            "self._as_of = clock.now() if self._per_second else 0.0",
            [
                "self._as_of = clock.now() if not self._per_second else 0.0",
                "self._as_of = clock.now() if self._per_second else 1.0",
                "self._as_of = clock.now() if self._per_second else -1.0",
            ],
            "a full budget earns nothing, so it is not read",
        ),
        (
            "if value is None or isinstance(value, RetryBudget):",
            "if ((value is None)):",
            f"{_QUICK_WAY}: it has the methods",
        ),
    ],
    "proxy.py": [
        (
            'return callable(member) and hasattr(type(member), "__get__") and not isinstance(member, type)',
            'return ((callable(member)) and (hasattr(type(member), "__get__")))',
            "only a metaclass could have a `__get__`",
        ),
        (
            _CACHED.format("maxsize=256"),
            ["", *(_CACHED.format(it) for it in ("maxsize= 257", "maxsize= 255", ""))],
            _OF_MEMORY,
        ),
    ],
    "state/permits.py": [
        ("BATCH = 16", ["BATCH = 17", "BATCH = 15"], _OF_MEMORY),
        ("return False", "pass", _FALSE_ANYWAY),
        ("if missing > self.BATCH:", "if missing >= self.BATCH:", "at equality, both give the same result"),
    ],
    "policies/retry.py": [
        (
            _FIRST.format(1),
            _FIRST.format(0),
            "the first attempt may have its own context, too",
        ),
        ("if error is None or self._state is None:", "if ((error is None)):", _FOR_CHECKERS),
        ("return False", "pass", _FALSE_ANYWAY),
        ("return None", "pass", _RETURNS_NONE),
    ],
    "policies/fallback.py": [
        ("@overload", "", "the definition below replaces it"),
        (
            "if self._handler is None and not is_observed and closable(error) is None: return self._value",
            "pass",
            _QUICK_WAY,
        ),
    ],
    "policies/live_permits.py": [
        ("return False", "pass", _FALSE_ANYWAY),
    ],
    "integrations/http/exchange.py": [("return None", "pass", _RETURNS_NONE)],
    "integrations/http/rules.py": [("return None", "pass", _RETURNS_NONE)],
    "integrations/http/bodies.py": [
        ("return None", "pass", _RETURNS_NONE),
        (
            "elif not isinstance(source, _PLAIN) and any(hasattr(source, name) for name in _STREAM_METHODS):",
            "elif ((any(hasattr(source, name) for name in _STREAM_METHODS))):",
            _QUICK_WAY,
        ),
        (
            "return self._files[0][1] if self._files else None",
            "return self._files[ -1][1] if self._files else None",
            "only the start of a body of one part is read",
        ),
        (_PARTS.format(65536), [_PARTS.format(it) for it in (65537, 65535)], _OF_MEMORY),
    ],
    "integrations/httpx/bodies.py": [
        ("if isinstance(stream, BYTES): return IN_MEMORY", "pass", _QUICK_WAY),
        ("return IN_MEMORY", "pass", _QUICK_WAY),
    ],
    "integrations/redis/protection.py": [
        (
            'if "timeout" in kwargs and not self.is_connected: # a subscriber only reads',
            'if (("timeout" in kwargs)): # a subscriber only reads',
            "connecting does nothing if it is connected",
        ),
    ],
    "runtimes/blocking.py": [
        ("return None", "pass", _RETURNS_NONE),
        ("return False", "pass", _FALSE_ANYWAY),
        (_NO_SLEEP.format("> 0"), _NO_SLEEP.format("> -1"), "no sleep is that short"),
    ],
    "network_errors.py": [
        ("if error.__cause__ is None and error.__context__ is None: return True", "pass", _QUICK_WAY),
        ("return True", "pass", _QUICK_WAY),
        ("return False", "pass", _FALSE_ANYWAY),
        ("return None", "pass", _RETURNS_NONE),
        (
            "return all(it is not error for it in _related(causes[0])) and transient(causes[0])",
            "return all(it is not error for it in _related(causes[ -1])) and transient(causes[0])",
            "a ring contains both",
        ),
        (
            "while isinstance(cause := error.__cause__, Exception) and len(found) < _MAX_CAUSES:",
            "while isinstance(cause := error.__cause__, Exception) and len(found) <= _MAX_CAUSES:",
            "so many causes count as too many in any case",
        ),
        (
            "if context is not None and context is not cause and is_handled_outside(context):",
            "if ((context is not None) and (is_handled_outside(context))):",
            f"{_QUICK_WAY}: a cause is looked at in any case",
        ),
        (
            'return isinstance(sqlstate, str) and sqlstate.startswith("08")',
            'return ((sqlstate.startswith("08")))',
            _FOR_CHECKERS,
        ),
    ],
    "checks.py": [
        (_VALID.format("0.0"), _VALID.format("1.0"), _QUICK_WAY),
        (f"{_VALID.format('0.0')} return value {_SAVES}", "pass " + _SAVES, _QUICK_WAY),
        (f"return value {_SAVES}", f"pass {_SAVES}", _QUICK_WAY),
        ("if type(value) is float and value >= 0.0:", "if type(value) is float and value > 0.0:", _QUICK_WAY),
        ("if type(value) is float and value >= 0.0:", "if type(value) is float and value >= 1.0:", _QUICK_WAY),
        ("return float(value)", "pass", _QUICK_WAY),
        ("return value", "pass", _QUICK_WAY),
        ("return", "pass", _QUICK_WAY),
        ("if type(value) is tuple: return value", "pass", _QUICK_WAY),
        (_TOO_SMALL.format("<"), _TOO_SMALL.format("<="), "it is not equal, as it is outside of the bounds"),
        (_HINT.format("1 <"), [_HINT.format("0 <"), _HINT.format("1 <=")], "what is at most 1 is valid, or negative"),
    ],
    "policy.py": [
        (
            "if Policy not in type(policy).__mro__ and not isinstance(policy, Policy):",
            "if ((not isinstance(policy, Policy))):",
            _QUICK_WAY,
        ),
        (
            "if self._resilience_foresees and any(it.races for it in chain):",
            "if ((self._resilience_foresees)):",
            _QUICK_WAY,
        ),
        ("return found[0]", "return found[ -1]", "there is one"),
        ("if type(policy) is Pipeline:", _OTHERS, _KEPT_CHAIN),
        ("if type(policy) is Pipeline: return policy", "pass", _KEPT_CHAIN),
        ("return policy", "pass", _KEPT_CHAIN),
    ],
    "integrations/prometheus.py": [
        (it.format(", strict=True"), [it.format(""), it.format(", strict=False")], "both have one for each")
        for it in (
            "if (label, text) in zip(it.labels, texts{}):",
            "families = dict(zip(_GAUGES, self.describe(){}))",
        )
    ],
    "integrations/dbapi/limits.py": [
        (_OF_BLOCK.format("0"), [_OF_BLOCK.format(it) for it in (" 1", " -1")], "without an error, all three are None"),
        ("if own > milliseconds:", "if own >= milliseconds:", _EQUAL),
        ("self._wakes_at = -inf", "self._wakes_at = inf", "the thread does not wait yet"),
        ("elif deadline < self._wakes_at:", "elif deadline <= self._wakes_at:", "it wakes at this instant anyway"),
        (_LEFT.format("(ctx.timeout() or 0)"), [_LEFT.format(it) for it in _ANY_TIMEOUT], _FOR_CHECKERS),
        ("await maybe_await(cursor.close())", "pass", "CPython closes it when it frees it"),
    ],
    "integrations/sqlalchemy.py": [
        ("if not isinstance(error, SQLAlchemyError): return False", "pass", _NO_IMPORT),
        ("return False", "pass", _NO_IMPORT),
    ],
    "integrations/telemetry/lines.py": [
        (
            _ENDINGS.format("False"),
            [_ENDINGS.format("True"), "pass # whether each execution has a line"],
            "`begin` sets it",
        ),
        (
            "if not self._follows_endings and self._repeats.has_open != (self._unsubscribe is not None):",
            "if ((not self._follows_endings)):",
            _QUICK_WAY,
        ),
    ],
    "integrations/urllib3.py": [
        (
            'self._options = {**options, "retries": False, "redirect": False, "preload_content": False}',
            'self._options = {**options, "retries": False, "redirect": True, "preload_content": False}',
            "a pool without retries follows no redirect",
        ),
    ],
    "integrations/asgi.py": [("return None", "pass", _RETURNS_NONE)],
    "integrations/httpx/sending.py": [
        (
            "self[name] = left if limit is None or limit > left else limit",
            "self[name] = left if limit is None or limit >= left else limit",
            _EQUAL,
        ),
        (
            "return left if limit is None or limit > left else limit",
            "return left if limit is None or limit >= left else limit",
            _EQUAL,
        ),
        (
            "if left is not None and self.why_not_once_sent is not None:",
            [
                "if left is not None or self.why_not_once_sent is not None:",
                "if ((self.why_not_once_sent is not None)):",
                "if ((left is not None)):",
            ],
            f"{_QUICK_WAY}: without the trace, a request without a limit, or one that may be repeated, is cheaper",
        ),
    ],
    "integrations/telemetry/repeats.py": [
        ("if line is None and not self._intervals: return []", "pass", _QUICK_WAY),
        ("return []", "pass", _QUICK_WAY),
    ],
    "integrations/wire.py": [
        (
            "if not self._patterns or ctx.deadline == inf or not self.reaches(url):",
            "if ((ctx.deadline == inf) or (not self.reaches(url))):",
            _QUICK_WAY,
        ),
        (
            'if match is None or (wildcard and match["host"] == "*") or int(match["port"] or 1) not in _PORTS:',
            'if match is None or (wildcard and match["host"] == "*") or int(match["port"] or 2) not in _PORTS:',
            "both are valid ports",
        ),
        (
            "parsed = [parse_timeout(name, texts[0]) for name, texts in found.items() if len(texts) == 1]",
            "parsed = [parse_timeout(name, texts[ -1]) for name, texts in found.items() if len(texts) == 1]",
            "there is one text",
        ),
    ],
    "work/for_each.py": [
        (
            "raise group.exceptions[0] from None",
            "raise group.exceptions[ -1] from None",
            "only the reader may raise, so the group has one error",
        ),
    ],
    "policies/timeout.py": [
        ("if clock.now() - deadline > 1.0:", "if clock.now() - deadline > 0.0:", _QUICK_WAY),
        ("if clock.now() - deadline > 1.0:", "if clock.now() - deadline >= 1.0:", _QUICK_WAY),
        ("if clock.now() - deadline > 1.0:", "if clock.now() + deadline > 1.0:", _QUICK_WAY),
    ],
}

#: (module, lines before, lines after) -> why
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (module, before, after): why
    for module, mutants in _EQUIVALENT.items()
    for before, afters, why in mutants
    for after in ([afters] if isinstance(afters, str) else afters)
}
