"""Permits, step by step: another thread or a finalizer runs between any two instructions of a method."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from resilience.state import permits as module
from resilience.state.permits import Permits, Place
from tests.state import taking
from tests.state.stepping import TO_THE_END, TRACING_CRASHES, Interruption, Stage
from tests.state.taking import Caller, give_back, hand_on, queue_up, take

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(TRACING_CRASHES, reason="CPython 3.12 crashes where several threads trace opcodes"),
]


class Scene:
    """Permits in some state: `i0, i1` hold one, `g0` was granted one and was not woken yet, `w0, w1` wait."""

    def __init__(self, limit: int, queue: int, inside: int, granted: int, waiting: int) -> None:
        self.permits: Permits[Caller] = Permits(limit, queue)
        self.most = limit
        self.inside: list[str] = []
        self.callers: dict[str, Caller] = {}
        self.early: list[Caller] = []
        self.awake: list[Caller] = []
        for number in range(inside):
            self.arrive(f"i{number}")
        for number in range(granted):
            self.arrive(f"x{number}")
        for name in [f"g{number}" for number in range(granted)] + [f"w{number}" for number in range(waiting)]:
            self.arrive(name)
        for number in range(granted):
            self.release(f"x{number}")
        self.early = [it for it in self.callers.values() if it.place is Place.WAITING]
        assert self.inside == [f"i{n}" for n in range(inside)] + [f"g{n}" for n in range(granted)]
        assert len(self.early) == waiting

    # --- the steps of callers ---

    def arrive(self, name: str) -> None:
        if take(self.permits):
            assert not self.has_earlier_waiters(), "overtaken"
            self.inside.append(name)
        else:
            self.callers[name] = Caller(name)
            queue_up(self.permits, self.callers[name], self.wake)

    def release(self, name: str) -> None:
        self.inside.remove(name)
        give_back(self.permits, self.wake)

    def time_out(self, name: str) -> None:
        self.permits.leave(self.callers[name])
        if self.callers[name].place is Place.GONE:
            assert name not in self.inside, "left with a permit"

    def cancel(self, name: str) -> None:
        self.permits.abandon(self.callers[name])
        if name in self.inside:
            self.inside.remove(name)
        hand_on(self.permits, self.wake)

    def resize(self, limit: int) -> None:
        self.most = max(self.most, limit)
        self.permits.resize(limit)
        hand_on(self.permits, self.wake)

    def has_earlier_waiters(self, caller: Caller | None = None) -> bool:
        before = self.early[: self.early.index(caller)] if caller in self.early else self.early
        return any(it.place is Place.WAITING for it in before)

    def wake(self, caller: Caller) -> None:
        if caller not in self.awake:  # another thread may wake it at the same time
            self.awake.append(caller)
            assert not self.has_earlier_waiters(caller), "overtaken"
            if caller.place is not Place.GONE:  # otherwise it was cancelled, and its permit passed on
                self.inside.append(caller.name)

    # --- checks ---

    def check(self) -> None:
        """The counts are exact, no wake-up is lost, and in the end each permit is free again."""
        waiting = [name for name, caller in self.callers.items() if caller.place is Place.WAITING]
        limit, in_flight, queued, _ = self.permits.counts()
        assert (in_flight, queued) == (len(self.inside), len(waiting))
        assert len(set(self.inside)) == len(self.inside) <= self.most
        assert not waiting or len(self.inside) >= limit, "a lost wake-up"
        while self.inside:
            self.release(self.inside[0])
        assert self.permits.counts()[:3] == (limit, 0, 0)
        for number in range(limit):
            self.arrive(f"again{number}")
        assert len(self.inside) == limit
        assert not take(self.permits)


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

#: The steps of callers; None if the step is not possible in that state.
STEPS: dict[str, Callable[[Scene], Callable[[], None] | None]] = {
    "arrive": lambda scene: lambda: scene.arrive("n0"),
    "release": lambda scene: (lambda: scene.release("i0")) if "i0" in scene.inside else None,
    "release granted": lambda scene: (lambda: scene.release("g0")) if "g0" in scene.inside else None,
    "time out": lambda scene: (lambda: scene.time_out("w0")) if "w0" in scene.callers else None,
    "cancel": lambda scene: (lambda: scene.cancel("w0")) if "w0" in scene.callers else None,
    "cancel another": lambda scene: (lambda: scene.cancel("w1")) if "w1" in scene.callers else None,
    "cancel granted": lambda scene: (lambda: scene.cancel("g0")) if "g0" in scene.callers else None,
    "cancel another granted": lambda scene: (lambda: scene.cancel("g1")) if "g1" in scene.callers else None,
    "time out granted": lambda scene: (lambda: scene.time_out("g0")) if "g0" in scene.callers else None,
    "grow": lambda scene: lambda: scene.resize(scene.permits.limit + 1),
    "shrink": lambda scene: lambda: scene.resize(1),
    "arrive too": lambda scene: lambda: scene.arrive("n1"),
}

#: Steps of the same caller, which cannot take place at the same time.
SAME_CALLER = [{"time out", "cancel"}, {"cancel granted", "time out granted", "release granted"}]


def can_meet(names: tuple[str, ...]) -> bool:
    return not any(len(same.intersection(names)) > 1 for same in SAME_CALLER)


def steps_of(scene: Scene, names: tuple[str, ...]) -> list[Callable[[], None]] | None:
    steps = [STEPS[name](scene) for name in names]
    return None if None in steps else [step for step in steps if step is not None]


# --- two threads -----------------------------------------------------------------------------


def interleave(state: str, names: tuple[str, ...], cuts: tuple[int, ...]) -> list[int] | None:
    """Interleave the steps, cut at these places; return their lengths, or None if the state does not allow them."""
    scene = Scene(*STATES[state])
    stage = Stage(module, taking)
    stage.give_locks(scene.permits)
    steps = steps_of(scene, names)
    if steps is None:
        return None
    lengths = stage.interleave(steps, cuts)
    scene.check()
    return lengths


@pytest.mark.parametrize("state", STATES)
def test_two_threads_may_interleave_between_any_two_instructions(state: str) -> None:
    """One stops after each of its instructions in turn, the other runs to its end, and the first continues."""
    for names in itertools.permutations(STEPS, 2):
        if not can_meet(names) or (lengths := interleave(state, names, (TO_THE_END, TO_THE_END))) is None:
            continue
        for first in range(lengths[0] + 1):
            interleave(state, names, (first, TO_THE_END))


#: Two steps that conflict, and the state in which they do.
PAIRS = [
    ("full, two wait", ("release", "cancel")),
    ("full, two wait", ("release", "shrink")),
    ("one granted, one waits", ("cancel granted", "cancel")),
    ("full, one waits", ("release", "arrive")),
]


@pytest.mark.parametrize(("state", "names"), PAIRS)
def test_two_threads_may_interleave_twice_between_any_instructions(state: str, names: tuple[str, str]) -> None:
    """Both stop after each of their instructions in turn, and continue in the same order."""
    for order in itertools.permutations(names):
        lengths = interleave(state, order, (TO_THE_END, TO_THE_END))
        assert lengths is not None
        for first in range(lengths[0] + 1):
            for second in range(lengths[1] + 1):
                interleave(state, order, (first, second))


def test_of_two_callers_that_join_at_once_one_gets_the_last_place_in_the_queue() -> None:
    names, state = ("arrive", "arrive too"), "full, one waits"
    lengths = interleave(state, names, (TO_THE_END, TO_THE_END))
    assert lengths is not None
    for cuts in itertools.product(range(lengths[0] + 1), range(lengths[1] + 1)):
        scene = Scene(*STATES[state])
        stage = Stage(module, taking)
        stage.give_locks(scene.permits)
        steps = steps_of(scene, names)
        assert steps is not None
        stage.interleave(steps, cuts)
        assert scene.permits.counts() == (1, 1, 2, 1)


#: Three steps that conflict, and the state in which they do.
TRIPLES = [
    ("full", ("release", "arrive", "arrive too")),
    ("full, one waits", ("release", "arrive", "time out")),
    ("full, two wait", ("cancel", "release", "grow")),
    ("one granted, one waits", ("cancel granted", "time out", "arrive")),
    ("two granted, two wait", ("shrink", "cancel granted", "release")),
]


@pytest.mark.parametrize(("state", "names"), TRIPLES)
def test_three_threads_may_interleave_between_any_instructions(state: str, names: tuple[str, str, str]) -> None:
    """Two stop at each of their places, the third runs to its end, and the two continue in either order."""
    for order in itertools.permutations(names):
        lengths = interleave(state, order, (TO_THE_END,) * 3)
        assert lengths is not None
        assert min(lengths) > 2  # there are places: the interpreter does trace
        for first in range(0, lengths[0] + 1, 2):
            for second in range(1, lengths[1] + 1, 3):
                interleave(state, order, (first, second, TO_THE_END))


@pytest.mark.parametrize(
    "names", [("arrive", "arrive too"), ("arrive", "release"), ("arrive", "grow"), ("arrive", "shrink")]
)
def test_two_threads_make_no_permits_above_the_limit(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Permits, "BATCH", 1, raising=False)
    STATES["more to make"] = (3, 1, 1, 0, 0)
    try:
        lengths = interleave("more to make", names, (TO_THE_END, TO_THE_END))
        assert lengths is not None
        for first in range(lengths[0] + 1):
            interleave("more to make", names, (first, TO_THE_END))
    finally:
        del STATES["more to make"]


# --- one thread, interrupted -----------------------------------------------------------------


def interrupted(state: str, step: str, by: tuple[str, ...], place: int) -> bool | None:
    """Run `step` and, at its n-th place, `by`.

    Return whether there was such a place, or None if the steps are not possible in this state.
    """
    scene = Scene(*STATES[state])
    steps = steps_of(scene, (step, *by))
    if steps is None:
        return None

    def finalizers() -> None:
        scene.early = []  # a waiter that is about to be granted a permit is not overtaken
        for each in steps[1:]:
            each()

    interruption = Interruption([module, taking], place, finalizers)
    interruption.around(steps[0])
    if interruption.happened:
        scene.check()
    return interruption.happened


#: What a coroutine that is garbage collected does: it releases its permit, or leaves the queue.
FINALIZERS = ["release", "cancel", "cancel another", "cancel granted", "cancel another granted"]


@pytest.mark.parametrize("state", STATES)
def test_a_finalizer_may_run_between_any_two_instructions(state: str) -> None:
    """The collector may close coroutines there, which release permits or leave the queue in the same thread."""
    bys = [*itertools.combinations(FINALIZERS, 1), *itertools.permutations(FINALIZERS, 2)]
    for step, by in itertools.product(STEPS, bys):
        if not can_meet((step, *by)) or step in by:
            continue
        place = 0
        while interrupted(state, step, by, place):
            place += 1
        assert place > 0 or interrupted(state, step, by, 0) is None  # there are places
