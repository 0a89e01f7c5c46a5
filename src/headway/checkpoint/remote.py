"""Checkpoints in any file system that fsspec knows, such as `s3://bucket/run` or `memory://run`.

Owns: a `Storage` whose root is a local working directory and whose checkpoints live elsewhere.
There, a rename is no single act, so the manifest alone is the commit: it is uploaded last and
deleted first, and a directory without one does not count. A save of a step that is there already
goes to a name of its own; nothing is ever overwritten.
Does not own: the sequence of a save or load, which is that of local files (manager.py, draft.py).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.checkpoint.errors import CheckpointError, DamagedError
from headway.checkpoint.leftovers import age_s, may_go
from headway.checkpoint.manifest import MANIFEST_NAME, read_manifest
from headway.checkpoint.owner import NONCE_PATTERN, new_nonce
from headway.checkpoint.pins import PIN_NAME, is_pinned
from headway.checkpoint.storage import (
    MADE_AGAIN,
    TRASH_PREFIX,
    Storage,
    check_name,
    is_url,
    list_files,
)
from headway.errors import ConfigError, missing_extra, unknown

_UPLOADING = ".uploading-"
_WORKING = "headway-remote-"

logger = logging.getLogger(__name__)


def check_address(url: str, option: str | None = None) -> None:
    """Refuse an address whose protocol this machine does not speak; nothing is connected to.

    `option` is what the user gave it as, for the error.
    """
    given = f"the address {url}" if option is None else f"{option}={url!r}"
    try:
        import fsspec
    except ImportError:
        raise missing_extra("fsspec", "remote", given) from None
    for link in url.split("::"):  # fsspec's chains, such as simplecache::s3://bucket/run
        protocol = link.partition("://")[0]
        try:
            fsspec.get_filesystem_class(protocol)
        except (ImportError, ValueError) as error:
            known = {*fsspec.available_protocols(), *fsspec.registry}
            problem = str(error) if protocol in known else unknown("protocol", protocol, known)
            raise ConfigError(f"{given} cannot be opened: {problem}") from error


def _open_file_system(url: str) -> tuple[Any, str]:
    check_address(url)
    import fsspec

    try:
        file_system, base = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"the address {url} cannot be opened: {error}") from error
    return file_system, str(base).rstrip("/")


def _make_working_directory() -> Path:
    """A new one; those of processes that were killed go, which hold a checkpoint at worst."""
    beside = Path(tempfile.gettempdir())
    for path in beside.glob(f"{_WORKING}*"):
        nonce = path.name.removeprefix(_WORKING)
        if re.fullmatch(NONCE_PATTERN, nonce, re.ASCII) and may_go(
            nonce, functools.partial(age_s, path)
        ):
            shutil.rmtree(path, ignore_errors=True)  # it may be another user's
    made = beside / f"{_WORKING}{new_nonce()}"
    made.mkdir(mode=0o700)
    return made


class RemoteStorage(Storage):
    """Writes locally, then uploads; downloads, then reads."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._base = _open_file_system(self.url)
        super().__init__(_make_working_directory())
        weakref.finalize(self, shutil.rmtree, str(self.root), ignore_errors=True)
        self._places: dict[str, str] = {}
        """Name in the root -> name at the address."""
        # A thread that saves and one that looks: what is half named would be taken for another's.
        self._lock = threading.RLock()

    def locate(self, path: Path) -> str:
        if path.parent != self.root:
            return str(path)
        return f"{self.url}/{self._places.get(path.name, path.name)}"

    def tell(self, message: str) -> str:
        for name, place in self._places.items():
            message = message.replace(f"{self.root}/{name}/", f"{self.url}/{place}/")
        return message.replace(str(self.root), self.url)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, ConfigError) as error:
            error.args = tuple(self.tell(str(said)) for said in error.args)
            if isinstance(error, DamagedError | ConfigError):
                error.problems = [self.tell(problem) for problem in error.problems]
            raise

    def path_of(self, location: str | Path) -> Path:
        parent, _, name = str(location).rstrip("/").rpartition("/")
        if not is_url(location) or parent != self.url:
            return Path(location)
        self.refresh()
        by_place = {place: local for local, place in self._places.items()}
        return self.root / by_place.get(name, name)

    def make_root(self) -> None:
        self.refresh()

    def sync_file(self, path: Path) -> None:
        """Nothing to wait for: what counts is uploaded when it is complete."""

    def sync_dir(self, path: Path) -> None:
        """A checkpoint's pin goes to the address; the rest is uploaded when it is complete."""
        place = self._places.get(path.name)
        if place is None or path.parent != self.root:
            return
        marker = self._path(place, PIN_NAME)
        if is_pinned(path):
            self._fs.pipe_file(marker, b"")
        elif self._fs.exists(marker):
            self._fs.rm_file(marker)

    # -- what is there ----------------------------------------------------------------------

    def _remote_dirs(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._base, detail=True)
        except FileNotFoundError:
            return []
        return sorted(
            entry["name"].rstrip("/").rpartition("/")[2]
            for entry in found
            if entry["type"] == "directory"
        )

    def _path(self, *parts: str) -> str:
        return "/".join((self._base, *parts))

    def refresh(self) -> None:
        """Fetch the manifests (and pins) of what is committed at the address."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        there = [n for n in self._remote_dirs() if self._fs.exists(self._path(n, MANIFEST_NAME))]
        for name, place in list(self._places.items()):
            if place not in there:
                shutil.rmtree(self.root / name, ignore_errors=True)
                del self._places[name]
        known = set(self._places.values())
        for place in there:
            if place not in known:
                self._bring_in(place)
        for name, place in self._places.items():
            pinned = self._fs.exists(self._path(place, PIN_NAME))
            marker = self.root / name / PIN_NAME
            marker.touch() if pinned else marker.unlink(missing_ok=True)

    def _bring_in(self, place: str) -> None:
        again = MADE_AGAIN.fullmatch(place)
        name = again["name"] if again else place
        if name in self._places:  # two saves of one step: the later one takes the name
            name = f"{name}.old-{new_nonce()}"
        directory = self.root / name
        directory.mkdir()
        try:
            self._fs.get_file(self._path(place, MANIFEST_NAME), str(directory / MANIFEST_NAME))
        except BaseException:
            shutil.rmtree(directory)  # else the next refresh finds its place taken
            raise
        self._places[name] = place
        owner = self.root / (again["name"] if again else place)
        if owner != directory and _counter(directory) > _counter(owner):
            self._swap(owner, directory)

    def _swap(self, first: Path, second: Path) -> None:
        spare = self.root / f"{TRASH_PREFIX}{new_nonce()}"
        first.rename(spare)
        second.rename(first)
        spare.rename(second)
        places = self._places
        places[first.name], places[second.name] = places[second.name], places[first.name]

    def fetch(self, path: Path) -> None:
        """Download the files of a checkpoint that are not in the working directory yet."""
        place = self._places.get(path.name)
        if place is None or path.parent != self.root:
            return
        for name, record in read_manifest(path).files.items():
            target = path / check_name(name)
            if target.is_file() and target.stat().st_size == record.size:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fs.get_file(self._path(place, name), str(target))
            except FileNotFoundError:
                logger.warning("%s/%s is missing", self.locate(path), name)

    def download(self, name: str) -> None:
        """Bring in a folder that is no checkpoint, with all it holds."""
        base = self._path(name)
        if not self._fs.isdir(base):
            raise FileNotFoundError(f"{self.url}/{name} does not exist")
        for remote in self._fs.find(base):
            file = self.root / name / check_name(str(remote)[len(base) + 1 :])
            file.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(remote, str(file))

    # -- changes ----------------------------------------------------------------------------

    def rename(self, source: Path, target: Path) -> None:
        """Local names change locally; a new checkpoint's name is given by uploading it."""
        with self._lock:
            self._rename(source, target)

    def _rename(self, source: Path, target: Path) -> None:
        place = self._places.get(source.name)
        if place is not None and target.name.startswith(TRASH_PREFIX):
            self._fs.rm_file(self._path(place, MANIFEST_NAME))
        is_new = place is None and (source / MANIFEST_NAME).is_file()
        if is_new and not target.name.startswith(TRASH_PREFIX):
            place = self._upload(source, target.name)
        super().rename(source, target)
        # Not before: what the address refused is still known here under its name.
        self._places.pop(source.name, None)
        if place is not None:
            self._places[target.name] = place

    def _upload(self, directory: Path, name: str) -> str:
        taken = self._remote_dirs()
        place = name if name not in taken else f"{name}.again-{new_nonce()}"
        marker = self._path(place, f"{_UPLOADING}{new_nonce()}")
        names = [n for n in list_files(directory) if n != MANIFEST_NAME]
        try:
            self._fs.makedirs(self._path(place), exist_ok=True)
            self._fs.pipe_file(marker, b"")
            for file_name in names:
                self._put(directory / file_name, place, file_name)
            self._put(directory / MANIFEST_NAME, place, MANIFEST_NAME)
        except BaseException:
            self._drop(place)
            raise
        self._fs.rm_file(marker)
        # Only the manifest stays here: the working directory holds one checkpoint at most.
        for file_name in names:
            if file_name != PIN_NAME:
                (directory / file_name).unlink()
        return place

    def _put(self, local: Path, place: str, name: str) -> None:
        target = self._path(place, name)
        if "/" in name:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(local), target)
        size = self._fs.size(target)
        if size != local.stat().st_size:
            raise CheckpointError(
                f"{self.url}/{place}/{name} has {size} bytes after the upload instead of "
                f"{local.stat().st_size}"
            )

    def _drop(self, place: str) -> None:
        try:
            manifest = self._path(place, MANIFEST_NAME)
            if self._fs.exists(manifest):
                self._fs.rm_file(manifest)
            if self._fs.exists(self._path(place)):
                self._fs.rm(self._path(place), recursive=True)
        except Exception as error:
            logger.warning("could not remove %s/%s: %s", self.url, place, error)

    def remove_tree(self, path: Path) -> None:
        """As in a folder; nobody looks between the two halves of it."""
        with self._lock:
            super().remove_tree(path)

    def delete_tree(self, path: Path) -> None:
        """Delete here and at the address."""
        place = self._places.pop(path.name, None)
        if place is not None:
            self._drop(place)
        super().delete_tree(path)

    def _age_s(self, place: str) -> float:
        """Since when nothing there was written; 0 where the file system does not tell."""
        try:
            times = [self._fs.modified(file) for file in self._fs.find(self._path(place))]
        except (NotImplementedError, FileNotFoundError, KeyError):
            return 0.0
        now = datetime.datetime.now(datetime.UTC)
        in_utc = [t if t.tzinfo else t.replace(tzinfo=datetime.UTC) for t in times]
        return min(((now - t).total_seconds() for t in in_utc), default=0.0)

    def collect_leftovers(self) -> list[str]:
        """Remove uploads of dead processes, and saves that a later one of their step replaced."""
        done = []
        for place in self._remote_dirs():
            if self._fs.exists(self._path(place, MANIFEST_NAME)):
                continue
            found = [
                str(f).rpartition("/")[2] for f in self._fs.ls(self._path(place), detail=False)
            ]
            nonces = [f.removeprefix(_UPLOADING) for f in found if f.startswith(_UPLOADING)]
            tell_age_s = functools.partial(self._age_s, place)
            if nonces and all(may_go(nonce, tell_age_s) for nonce in nonces):
                self._drop(place)
                done.append(place)
        self.refresh()
        for name, place in list(self._places.items()):
            successor = re.fullmatch(rf"(.+)\.old-{NONCE_PATTERN}", name, re.ASCII)
            if successor and successor[1] in self._places and not is_pinned(self.root / name):
                self.remove_tree(self.root / name)
                done.append(place)
        return done


def _counter(directory: Path) -> int:
    try:
        return read_manifest(directory).save_counter
    except CheckpointError:
        return -1


@contextlib.contextmanager
def local_copy(location: str | Path) -> Iterator[Path]:
    """A directory as local files: itself, or a temporary copy of what is at an address."""
    if not is_url(location):
        yield Path(location)
        return
    parent, _, name = str(location).rstrip("/").rpartition("/")
    storage = RemoteStorage(parent)
    path = storage.path_of(f"{storage.url}/{name}")
    if path.is_dir():
        storage.fetch(path)
    else:
        storage.download(name)
    yield path
