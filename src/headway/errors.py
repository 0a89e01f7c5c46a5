"""The errors Headway raises for a user's mistake, and the wording they share.

Owns: `ConfigError`, several of them as one, which errors count as a user's mistake, did-you-mean
hints, the messages for an absent path and an absent extra, whose code an error came from.
Does not own: where in a file a mistake stands (config/), nor how it is printed (cli/).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class ConfigError(ValueError):
    """A user's mistake: the message says which option, what was given and what is allowed.

    Several mistakes found together travel in one error; `problems` lists them one by one.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def check_all(*checks: Callable[[], object]) -> None:
    """Call each check, and raise what they found in one `ConfigError`, the same thing once."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


OUT_OF_PLACE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
"""Errors of Python's own that are a user's mistake: a file is not where it was said to be."""


def problems_of(error: BaseException) -> list[str] | None:
    """What to say of a user's mistake, line by line; None for an error that is none."""
    if isinstance(error, ConfigError):
        return error.problems
    if isinstance(error, OUT_OF_PLACE):
        if error.strerror is None:
            return [str(error) or type(error).__name__]
        return [f"{error.filename or ''}: {error.strerror}".lstrip(": ")]
    return None


def put_before(error: BaseException, who: str) -> bool:
    """Put whose error it is before its message; returns whether that could be done.

    A note would show in a traceback only; what other ranks, logs and notifications pass on is the
    message.
    """
    if isinstance(error, ConfigError):
        error.problems = [f"{who}: {problem}" for problem in error.problems]
        error.args = ("\n".join(error.problems),)
    elif isinstance(error, OSError) and error.strerror is not None:
        error.strerror = f"{who}: {error.strerror}"
    elif isinstance(error, Exception) and len(error.args) < 2:
        text = str(error.args[0]) if error.args else ""
        error.args = (f"{who}: {text}" if text else who,)
    return who in str(error)


@contextmanager
def naming(function: str) -> Iterator[None]:
    """Around a call of a function that the user gave as `function`: its errors say so."""
    try:
        yield
    except Exception as error:
        if not put_before(error, function):
            error.add_note(f"raised by {function}")
        raise


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest to `name`, or None if nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in allowed}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def not_there(path: str | os.PathLike[str]) -> str:
    """Say that a path does not exist, with the nearest name, or where it was looked for."""
    place = Path(path)
    try:
        beside = os.listdir(place.absolute().parent)
    except OSError:
        beside = []
    hint = nearest(place.name, beside)
    if hint:
        return f"{path} does not exist; did you mean {str(place.with_name(hint))!r}?"
    if place.is_absolute():
        return f"{path} does not exist"
    return f"{path} does not exist; relative paths begin at the current folder, {Path.cwd()}"


class UnknownName(str):
    """That a name is not known, in words; with the name itself, for who knows it elsewhere."""

    kind: str
    name: object
    nearest: str | None


def unknown(kind: str, given: object, allowed: Iterable[str], *, most: int = 12) -> str:
    """Say that `given` is no known `kind`, with the nearest name and what is allowed.

    What is returned is an `UnknownName`.
    """
    names = sorted(allowed)
    hint = nearest(str(given), names)
    did_you_mean = f"; did you mean {hint!r}?" if hint else "."
    shown = ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")
    message = UnknownName(f"unknown {kind} {given!r}{did_you_mean} Allowed: {shown}")
    message.kind, message.name, message.nearest = kind, given, hint
    return message


def missing_extra(package: str, extra: str, purpose: str) -> ConfigError:
    """The error for an optional package that is not installed."""
    return ConfigError(
        f"{purpose} needs the package {package!r}, which is not installed. "
        f"Install it with: pip install 'headway[{extra}]'"
    )
