"""The pieces of a composed schedule, as a run file lists them.

Owns the shape of one entry of `lr_scheduler_kwargs.schedules` and how long each piece is. Does not
own the curves of the pieces (schedules.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError, unknown


@dataclass(frozen=True)
class Piece:
    """One schedule of a sequence. `peak` is the factor it starts from, or climbs to."""

    where: str
    kind: Any
    length: int | None
    warmup: int
    peak: float | None
    options: Mapping[str, Any]


def read_pieces(entries: Sequence[Any], total: int | None, unit: str) -> Iterator[Piece]:
    """The entries in order. Only the last may leave out its length: it has what is left.

    A length is a count, or a part of the whole where it lies between 0 and 1.
    """
    done = 0
    for number, entry in enumerate(entries):
        where = f"lr_scheduler_kwargs.schedules.{number}"
        _check_entry(entry, where, unit)
        length = entry.get("length")
        if length is None:
            if number != len(entries) - 1:
                raise ConfigError(f"{where}.length: only the last schedule may leave it out")
            length = None if total is None else total - done
        else:
            length = _read_length(length, total, where, unit)
            done += length
        if total is not None and (done > total or length == 0):
            raise ConfigError(
                f"{where}.length: the schedules are longer than the training of {total} {unit}"
            )
        yield Piece(
            where,
            entry["type"],
            length,
            int(entry.get(f"warmup_{unit}") or 0),
            entry.get("peak"),
            entry.get("kwargs") or {},
        )


def _check_entry(entry: Any, where: str, unit: str) -> None:
    if not isinstance(entry, Mapping) or "type" not in entry:
        raise ConfigError(f"{where}: must be a mapping with 'type', got {entry!r}")
    keys = ("type", "length", "kwargs", f"warmup_{unit}", "peak")
    problems = [f"{where}: " + unknown("key", str(key), keys) for key in entry if key not in keys]
    if not isinstance(entry.get("kwargs") or {}, Mapping):
        problems.append(f"{where}.kwargs: must be a mapping, got {entry['kwargs']!r}")
    for key in (f"warmup_{unit}", "peak"):
        value = entry.get(key)
        if value is not None and (not _is_number(value) or value < 0):
            problems.append(f"{where}.{key}: must be a number and not negative, got {value!r}")
    if problems:
        raise ConfigError(problems)


def _read_length(given: Any, total: int | None, where: str, unit: str) -> int:
    if not _is_number(given) or given <= 0:
        raise ConfigError(
            f"{where}.length: must be a count of {unit}, or a part of the training between 0 and "
            f"1, got {given!r}"
        )
    if given >= 1:
        if int(given) != given:
            raise ConfigError(f"{where}.length: a count of {unit} is whole, got {given!r}")
        return int(given)
    if total is None:
        raise ConfigError(
            f"{where}.length={given}: a part needs to know how many {unit} the training has"
        )
    # Down, so that parts that come to 1 never pass the end; 0.29 * 100 is 28.999999999999996.
    return max(1, int(given * total + 1e-9))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
