"""Pickled files of other tools: read only on request, and only what holds no code.

Owns: every use of `torch.load` and `torch.save` in Headway. Files are read with
`weights_only=True`, which builds tensors, containers and the few listed numpy types and refuses
all else. Does not own: what becomes of the values (convert.py, weights.py).
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.checkpoint.errors import CheckpointError
from headway.errors import ConfigError

# Where training scripts put the weights inside a larger file.
_WEIGHT_KEYS = ("model", "state_dict", "model_state_dict", "module")
_DATA_PARALLEL_PREFIX = "module."


def require_permission(path: Path, allow_legacy: bool) -> None:
    """Refuse a pickled file unless the caller asked for it."""
    if not allow_legacy:
        raise ConfigError(
            f"{path} is a pickled PyTorch file, which is not read by default; pass "
            "allow_legacy=True, or turn it into safetensors with: headway checkpoint convert "
            "--allow-legacy"
        )


def _safe_globals() -> list[Any]:
    # What the generators' states of numpy consist of, under the names of numpy 1 and 2.
    core = getattr(np, "_core", None) or np.core
    reconstruct = core.multiarray._reconstruct
    return [
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
    ]


def read_pickled(path: Path) -> Any:
    """What a file holds, on the CPU; `CheckpointError` if it holds more than data."""
    try:
        with torch.serialization.safe_globals(_safe_globals()):
            return torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than tensors and plain values: {error}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_pickled(value: Any, path: Path) -> None:
    """Write a PyTorch file, for tools that read nothing else."""
    torch.save(value, path)


def weight_key(held: Any) -> str | None:
    """Under which key a file held the weights; None if it held nothing else."""
    for key in _WEIGHT_KEYS:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            return key
    return None


def state_dict_of(held: Any, path: Path) -> dict[str, torch.Tensor]:
    """The named tensors in what a file held: all of it, or the part that is the model."""
    key = weight_key(held)
    held = held if key is None else held[key]
    if not isinstance(held, Mapping):
        raise CheckpointError(f"{path} holds a {type(held).__name__}, not named tensors")
    odd = [name for name, value in held.items() if not isinstance(value, torch.Tensor)]
    odd = [name for name in odd if not str(name).endswith("_extra_state")]
    if odd:
        raise CheckpointError(f"{path}: {odd[0]!r} is not a tensor; these are not weights alone")
    tensors = {str(n): value for n, value in held.items() if isinstance(value, torch.Tensor)}
    if tensors and all(name.startswith(_DATA_PARALLEL_PREFIX) for name in tensors):
        return {n.removeprefix(_DATA_PARALLEL_PREFIX): value for n, value in tensors.items()}
    return tensors


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a PyTorch file."""
    return state_dict_of(read_pickled(path), path)
