"""An append-only log of JSON records that survives a kill at any moment and follows a resume.

Owns: one record per write, the place in the file that a checkpoint stands for, and how a resumed
run finds that place again. Does not own: when records are written (the callbacks), nor reading
whole logs (json_reader.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.callbacks.log.json_values import plain_value
from headway.callbacks.watch.ranges import require_file_name
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

FORMS = ("lines", "array")
_BLOCK_BYTES = 1 << 16
_BEGIN_BYTES = 256
"""Enough for the time of the first record, by which logs are told apart."""
_LAST_BYTES = 2048
"""As many as the summary of a run has, and more."""
_AUTOMATIC_FOLDER = re.compile(r"\d{16,}_.+")


def log_folder(args: Any) -> Path:
    """Where logs that a resumed run must find again belong: `logging_dir` if it was chosen.

    The automatic `logging_dir` carries the time, so every start has another one; then it is
    `output_dir`.
    """
    output_dir = Path(args.output_dir)
    chosen = getattr(args, "logging_dir", None)
    if chosen is None or chosen == os.environ.get("TENSORBOARD_LOGGING_DIR"):
        return output_dir
    folder = Path(chosen)
    if folder.parent.name == "runs" and _AUTOMATIC_FOLDER.fullmatch(folder.name):
        return output_dir
    return folder


_writers: weakref.WeakSet[JsonLogWriter] = weakref.WeakSet()
"""All that were ever opened, so that no two write one file."""


@dataclass(frozen=True)
class _Place:
    """A position between two records, and what lies before it."""

    offset: int = 0
    last_size: int = 0
    last_crc: int = 0


class JsonLogWriter:
    """Writes records to `filename` in a folder, each whole in one write.

    `form="lines"` is one object a line. `form="array"` is one JSON array, closed again by every
    write, for tools that read the file as a whole.

    `state_dict` names the place where the file ends now. After `load_state_dict`, `open` (or
    `rewind`, while open) drops what was written after that place, without reading what is before.
    """

    def __init__(self, filename: str, form: str = "lines", *, option: str = "file_name") -> None:
        require_file_name(option, filename)
        if form not in FORMS:
            raise ConfigError(unknown("format", form, FORMS))
        self.filename = filename
        self.form = form
        self.path: Path | None = None
        """The file, once it has been opened."""
        self.kept_aside: Path | None = None
        """What `open` or `rewind` last put aside, if anything."""
        self.dropped_last: dict[str, Any] | None = None
        """The last of the records that `open` dropped, if there were any and it is not long."""
        self._file = -1
        self._place = _Place()
        self._is_torn = False
        """Whether part of a record may lie after `_place`."""
        self._last_step = -1
        self._saved: dict[str, Any] | None = None

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def open(self, folder: str | Path, global_step: int = 0) -> None:
        """Begin to write, holding what an earlier process wrote up to `global_step`.

        At step 0 a file that is there already is of another run: it is kept under another name.
        """
        self.close()
        path = Path(folder) / self.filename
        if any(one.is_open and one.path == path for one in _writers):
            raise ConfigError(
                f"{path} is being written by another callback; leave one of them out, or give it "
                "another file name"
            )
        _writers.add(self)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.kept_aside, self._last_step = path, None, -1
        self.dropped_last = None
        if global_step == 0:
            self._saved = None
            if path.exists() and path.stat().st_size:
                self._move_aside("old")
        self._file = self._create()
        if global_step > 0:
            self._seek(global_step)

    def rewind(self, global_step: int) -> None:
        """Drop what was written after a checkpoint that has just been loaded."""
        if not self.is_open:
            return
        self.kept_aside = None
        self._seek(global_step)

    def reopen_if_gone(self) -> bool:
        """Begin a new file where the one so far was moved or deleted, or go on in a copy put there.

        Another run's log is left alone, and so is a file that cannot be looked at.
        """
        if not self.is_open or self.path is None:
            return False
        try:
            if self._stays(os.stat(self.path)):
                return False
        except (FileNotFoundError, NotADirectoryError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        before = self._file
        self._file = self._create()  # until this succeeds, the next record tries again
        os.close(before)
        self._seek(max(1, self._last_step))
        return self._place.offset == 0

    def write_record(
        self, global_step: int, epoch: float, data: Mapping[str, Any], type: str = "train"
    ) -> None:
        """Append a record; does nothing while closed. What `data` names wins on a clash.

        An OSError, such as of a full disk, costs this record alone: the next one may be tried.
        """
        if not self.is_open:
            return
        record = {
            "type": type,
            "timestamp": time.time(),
            "global_step": global_step,
            "epoch": epoch,
            **data,
        }
        text = json.dumps(plain_value(record), allow_nan=False).encode()
        if self.form == "lines":
            text += b"\n"
        lead = b"" if self.form == "lines" else b",\n" if self._place.offset else b"[\n"
        if self._is_torn:
            self._cut(self._place)
        self._is_torn = True
        try:
            end = self._write(lead + text)
        except OSError:
            # A full disk may take part of a record; what is there must stay whole.
            with contextlib.suppress(OSError):
                self._cut(self._place)
            raise
        self._is_torn = False
        self._place = _Place(end, len(text), zlib.crc32(text))
        self._last_step = global_step

    def close(self) -> None:
        if self.is_open:
            os.close(self._file)
            self._file = -1

    def state_dict(self) -> dict[str, Any]:
        """The place where the file ends now, exact to the byte."""
        if self.path is None and self._saved is not None:
            return dict(self._saved)
        return {
            "version": 1,
            "filename": self.filename,
            "last_step": self._last_step,
            "offset": self._place.offset,
            "last_size": self._place.last_size,
            "last_crc": self._place.last_crc,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember the place of a checkpoint, for the next `open` or `rewind`."""
        self._saved = dict(state)

    # The file

    def _create(self) -> int:
        assert self.path is not None
        # Appending leaves a second writer's records whole; an array overwrites its own end.
        append = os.O_APPEND if self.form == "lines" else 0
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | append, 0o644)
        self._place, self._is_torn = _Place(), False
        return file

    def _stays(self, there: os.stat_result) -> bool:
        """Whether what is under the name is the file that is written, or another run's."""
        assert self.path is not None
        try:
            ours = os.fstat(self._file)
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                return True
            begin = os.pread(self._file, _BEGIN_BYTES, 0)
        except OSError:  # a network file system's, deleted by another machine
            return False
        with open(self.path, "rb") as file:
            return not begin.startswith(file.read(_BEGIN_BYTES))

    def _write(self, chunk: bytes) -> int:
        """Write a record; returns where the next one begins."""
        closing = b"\n]" if self.form == "array" else b""
        if closing:
            os.lseek(self._file, self._place.offset, os.SEEK_SET)
        chunk += closing
        written = os.write(self._file, chunk)
        while written < len(chunk):
            written += os.write(self._file, chunk[written:])
        return os.lseek(self._file, 0, os.SEEK_CUR) - len(closing)

    def _replace(self, why: str) -> None:
        """Begin an empty file; the one so far keeps its contents under another name."""
        os.close(self._file)
        self._file = -1
        self._move_aside(why)
        self._file = self._create()

    def _move_aside(self, why: str) -> None:
        assert self.path is not None
        self.kept_aside = _free_name(self.path, why)
        os.replace(self.path, self.kept_aside)
        logger.info("%s: what was there is kept as %s", self.path, self.kept_aside)

    # Finding the place of a checkpoint

    def _seek(self, step: int) -> None:
        """Cut the file where the loaded checkpoint was made."""
        saved, self._saved = self._saved, None  # a later start may be from somewhere else
        size = os.fstat(self._file).st_size
        if size == 0:
            self._place = _Place()
            return
        place = self._find_saved(saved or {}, size)
        if place is None:
            place = self._search(step, size)
            if place is None:
                self._replace("damaged")
                logger.warning("%s cannot be read; a new log begins", self.path)
                return
            if place.offset == 0:
                self._replace("dropped")
                return
            self._keep_tail(place.offset, size)
        self.dropped_last = self._last_record(max(place.offset, size - _LAST_BYTES), size)
        self._cut(place)

    def _find_saved(self, saved: Mapping[str, Any], size: int) -> _Place | None:
        """The place that the checkpoint names, if the record before it is the same as then."""
        numbers = [saved.get(key) for key in ("offset", "last_size", "last_crc")]
        if not all(isinstance(number, int) for number in numbers):
            return None
        place = _Place(*numbers)  # type: ignore[arg-type]
        if not 0 < place.last_size <= place.offset <= size:
            return None
        last = os.pread(self._file, place.last_size, place.offset - place.last_size)
        return place if zlib.crc32(last) == place.last_crc else None

    def _search(self, step: int, size: int) -> _Place | None:
        """The end of the last record of `step` or before, searched from the end of the file.

        The start of the file if all records are later. None where a line cannot be read: only the
        last one may be broken, by a kill.
        """
        may_be_torn, num_read = True, 0
        for start, line in _lines_backwards(self._file, size):
            found = _find_record(line, self.form)
            if found is not None:
                record_step, begin, end = found
                if record_step <= step:
                    text = line[begin:end]
                    return _Place(start + end, len(text), zlib.crc32(text))
                num_read += 1
            elif line.strip(b"\0 \t\r\n,[]") and not may_be_torn:
                return None
            may_be_torn = may_be_torn and not line.strip(b"\0 \t\r\n,[]")
        return _Place() if num_read else None

    def _last_record(self, start: int, size: int) -> dict[str, Any] | None:
        tail = os.pread(self._file, size - start, start)
        for line in reversed(tail.splitlines(keepends=True)):
            found = _find_record(line, self.form)
            if found is not None:
                record: dict[str, Any] = json.loads(line[found[1] : found[2]])
                return record
        return None

    def _keep_tail(self, offset: int, size: int) -> None:
        """Without the checkpoint's own word, what is dropped may be wanted: it is kept aside."""
        tail = os.pread(self._file, size - offset, offset)
        if not any(_find_record(line, self.form) for line in tail.splitlines(keepends=True)):
            return
        assert self.path is not None
        self.kept_aside = _free_name(self.path, "dropped")
        self.kept_aside.write_bytes(tail)
        logger.warning(
            "%s: records after the checkpoint are dropped; a copy is in %s",
            self.path,
            self.kept_aside,
        )

    def _cut(self, place: _Place) -> None:
        os.ftruncate(self._file, place.offset)
        self._place, self._is_torn = place, False
        if self.form == "array" and place.offset:
            os.lseek(self._file, place.offset, os.SEEK_SET)
            os.write(self._file, b"\n]")


def _lines_backwards(file: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Lines with their ends and where they start, the last one first."""
    start, rest = size, b""
    while start > 0:
        begin = max(0, start - _BLOCK_BYTES)
        rest = os.pread(file, start - begin, begin) + rest
        start = begin
        while (cut := rest.rfind(b"\n", 0, -1)) >= 0:
            yield start + cut + 1, rest[cut + 1 :]
            rest = rest[: cut + 1]
    if rest:
        yield 0, rest


def _find_record(line: bytes, form: str) -> tuple[int, int, int] | None:
    """Step, start and end of the record in a line; None if it holds no whole record."""
    begin, end = 0, len(line)
    if form == "array":
        begin = end - len(line.lstrip(b"[, \t"))
        end = len(line.rstrip(b"],\r\n\t "))
    elif not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line[begin:end])
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("global_step", record.get("step", 0))
    return (step if isinstance(step, int) else 0), begin, end


def _free_name(path: Path, why: str) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}.{why}-{number}{path.suffix}")).exists():
        number += 1
    return free
