"""Which weight files a folder has: safetensors or PyTorch, one file or shards with an index.

Owns: the file names and the choice between them. Does not own: reading tensors (weights.py).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.manifest import MANIFEST_NAME
from headway.checkpoint.storage import check_name

WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
CHECKPOINT_MANIFEST_FILENAME = MANIFEST_NAME
MODEL_EXCLUDED_MARKER = ".forgather_no_model_weights"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointMeta:
    """The file through which a folder's weights are read."""

    file_name: str
    is_index: bool
    safetensors: bool


# Safetensors first: a pickle is never read where there is a choice.
_FORMS = (
    CheckpointMeta(SAFE_WEIGHTS_INDEX_NAME, True, True),
    CheckpointMeta(SAFE_WEIGHTS_NAME, False, True),
    CheckpointMeta(WEIGHTS_INDEX_NAME, True, False),
    CheckpointMeta(WEIGHTS_NAME, False, False),
)


def find_weights(path: str | Path) -> CheckpointMeta | None:
    """The weights of a folder, or None. Two different safetensors forms are an error."""
    directory = Path(path)
    there = [form for form in _FORMS if (directory / form.file_name).is_file()]
    if not there:
        return None
    safe = [form for form in there if form.safetensors]
    if len(safe) == 2 and set(_indexed_files(directory / safe[0].file_name)) != {SAFE_WEIGHTS_NAME}:
        raise CheckpointError(
            f"{directory} holds two sets of weights, {safe[0].file_name} and {safe[1].file_name}; "
            "remove the one that is not meant"
        )
    if safe and len(safe) < len(there):
        logger.warning(
            "%s holds weights in two formats; %s is read, not %s",
            directory,
            safe[0].file_name,
            next(form.file_name for form in there if not form.safetensors),
        )
    return there[0]


def get_checkpoint_metadata(path: str | Path) -> CheckpointMeta:
    """The weights of a folder; `FileNotFoundError` if it has none."""
    found = find_weights(path)
    if found is None:
        names = ", ".join(form.file_name for form in _FORMS)
        raise FileNotFoundError(f"{path} holds no weights: none of {names}")
    return found


def _indexed_files(index_path: Path) -> list[str]:
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index_path} has no weight_map from names to files")
    return sorted({check_name(name) for name in weight_map.values()})


def is_half_checkpoint(directory: Path) -> bool:
    """Whether a folder has the parts of a Headway checkpoint but not the manifest."""
    return (directory / "state").is_dir() and not os.path.lexists(directory / MANIFEST_NAME)


def weight_files(directory: Path, meta: CheckpointMeta) -> list[str]:
    """Names of the files that hold the tensors."""
    return _indexed_files(directory / meta.file_name) if meta.is_index else [meta.file_name]


def missing_weight_files(directory: Path, meta: CheckpointMeta) -> list[Path]:
    """Weight files that an index names and the folder does not have."""
    paths = [directory / name for name in weight_files(directory, meta)]
    return [path for path in paths if not path.is_file()]
