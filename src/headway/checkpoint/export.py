"""Weights on their way out: a clean model folder, one safetensors file, or a PyTorch file.

Owns: `export_folder` and `export_file`. What they write appears whole or not at all, and never in
the place of something else. Does not own: reading the source (weights.py), imports (convert.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headway.checkpoint import legacy
from headway.checkpoint.draft import Draft
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify
from headway.checkpoint.meta import WEIGHTS_NAME
from headway.checkpoint.owner import new_nonce
from headway.checkpoint.storage import Storage
from headway.checkpoint.tensors import write_tensor_file
from headway.errors import ConfigError, unknown

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
# Of a training state, or of somebody else's: no part of a model folder.
_LEFT_OUT = {
    MANIFEST_NAME,
    "trainer_state.json",
    "eval_metrics.json",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "metadata.json",
}
_LEFT_OUT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


@dataclass
class Source:
    """Weights in memory and the small files that belong to them."""

    tensors: dict[str, torch.Tensor]
    """Each stored tensor once."""
    aliases: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    """config.json, the tokenizer's files, ...: name -> where it is."""
    step: int = 0

    def cast(self, dtype: str | None) -> None:
        """Change the floating-point tensors to a dtype."""
        if dtype is None:
            return
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: {unknown('dtype', dtype, DTYPES)}")
        self.tensors = {
            name: t.to(DTYPES[dtype]) if t.is_floating_point() else t
            for name, t in self.tensors.items()
        }


def model_files(directory: Path) -> dict[str, Path]:
    """The files at the top of a folder that belong to the model, without its weights."""
    return {
        entry.name: Path(entry.path)
        for entry in sorted(os.scandir(directory), key=lambda e: e.name)
        if entry.is_file()
        and not entry.name.startswith((".", "rng_state"))
        and entry.name not in _LEFT_OUT
        and not entry.name.endswith(_LEFT_OUT_ENDINGS)
    }


def require_whole(directory: Path, names: Iterable[str] | None = None) -> None:
    """Refuse a committed checkpoint that is damaged."""
    if not os.path.lexists(directory / MANIFEST_NAME):
        return
    wanted = None if names is None else set(names)
    problems = verify(directory, names=wanted, num_threads=os.cpu_count() or 1)
    if problems:
        raise CheckpointError("\n".join(problems))


def require_new(target: Path) -> None:
    """Refuse a target that exists."""
    if os.path.lexists(target):
        raise ConfigError(f"DST: {target} exists; nothing is overwritten, choose another name")


def export_folder(
    source: Source,
    target: Path,
    *,
    dtype: str | None = None,
    optimizer_of: Path | None = None,
    to_bin: bool = False,
) -> Path:
    """A Hugging Face model folder, committed as kind export.

    `optimizer_of` is a checkpoint whose optimizer state goes along.
    """
    require_new(target)
    source.cast(dtype)
    with Draft(target) as draft:
        if to_bin:
            everything = {**source.tensors}
            everything.update({a: source.tensors[n] for a, n in source.aliases.items()})
            legacy.write_pickled(everything, draft.directory / WEIGHTS_NAME)
            draft.adopt(WEIGHTS_NAME)
            files = [WEIGHTS_NAME]
        else:
            files = draft.write_shards("model", source.tensors, aliases=source.aliases)
        for name, path in source.files.items():
            if name == "config.json" and dtype is not None:
                draft.write_json(name, read_json_object(path) | dtype_settings(dtype), indent=2)
            else:
                draft.take(path, name)
            files.append(name)
        draft.add_component("model", files)
        if optimizer_of is not None:
            _take_optimizer(draft, optimizer_of)
        return draft.commit(draft.describe(kind="export", step=source.step))


def dtype_settings(dtype: str) -> dict[str, str]:
    """What a config.json says of the dtype: version 4 of transformers reads the second name."""
    return {"dtype": dtype, "torch_dtype": dtype}


def _take_optimizer(draft: Draft, directory: Path) -> None:
    manifest = read_manifest(directory)
    entry = manifest.component("optimizer")
    if entry is None:
        raise ConfigError(f"{directory} holds no optimizer state to keep")
    for name in entry["files"]:
        draft.take(directory / name, name)
    draft.add_component("optimizer", list(entry["files"]))


def export_file(source: Source, target: Path, *, dtype: str | None = None) -> Path:
    """All weights in one file: safetensors, or a PyTorch file by its ending."""
    require_new(target)
    source.cast(dtype)
    storage = Storage(target.absolute().parent)
    temporary = storage.root / f".{target.name}.tmp-{new_nonce()}"
    try:
        if target.suffix == ".safetensors":
            write_tensor_file(storage, temporary, source.tensors)
        else:
            tied = {alias: source.tensors[name] for alias, name in source.aliases.items()}
            legacy.write_pickled({**source.tensors, **tied}, temporary)
            storage.sync_file(temporary)
        storage.rename(temporary, target.absolute())
        storage.sync_dir(storage.root)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target
