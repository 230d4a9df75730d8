"""Copies of exceptions, for callers that get the error of another call: each raises its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping


def copy_of(error: Exception) -> Exception:
    """Return a copy of an exception with its cause, context and notes, but without its traceback.

    An exception that cannot be copied, as its class takes other arguments than its `args`, is returned itself. So is
    one with a finalizer, such as gRPC's, which is a stream as well: that would also run for a copy that has failed.
    """
    if hasattr(type(error), "__del__"):
        return error
    try:
        own = copy.copy(error)
        if type(own) is not type(error) or own.args != error.args:
            return error
        _complete(own, error)
    except Exception:
        return error
    return own


def without_frames(error: Exception) -> Exception:
    """Return a copy that keeps no frames of the call alive: not by its traceback, its cause, or errors in a group."""
    own = copy_of(error)
    if own is error or isinstance(error, ExceptionGroup):
        args = error.args
        if isinstance(error, ExceptionGroup):
            args = (error.message, [without_frames(it) for it in error.exceptions])
        built_in = next(it for it in type(error).__mro__ if it.__module__ == "builtins")
        own = built_in.__new__(type(error), *args)  # bypasses the constructor of its class
        vars(own).update(vars(error))
        _complete(own, error)
    _set_attributes(own, {"__cause__": None, "__context__": None})
    return own


def _complete(own: Exception, error: Exception) -> None:
    """Give a copy what `copy.copy` leaves out: cause, context, a list of notes of its own, attributes in slots."""
    state = object.__getstate__(error)
    attributes = dict(state[1]) if isinstance(state, tuple) else {}
    if isinstance(notes := vars(error).get("__notes__"), list):
        attributes["__notes__"] = notes.copy()
    for name in ("__cause__", "__context__", "__suppress_context__"):
        attributes[name] = getattr(error, name)
    _set_attributes(own, attributes)


def _set_attributes(error: Exception, attributes: Mapping[str, object]) -> None:
    """Set attributes of an exception, even if its class refuses that, as a frozen dataclass does."""
    for name, value in attributes.items():
        object.__setattr__(error, name, value)
