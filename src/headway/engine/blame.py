"""Whose failure it was, in the words of the error itself.

Owns: naming a callback in what it raised. A note would show in a traceback only; what other ranks,
logs and notifications pass on is the message.
"""

from __future__ import annotations

from headway.errors import ConfigError


def name_culprit(error: BaseException, name: str, where: str) -> None:
    """Put the callback and what it was doing before the message; as a note where that cannot be."""
    who = f"callback {name!r}, {where}"
    if isinstance(error, ConfigError):
        error.problems = [f"{who}: {problem}" for problem in error.problems]
        error.args = ("\n".join(error.problems),)
    elif isinstance(error, OSError) and error.strerror is not None:
        error.strerror = f"{who}: {error.strerror}"
    elif isinstance(error, Exception) and len(error.args) < 2:
        text = str(error.args[0]) if error.args else ""
        error.args = (f"{who}: {text}" if text else who,)
    if who not in str(error):
        error.add_note(f"raised by callback {name!r} in {where}")
