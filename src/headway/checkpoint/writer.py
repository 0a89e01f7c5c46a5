"""Writes the files of one checkpoint into a directory.

Owns: `CheckpointContents` and the layout file by file. Does not own: the commit (manifest.py), the
directory's name and its publication (manager.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.checkpoint.component import StateComponent, file_stem
from headway.checkpoint.digest import digest_bytes, digest_file
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manifest import MANIFEST_NAME, finite_or_text
from headway.checkpoint.model import collect_model
from headway.checkpoint.optimizer import split_optimizer
from headway.checkpoint.storage import (
    FileRecord,
    Storage,
    check_name,
    is_plain_file,
    list_files,
    list_subdirs,
)
from headway.checkpoint.tensors import write_shards, write_tensor_file
from headway.checkpoint.tree import split_tree
from headway.errors import ConfigError

RESERVED_KEYS = frozenset({"model", "optimizer"})
TRAINER_STATE_NAME = "trainer_state.json"
EVAL_METRICS_NAME = "eval_metrics.json"
OPTIMIZER_STATE_NAME = "state/optimizer.json"
MODEL_EXTRA_STEM = "state/model"


@dataclass
class CheckpointContents:
    """What one save writes and one load fills."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    components: list[StateComponent] = field(default_factory=list)
    """Scheduler, data position, RNG, callbacks: each to `state/<key>.json` and, if it has tensors,
    `state/<key>.safetensors`."""
    trainer_state: dict[str, Any] = field(default_factory=dict)
    """Goes to `trainer_state.json`."""
    model_config: dict[str, Any] | None = None
    """Goes to `config.json`, the Hugging Face model config; None: shards and index only."""
    generation_config: dict[str, Any] | None = None
    save_tokenizer: Callable[[str], None] | None = None
    """Writes the tokenizer's files into the directory it is given."""
    run_config: dict[str, Any] | None = None
    """Goes to `run/config.json`."""

    def check_keys(self) -> None:
        """Component keys must be unique and not those of the model and the optimizer."""
        seen = set(RESERVED_KEYS)
        for component in self.components:
            if component.key in seen:
                raise ConfigError(f"checkpoint component key {component.key!r} is taken already")
            seen.add(component.key)


def plain_json(value: Any, what: str) -> bytes:
    """Plain JSON text of a configuration; anything else in it is a `ConfigError`."""
    try:
        return json.dumps(value, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be written as JSON: {error}") from error


class ContentsWriter:
    """Writes one checkpoint's files and keeps a record of each."""

    def __init__(
        self, storage: Storage, directory: Path, *, digest: str, max_shard_bytes: int
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._digest = digest
        self._max_shard_bytes = max_shard_bytes
        self._stamps: dict[str, tuple[int, int]] = {}
        self.files: dict[str, FileRecord] = {}
        self.components: list[dict[str, Any]] = []
        self.config_digest: str | None = None

    def write(self, contents: CheckpointContents, metrics: Mapping[str, Any] | None) -> None:
        """Write everything but the manifest."""
        contents.check_keys()
        if contents.save_tokenizer is not None:
            contents.save_tokenizer(str(self._directory))
        self._storage.make_dir(self._directory / "state")
        names = self._write_model(contents)
        if contents.optimizer is not None:
            self._write_optimizer(contents.optimizer, names)
        for component in contents.components:
            self._write_component(component)
        encoded, tensors = split_tree(contents.trainer_state, what="trainer state")
        if tensors:
            raise ConfigError(
                f"trainer state: {', '.join(tensors)} is a tensor or array; "
                f"{TRAINER_STATE_NAME} takes plain values only"
            )
        self._write_json(TRAINER_STATE_NAME, encoded)
        if contents.run_config is not None:
            text = plain_json(contents.run_config, "the run configuration")
            self._storage.make_dir(self._directory / "run")
            self._write("run/config.json", text)
            self.config_digest = digest_bytes(text, self._digest)
        if metrics is not None:
            finite = {key: finite_or_text(value) for key, value in metrics.items()}
            self._write(EVAL_METRICS_NAME, plain_json(finite, "the evaluation metrics"))

    def _record(self, name: str, record: FileRecord) -> None:
        self.files[name] = record
        self._stamps[name] = self._stamp(name)

    def _stamp(self, name: str) -> tuple[int, int]:
        status = os.lstat(self._directory / name)
        return (status.st_size, status.st_mtime_ns)

    def _write(self, name: str, data: bytes) -> None:
        record = self._storage.write_bytes(self._directory / name, data, digest=self._digest)
        self._record(name, record)

    def _write_json(self, name: str, encoded: Any) -> None:
        self._write(name, json.dumps(encoded, indent=1, allow_nan=False).encode() + b"\n")

    def _write_tree(self, name: str, state: Any, what: str) -> list[str]:
        """Write a state as `name` (JSON) and, if it has tensors, the same name .safetensors."""
        encoded, tensors = split_tree(state, what=what)
        files = [name]
        self._write_json(name, encoded)
        if tensors:
            tensor_file = name.removesuffix(".json") + ".safetensors"
            path = self._directory / tensor_file
            self._record(tensor_file, write_tensor_file(self._storage, path, tensors, self._digest))
            files.append(tensor_file)
        return files

    def _write_shards(
        self, prefix: str, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
    ) -> list[str]:
        records = write_shards(
            self._directory,
            prefix,
            tensors,
            max_shard_bytes=self._max_shard_bytes,
            aliases=aliases,
            digest=self._digest,
            storage=self._storage,
        )
        for name, record in records.items():
            self._record(name, record)
        return list(records)

    def _list_component(
        self, key: str, pattern: str, files: list[str], metadata: Mapping[str, Any]
    ) -> None:
        self.components.append(
            {"key": key, "sharing_pattern": pattern, "files": files, "metadata": dict(metadata)}
        )

    def _write_model(self, contents: CheckpointContents) -> dict[int, str]:
        tensors = collect_model(contents.model)
        files = self._write_shards("model", tensors.stored, tensors.aliases)
        if tensors.extra:
            files += self._write_tree(
                f"{MODEL_EXTRA_STEM}.json", tensors.extra, "extra state of the model"
            )
        for name, config in (
            ("config.json", contents.model_config),
            ("generation_config.json", contents.generation_config),
        ):
            if config is not None:
                self._write(name, plain_json(config, name))
                files.append(name)
        self._list_component("model", "global", files, {})
        return tensors.names_by_id()

    def _write_optimizer(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        encoded, tensors = split_optimizer(optimizer, names)
        files = self._write_shards("optimizer", tensors, {})
        self._write_json(OPTIMIZER_STATE_NAME, encoded)
        self._list_component("optimizer", "global", [*files, OPTIMIZER_STATE_NAME], {})

    def _write_component(self, component: StateComponent) -> None:
        state = component.stateful.state_dict()
        what = f"state of {component.key!r}"
        files = self._write_tree(f"{file_stem(component)}.json", state, what)
        plain_json(component.metadata, f"the metadata of component {component.key!r}")
        self._list_component(
            component.key, component.sharing_pattern.value, files, component.metadata
        )

    def finish(self) -> None:
        """Record and sync what others wrote into the directory, then sync the directories."""
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
