"""FP8 training: the matrix products of linear layers in eight bits, by torchao.

Owns: whether this machine can do it, and the exchange of the layers. Weights, their names and
their dtype stay, so that checkpoints do not tell an FP8 run from another. Does not own: the
recipes' arithmetic (torchao), which layers are meant (layers.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from headway.errors import ConfigError, unknown
from headway.precision.layers import choose_layers, require_some, warn_of_idle_patterns
from headway.precision.torchao_package import load_torchao, torchao_version

logger = logging.getLogger(__name__)

RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")
TOKEN_MULTIPLE = 16
"""The gradient of a weight is a product over all tokens of a micro-batch. In eight bits the device
makes it only of a multiple of this number of them; torchao would pad only with copies of them all.
"""
_WHOLE_WEIGHT_GRADIENTS = ("rowwise_with_gw_hp",)
LEAST_CAPABILITY = (8, 9)
# Fails for inputs of more than two dimensions, which are those of every language model.
_BROKEN = {("rowwise_with_gw_hp", "0.16.0")}

_checks_device = True


@contextmanager
def on_any_device() -> Iterator[None]:
    """For tests: FP8 layers also where they gain nothing; a CPU computes all recipes, slowly."""
    global _checks_device
    _checks_device = False
    try:
        yield
    finally:
        _checks_device = True


def check(recipe: str, device: torch.device) -> None:
    """Refuse what cannot work here, before a model is built; `ConfigError` with the reason."""
    if recipe not in RECIPES:
        raise ConfigError(unknown("fp8_recipe", recipe, RECIPES))
    if _checks_device:
        _check_device(recipe, device)
    load_torchao(f"fp8_recipe={recipe!r}", "torchao.float8")
    version = torchao_version()
    if (recipe, version) in _BROKEN:
        raise ConfigError(
            f"fp8_recipe={recipe!r} fails in torchao {version} for inputs of more than two "
            "dimensions; install another version, or use 'rowwise' or 'tensorwise'"
        )


def limits_tokens(recipe: str, device: torch.device) -> bool:
    """Whether micro-batches need a multiple of `TOKEN_MULTIPLE` tokens."""
    return device.type == "cuda" and recipe not in _WHOLE_WEIGHT_GRADIENTS


def _check_device(recipe: str, device: torch.device) -> None:
    needs = "needs a CUDA device of compute capability 8.9 or more (Ada, Hopper, Blackwell)"
    if device.type != "cuda":
        raise ConfigError(f"fp8_recipe={recipe!r} {needs}; this run is on {device}")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"fp8_recipe={recipe!r} {needs}; {torch.cuda.get_device_name(device)} ({device}) has "
            f"{capability[0]}.{capability[1]}. mixed_precision='bf16' works on it"
        )


def convert(
    module: nn.Module,
    recipe: str,
    alignment: int = 16,
    device: torch.device | None = None,
    *,
    exclude: Sequence[str] = (),
    is_part: bool = False,
) -> nn.Module:
    """Put FP8 layers in the place of linear layers, around the same weights; returns `module`.

    Works on a model without values (on the meta device). `alignment`: layers with a dimension that
    is no multiple of it stay; 0: all are taken. `device`: where it will train; None if `check` was
    called. `exclude`: regular expressions for names that stay. `is_part`: the module is a stage of
    a pipeline, which may have nothing to convert.
    """
    if device is not None:
        check(recipe, device)

    def misfit(layer: nn.Linear) -> str | None:
        if alignment and (layer.in_features % alignment or layer.out_features % alignment):
            return f"a dimension is no multiple of fp8_dim_alignment={alignment}"
        return None

    choice = choose_layers(module, exclude, misfit, option="fp8_exclude", own_class="Float8Linear")
    if not is_part:
        warn_of_idle_patterns(module, exclude, option="fp8_exclude")
    require_some(choice, f"fp8_recipe={recipe!r}", "fp8_exclude", is_part=is_part)
    float8 = load_torchao(f"fp8_recipe={recipe!r}", "torchao.float8")
    chosen = set(choice.chosen)
    if chosen:
        float8.convert_to_float8_training(
            module,
            config=float8.Float8LinearConfig.from_recipe_name(recipe),
            module_filter_fn=lambda _, name: name in chosen,
        )
    rest = choice.describe_rest("fp8_exclude")
    logger.info(
        "FP8 (%s): converted %d/%d Linear layers%s",
        recipe,
        len(chosen),
        choice.num_layers,
        f"; as they were: {rest}" if rest else "",
    )
    return module
