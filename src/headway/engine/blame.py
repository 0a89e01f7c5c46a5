"""Whose failure it was, in the words of the error itself.

Owns: naming a callback in what it raised. Does not own: how a message is changed (errors).
"""

from __future__ import annotations

from headway.errors import put_before


def name_culprit(error: BaseException, name: str, where: str) -> None:
    """Put the callback and what it was doing before the message; as a note where that cannot be."""
    if not put_before(error, f"callback {name!r}, {where}"):
        error.add_note(f"raised by callback {name!r} in {where}")
