"""A checkpoint storage that goes wrong at a chosen operation, again and again in the same way.

Owns: `Fault` (what goes wrong, where) and `FaultyStorage`. Does not own: what a power cut leaves
(powercut.py), the proofs that use both (proofs/), the contents that are saved (contents.py).
"""

from __future__ import annotations

import errno
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar, cast, get_args

from headway.checkpoint.storage import Storage
from headway.errors import ConfigError, unknown
from headway.testing.powercut import (
    CrashState,
    DirectoryState,
    Disk,
    Journal,
    Operation,
    crash_states,
)

__all__ = [
    "ERRNOS",
    "CrashState",
    "Died",
    "DirectoryState",
    "Disk",
    "Fault",
    "FaultyStorage",
    "Journal",
    "Operation",
    "crash_states",
    "enumerate_operations",
]

ERRNOS = {
    name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES", "ESTALE")
}
"""The errors that a disk may answer with, by name."""

_T = TypeVar("_T")
Action = Literal["error", "short_write", "truncate", "die", "kill", "power_cut"]
_KINDS = (
    *("make_dir", "create", "write", "sync_file", "sync_dir", "rename", "link", "unlink"),
    *("remove_dir", "barrier"),
)


class Died(BaseException):
    """Stands for the end of the process: nothing after it reaches the disk."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong at one operation.

    - `error`: it fails with `errno`; of a write, half is done. With `lasting`, so do all after it.
    - `short_write`: a write does a part and says so, as the system may at any time.
    - `truncate`: a write does a part and claims to have done all of it.
    - `die`: `Died` is raised, there and by all that follow; of a write, half is done.
    - `kill`: the process gets SIGKILL; of a write, half is done.
    - `power_cut`: what is not synced is lost, or a part of it chosen by `seed`; then as `die`.
    """

    action: Action
    at: int
    """The operation's number, from 1, among those of its kind and rank."""
    operation: str | None = None
    """The kind to count; None: all."""
    rank: int | None = None
    """The rank to count; None: whichever storage has it."""
    errno: int = errno.ENOSPC
    lasting: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        # A fault that can never happen would let a test pass that proves nothing.
        if self.action not in get_args(Action):
            raise ConfigError(unknown("action", self.action, get_args(Action)))
        if self.operation is not None and self.operation not in _KINDS:
            raise ConfigError(unknown("operation", self.operation, _KINDS))

    @classmethod
    def random(cls, action: Action, num_operations: int, seed: int) -> Fault:
        """A fault at one of the operations, the same for the same seed."""
        chance = random.Random(seed)
        return cls(
            action,
            chance.randint(1, num_operations),
            errno=chance.choice(list(ERRNOS.values())),
            seed=seed,
        )


class FaultyStorage(Storage):
    """Local files, with at most one fault; records what it does in `journal`, if given.

    `delete_tree` is carried out, and counted, entry by entry.
    """

    def __init__(
        self,
        root: str | Path,
        fault: Fault | None = None,
        *,
        rank: int = 0,
        journal: Journal | None = None,
        on_operation: Callable[[Operation], None] | None = None,
    ) -> None:
        super().__init__(root)
        if fault is not None and fault.action == "power_cut" and journal is None:
            journal = Journal(self.root.parent)
        self.fault = fault
        self.rank = rank
        self.journal = journal
        self.struck = False
        """Whether the fault has happened."""
        self.num_operations = 0
        self._num_matching = 0
        self._on_operation = on_operation
        self._lock = journal.lock if journal is not None else threading.RLock()

    # -- the fault --------------------------------------------------------------------------

    def _due(self, operation: Operation) -> Fault | None:
        """The fault, if it is this operation's; raises if nothing can be done any more."""
        fault = self.fault
        self._require_alive()
        self.num_operations += 1
        if self._on_operation is not None:
            self._on_operation(operation)
        if fault is None:
            return None
        if self.struck:
            if fault.lasting and fault.action == "error":
                raise OSError(fault.errno, os.strerror(fault.errno), operation.path)
            return None
        if fault.operation not in (None, operation.kind) or fault.rank not in (None, self.rank):
            return None
        self._num_matching += 1
        if self._num_matching != fault.at:
            return None
        if fault.action in ("short_write", "truncate") and operation.kind != "write":
            self._num_matching -= 1
            return None
        self.struck = True
        return fault

    def _require_alive(self) -> None:
        if self.struck and self.fault is not None and self.fault.action in ("die", "power_cut"):
            raise Died

    def _strike(self, fault: Fault, path: str) -> None:
        if fault.action == "error":
            raise OSError(fault.errno, os.strerror(fault.errno), path)
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "power_cut":
            self._cut_power(fault)
        raise Died

    def _cut_power(self, fault: Fault) -> None:
        journal = self.journal
        assert journal is not None
        disk = journal.disk
        left = disk.cut(random.Random(fault.seed)) if fault.seed else disk.safe()
        prefix = f"{journal.name_of(self.root)}/"
        DirectoryState(
            {n.removeprefix(prefix): d for n, d in left.files.items() if n.startswith(prefix)},
            frozenset(n.removeprefix(prefix) for n in left.folders if n.startswith(prefix)),
        ).write_to(self.root)

    # -- the operations ---------------------------------------------------------------------

    def _name(self, path: Path) -> str:
        return self.journal.name_of(path) if self.journal is not None else str(path)

    def _do(self, kind: str, path: Path, act: Callable[[], _T], target: Path | None = None) -> _T:
        to = "" if target is None else self._name(target)
        operation = Operation(kind, self._name(path), self.rank, to)
        with self._lock:
            fault = self._due(operation)
            if fault is not None:
                self._strike(fault, str(path))
            result = act()
            if self.journal is not None:
                self.journal.add(operation)
            return result

    def barrier(self, what: str = "") -> None:
        """Count a meeting of the ranks as an operation."""
        self._do("barrier", self.root, lambda: None)

    def make_dir(self, path: Path) -> None:
        self._do("make_dir", path, lambda: super(FaultyStorage, self).make_dir(path))

    def create(self, path: Path) -> BinaryIO:
        file = self._do("create", path, lambda: super(FaultyStorage, self).create(path))
        return cast(BinaryIO, _FaultyFile(self, path, file))

    def link(self, source: Path, path: Path) -> None:
        self._do("link", source, lambda: super(FaultyStorage, self).link(source, path), path)

    def sync_file(self, path: Path) -> None:
        if self.journal is not None:
            self._adopt(path)
        self._do("sync_file", path, lambda: super(FaultyStorage, self).sync_file(path))

    def sync_dir(self, path: Path) -> None:
        self._do("sync_dir", path, lambda: super(FaultyStorage, self).sync_dir(path))

    def rename(self, source: Path, target: Path) -> None:
        move = super().rename
        self._do("rename", source, lambda: move(source, target), target)

    def delete_tree(self, path: Path) -> None:
        self._inside(path)
        for folder, _, names in os.walk(path, topdown=False, followlinks=False):
            for name in sorted(names):
                entry = Path(folder, name)
                self._do("unlink", entry, entry.unlink)
            self._do("remove_dir", Path(folder), Path(folder).rmdir)

    def _adopt(self, path: Path) -> None:
        """Take a file into the journal that somebody wrote without this storage."""
        journal = self.journal
        assert journal is not None
        inside = [p for p in reversed(path.parents) if p.is_relative_to(self.root)]
        with self._lock:
            for folder in inside:
                if not journal.disk.has(self._name(folder)):
                    journal.add(Operation("make_dir", self._name(folder), self.rank))
            name = self._name(path)
            if not journal.disk.has(name):
                journal.add(Operation("create", name, self.rank))
                journal.add(Operation("write", name, self.rank, data=path.read_bytes()))

    def _write(self, path: Path, file: BinaryIO, data: bytes | memoryview) -> int:
        whole = bytes(data)
        operation = Operation("write", self._name(path), self.rank, data=whole)
        with self._lock:
            fault = self._due(operation)
            done = whole if fault is None else whole[: len(whole) // 2]
            view = memoryview(done)
            while view.nbytes:
                view = view[file.write(view) :]
            if self.journal is not None and done:
                self.journal.add(Operation("write", operation.path, self.rank, data=done))
            if fault is None or fault.action == "truncate":
                return len(whole)
            if fault.action == "short_write" and done:
                return len(done)
            self._strike(fault, str(path))
            raise AssertionError("not reached")


class _FaultyFile:
    """As much of a file as a storage's caller may use."""

    def __init__(self, storage: FaultyStorage, path: Path, file: BinaryIO) -> None:
        self._storage, self._path, self._file = storage, path, file

    def write(self, data: bytes | memoryview) -> int:
        return self._storage._write(self._path, self._file, data)

    def close(self) -> None:
        self._file.close()


def enumerate_operations(
    save: Callable[[Storage], object], root: str | Path | None = None
) -> list[Operation]:
    """The operations that `save` makes on the storage it is given, in order.

    It works in `root`, or in a temporary directory. `len` of the result is the number of points
    at which a fault can be put.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "run") if root is None else Path(root)
        journal = Journal(place.absolute().parent)
        save(FaultyStorage(place, journal=journal))
        return journal.operations
