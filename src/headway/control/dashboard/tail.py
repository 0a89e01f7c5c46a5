"""Follows a log of JSON records as it grows, a piece at a time.

Owns: what has been read so far, and noticing that the file was cut, rewritten or replaced. Does
not own: what records mean (control/run_log.py), nor keeping them (columns.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.control.dashboard.files import open_inside
from headway.control.run_log import find_records

_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 256


@dataclass(frozen=True)
class Piece:
    """What came with one look at the file."""

    anew: bool = False
    """The file is another one: what came before does not count any more."""
    records: list[dict[str, Any]] = field(default_factory=list)
    at_end: bool = True
    """Whether that was all there is for now."""


class LogTail:
    """One log. A line counts once it has its end: what a writer is at, or a kill tore, waits."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.size_bytes = 0
        self.modified_at: float | None = None
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._mark: tuple[int, bytes] = (0, b"")
        """Where the last line that was read ends, and its last bytes."""
        self._in_long_line = False

    def read(self) -> Piece:
        """The next records, of about a megabyte at most."""
        try:
            descriptor = open_inside(self.folder, self.name)
        except OSError:
            return Piece()
        try:
            return self._read(descriptor)
        except OSError:
            return Piece()
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int) -> Piece:
        facts = os.fstat(descriptor)
        self.size_bytes, self.modified_at = facts.st_size, facts.st_mtime
        identity = (facts.st_dev, facts.st_ino)
        anew = identity != self._identity or not self._is_as_read(descriptor)
        if anew:
            self._identity, self._offset, self._mark = identity, 0, (0, b"")
            self._in_long_line = False
        block = os.pread(descriptor, _BLOCK_BYTES, self._offset)
        at_end = len(block) < _BLOCK_BYTES
        end = block.rfind(b"\n") + 1
        if not end and not at_end:
            # No honest record is that long; it is passed over to its end.
            self._in_long_line = True
            end = len(block)
            whole = b""
        else:
            whole = block[:end]
            if self._in_long_line and end:
                whole = whole.partition(b"\n")[2]
                self._in_long_line = False
        self._remember(block[:end])
        self._offset += end
        lines = whole.split(b"\n")
        return Piece(anew, [r for line in lines for r in parse_line(line)], at_end)

    def _remember(self, taken: bytes) -> None:
        # An array's writer puts its next comma where the end of this line is now.
        line = taken.rstrip(b"\n")
        if line:
            self._mark = self._offset + len(line), line[-_MARK_BYTES:]

    def _is_as_read(self, descriptor: int) -> bool:
        """Whether the file goes on from what was read: a run may cut its log and write on."""
        end, mark = self._mark
        return os.pread(descriptor, len(mark), end - len(mark)) == mark


def parse_line(line: bytes) -> Iterator[dict[str, Any]]:
    """The records in a line, which may be a part of an array."""
    line = line.strip(b" \t\r,[]\0")
    if not line:
        return
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        text = line.decode("utf-8", "replace")
        yield from (found for found in find_records(text) if found is not None)
        return
    if isinstance(record, dict):
        yield record
