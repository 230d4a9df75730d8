"""Mutants that no test can kill, because they do what the code does, each with the reason."""

from __future__ import annotations

#: (module, lines before, lines after) -> why nobody can tell the difference.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "state/trips.py",
        "window: Window = CountWindow(self.last or 1) if self.window is None else TimeWindow(self.window)",
        f"window: Window = CountWindow({after}) if self.window is None else TimeWindow(self.window)",
    ): "where there is no window of time, `last` is there; the other side is for type checkers"
    for after in ("self.last or 2", "self.last or 0", "((self.last))")
}
