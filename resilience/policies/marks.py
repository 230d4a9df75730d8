"""Marks on errors: which of them a circuit has counted, so that a call around does not count the same failure again."""

from __future__ import annotations

from typing import Final

#: Where an error keeps its marks (numbers, so that it can still be pickled), and how many causes are looked at.
_MARKS: Final = "_resilience_counted_by"
_DEEPEST: Final = 20


def mark(error: Exception, circuit: int, number: int) -> None:
    """Note on an error that a circuit has counted it, and as which of its failures."""
    try:
        marks: dict[int, int] = vars(error).get(_MARKS, {})
        setattr(error, _MARKS, {**marks, circuit: number})
    except Exception:  # one that refuses attributes goes without
        pass


def is_marked(error: BaseException | None, circuit: int, since: int) -> bool:
    """Whether this error, or one that caused it, or all of a group, were counted by a circuit after so many others."""
    for _ in range(_DEEPEST):
        if error is None:
            break
        marks = vars(error).get(_MARKS)
        if marks is not None and marks.get(circuit, 0) > since:
            return True
        if isinstance(error, BaseExceptionGroup) and all(is_marked(it, circuit, since) for it in error.exceptions):
            return True
        error = error.__cause__ or error.__context__
    return False
