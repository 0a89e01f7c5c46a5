"""Options that come from an argument, else from a variable of the environment, else a default.

Owns: that order, and how text is read. An empty variable is one that is not set.
"""

from __future__ import annotations

import os
from typing import Any

from headway.errors import ConfigError

_TRUE = ("1", "true", "yes")


def choose(given: Any, variable: str, default: Any) -> Any:
    """The argument if it is given, else what the variable says, read as the default's type is."""
    if given is not None:
        return given
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if isinstance(default, bool):
        return text.lower() in _TRUE
    kind = type(default)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            words = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{variable}: {text!r} given; allowed: {words}") from None
    return text
