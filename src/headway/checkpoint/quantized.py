"""A checkpoint's weights as a low-bit model folder.

Owns: what a run tells about its quantization, the plan for a folder, writing it. Always
safetensors: the parts of a quantized weight are tensors under names of their own, as transformers
stores them. Does not own: reading one (weights.py, models/hf.py), torchao's tensors
(precision/quantized.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.args import HEAD_LAYERS
from headway.checkpoint.draft import Draft
from headway.checkpoint.export import Source, dtype_settings, require_new
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.tensors import num_bytes
from headway.errors import ConfigError
from headway.precision import qat
from headway.precision.layers import LayerChoice, require_some, warn_of_idle_patterns
from headway.precision.quantized import (
    CONFIG_KEY,
    OWN_KEY,
    check_machine,
    describe,
    quantize_weight,
    take_apart,
)
from headway.precision.recipes import QuantRecipe, find_recipe

logger = logging.getLogger(__name__)

_RUN_CONFIG = Path("run", "config.json")


@dataclass(frozen=True)
class TrainedAs:
    """What a run that trained for quantization was told."""

    recipe: str
    group_size: int | None
    exclude: tuple[str, ...]


@dataclass
class QuantizationPlan:
    """Which weights of a source become what."""

    recipe: QuantRecipe
    group_size: int | None
    choice: LayerChoice
    trained_as: TrainedAs | None

    @property
    def names(self) -> list[str]:
        """Of the weights, as they are stored."""
        return [_weight_of(layer) for layer in self.choice.chosen]


def _weight_of(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


def trained_as(directory: Path) -> TrainedAs | None:
    """The recipe that a checkpoint's run trained with; None if with none, or if nobody knows."""
    path = directory / _RUN_CONFIG
    args = read_json_object(path).get("args") if path.is_file() else None
    recipe = args.get("qat_recipe") if isinstance(args, dict) else None
    if not isinstance(args, dict) or not isinstance(recipe, str):
        return None
    exclude = args.get("qat_exclude")
    return TrainedAs(
        recipe,
        args.get("qat_group_size"),
        tuple(exclude if isinstance(exclude, list) else HEAD_LAYERS),
    )


def plan_quantization(
    source: Source,
    model: nn.Module,
    recipe: str,
    *,
    group_size: int | None = None,
    exclude: Sequence[str] = (),
    all_layers: bool = False,
    trained: TrainedAs | None = None,
) -> QuantizationPlan:
    """What `--quantize` will do; all that is wrong is told here, before anything is written.

    `model` is the source's, values are not needed. Where the run trained with this recipe, its
    group size counts unless another is given, and the layers that it left whole stay so; else the
    head does. `exclude` adds to these, and `all_layers` takes them away.
    """
    known = find_recipe(recipe, "--quantize")
    check_machine(known)
    left: Sequence[str] = HEAD_LAYERS
    if trained is not None and trained.recipe == recipe:
        group_size = trained.group_size if group_size is None else group_size
        left = trained.exclude
    size = known.resolve_group_size(group_size)
    _warn_of_difference(known, size, trained)
    option = "--exclude"
    kept = [*(() if all_layers else left), *exclude]
    choice = qat.choose(model, known, size, kept, option=option)
    warn_of_idle_patterns(model, exclude, option=option)
    _keep_stored(choice, source)
    require_some(choice, f"--quantize {recipe}", option, is_part=False)
    return QuantizationPlan(known, size, choice, trained)


def _keep_stored(choice: LayerChoice, source: Source) -> None:
    absent = [name for name in choice.chosen if _weight_of(name) not in source.tensors]
    if absent:
        choice.unfit["not stored under this name"] = absent
        choice.chosen = [name for name in choice.chosen if name not in set(absent)]


def _warn_of_difference(
    recipe: QuantRecipe, group_size: int | None, trained: TrainedAs | None
) -> None:
    if trained is None:
        return
    if trained.recipe != recipe.name:
        logger.warning(
            "--quantize %s, but the model was trained with qat_recipe=%r: it is rounded to a grid "
            "that its training did not see",
            recipe.name,
            trained.recipe,
        )
        return
    before = recipe.resolve_group_size(trained.group_size)
    if before != group_size:
        logger.warning(
            "--group-size %s, but the model was trained with qat_group_size=%s",
            group_size,
            before,
        )


def count_bytes(source: Source, plan: QuantizationPlan) -> int:
    """Bytes of the weights that the plan will make, without making them."""
    # torchao makes float8 weights on their device alone, not without values.
    device = "cuda" if plan.recipe.weights == "float8" else "meta"
    planned, sizes, total = set(plan.names), {}, 0
    for name, tensor in source.tensors.items():
        if name not in planned:
            total += num_bytes(tensor)
            continue
        kind = (tensor.shape, tensor.dtype)
        if kind not in sizes:
            blank = torch.zeros_like(tensor, device=device)
            made, _ = take_apart({name: quantize_weight(blank, plan.recipe, plan.group_size)})
            sizes[kind] = sum(num_bytes(part) for part in made.values())
        total += sizes[kind]
    return total


def quantize_source(source: Source, plan: QuantizationPlan) -> dict[str, Any]:
    """Change the planned weights in memory; returns the block for config.json."""
    device = "cuda" if plan.recipe.weights == "float8" else "cpu"
    layout = ""
    for name in plan.names:
        weight = source.tensors[name].to(device)
        found = quantize_weight(weight, plan.recipe, plan.group_size)
        layout = type(found).__name__
        source.tensors[name] = found if device == "cpu" else found.to("cpu")
    left = [*plan.choice.excluded, *(n for names in plan.choice.unfit.values() for n in names)]
    return describe(plan.recipe, plan.group_size, left, layout)


def check_dtype(recipe: QuantRecipe, dtype: str | None) -> str | None:
    """The dtype of the weights that stay: the one given, or the only one that works."""
    if recipe.dtype is None:
        return dtype
    if dtype not in (None, recipe.dtype):
        raise ConfigError(
            f"--dtype {dtype}: {recipe.name} works only with weights in {recipe.dtype}"
        )
    return recipe.dtype


def export_quantized(source: Source, block: dict[str, Any], target: Path, dtype: str | None) -> int:
    """Write the folder, committed as kind export; returns the bytes of its weights."""
    require_new(target)
    plain, metadata = take_apart(source.tensors)
    with Draft(target) as draft:
        # Every file tells of all weights: a reader may take any of them for the first.
        files = draft.write_shards("model", plain, aliases=source.aliases, metadata=metadata)
        for name, path in source.files.items():
            if name == "config.json":
                config = {**read_json_object(path), CONFIG_KEY: block}
                if dtype is not None:
                    config |= dtype_settings(dtype)
                draft.write_json(name, config, indent=2)
            else:
                draft.take(path, name)
            files.append(name)
        draft.add_component("model", files)
        facts = {"quantized": block[OWN_KEY]}
        draft.commit(draft.describe(kind="export", step=source.step, metadata=facts))
    return sum(num_bytes(tensor) for tensor in plain.values())
