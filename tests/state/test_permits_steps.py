"""Permits, cut to pieces: between any two instructions of a method there comes another thread, or a finalizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from resilience.state import permits as module
from resilience.state.permits import Permits, Ticket, TicketState
from tests.state.stepping import TO_THE_END, TRACING_CRASHES, Interruption, Stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(TRACING_CRASHES, reason="CPython 3.12 crashes where several threads trace opcodes"),
]


class Hall:
    """Permits in some state: `i0, i1` are inside, `g0` was granted a permit and does not know yet, `w0, w1` wait."""

    def __init__(self, limit: int, queue: int, inside: int, granted: int, waiting: int) -> None:
        self.permits: Permits[str] = Permits(limit, queue)
        self.most = limit
        self.inside: list[str] = []
        self.tickets: dict[str, Ticket[str]] = {}
        self.early: list[Ticket[str]] = []
        for number in range(inside):
            self.arrive(f"i{number}")
        for number in range(granted):
            self.arrive(f"x{number}")
        for name in [f"g{number}" for number in range(granted)] + [f"w{number}" for number in range(waiting)]:
            self.arrive(name)
        for number in range(granted):
            self.release(f"x{number}")
        self.early = [ticket for ticket in self.tickets.values() if ticket.state is TicketState.WAITING]
        assert self.inside == [f"i{n}" for n in range(inside)] + [f"g{n}" for n in range(granted)]
        assert len(self.early) == waiting

    # --- what callers do ---

    def arrive(self, name: str) -> None:
        if self.permits.take():
            assert not self.someone_waits_since_before(), "overtaken"
            self.inside.append(name)
        else:
            self.tickets[name] = ticket = Ticket(name)
            self.note(self.permits.join(ticket))

    def release(self, name: str) -> None:
        self.inside.remove(name)
        self.note(self.permits.give_back())

    def time_out(self, name: str) -> None:
        ticket = self.tickets[name]
        if self.permits.leave(ticket):
            assert ticket.state is TicketState.GONE
            assert name not in self.inside, "left with a permit"

    def cancel(self, name: str) -> None:
        granted = self.permits.abandon(self.tickets[name])
        if name in self.inside:
            self.inside.remove(name)
        self.note(granted)

    def resize(self, limit: int) -> None:
        self.most = max(self.most, limit)
        self.note(self.permits.resize(limit))

    def someone_waits_since_before(self, ticket: Ticket[str] | None = None) -> bool:
        before = self.early[: self.early.index(ticket)] if ticket in self.early else self.early
        return any(it.state is TicketState.WAITING for it in before)

    def note(self, granted: list[Ticket[str]] | None) -> None:
        """What the caller of a method does with what it returns: it wakes them."""
        for ticket in granted or []:
            assert not self.someone_waits_since_before(ticket), "overtaken"
            if ticket.state is not TicketState.GONE:  # else cancelled since, and passed on
                self.inside.append(ticket.waiter)

    # --- afterwards ---

    def check(self) -> None:
        """The counts are exact, nobody waits in vain, and in the end every permit is there again."""
        waiting = [name for name, ticket in self.tickets.items() if ticket.state is TicketState.WAITING]
        counts = self.permits.counts()
        assert (counts.in_flight, counts.queued) == (len(self.inside), len(waiting))
        assert len(set(self.inside)) == len(self.inside) <= self.most
        assert not waiting or len(self.inside) >= counts.limit, "a lost wake-up"
        while self.inside:
            self.release(self.inside[0])
        assert self.permits.counts()[:3] == (counts.limit, 0, 0)
        for number in range(counts.limit):
            self.arrive(f"again{number}")
        assert len(self.inside) == counts.limit
        assert not self.permits.take()


#: limit, queue, inside, granted, waiting
STATES = {
    "room": (2, 2, 1, 0, 0),
    "full": (1, 2, 1, 0, 0),
    "full, no queue": (1, 0, 1, 0, 0),
    "full, one waits": (1, 2, 1, 0, 1),
    "full, two wait": (2, 3, 2, 0, 2),
    "one granted, one waits": (1, 3, 0, 1, 1),
    "two granted, two wait": (3, 4, 1, 2, 2),
}

#: What somebody may do, if it can be done in that state.
STEPS: dict[str, Callable[[Hall], Callable[[], None] | None]] = {
    "arrive": lambda hall: lambda: hall.arrive("n0"),
    "release": lambda hall: (lambda: hall.release("i0")) if "i0" in hall.inside else None,
    "release granted": lambda hall: (lambda: hall.release("g0")) if "g0" in hall.inside else None,
    "time out": lambda hall: (lambda: hall.time_out("w0")) if "w0" in hall.tickets else None,
    "cancel": lambda hall: (lambda: hall.cancel("w0")) if "w0" in hall.tickets else None,
    "cancel another": lambda hall: (lambda: hall.cancel("w1")) if "w1" in hall.tickets else None,
    "cancel granted": lambda hall: (lambda: hall.cancel("g0")) if "g0" in hall.tickets else None,
    "cancel another granted": lambda hall: (lambda: hall.cancel("g1")) if "g1" in hall.tickets else None,
    "time out granted": lambda hall: (lambda: hall.time_out("g0")) if "g0" in hall.tickets else None,
    "grow": lambda hall: lambda: hall.resize(hall.permits.limit + 1),
    "shrink": lambda hall: lambda: hall.resize(1),
    "arrive too": lambda hall: lambda: hall.arrive("n1"),
}

#: Who can do one of these cannot do another one at the same time: it is one and the same caller.
SAME = [{"time out", "cancel"}, {"cancel granted", "time out granted", "release granted"}]


def can_meet(names: tuple[str, ...]) -> bool:
    return not any(len(same.intersection(names)) > 1 for same in SAME)


def steps_of(hall: Hall, names: tuple[str, ...]) -> list[Callable[[], None]] | None:
    steps = [STEPS[name](hall) for name in names]
    return None if None in steps else [step for step in steps if step is not None]


# --- two threads -----------------------------------------------------------------------------


def cut(state: str, names: tuple[str, ...], cuts: tuple[int, ...]) -> list[int] | None:
    """Run the steps side by side, cut in these places; return how long they were, None if they make no sense here."""
    hall = Hall(*STATES[state])
    stage = Stage(module)
    stage.give_locks(hall.permits)
    steps = steps_of(hall, names)
    if steps is None:
        return None
    lengths = stage.interleave(steps, cuts)
    hall.check()
    return lengths


@pytest.mark.parametrize("state", STATES)
def test_two_threads_may_meet_between_any_two_instructions(state: str) -> None:
    """One stops after each of its instructions in turn, the other goes all the way, the first goes on."""
    for names in itertools.permutations(STEPS, 2):
        if not can_meet(names) or (lengths := cut(state, names, (TO_THE_END, TO_THE_END))) is None:
            continue
        for first in range(lengths[0] + 1):
            cut(state, names, (first, TO_THE_END))


#: Three who meet where it hurts, in one state each.
TRIPLES = [
    ("full", ("release", "arrive", "arrive too")),
    ("full, one waits", ("release", "arrive", "time out")),
    ("full, two wait", ("cancel", "release", "grow")),
    ("one granted, one waits", ("cancel granted", "time out", "arrive")),
    ("two granted, two wait", ("shrink", "cancel granted", "release")),
]


@pytest.mark.parametrize(("state", "names"), TRIPLES)
def test_three_threads_may_meet_between_any_instructions(state: str, names: tuple[str, str, str]) -> None:
    """Two stop, each at every one of its places, a third goes all the way, and the two go on in either order."""
    for order in itertools.permutations(names):
        lengths = cut(state, order, (TO_THE_END,) * 3)
        assert lengths is not None
        assert min(lengths) > 2  # the places are there: the interpreter does trace
        for first in range(0, lengths[0] + 1, 2):
            for second in range(1, lengths[1] + 1, 3):
                cut(state, order, (first, second, TO_THE_END))


@pytest.mark.parametrize(
    "names", [("arrive", "arrive too"), ("arrive", "release"), ("arrive", "grow"), ("arrive", "shrink")]
)
def test_two_threads_may_meet_where_permits_are_made(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is laid out in batches is never exceeded by two who make one at the same time."""
    monkeypatch.setattr(Permits, "BATCH", 1, raising=False)
    STATES["more to make"] = (3, 1, 1, 0, 0)
    try:
        lengths = cut("more to make", names, (TO_THE_END, TO_THE_END))
        assert lengths is not None
        for first in range(lengths[0] + 1):
            cut("more to make", names, (first, TO_THE_END))
    finally:
        del STATES["more to make"]


# --- one thread, interrupted -----------------------------------------------------------------


def interrupted(state: str, step: str, by: tuple[str, ...], place: int) -> bool | None:
    """Run `step` and, at its n-th place, `by`; say whether there was such a place, None if it makes no sense here."""
    hall = Hall(*STATES[state])
    steps = steps_of(hall, (step, *by))
    if steps is None:
        return None

    def finalizers() -> None:
        hall.early = []  # who is about to be granted a permit has not been overtaken
        for each in steps[1:]:
            each()

    interruption = Interruption([module], place, finalizers)
    interruption.around(steps[0])
    if interruption.happened:
        hall.check()
    return interruption.happened


#: What a coroutine does that is thrown away: it gives back what it holds, or leaves the queue.
FINALIZERS = ["release", "cancel", "cancel another", "cancel granted", "cancel another granted"]


@pytest.mark.parametrize("state", STATES)
def test_a_finalizer_may_run_anywhere(state: str) -> None:
    """Where the collector may run, coroutines that are thrown away give back permits or leave, in the same thread."""
    bys = [*itertools.combinations(FINALIZERS, 1), *itertools.permutations(FINALIZERS, 2)]
    for step, by in itertools.product(STEPS, bys):
        if not can_meet((step, *by)) or step in by:
            continue
        place = 0
        while interrupted(state, step, by, place):
            place += 1
        assert place > 1 or interrupted(state, step, by, 0) is None  # the places are there
