"""Numbers as text, for messages and descriptions."""

from __future__ import annotations


def format_number(value: float) -> str:
    """Return a number with all of its digits, but without a trailing `.0`."""
    return str(value) if isinstance(value, int) else repr(float(value)).removesuffix(".0")  # an int may be too large


def format_count(number: float, noun: str) -> str:
    """Return a number with its noun: `1 call`, `2.5 calls`."""
    return f"{format_number(number)} {noun if number == 1 else f'{noun}s'}"


def format_seconds(value: float) -> str:
    """Return a duration with three digits, and with all before the point: `0.25 s`, `3600 s`."""
    return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s"


def format_percent(share: float) -> str:
    """Return a share as a percentage; 0.07 is 7 %, not 7.000000000000001 %."""
    return f"{format_number(round(100 * share, 10))} %"


def format_call(function: str, *arguments: object, **keywords: tuple[object, object]) -> str:
    """Return a call as text: `Rate(60, per=60)`.

    :param keywords: pairs of a value and its default, which is left out.
    """
    shown = [_argument(it) for it in arguments]
    shown += [f"{name}={_argument(value)}" for name, (value, default) in keywords.items() if value != default]
    return f"{function}({', '.join(shown)})"


def _argument(value: object) -> str:
    return format_number(value) if isinstance(value, float) else repr(value)
