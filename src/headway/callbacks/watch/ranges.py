"""Checks of what a callback's constructor was given.

Owns: the words in which a value of the wrong kind or out of its range is refused.
"""

from __future__ import annotations

import math
import os
from typing import Any

from headway.errors import ConfigError


def require_count(option: str, given: Any, *, least: int = 0, optional: bool = False) -> None:
    """A whole number from `least` up; None too if `optional`."""
    if optional and given is None:
        return
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise ConfigError(_refuse(option, given, f"a whole number from {least} up", optional))


def require_positive(option: str, given: Any, *, optional: bool = False) -> None:
    """A finite number above 0; None too if `optional`."""
    if optional and given is None:
        return
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not math.isfinite(given) or given <= 0:
        raise ConfigError(_refuse(option, given, "a finite number above 0", optional))


def require_flag(option: str, given: Any) -> None:
    if not isinstance(given, bool):
        raise ConfigError(_refuse(option, given, "true or false", False))


def require_name(option: str, given: Any) -> None:
    """Text that is not empty."""
    if not isinstance(given, str) or not given:
        raise ConfigError(_refuse(option, given, "text that is not empty", False))


def require_path(option: str, given: Any) -> None:
    """A path, or text that names one."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError(_refuse(option, given, "a path", False))


def require_file_name(option: str, given: Any) -> None:
    """Text that names a file in the folder it is put into, not another folder."""
    if not isinstance(given, str) or given in ("", ".", "..") or set(given) & set("/\\\0"):
        raise ConfigError(_refuse(option, given, "a name of a file, without a folder", False))


def _refuse(option: str, given: Any, allowed: str, optional: bool) -> str:
    return f"{option}: {given!r} given; allowed: {allowed}{', or none' * optional}"
