"""Notes on exceptions, and their contexts: what tells the reader of a traceback how the attempts before it went."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

#: What all notes that the library adds to exceptions begin with.
_NOTE: Final = "resilience: "


def is_handled_outside(error: BaseException) -> bool:
    """Whether a frame that still runs handles this error, which Python makes the context of errors raised meanwhile.

    It is no cause of the failures of a call in an `except` block, or in the handler of a `Fallback`.
    """
    handling = None if error.__traceback__ is None else error.__traceback__.tb_frame
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not handling:
        frame = frame.f_back
    return frame is not None


def annotate(error: Exception, note: str, *, replaces: str) -> None:
    """Add a note to an exception, and remove the earlier notes of ours that contain `replaces`."""
    try:
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list):
            notes[:] = [it for it in notes if not _is_our_note(it, replaces)]
        error.add_note(_NOTE + note)
    except Exception:  # an exception that refuses attributes, such as a frozen dataclass, gets no note
        return


def is_annotated(error: Exception, containing: str) -> bool:
    """Whether an exception has a note of ours that contains this text."""
    return any(_is_our_note(it, containing) for it in getattr(error, "__notes__", ()))


def _is_our_note(note: object, containing: str) -> bool:
    return isinstance(note, str) and note.startswith(_NOTE) and containing in note
