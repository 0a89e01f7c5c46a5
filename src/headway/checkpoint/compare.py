"""How two checkpoints differ.

Owns: the comparison of configuration, counters, state and tensors. Does not own: whether either
is intact (manifest.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.contents import TRAINER_STATE_NAME
from headway.checkpoint.jsonfile import read_json
from headway.checkpoint.manifest import Manifest, read_manifest
from headway.checkpoint.tensors import open_tensor_file
from headway.config.differences import differences

_MANIFEST_FIELDS = ("kind", "step", "topology", "metrics", "metric", "format_version")


@dataclass
class Comparison:
    """What is not the same; all empty (but `num_equal_tensors`) for equal checkpoints."""

    manifest: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    counters: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    state: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    different_tensors: dict[str, str] = field(default_factory=dict)
    """Name -> what differs: shape, dtype, or the largest absolute difference."""
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    num_equal_tensors: int = 0
    max_abs_difference: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether anything that training depends on differs."""
        return not (
            self.manifest
            or self.config
            or self.counters
            or self.state
            or self.different_tensors
            or self.only_first
            or self.only_second
        )


def compare_checkpoints(first: Path, second: Path) -> Comparison:
    """Compare two committed checkpoints, tensor by tensor."""
    manifests = read_manifest(first), read_manifest(second)
    found = Comparison()
    found.manifest = differences(
        *({name: getattr(m, name) for name in _MANIFEST_FIELDS} for m in manifests)
    )
    found.config = differences(
        *(
            _read(d, m, ["run/config.json", "config.json"])
            for d, m in zip((first, second), manifests)
        )
    )
    counters = [_read(d, m, [TRAINER_STATE_NAME]) for d, m in zip((first, second), manifests)]
    found.counters = differences(*counters)
    states = [
        _read(d, m, [n for n in m.files if n.startswith("state/") and n.endswith(".json")])
        for d, m in zip((first, second), manifests)
    ]
    found.state = differences(*states)
    _compare_tensors(first, second, manifests, found)
    return found


def _read(directory: Path, manifest: Manifest, names: list[str]) -> dict[str, Any]:
    return {name: read_json(directory / name) for name in names if name in manifest.files}


def _tensor_places(directory: Path, manifest: Manifest) -> dict[str, tuple[Path, str]]:
    """A name for each tensor that does not depend on how many shards there are."""
    places = {}
    for name in manifest.files:
        if not name.endswith(".safetensors"):
            continue
        group = name.removesuffix(".safetensors")
        if "-of-" in group:
            group = group.rpartition("-of-")[0].rpartition("-")[0]
        with open_tensor_file(directory / name) as file:
            for tensor in file.keys():  # noqa: SIM118
                places[f"{group}:{tensor}"] = (directory / name, tensor)
    return places


def _compare_tensors(
    first: Path, second: Path, manifests: tuple[Manifest, Manifest], found: Comparison
) -> None:
    left, right = (_tensor_places(d, m) for d, m in zip((first, second), manifests))
    found.only_first = sorted(set(left) - set(right))
    found.only_second = sorted(set(right) - set(left))
    for name in sorted(set(left) & set(right)):
        difference = _compare_tensor(_tensor(*left[name]), _tensor(*right[name]), found)
        if difference is None:
            found.num_equal_tensors += 1
        else:
            found.different_tensors[name] = difference


def _tensor(path: Path, name: str) -> torch.Tensor:
    with open_tensor_file(path) as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _compare_tensor(a: torch.Tensor, b: torch.Tensor, found: Comparison) -> str | None:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"{a.dtype} and {b.dtype}"
    if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest = (a.to(wide) - b.to(wide)).abs().nan_to_num(nan=float("inf")).max().item()
    found.max_abs_difference = max(found.max_abs_difference, largest)
    return f"max abs difference {largest:.6g}"
