"""How a figure of a log record is written for people.

Owns: formats, reductions of lists, and the checks of both. Does not own: which figures are shown
(columns.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from headway.errors import ConfigError, nearest, unknown

Format = str | Callable[[Any], str]
Reduce = str | Callable[[Sequence[Any]], Any] | None

ALIASES = ("gib", "si")
REDUCTIONS = ("all", "max", "mean", "min", "sum")
_INTEGER_CODES = "doxXbn"


def check_format(where: str, fmt: Any) -> None:
    """Refuse what is no format."""
    if callable(fmt) or fmt in ALIASES:
        return
    if isinstance(fmt, str):
        try:
            format(1 if fmt[-1:] in tuple(_INTEGER_CODES) else 1.0, fmt)
            return
        except ValueError:
            pass
    hint = nearest(str(fmt), ALIASES)
    also = f"; did you mean {hint!r}?" if hint else "."
    raise ConfigError(
        f"{where}: unknown fmt {fmt!r}{also} Allowed: {', '.join(ALIASES)}, a Python format "
        f"specification such as .4f, or a function"
    )


def check_reduce(where: str, reduce: Any) -> None:
    """Refuse what is no reduction."""
    if reduce is None or callable(reduce) or reduce in REDUCTIONS:
        return
    raise ConfigError(f"{where}: " + unknown("reduce", reduce, REDUCTIONS))


def format_value(value: Any, fmt: Format = "") -> str:
    """A value as text; one that its format is not for is written as it is."""
    if callable(fmt):
        return str(fmt(value))
    if value is None:
        return "None"
    if callable(getattr(value, "tolist", None)) and not isinstance(value, type):
        listed = value.tolist()
        value = listed[0] if isinstance(listed, list) and len(listed) == 1 else listed
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if fmt == "si":
        return format_si(value)
    if fmt == "gib":
        return f"{value / 1024**3:.3f} GiB"
    if not fmt:
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    try:
        return format(int(value) if fmt[-1] in _INTEGER_CODES else value, fmt)
    except (ValueError, TypeError):
        return str(value)


def format_si(value: float) -> str:
    """A number with K, M, G or T and three significant digits."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size * 0.9995:  # 999,999 is 1M, not 1e+03K
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def reduce_value(value: Any, reduce: Reduce, fmt: Format = "") -> Any:
    """One value of a list, such as the one with an entry for each rank."""
    if not isinstance(value, list | tuple):
        return value
    if callable(reduce):
        return reduce(value)
    if reduce == "all":
        return "/".join(format_value(one, fmt) for one in value)
    numbers = [one for one in value if isinstance(one, int | float)]
    if not numbers:
        return 0
    if reduce == "min":
        return min(numbers)
    if reduce == "mean":
        return sum(numbers) / len(numbers)
    return sum(numbers) if reduce == "sum" else max(numbers)
