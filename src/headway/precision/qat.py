"""Quantization-aware training: linear layers that compute as if their weights had few bits.

Owns: putting torchao's fake-quantized layers in the place of linear ones, around the same weights.
Weights stay whole, and nothing else is stored. Does not own: making the low-bit model afterwards
(quantized.py), what a recipe means (recipes.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from headway.precision.layers import (
    LayerChoice,
    choose_layers,
    require_some,
    warn_of_idle_patterns,
)
from headway.precision.recipes import QuantRecipe, find_recipe
from headway.precision.torchao_package import load_torchao, quietly

logger = logging.getLogger(__name__)

_LAYER = "FakeQuantizedLinear"
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]


def base_config(recipe: QuantRecipe, group_size: int | None) -> Any:
    """torchao's configuration of a recipe.

    int4-weight-only is symmetric with a scale for each group: the one grid of int4 weights that
    torchao trains with, writes and computes on every device.
    """
    ao = load_torchao(f"the recipe {recipe.name}", "torchao.quantization")
    if recipe.weights == "float8":
        return ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
    groups = ao.PerGroup(group_size)
    if recipe.activations == "unchanged":
        return ao.IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=groups)
    return ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=_INT4, weight_granularity=groups)


def choose(
    module: nn.Module,
    recipe: QuantRecipe,
    group_size: int | None,
    exclude: Sequence[str],
    *,
    option: str = "qat_exclude",
) -> LayerChoice:
    """The layers that a recipe quantizes, in training and in the file alike."""
    owners: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1

    def misfit(layer: nn.Linear) -> str | None:
        if owners[id(layer.weight)] > 1:
            return "its weight is also another layer's"
        if group_size is not None and layer.in_features % group_size:
            return f"its input is no multiple of the group size {group_size}"
        if group_size is None and (layer.in_features % 16 or layer.out_features % 16):
            return "a dimension is no multiple of 16"
        return None

    return choose_layers(module, exclude, misfit, option=option, own_class=_LAYER)


def prepare(
    module: nn.Module,
    recipe: str,
    *,
    group_size: int | None = None,
    exclude: Sequence[str] = (),
    is_part: bool = False,
) -> nn.Module:
    """Put fake-quantized layers in the place of linear layers; returns `module`.

    Works on a model without values (on the meta device). `group_size` None: the recipe's own.
    `exclude`: regular expressions for names that stay. `is_part`: the module is a stage of a
    pipeline, which may have nothing to convert.
    """
    known = find_recipe(recipe, "qat_recipe")
    group_size = known.resolve_group_size(group_size)
    config = base_config(known, group_size)
    choice = choose(module, known, group_size, exclude)
    if not is_part:
        warn_of_idle_patterns(module, exclude, option="qat_exclude")
    require_some(choice, f"qat_recipe={recipe!r}", "qat_exclude", is_part=is_part)
    before = {name: module.get_submodule(name) for name in choice.chosen}
    quantization = load_torchao(f"qat_recipe={recipe!r}", "torchao.quantization")
    steps = load_torchao(f"qat_recipe={recipe!r}", "torchao.quantization.qat")
    with quietly():
        quantization.quantize_(
            module,
            steps.QATConfig(config, step="prepare"),
            filter_fn=lambda _, name: name in before,
        )
    for name, old in before.items():
        new = module.get_submodule(name)
        # On the meta device torchao makes new ones, which would lose ties and frozen weights.
        new.weight, new.bias = old.weight, old.bias
        new.train(old.training)
    if before and known.weights == "int4" and _bounds_stop_gradients():
        logger.warning(
            "qat_recipe=%r: weights at the ends of their grid have no gradient with torch %s, "
            "whose clamp lets none through at its bounds; torch before 2.14 does",
            recipe,
            torch.__version__,
        )
    rest = choice.describe_rest("qat_exclude")
    logger.info(
        "QAT (%s%s): converted %d/%d Linear layers%s",
        recipe,
        f", groups of {group_size}" if group_size else "",
        len(before),
        choice.num_layers,
        f"; as they were: {rest}" if rest else "",
    )
    return module


def _bounds_stop_gradients() -> bool:
    """torchao rounds to the grid first and clamps then, so that many weights are at a bound."""
    with torch.enable_grad():
        at_bound = torch.ones(1, device="cpu", requires_grad=True)
        (gradient,) = torch.autograd.grad(at_bound.clamp(-1, 1), at_bound)
    return gradient.item() < 1


def switch(module: nn.Module, active: bool) -> int:
    """Have prepared layers compute with few bits, or as plain linear ones; how many there are."""
    found = 0
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and type(layer).__name__ == _LAYER:
            found += 1
            for part in ("activation_fake_quantizer", "weight_fake_quantizer"):
                quantizer = getattr(layer, part)
                if quantizer is not None:
                    quantizer.enabled = active
    return found
