"""`save_checkpoint` and `load_checkpoint`: one directory, one call.

Owns: the two spellings that meet in these names. With `module` they write and read weights alone;
with `model`, `optimizer` and `state`, all by keyword, a training state. A mixture is a TypeError.
Does not own: a run's checkpoints (manager.py), the files (weights.py, state_files.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from headway.checkpoint.component import SharingPattern, StateComponent
from headway.checkpoint.contents import MODEL_EXTRA_STEM, CheckpointContents
from headway.checkpoint.draft import Draft, settle
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manager import CheckpointManager
from headway.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify
from headway.checkpoint.meta import get_checkpoint_metadata, is_half_checkpoint, weight_files
from headway.checkpoint.model import collect_model, load_extra_state
from headway.checkpoint.reader import read_tree
from headway.checkpoint.remote import local_copy
from headway.checkpoint.sharded import (
    encode_index,
    index_file_name,
    log_weights,
    make_shard_index,
    refuse_pickles,
    shard_parts,
)
from headway.checkpoint.sharing import SharingMetadata, create_sharing_metadata, groups_of
from headway.checkpoint.state_files import (
    EncodedState,
    encode_state,
    files_to_keep,
    require_state,
    save_state,
)
from headway.checkpoint.train_state import TrainState, to_number
from headway.checkpoint.weights import LoadReport, load_into, open_weights, unwrap
from headway.errors import ConfigError
from headway.models.hf import hf_config_of

_SAVES_WEIGHTS = {
    "module",
    "metadata",
    "safetensors",
    "max_shard_size",
    "debug",
    "include_param_sharing",
    "param_sharing_metadata",
}
_SAVES_STATE = {"model", "optimizer", "state", "scheduler", "scaler"}
_LOADS_WEIGHTS = {"model_dir", "module", "device", "strict", "assign", "keys", "allow_legacy"}
_LOADS_STATE = {"checkpoint_dir", "model", "optimizer", "scheduler", "scaler"}


@overload
def save_checkpoint(
    output_dir: str | Path,
    module: nn.Module | Mapping[str, torch.Tensor],
    metadata: Mapping[str, Any] | None = None,
    safetensors: bool = True,
    max_shard_size: int = 2**31,
    debug: bool = False,
    include_param_sharing: bool = True,
    param_sharing_metadata: SharingMetadata | None = None,
) -> str: ...


@overload
def save_checkpoint(
    *,
    output_dir: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Any,
    scheduler: Any = None,
    scaler: Any = None,
) -> str: ...


def save_checkpoint(*args: Any, **given: Any) -> str:
    """Write one checkpoint directory, committed as a whole; returns its path.

    With `module` (a module, or named tensors): shards and index, `metadata` in the index, ties
    stored once. With `model`, `optimizer` and `state`, all by keyword: the training state. A
    checkpoint that was there under this name is replaced at one instant.
    """
    function = _choose("save_checkpoint", args, given, _save_weights, _save_training, _SAVES_STATE)
    result: str = function()
    return result


@overload
def load_checkpoint(
    model_dir: str | Path,
    module: None = None,
    device: str | torch.device = "cpu",
    strict: bool = True,
    assign: bool = False,
    keys: Collection[str] | None = None,
    *,
    allow_legacy: bool = False,
) -> dict[str, torch.Tensor]: ...


@overload
def load_checkpoint(
    model_dir: str | Path,
    module: nn.Module,
    device: str | torch.device = "cpu",
    strict: bool = True,
    assign: bool = False,
    keys: Collection[str] | None = None,
    *,
    allow_legacy: bool = False,
) -> LoadReport: ...


@overload
def load_checkpoint(
    *,
    checkpoint_dir: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any = None,
    scaler: Any = None,
) -> TrainState: ...


def load_checkpoint(*args: Any, **given: Any) -> Any:
    """Read one checkpoint directory; all that is used is verified before anything is changed.

    With `module`: load weights into it. Without: return them by name, limited to `keys`. With
    `checkpoint_dir`, `model` and `optimizer`, all by keyword: restore a training state and return
    its progress. Nothing there is a `FileNotFoundError`.
    """
    return _choose("load_checkpoint", args, given, _load_weights, _load_training, _LOADS_STATE)()


def _choose(
    name: str,
    args: tuple[Any, ...],
    given: dict[str, Any],
    for_weights: Callable[..., Any],
    for_state: Callable[..., Any],
    state_names: set[str],
) -> Callable[[], Any]:
    """The one of two functions that the keywords mean, with its arguments."""
    of_state = sorted(state_names & set(given))
    of_weights = sorted((_SAVES_WEIGHTS | _LOADS_WEIGHTS) & set(given))
    if of_state and (of_weights or args):
        mixed_with = of_weights[0] if of_weights else "arguments by position"
        raise TypeError(
            f"{name}() is called with {of_state[0]}, for a training state, and {mixed_with}, for "
            "weights alone; give module, or model with optimizer (and the rest by keyword)"
        )
    function = for_state if of_state else for_weights
    try:
        bound = inspect.signature(function).bind(*args, **given)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None
    return lambda: function(*bound.args, **bound.kwargs)


# -- weights ----------------------------------------------------------------------------------


def _save_weights(
    output_dir: str | Path,
    module: nn.Module | Mapping[str, torch.Tensor],
    metadata: Mapping[str, Any] | None = None,
    safetensors: bool = True,
    max_shard_size: int = 2**31,
    debug: bool = False,
    include_param_sharing: bool = True,
    param_sharing_metadata: Sequence[Sequence[str]] | None = None,
) -> str:
    refuse_pickles(safetensors)
    if not isinstance(module, nn.Module | Mapping):
        raise TypeError(f"module is a {type(module).__name__}; allowed: a Module or a dict")
    tensors: Mapping[str, torch.Tensor]
    config = None
    if isinstance(module, nn.Module):
        module = unwrap(module)
        config = hf_config_of(module)
        live = collect_model(module)
        tensors = live.by_name
        if param_sharing_metadata is None and include_param_sharing:
            # Names that only the module's own buffers share are listed, but nothing stores them.
            param_sharing_metadata = groups_of(live.aliases) or create_sharing_metadata(module)
    else:
        tensors = module
    index = make_shard_index(
        [tensors],
        metadata,
        max_shard_size=max_shard_size,
        param_sharing_metadata=param_sharing_metadata,
    )
    with Draft(output_dir) as draft:
        kept = files_to_keep(draft.target, kind="export")
        files = []
        for file_name, part in shard_parts(index, tensors).items():
            if debug:
                log_weights(file_name, part)
            draft.write_tensor_file(file_name, part)
            files.append(file_name)
        draft.write_bytes(index_file_name(), encode_index(index))
        files.append(index_file_name())
        if config is not None and "config.json" not in kept:
            draft.write_json("config.json", config, indent=2)
            files.append("config.json")
        for name in kept:
            draft.take(draft.target / name, name)
        draft.add_component("model", files)
        manifest = draft.describe(kind="export", step=0)
        return draft.storage.locate(draft.commit(manifest, replace=True))


def _load_weights(
    model_dir: str | Path,
    module: nn.Module | None = None,
    device: str | torch.device = "cpu",
    strict: bool = True,
    assign: bool = False,
    keys: Collection[str] | None = None,
    *,
    allow_legacy: bool = False,
) -> dict[str, torch.Tensor] | LoadReport:
    if isinstance(keys, str):
        raise ConfigError(f"keys is the text {keys!r}; a list of names is needed")
    with local_copy(settle(model_dir)) as directory:
        if not directory.is_dir():
            raise FileNotFoundError(f"{model_dir} does not exist or is not a directory")
        if is_half_checkpoint(directory):
            raise CheckpointError(
                f"{directory / MANIFEST_NAME} is missing: the checkpoint was never committed"
            )
        meta = get_checkpoint_metadata(directory)
        if (directory / MANIFEST_NAME).exists():
            _verify_weights(directory, [meta.file_name, *weight_files(directory, meta)])
        weights = open_weights(directory, allow_legacy=allow_legacy, meta=meta)
        if module is None:
            return weights.read(keys, device)
        inner = unwrap(module)
        report = load_into(inner, weights, device=device, strict=strict, assign=assign)
        _load_extra_state(inner, directory)
        return report


def _verify_weights(directory: Path, names: list[str]) -> None:
    manifest = read_manifest(directory)
    listed = [*names, *(n for n in manifest.files if n.startswith(f"{MODEL_EXTRA_STEM}."))]
    unlisted = [name for name in names if name not in manifest.files]
    problems = [f"{directory / name} is not listed in the manifest" for name in unlisted]
    problems += verify(directory, names=listed)
    if problems:
        raise CheckpointError("\n".join(problems))


def _load_extra_state(module: nn.Module, directory: Path) -> None:
    if not (directory / MANIFEST_NAME).exists():
        return
    manifest = read_manifest(directory)
    if f"{MODEL_EXTRA_STEM}.json" in manifest.files:
        load_extra_state(module, read_tree(directory, MODEL_EXTRA_STEM, manifest))


# -- a training state -------------------------------------------------------------------------


def _contents(
    model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, progress: dict[str, Any]
) -> CheckpointContents:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; a torch.nn.Module is needed")
    inner = unwrap(model)
    given = {"scheduler": scheduler, "scaler": scaler}
    return CheckpointContents(
        model=inner,
        optimizer=optimizer,
        components=[
            StateComponent(key, value, SharingPattern.GLOBAL)
            for key, value in given.items()
            if value is not None
        ],
        trainer_state=progress,
        model_config=hf_config_of(inner),
    )


def encode_training(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Any,
    scheduler: Any = None,
    scaler: Any = None,
    copy: bool = False,
) -> EncodedState:
    """A training state as it is now, ready to be written by `save_state`."""
    progress = state.to_dict() if callable(getattr(state, "to_dict", None)) else dict(vars(state))
    progress["metrics"] = {k: _plain_metric(v) for k, v in (progress.get("metrics") or {}).items()}
    return encode_state(_contents(model, optimizer, scheduler, scaler, progress), copy=copy)


def _plain_metric(value: Any) -> Any:
    number = to_number(value)
    return number if isinstance(number, int | float | str | list | None) else str(number)


def _save_training(
    *,
    output_dir: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Any,
    scheduler: Any = None,
    scaler: Any = None,
) -> str:
    encoded = encode_training(
        model=model, optimizer=optimizer, state=state, scheduler=scheduler, scaler=scaler
    )
    return save_state(encoded, output_dir, int(state.global_step))


def _load_training(
    *,
    checkpoint_dir: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any = None,
    scaler: Any = None,
) -> TrainState:
    with local_copy(settle(checkpoint_dir)) as directory:
        require_state(directory)
        contents = _contents(model, optimizer, scheduler, scaler, {})
        # Whoever catches the error of a damaged one goes on with the objects as they were.
        manager = CheckpointManager(directory.parent)
        loaded = manager.load(contents, directory, verify_first=True)
    return TrainState.from_saved(loaded.trainer_state)
