"""The file operations of the checkpoint room, one small method each.

Owns: how bytes reach the disk (exclusive create, fsync, rename, delete by rename first), and that
nothing outside the root is touched through a symbolic link.
Does not own: what is written, in which order, or when it counts as complete (manifest.py).
A subclass may replace any method: every change to the disk goes through exactly one of
`make_dir`, `create`, `link`, `sync_file`, `sync_dir`, `rename` and `delete_tree`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headway.checkpoint.digest import DEFAULT_DIGEST, Hasher, new_hasher
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.owner import NONCE_PATTERN, new_nonce

TRASH_PREFIX = ".trash-"
# At an address nothing is overwritten: a save that is made again has a name of its own there.
MADE_AGAIN = re.compile(rf"(?P<name>.+)\.again-{NONCE_PATTERN}", re.ASCII)

logger = logging.getLogger(__name__)


class FileRecord(NamedTuple):
    """What the manifest says about one file."""

    size: int
    digest: str


class Storage:
    """Local files below one root directory."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()

    def _inside(self, path: Path) -> Path:
        # Only the parent is resolved: the entry itself is never followed by the calls below.
        real_parent = Path(os.path.realpath(path.parent))
        real_root = Path(os.path.realpath(self.root))
        if path != self.root and not real_parent.is_relative_to(real_root):
            raise CheckpointError(f"{path} leads outside {self.root} through a symbolic link")
        return path

    def make_root(self) -> None:
        """Create the root directory, with its parents, if it is not there."""
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process was faster
                self.make_dir(path)
            self.sync_dir(path.parent)
        self.root.mkdir(exist_ok=True)

    def make_dir(self, path: Path) -> None:
        """Create one directory; its parent must exist."""
        leads_to_root = self.root.is_relative_to(path)
        os.mkdir(path if leads_to_root else self._inside(path))

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing; an existing entry of that name is an error."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        return os.fdopen(os.open(self._inside(path), flags, 0o666), "wb", buffering=0)

    def link(self, source: Path, path: Path) -> None:
        """Give a file a second name; `OSError` where the file system cannot."""
        os.link(source, self._inside(path), follow_symlinks=False)

    def sync_file(self, path: Path) -> None:
        """Wait until a file's content is on the disk."""
        self._sync(path)

    def sync_dir(self, path: Path) -> None:
        """Wait until a directory's entries are on the disk."""
        self._sync(path)

    def _sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move an entry; the target must not exist."""
        if os.path.lexists(self._inside(target)):
            raise CheckpointError(f"cannot rename {source.name}: {target} exists")
        os.rename(self._inside(source), target)

    def delete_tree(self, path: Path) -> None:
        """Delete a directory with all it holds; links inside it are removed, not followed."""
        shutil.rmtree(self._inside(path))

    def remove_tree(self, path: Path) -> None:
        """Take a directory away at one instant (rename), then free its space.

        A failure to free the space is only logged: the directory is gone already, and the trash
        is collected when leftovers are cleaned.
        """
        trash = self.root / f"{TRASH_PREFIX}{new_nonce()}"
        self.rename(path, trash)
        try:
            # Else a power cut may undo the rename and keep what was deleted under the old name.
            self.sync_dir(self.root)
            self.delete_tree(trash)
        except OSError as error:
            logger.warning("could not free the space of %s (now %s): %s", path, trash, error)

    def write_bytes(self, path: Path, data: bytes, *, digest: str = DEFAULT_DIGEST) -> FileRecord:
        """Write a whole file, digested and synced."""
        with DigestWriter(self, path, digest) as writer:
            writer.write(data)
        return writer.record

    def refresh(self) -> None:
        """Learn which checkpoints there are; local files are always known."""

    def fetch(self, path: Path) -> None:
        """Have all files of a committed checkpoint at hand; local files always are."""

    def collect_leftovers(self) -> list[str]:
        """Remove what dead processes left where this storage keeps data besides the root."""
        return []

    def locate(self, path: Path) -> str:
        """Where a directory of the root is, for people: its path or address."""
        return str(path)

    def tell(self, message: str) -> str:
        """A message that names files of the root, with their place for people."""
        return message

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Errors of what is read inside name files of the root by their place for people."""
        yield

    def path_of(self, location: str | Path) -> Path:
        """The path that `locate` was asked for; a path stands for itself."""
        return Path(location)

    def list_dirs(self) -> list[str]:
        """Names of the real directories in the root, sorted; none if the root does not exist."""
        try:
            with os.scandir(self.root) as entries:
                return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []


def is_url(location: str | Path) -> bool:
    """Whether a location is an address such as `memory://run` rather than a path."""
    return isinstance(location, str) and "://" in location


def join_location(location: str | Path, name: str) -> str:
    """Where something of that name is in a directory, or at an address."""
    if is_url(location):
        return f"{str(location).rstrip('/')}/{name}"
    return str(Path(location) / name)


def split_location(location: str | Path) -> tuple[str, str]:
    """The other way around: the directory, absolute, or the address, and the name in it; that of a
    save that was made again is the first one's, as it is in a directory."""
    if is_url(location):
        parent, _, name = str(location).rstrip("/").rpartition("/")
        again = MADE_AGAIN.fullmatch(name)
        return parent, again["name"] if again else name
    path = Path(location).absolute()
    return str(path.parent), path.name


def open_storage(location: str | Path) -> Storage:
    """Local files for a path, those of fsspec for an address."""
    if is_url(location):
        from headway.checkpoint.remote import RemoteStorage

        return RemoteStorage(str(location))
    return Storage(location)


class DigestWriter:
    """A new file that is digested while it is written and synced when closed without an error."""

    def __init__(self, storage: Storage, path: Path, digest: str) -> None:
        self._storage = storage
        self._path = path
        self._hasher: Hasher = new_hasher(digest)
        self._num_bytes = 0
        self._file = storage.create(path)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._hasher.update(data)
        view = memoryview(data)
        self._num_bytes += view.nbytes
        try:
            while view.nbytes:  # one write call moves at most 2 GiB on Linux
                view = view[self._file.write(view) :]
        except OSError as error:
            error.filename = str(self._path)  # a full disk does not tell which
            raise

    @property
    def record(self) -> FileRecord:
        """Size and digest of what was written."""
        return FileRecord(self._num_bytes, self._hasher.hexdigest())

    def __enter__(self) -> DigestWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()
        if kind is None:
            self._storage.sync_file(self._path)
            size = os.lstat(self._path).st_size
            if size != self._num_bytes:
                reason = f"{size} bytes are there of {self._num_bytes} that were written"
                raise OSError(errno.EIO, reason, str(self._path))


def list_files(directory: Path) -> list[str]:
    """Relative names (with `/`) of every entry below `directory` that is not a directory."""
    names: list[str] = []
    for folder, _, files in os.walk(directory, followlinks=False):
        names += [(Path(folder) / name).relative_to(directory).as_posix() for name in files]
    return sorted(names)


def list_subdirs(directory: Path) -> list[Path]:
    """`directory` and every directory below it, deepest first."""
    return [Path(folder) for folder, _, _ in os.walk(directory, topdown=False)]


def check_name(name: str) -> str:
    """Refuse a file name from a manifest or index that could lead out of its directory."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"{name!r} is not a plain file name inside a checkpoint")
    return name


def is_plain_file(directory: Path, name: str) -> bool:
    """Whether `name` is a regular file below `directory`, with no symbolic link on the way."""
    path = directory / check_name(name)
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
    except OSError:
        return False
    return os.path.realpath(path.parent) == os.path.join(
        os.path.realpath(directory), *name.split("/")[:-1]
    )
