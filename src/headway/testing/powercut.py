"""A model of a disk that loses power: what of a series of operations may be left.

Owns: `Journal` (operations as they were carried out, and the disk before them) and `crash_states`
(the directories a cut may leave). Does not own: making the operations (faults.py) or judging what
is left (proofs/).

The model promises no more than POSIX does. The content of a file is safe once the file is synced;
an entry of a directory (made, renamed, removed) once that directory is synced, whether or not the
file behind it is. Whatever is not safe may be there or not, each change on its own, in any order;
a renaming within a directory is there as a whole or not at all. Content that is not safe may be
cut short, filled with zeros, or whole in some blocks and zero in others.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

BLOCK_BYTES = 512

_OWNER = re.compile(r"(?P<machine>-[0-9a-f]{8}-\d+)-\d+(?P<random>-[0-9a-f]+)$", re.ASCII)


@dataclass(frozen=True)
class Operation:
    """One change to the disk, or one meeting of the ranks (`barrier`), which changes nothing."""

    kind: str
    path: str
    rank: int = 0
    target: str = ""
    data: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        to = f" -> {self.target}" if self.target else ""
        size = f" ({len(self.data)} bytes)" if self.kind == "write" else ""
        return f"{self.kind} {self.path}{to}{size}"


class _File:
    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.safe = data


class _Folder:
    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.safe: dict[str, _File | _Folder] = {}
        # (name before or "", name after or "", node): a birth, a renaming or a removal.
        self.pending: list[tuple[str, str, _File | _Folder]] = []

    def change(self, before: str, after: str, node: _File | _Folder) -> None:
        _apply(self.entries, before, after, node)
        self.pending.append((before, after, node))


def _apply(
    entries: dict[str, _File | _Folder], before: str, after: str, node: _File | _Folder
) -> None:
    if before and entries.get(before) is node:
        del entries[before]
    if after:
        entries[after] = node


@dataclass(frozen=True)
class DirectoryState:
    """Files with their content, and directories, by path relative to one directory."""

    files: dict[str, bytes]
    folders: frozenset[str]

    def key(self) -> int:
        """The same for equal states."""
        return hash((frozenset(self.files.items()), self.folders))

    def write_to(self, directory: str | os.PathLike[str]) -> None:
        """Make a directory, replaced if it is there, into this state.

        Names that tell which process they belong to are changed to tell of one that is gone.
        """
        root = Path(directory)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for name in sorted(self.folders):
            (root / _orphaned(name)).mkdir(exist_ok=True)
        for name, data in self.files.items():
            (root / _orphaned(name)).write_bytes(data)


def _orphaned(path: str) -> str:
    parts = [_OWNER.sub(r"\g<machine>-0\g<random>", part) for part in path.split("/")]
    return "/".join(parts)


class Disk:
    """The disk below one directory: what programs see, and what is safe."""

    def __init__(self) -> None:
        self.root = _Folder()

    @classmethod
    def read(cls, directory: Path) -> Disk:
        """The disk as it is, all of it safe."""
        disk = cls()
        if directory.is_dir():
            _read_folder(disk.root, directory)
        return disk

    def _find(self, path: str) -> tuple[_Folder, str]:
        *parents, name = PurePosixPath(path).parts
        folder = self.root
        for part in parents:
            node = folder.entries[part]
            assert isinstance(node, _Folder)
            folder = node
        return folder, name

    def _folder(self, path: str) -> _Folder:
        if path in ("", "."):
            return self.root
        parent, name = self._find(path)
        node = parent.entries[name]
        assert isinstance(node, _Folder)
        return node

    def has(self, path: str) -> bool:
        """Whether programs see an entry of that name."""
        try:
            parent, name = self._find(path)
        except KeyError:
            return False
        return name in parent.entries

    def apply(self, operation: Operation) -> None:
        """Carry out one operation."""
        kind, path = operation.kind, operation.path
        if kind == "barrier":
            return
        if kind == "sync_dir":
            folder = self._folder(path)
            folder.safe = dict(folder.entries)
            folder.pending.clear()
            return
        parent, name = self._find(path)
        if kind == "make_dir":
            parent.change("", name, _Folder())
        elif kind == "create":
            parent.change("", name, _File())
        elif kind == "link":
            target_parent, target = self._find(operation.target)
            target_parent.change("", target, parent.entries[name])
        elif kind == "rename":
            self._rename(parent, name, operation.target)
        elif kind in ("unlink", "remove_dir"):
            parent.change(name, "", parent.entries[name])
        else:
            file = parent.entries[name]
            assert isinstance(file, _File)
            if kind == "write":
                file.data += operation.data
            else:
                assert kind == "sync_file", kind
                file.safe = file.data

    def _rename(self, parent: _Folder, name: str, target_path: str) -> None:
        node = parent.entries[name]
        target_parent, target = self._find(target_path)
        if target_parent is parent:
            parent.change(name, target, node)
        else:
            parent.change(name, "", node)
            target_parent.change("", target, node)

    def seen(self) -> DirectoryState:
        """What programs see, and what the death of a process leaves."""
        return _collect(self.root, lambda folder: folder.entries, lambda file: file.data)

    def safe(self) -> DirectoryState:
        """What is left if everything that is not safe is lost."""
        return _collect(self.root, lambda folder: folder.safe, lambda file: file.safe)

    def cut(self, chance: random.Random) -> DirectoryState:
        """What is left if every change that is not safe is kept or lost by chance."""

        def entries(folder: _Folder) -> dict[str, _File | _Folder]:
            kept = dict(folder.safe)
            for change in folder.pending:
                if chance.random() < 0.5:
                    _apply(kept, *change)
            return kept

        return _collect(self.root, entries, lambda file: _damage(file, chance))


def _read_folder(folder: _Folder, directory: Path) -> None:
    for entry in sorted(directory.iterdir()):
        if entry.is_symlink():
            continue
        node: _File | _Folder
        if entry.is_dir():
            node = _Folder()
            _read_folder(node, entry)
        else:
            node = _File(entry.read_bytes())
        folder.entries[entry.name] = folder.safe[entry.name] = node


def _damage(file: _File, chance: random.Random) -> bytes:
    if file.data == file.safe:
        return file.data
    match chance.randrange(5):
        case 0:
            return file.safe
        case 1:
            return file.data
        case 2:
            return file.data[: chance.randrange(len(file.data) + 1)]
        case 3:
            return bytes(len(file.data))
    blocks = [
        file.data[start : start + BLOCK_BYTES] for start in range(0, len(file.data), BLOCK_BYTES)
    ]
    return b"".join(b if chance.random() < 0.5 else bytes(len(b)) for b in blocks)


def _collect(
    root: _Folder,
    entries_of: Callable[[_Folder], dict[str, _File | _Folder]],
    data_of: Callable[[_File], bytes],
) -> DirectoryState:
    files: dict[str, bytes] = {}
    folders: set[str] = set()
    stack: list[tuple[str, _Folder]] = [("", root)]
    while stack:
        prefix, folder = stack.pop()
        for name, node in entries_of(folder).items():
            if isinstance(node, _Folder):
                folders.add(prefix + name)
                stack.append((f"{prefix}{name}/", node))
            else:
                files[prefix + name] = data_of(node)
    return DirectoryState(files, frozenset(folders))


class Journal:
    """The operations below one directory, in the order in which they were carried out.

    Several storages (ranks) may share one.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self.operations: list[Operation] = []
        self.lock = threading.RLock()
        self.disk = Disk.read(self.directory)
        """The disk as it is now."""
        self._start = _copy_safe(self.disk)

    def name_of(self, path: Path) -> str:
        """A path as the journal writes it."""
        return path.relative_to(self.directory).as_posix()

    def add(self, operation: Operation) -> None:
        """Note an operation that has been carried out."""
        self.operations.append(operation)
        self.disk.apply(operation)

    def disk_at_start(self) -> Disk:
        """The disk as it was before the first operation."""
        return _copy_safe(self._start)


def _copy_safe(disk: Disk) -> Disk:
    copy = Disk()

    def fill(target: _Folder, source: _Folder) -> None:
        for name, node in source.safe.items():
            twin: _File | _Folder
            if isinstance(node, _Folder):
                twin = _Folder()
                fill(twin, node)
            else:
                twin = _File(node.safe)
            target.entries[name] = target.safe[name] = twin

    fill(copy.root, disk.root)
    return copy


@dataclass(frozen=True)
class CrashState:
    """The directory after a crash, and how it came about."""

    number: int
    """Operations carried out before the crash."""
    operation: Operation | None
    """The one that was to come, or was under way; None after the last."""
    variant: str
    """`killed` (nothing is lost), `torn:<bytes>` (killed inside a write), `safe` (all that was not
    safe is lost) or `cut:<seed>` (each change kept or lost by chance)."""
    directory: DirectoryState

    @property
    def loses_unsynced(self) -> bool:
        """Whether the power was cut, rather than a process killed."""
        return self.variant.startswith(("safe", "cut"))

    def __str__(self) -> str:
        return f"crash before operation {self.number + 1} ({self.operation}), {self.variant}"


def crash_states(
    journal: Journal, *, seed: int = 0, num_cuts: int = 4, num_torn: int = 3
) -> Iterator[CrashState]:
    """Every state in which a crash may leave the journal's directory.

    At each point, from before the first operation to after the last: the process killed; all that
    is not safe lost; and `num_cuts` times a random part of it lost. For a write, also the process
    killed after `num_torn` random numbers of its bytes. The same seed gives the same states.
    """
    disk = journal.disk_at_start()
    operations: Sequence[Operation | None] = [*journal.operations, None]
    for number, operation in enumerate(operations):
        yield CrashState(number, operation, "killed", disk.seen())
        yield CrashState(number, operation, "safe", disk.safe())
        for cut in range(num_cuts):
            chance = random.Random(f"{seed}/{number}/{cut}")
            yield CrashState(number, operation, f"cut:{seed}/{number}/{cut}", disk.cut(chance))
        if operation is None:
            return
        if operation.kind == "write" and len(operation.data) > 1:
            yield from _torn_states(disk, number, operation, seed, num_torn)
        disk.apply(operation)


def _torn_states(
    disk: Disk, number: int, operation: Operation, seed: int, num_torn: int
) -> Iterator[CrashState]:
    chance = random.Random(f"{seed}/{number}/torn")
    choices = range(1, len(operation.data))
    for size in sorted(chance.sample(choices, min(num_torn, len(choices)))):
        seen = disk.seen()
        files = {**seen.files}
        files[operation.path] += operation.data[:size]
        state = DirectoryState(files, seen.folders)
        yield CrashState(number, operation, f"torn:{size}", state)
