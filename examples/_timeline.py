"""The output of the quickstart: one line for each call, then sums and promises."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from rich.console import Console
from rich.table import Table
from rich.text import Text

from resilience import Context, Failure, Outcome, Success, TimeoutExceeded
from resilience.events import (
    AttemptFailed,
    CallRejected,
    CircuitChanged,
    Event,
    FallbackUsed,
    RetryGaveUp,
    RetryScheduled,
    TimedOut,
)

COLOURS = {"threads": "cyan", "asyncio": "magenta", "trio": "blue"}
CHART = 48  # columns
LONGEST_STEP = 36  # columns, approximately

#: The reasons for which a retry gives up, except lack of time.
GAVE_UP = {"attempts": "no attempts left", "circuit_open": "no retry into an open circuit"}


@dataclass(eq=False)
class Visit:
    """One call: its runtime, its time budget, its events and its outcome."""

    runtime: str
    url: str
    budget: float
    delay: float = 0.0
    events: list[Event] = field(default_factory=list)
    began: float = 0.0
    entered: float = inf
    ended: float = 0.0
    left: float = 0.0
    outcome: Outcome[str] | None = None

    @property
    def path(self) -> str:
        """The path of the URL, without the runtime at its end."""
        return "/" + self.url.split("/")[3]

    def begin(self) -> Context:
        """Start the clock, and return the context of the call, with its budget, its name and this visit."""
        self.began = time.monotonic()
        self.ctx = Context(timeout=self.budget, operation=f"GET {self.path}", properties={"visit": self})
        return self.ctx

    def enter(self) -> str:
        """Record when the pipeline first lets the call through to the client, and return the URL to fetch."""
        self.entered = min(self.entered, time.monotonic())
        return self.url

    def end(self, outcome: Outcome[str]) -> None:
        """Stop the clock."""
        self.ended = time.monotonic()
        self.left = self.ctx.remaining()
        self.outcome = outcome

    @property
    def late(self) -> float:
        """Seconds by which the call ended after its deadline, measured here."""
        return max(0.0, self.ended - (self.began + self.budget))

    @property
    def answer(self) -> str | None:
        return self.outcome.value if isinstance(self.outcome, Success) else None

    @property
    def fell_back(self) -> bool:
        return self.count(FallbackUsed) > 0

    @property
    def answered(self) -> bool:
        """Whether the answer is from the server."""
        return self.answer is not None and not self.fell_back

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)


class Timeline:
    """Prints the calls, in colours on a terminal and as plain text elsewhere, and stores them with the promises."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        if not console.is_terminal and not os.environ.get("COLUMNS", "").lstrip("0").isdecimal():
            console.width = 120  # a pipe has no width: rich would assume 80 columns, and print nothing if COLUMNS is 0
        self._console = console
        self._plain = not console.is_terminal or console.options.ascii_only
        self._began = time.monotonic()
        self.visits: list[Visit] = []
        self.broken: list[str] = []
        self._promises: list[tuple[bool, str]] = []

    def hear(self, event: Event) -> None:
        """Add an event of the library to the visit that travels with its execution."""
        visit = event.properties.get("visit")
        if isinstance(visit, Visit):
            visit.events.append(event)

    # --- the story ---

    def say(self, text: str) -> None:
        self._console.print(Text(text, style="" if self._plain else "dim"))

    def act(self, title: str, blurb: str) -> None:
        self._console.print()
        self._console.print(Text(f"-- {title} --" if self._plain else f"━━ {title}", style="bold"))
        self.say(blurb)

    def heading(self) -> None:
        self.say(f"{'at':>5}  {'runtime':<7}  {'path':<11}  {'tries':>5}  {'took':>6}  {'left':>6}  what happened")

    def show(self, visits: Iterable[Visit]) -> None:
        """Print the lines of these visits, in the order in which they began."""
        for visit in sorted(visits, key=lambda visit: visit.began):
            self.visits.append(visit)
            line = Text(f"{visit.began - self._began:5.2f}  ")
            line.append(f"{visit.runtime:<7}  ", style=COLOURS[visit.runtime])
            line.append(f"{visit.path:<11}  {visit.ctx.attempts:5}  {visit.ctx.elapsed:4.2f} s  {visit.left:4.2f} s  ")
            indent = min(len(line), max(7, self._console.width - LONGEST_STEP))
            for row in self._folded(_steps(visit), len(line), indent):
                self._console.print(line + row)
                line = Text(" " * indent)

    def chart(self, visits: list[Visit]) -> None:
        """Draw when each call waited and when it ran, in one row for each call."""
        self.visits += visits
        first, last = min(visit.began for visit in visits), max(visit.ended for visit in visits)
        wait, work = (".", "#") if self._plain else ("·", "█")
        columns = max(1, min(CHART, self._console.width - 32))  # less the text on both sides
        for visit in sorted(visits, key=lambda visit: visit.began):
            came, entered, left = (
                round((at - first) / (last - first) * columns)
                for at in (visit.began, min(visit.entered, visit.ended), visit.ended)
            )
            row = Text(f"{visit.began - self._began:5.2f}  ")
            row.append(f"{visit.runtime:<9}{' ' * came}", style=COLOURS[visit.runtime])
            row.append(wait * (entered - came), style="dim")
            row.append(work * (left - entered), style=COLOURS[visit.runtime])
            waited = f"waited {visit.entered - visit.began:.2f} s" if visit.ctx.attempts else "not let in"
            row.append(f"{' ' * (columns - left)}  {waited}", style="dim")
            self._console.print(row)

    def _folded(self, steps: Iterable[Text], start: int, indent: int) -> Iterator[Text]:
        """Lay out steps in rows from column `start`, later `indent`, to the edge; break only between steps."""
        arrow = Text(" > " if self._plain else " → ", style="dim")
        row = Text()
        for step in steps:
            joined = row + arrow + step if row else step
            if start + len(joined) < self._console.width:
                row = joined
            else:
                yield row
                start, row = indent, arrow[1:] + step
        yield row

    # --- the end ---

    def promise(self, text: str, evidence: str, held: bool) -> None:
        """Record a promise, the evidence, and whether it was kept."""
        self._promises.append((held, f"{text}: {evidence}"))
        if not held:
            self.broken.append(f"{text}: {evidence}")

    def summary(self) -> None:
        """Print the sums for each runtime, and which promises were kept."""
        self.act("Summary", f"{len(self.visits)} calls in {time.monotonic() - self._began:.1f} s.")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="" if self._plain else "dim")
        for heading in ("runtime", "calls", "answered", "fell back", "tries", "waits", "cut off", "refused", "longest"):
            table.add_column(heading, justify="left" if heading == "runtime" else "right", overflow="fold")
        for runtime, colour in COLOURS.items():
            visits = [visit for visit in self.visits if visit.runtime == runtime]
            table.add_row(
                Text(runtime, style=colour),
                str(len(visits)),
                str(sum(visit.answered for visit in visits)),
                str(sum(visit.fell_back for visit in visits)),
                str(sum(visit.ctx.attempts for visit in visits)),
                *(str(sum(visit.count(kind) for visit in visits)) for kind in (RetryScheduled, TimedOut, CallRejected)),
                f"{max(visit.ctx.elapsed for visit in visits):.2f} s",
            )
        self._console.print(table)
        self.act("Promises", "Checked against the records of the server and the clients.")
        for held, text in self._promises:
            mark = ("kept  " if held else "BROKEN") if self._plain else ("✔" if held else "✘")
            self._console.print(Text.assemble((f"{mark} ", "green" if held else "bold red"), text))


def _steps(visit: Visit) -> Iterator[Text]:
    """Yield the steps of a call, and how it ended."""
    for event in _outcome_first(visit.events):
        text, style = _in_words(event)
        if text:
            yield Text.assemble((text, style))
    if visit.answer is None:
        yield Text.assemble((f"raised {_reason(visit.outcome)}", "bold red"))
    else:
        yield Text.assemble((f'"{visit.answer}"', "yellow" if visit.fell_back else "green"))


def _outcome_first(events: list[Event]) -> list[Event]:
    """Put a failed attempt before a change of the circuit: the breaker is inside the retry, and reports first."""
    ordered = list(events)
    for at, (event, after) in enumerate(pairwise(events)):
        if isinstance(event, CircuitChanged) and isinstance(after, AttemptFailed):
            ordered[at : at + 2] = [after, event]
    return ordered


def _in_words(event: Event) -> tuple[str, str]:
    """Return the text of an event, and its style; no text if another event says the same."""
    match event:
        case AttemptFailed(outcome=outcome):
            cut_off = isinstance(outcome, Failure) and isinstance(outcome.error, TimeoutExceeded)
            return "" if cut_off else _reason(outcome), "red"
        case RetryScheduled(delay=delay):
            return f"wait {delay:.2f} s", "dim"
        case RetryGaveUp(reason=reason):
            return GAVE_UP.get(reason, "no time left"), "red"
        case TimedOut(timeout=timeout, by_deadline=by_deadline):
            return f"cut off at {'its deadline' if by_deadline else f'{timeout:g} s'}", "red"
        case CallRejected(reason=reason):
            return f"refused: {reason}", "red"
        case CircuitChanged(new=new):
            return f"CIRCUIT {new.name.replace('_', '-')}", "bold"
        case _:
            return "", ""


def _reason(outcome: Outcome[object] | None) -> str:
    """Return the failure of a call, in a word or two."""
    if not isinstance(outcome, Failure):
        return "nothing"
    status = getattr(getattr(outcome.error, "response", None), "status_code", None)
    return type(outcome.error).__name__ if status is None else f"status {status}"
