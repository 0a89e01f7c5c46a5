"""A checkpoint on its way to one named directory: written beside it, committed, put in its place.

Owns: `Draft`, which saves outside a run's own sequence go through (the functions of api.py, the
commands that convert and modify). Does not own: a run's checkpoints and their retention
(manager.py), what goes into the files.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

import headway
from headway.checkpoint.digest import DEFAULT_DIGEST, digest_file
from headway.checkpoint.discovery import committed_in, list_checkpoints
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import encode_json
from headway.checkpoint.leftovers import clean_leftovers
from headway.checkpoint.manifest import Manifest, is_committed, torch_version, write_manifest
from headway.checkpoint.owner import new_nonce
from headway.checkpoint.pins import is_pinned
from headway.checkpoint.storage import (
    DigestWriter,
    FileRecord,
    Storage,
    check_name,
    is_url,
    list_subdirs,
    open_storage,
)
from headway.checkpoint.tensors import MAX_SHARD_BYTES, write_shards, write_tensor_file

_COPY_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class Draft:
    """A context manager: leaving it without `commit` removes all that was written."""

    def __init__(
        self, target: str | Path, *, digest: str = DEFAULT_DIGEST, storage: Storage | None = None
    ) -> None:
        if is_url(target):
            parent, _, name = str(target).rstrip("/").rpartition("/")
            self.storage = storage or open_storage(parent)
            self.target = self.storage.root / name
        else:
            self.target = Path(target).absolute()
            self.storage = storage or Storage(self.target.parent)
        self._has_own_storage = storage is None and not is_url(target)
        self.digest = digest
        self._nonce = new_nonce()
        self.directory = self.target.with_name(f"{self.target.name}.tmp-{self._nonce}")
        self.files: dict[str, FileRecord] = {}
        self.components: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        try:
            self.storage.make_root()
            if self._has_own_storage:  # nobody else starts here and would clean up
                clean_leftovers(self.storage)
            self.storage.fetch(self.target)
            self.storage.make_dir(self.directory)
        except OSError as error:
            raise CheckpointError(f"{self.target} cannot be written: {error}") from error
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if os.path.lexists(self.directory):
            try:
                self.storage.remove_tree(self.directory)
            except Exception as trouble:
                # The failure of the save itself is the one to report.
                logger.warning("could not remove %s: %s", self.directory, trouble)
        if isinstance(error, OSError):
            raise CheckpointError(f"{self.target} cannot be written: {error}") from error

    # -- files ------------------------------------------------------------------------------

    def _place(self, name: str) -> Path:
        path = self.directory / check_name(name)
        for parent in reversed(path.relative_to(self.directory).parents[:-1]):
            if not (self.directory / parent).is_dir():
                self.storage.make_dir(self.directory / parent)
        return path

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        path = self._place(name)
        self.files[name] = self.storage.write_bytes(path, data, digest=self.digest)

    def write_json(self, name: str, value: Any, *, indent: int = 1) -> None:
        """Write a JSON file."""
        self.write_bytes(name, encode_json(value, name, indent=indent))

    def write_tensor_file(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write one safetensors file."""
        path = self._place(name)
        self.files[name] = write_tensor_file(self.storage, path, tensors, self.digest)

    def write_shards(
        self,
        prefix: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        aliases: Mapping[str, str] | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Write shards, with `metadata` in each, and their index; returns the names."""
        records = write_shards(
            self.directory,
            prefix,
            tensors,
            max_shard_bytes=max_shard_bytes,
            aliases=aliases,
            digest=self.digest,
            storage=self.storage,
            metadata=metadata,
        )
        self.files.update(records)
        return list(records)

    def write_tree(self, stem: str, encoded: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Write what `split_tree` returned; returns the names."""
        names = [f"{stem}.json"]
        self.write_json(names[0], encoded)
        if tensors:
            names.append(f"{stem}.safetensors")
            self.write_tensor_file(names[1], tensors)
        return names

    def take(self, source: Path, name: str, record: FileRecord | None = None) -> None:
        """Bring an existing file in: by a second name for it where possible, else by a copy.

        With `record`, a linked file is not read; without it, it is digested.
        """
        path = self._place(name)
        if record is not None:
            try:
                self.storage.link(source, path)
                self.files[name] = record
                return
            except OSError:
                pass  # another file system, or one without links
        with (
            open(source, "rb", buffering=0) as file,
            DigestWriter(self.storage, path, self.digest) as writer,
        ):
            while data := file.read(_COPY_BYTES):
                writer.write(data)
        if record is not None and record != writer.record:
            raise CheckpointError(f"{source} is damaged: its content does not match its digest")
        self.files[name] = writer.record

    def adopt(self, name: str) -> None:
        """Record a file that something else wrote into the directory."""
        path = self.directory / check_name(name)
        self.storage.sync_file(path)
        self.files[name] = FileRecord(path.stat().st_size, digest_file(path, self.digest))

    def add_component(
        self,
        key: str,
        files: list[str],
        *,
        pattern: str = "global",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """List a component in the manifest."""
        entry = {"key": key, "sharing_pattern": pattern, "files": files}
        self.components.append({**entry, "metadata": dict(metadata or {})})

    # -- the commit -------------------------------------------------------------------------

    def describe(self, *, kind: str, step: int, **fields: Any) -> Manifest:
        """A manifest of what was written, as the newest save beside its target."""
        beside = [found.save_counter for found in committed_in(self.storage)]
        given: dict[str, Any] = {
            "save_counter": max(beside, default=0) + 1,
            "topology": {"world_size": 1, "strategy": "single"},
            "headway_version": headway.__version__,
            "torch_version": torch_version(),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **fields,
        }
        return Manifest(
            kind=kind,
            step=step,
            files=self.files,
            components=self.components,
            digest_algorithm=self.digest,
            **given,
        )

    def commit(
        self, manifest: Manifest, *, replace: bool = False, backup: Path | None = None
    ) -> Path:
        """Make it a checkpoint under its name; returns the directory, below the storage's root.

        With `replace` a directory of that name makes room at the last instant; it stays as
        `backup`, or is deleted, unless it is pinned and the pin has not been taken along.
        """
        for directory in list_subdirs(self.directory):
            self.storage.sync_dir(directory)
        write_manifest(self.directory, manifest, self.storage)
        if not os.path.lexists(self.target):
            self.storage.rename(self.directory, self.target)
            self.storage.sync_dir(self.target.parent)
            return self.target
        if not replace:
            raise CheckpointError(f"{self.target} exists already")
        aside = self.target.with_name(f"{self.target.name}.old-{self._nonce}")
        self.storage.rename(self.target, aside)
        try:
            # A disk may reorder the two renames; the earlier one must not be lost between them.
            self.storage.sync_dir(self.target.parent)
            self.storage.rename(self.directory, self.target)
        except BaseException:
            self.storage.rename(aside, self.target)
            raise
        self.storage.sync_dir(self.target.parent)
        if backup is not None:
            self.storage.rename(aside, backup)
            self.storage.sync_dir(self.target.parent)
        elif is_pinned(aside) and not is_pinned(self.target):
            logger.warning(
                "%s was pinned; it is now %s beside its successor", self.target, aside.name
            )
        else:
            self.storage.remove_tree(aside)
        return self.target


def settle(path: str | Path) -> str | Path:
    """Where a checkpoint is: at `path`, or beside it if a replacement was cut short.

    Between the two renames of a replacement a kill leaves the earlier checkpoint under a name that
    begins with its own and `.old-`; it is read from there.
    """
    if is_url(path):
        return path
    wanted = Path(path)
    if os.path.lexists(wanted):
        return wanted
    aside = [
        found.path
        for found in list_checkpoints(wanted.parent)
        if found.path.name.startswith(f"{wanted.name}.old-")
    ]
    return aside[-1] if aside and is_committed(aside[-1]) else wanted
