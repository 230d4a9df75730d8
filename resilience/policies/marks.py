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
    counter, level = (os.getpid(), circuit), [error]
    for _ in range(_MAX_DEPTH):
        if any(vars(it).get(_MARKS, {}).get(counter, 0) > since for it in level):
            return True
        level = list({id(it): it for each in level for it in _causes_of(each)}.values())  # several may share a cause
        if not level:
            break
    return False


def _causes_of(error: BaseException) -> list[BaseException]:
    """Return the cause of an error, or else its context, and the errors of a group."""
    cause = error.__context__ if error.__cause__ is None else error.__cause__
    causes = [] if cause is None else [cause]
    return [*causes, *error.exceptions] if isinstance(error, BaseExceptionGroup) else causes
