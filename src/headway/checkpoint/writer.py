"""Writes the files of one staged checkpoint into a directory.

Owns: the layout file by file and the record of each file. Does not own: the copy of the state
(staging.py), who writes which tensor (dealing.py), the commit (manifest.py), the directory's name
and its publication (manager.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from headway.checkpoint.contents import OPTIMIZER_STATE_NAME, RUN_CONFIG_NAME
from headway.checkpoint.dealing import ShardPlan, deal, describe
from headway.checkpoint.digest import digest_file
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jobs import Job, run_jobs
from headway.checkpoint.jsonfile import encode_json
from headway.checkpoint.manifest import MANIFEST_NAME
from headway.checkpoint.nodes import copy_to_nodes
from headway.checkpoint.optimizer import merge_optimizers
from headway.checkpoint.ranks import Ranks, SoloRanks
from headway.checkpoint.slices import sliced_files, write_sliced
from headway.checkpoint.staged import (
    StagedCheckpoint,
    StagedComponent,
    StagedShards,
    StagedTree,
    TensorSlice,
)
from headway.checkpoint.storage import (
    FileRecord,
    Storage,
    check_name,
    is_plain_file,
    list_files,
    list_subdirs,
)
from headway.checkpoint.tensors import index_text, num_bytes, write_tensor_file
from headway.models.shards import index_name

NUM_THREADS = 4


class ContentsWriter:
    """Writes this rank's files of one checkpoint and keeps a record of each."""

    def __init__(
        self,
        storage: Storage,
        directory: Path,
        *,
        digest: str,
        max_shard_bytes: int,
        ranks: Ranks | None = None,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._digest = digest
        self._max_shard_bytes = max_shard_bytes
        self._ranks = ranks or SoloRanks()
        self._num_threads = num_threads
        self._stamps: dict[str, tuple[int, int]] = {}
        self._jobs: list[Job] = []
        self._told: list[Any] = []
        self.files: dict[str, FileRecord] = {}
        self.components: list[dict[str, Any]] = []

    @property
    def config_digest(self) -> str | None:
        """Digest of the run configuration, if there is one."""
        record = self.files.get(RUN_CONFIG_NAME)
        return record.digest if record else None

    def write(self, staged: StagedCheckpoint) -> None:
        """Write this rank's files; `finish`, where it commits, takes in those of the others."""
        ranks = self._ranks
        with ranks.together("preparing to write"):
            staged.wait()
            parts = {c.key: describe(c.shards.tensors) for c in staged.components if c.shards}
        told = ranks.exchange(
            {
                "keys": [component.key for component in staged.components],
                "tensors": parts,
                "folders": _folders(staged),
            }
        )
        for rank, one in enumerate(told):
            if one["keys"] != told[0]["keys"]:
                raise CheckpointError(
                    f"rank {rank} saves the components {one['keys']}, rank 0 {told[0]['keys']}"
                )
        plans = {
            component.key: deal(
                [one["tensors"].get(component.key, {}) for one in told],
                component.shards.prefix,
                self._max_shard_bytes,
            )
            for component in staged.components
            if component.shards is not None
        }
        shared = ranks.gather(_shared_parts(staged))
        with ranks.together("creating directories"):
            if ranks.leads:
                for folder in sorted({folder for one in told for folder in one["folders"]}):
                    self._storage.make_dir(self._directory / folder)
        with ranks.together("writing files"):
            for component in staged.components:
                self._add_component(component, plans.get(component.key), shared)
            for name, text in staged.texts.items():
                self._add_text(name, text)
            for tree in staged.trees:
                self._add_tree(tree)
            run_jobs(self._jobs, self._num_threads)
        for component, entry in zip(staged.components, self.components):
            if component.shards is not None and component.key in plans:
                entry["files"] += write_sliced(
                    plans[component.key],
                    component.shards.tensors,
                    ranks,
                    self._storage,
                    self._directory,
                    self._digest,
                    self._record,
                )
        if not ranks.each_node:
            self._told = ranks.gather([self.files, self.components])[1:]
            return
        told = ranks.exchange([self.files, self.components])
        written = [files for files, _ in told]
        copy_to_nodes(ranks, written, self._storage, self._directory, self._digest)
        self._told = [one for rank, one in enumerate(told) if rank != ranks.rank]

    # -- jobs -------------------------------------------------------------------------------

    def _add_component(
        self, component: StagedComponent, plan: ShardPlan | None, shared: list[dict[str, Any]]
    ) -> None:
        files = []
        if component.key == "model" and self._ranks.is_main:
            _check_extra_state(shared)
        if plan is not None:
            assert component.shards is not None
            files += self._add_shards(component.shards, plan, shared)
        for tree in component.trees:
            files += self._add_tree(tree)
        for name, text in component.texts.items():
            files += self._add_text(name, text)
        if component.optimizer is not None and self._ranks.is_main:
            merged = merge_optimizers([one["optimizer"] for one in shared])
            files += self._add_json(OPTIMIZER_STATE_NAME, merged)
        self.components.append(
            {
                "key": component.key,
                "sharing_pattern": component.pattern.value,
                "files": files,
                "metadata": component.metadata,
            }
        )

    def _add_shards(
        self, shards: StagedShards, plan: ShardPlan, shared: list[dict[str, Any]]
    ) -> list[str]:
        files = []
        in_rounds = set(sliced_files(plan))
        for file_name, names in plan.files.items():
            if plan.owner_of(file_name) != self._ranks.rank or file_name in in_rounds:
                continue
            tensors = {name: _whole(shards.tensors[name]) for name in names}
            files += self._add_tensor_file(file_name, tensors)
        if self._ranks.is_main:
            aliases: dict[str, str] = {}
            for one in shared:
                aliases.update(one["aliases"].get(shards.prefix, {}))
            name = index_name(shards.prefix)
            files += self._add(name, lambda: index_text(plan.weight_map, plan.total_bytes, aliases))
        return files

    def _add_tensor_file(self, name: str, tensors: Mapping[str, Tensor]) -> list[str]:
        def run() -> None:
            path = self._directory / name
            self._record(name, write_tensor_file(self._storage, path, tensors, self._digest))

        self._jobs.append(Job(sum(num_bytes(tensor) for tensor in tensors.values()), run))
        return [name]

    def _add_text(self, name: str, text: bytes) -> list[str]:
        return self._add(name, lambda: text, len(text))

    def _add_json(self, name: str, value: Any) -> list[str]:
        return self._add(name, lambda: encode_json(value, name))

    def _add(self, name: str, make: Callable[[], bytes], about_bytes: int = 0) -> list[str]:
        # Made by its job: putting JSON together costs nothing while others write tensors.
        def run() -> None:
            path = self._directory / name
            self._record(name, self._storage.write_bytes(path, make(), digest=self._digest))

        self._jobs.append(Job(about_bytes, run))
        return [name]

    def _add_tree(self, tree: StagedTree) -> list[str]:
        files = self._add_json(f"{tree.stem}.json", tree.encoded)
        if tree.tensors:
            files += self._add_tensor_file(f"{tree.stem}.safetensors", tree.tensors)
        return files

    # -- records ----------------------------------------------------------------------------

    def _record(self, name: str, record: FileRecord) -> None:
        self.files[name] = record
        self._stamps[name] = self._stamp(name)

    def _stamp(self, name: str) -> tuple[int, int]:
        status = os.lstat(self._directory / name)
        return (status.st_size, status.st_mtime_ns)

    def _merge(self) -> None:
        """Take in the files and components of the other ranks."""
        for files, components in self._told:
            for name, record in files.items():
                self._record(name, FileRecord(*record))
                if self._stamps[name][0] != self.files[name].size:
                    raise CheckpointError(
                        f"{self._directory / name} has {self._stamps[name][0]} bytes here, but its "
                        f"writer wrote {self.files[name].size}: do all ranks share the directory?"
                    )
            for own, other in zip(self.components, components, strict=True):
                own["files"] += other["files"]
        for component in self.components:
            component["files"].sort()

    def finish(self) -> None:
        """Where it commits: record the files of all ranks and what else lies there; sync."""
        self._merge()
        for name in list_files(self._directory):
            check_name(name)
            if name == MANIFEST_NAME:
                raise CheckpointError(f"{name} was written before the commit")
            if not is_plain_file(self._directory, name):
                raise CheckpointError(f"{self._directory / name} is not a regular file")
            if self._stamps.get(name) == self._stamp(name):
                continue
            path = self._directory / name
            self._storage.sync_file(path)
            self._record(name, FileRecord(path.stat().st_size, digest_file(path, self._digest)))
        gone = sorted(name for name in self.files if not is_plain_file(self._directory, name))
        if gone:
            raise CheckpointError(f"files vanished while saving: {', '.join(gone)}")
        for directory in list_subdirs(self._directory):
            self._storage.sync_dir(directory)


def _whole(held: Tensor | TensorSlice) -> Tensor:
    assert isinstance(held, Tensor), "files with slices are written in rounds"
    return held


def _shared_parts(staged: StagedCheckpoint) -> dict[str, Any]:
    """What rank 0 has to know of a rank to write the files that are about all of them."""
    shards = [c.shards for c in staged.components if c.shards is not None]
    return {
        "aliases": {one.prefix: one.aliases for one in shards if one.aliases},
        "optimizer": next((c.optimizer for c in staged.components if c.optimizer), None),
        "extra_state": staged.extra_state,
    }


def _check_extra_state(shared: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(shared):
        missing = sorted(set(one["extra_state"]) - set(shared[0]["extra_state"]))
        if missing:
            raise CheckpointError(
                f"rank {rank} has extra state of modules that rank 0 does not have and that would "
                f"not be saved: {', '.join(missing)}"
            )


def _folders(staged: StagedCheckpoint) -> list[str]:
    """The directories that a rank's files need, below the checkpoint's own."""
    names = {"state/", *staged.texts, *(f"{tree.stem}.json" for tree in staged.trees)}
    for component in staged.components:
        names |= {*component.texts, *(f"{tree.stem}.json" for tree in component.trees)}
    parents = {parent for name in names for parent in PurePosixPath(f"{name}x").parents}
    return sorted(str(parent) for parent in parents if str(parent) != ".")
