"""Marks on errors that a circuit has counted, so that an enclosing call does not count the same failure again."""

from __future__ import annotations

import os
from typing import Final

#: The attribute with the marks of an error (numbers, so that it can be pickled), and how far its causes are followed.
#: A mark names its process: a fork copies circuits with their ids, and errors return from it.
_MARKS: Final = "_resilience_counted_by"
_MAX_DEPTH: Final = 20


def mark(error: Exception, circuit: int, number: int) -> None:
    """Mark an error as failure `number` of a circuit."""
    attributes = vars(error)  # not `setattr`, which an exception may refuse, such as a frozen dataclass
    attributes[_MARKS] = {**attributes.get(_MARKS, {}), (os.getpid(), circuit): number}


def is_marked(error: BaseException, circuit: int, since: int) -> bool:
    """Whether a circuit has counted this error, a cause of it, or an error of a group, after failure `since`."""
    level, seen = [error], set[int]()  # each error once: one of a group may have the group as its cause
    for _ in range(_MAX_DEPTH):
        causes: list[BaseException] = []
        for each in level:
            if id(each) in seen:
                continue
            seen.add(id(each))
            marks = vars(each).get(_MARKS)
            if marks is not None and marks.get((os.getpid(), circuit), 0) > since:
                return True
            cause = each.__context__ if each.__cause__ is None else each.__cause__
            if cause is not None:
                causes.append(cause)
            if isinstance(each, BaseExceptionGroup):
                causes += each.exceptions
        level = causes
    return False
