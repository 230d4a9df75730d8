"""Marks on errors that a circuit has counted, so that an enclosing call does not count the same failure again."""

from __future__ import annotations

import os
from typing import Final

#: The attribute with the marks of an error (numbers, so that it can be pickled), and how many causes are examined.
#: A mark names its process: a fork copies circuits with their ids, and errors return from it.
_MARKS: Final = "_resilience_counted_by"
_MAX_DEPTH: Final = 20


def mark(error: Exception, circuit: int, number: int) -> None:
    """Mark an error as failure `number` of a circuit."""
    attributes = vars(error)  # not `setattr`, which an exception may refuse, such as a frozen dataclass
    attributes[_MARKS] = {**attributes.get(_MARKS, {}), (os.getpid(), circuit): number}


def is_marked(error: BaseException | None, circuit: int, since: int) -> bool:
    """Whether a circuit has counted this error, a cause of it, or an error of a group, after failure `since`."""
    for _ in range(_MAX_DEPTH):
        if error is None:
            break
        marks = vars(error).get(_MARKS)
        if marks is not None and marks.get((os.getpid(), circuit), 0) > since:
            return True
        if isinstance(error, BaseExceptionGroup) and any(is_marked(it, circuit, since) for it in error.exceptions):
            return True
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return False
