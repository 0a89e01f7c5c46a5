"""The recipes by which weights and activations get fewer bits, as facts without torch.

Owns: what each name of `qat_recipe` and `finalize --quantize` means. Does not own: the classes
that carry it out (qat.py, quantized.py), the names of FP8 training, which are torchao's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import ConfigError, unknown


@dataclass(frozen=True)
class QuantRecipe:
    """How a linear layer is quantized."""

    name: str
    weights: str
    activations: str
    group_size: int | None
    """Weights along a row that share a scale, unless another number is asked for.

    None: a whole row does, whatever its length."""
    dtype: str | None = None
    """The only dtype of the other weights that the quantized layers work with; None: any."""

    def resolve_group_size(self, given: int | None) -> int | None:
        """The group size that is meant; `ConfigError` where there are no groups to size."""
        if given is None:
            return self.group_size
        if self.group_size is None:
            raise ConfigError(
                f"a group size of {given} was given, but {self.name} has one scale for each row; "
                "leave it out"
            )
        if given < 2:
            raise ConfigError(f"a group has 2 weights or more, got a group size of {given}")
        return given


RECIPES = {
    recipe.name: recipe
    for recipe in (
        QuantRecipe("int8-dynamic-act-int4-weight", "int4", "int8 per token", 32),
        QuantRecipe("int4-weight-only", "int4", "unchanged", 128),
        QuantRecipe(
            "float8-dynamic-act-float8-weight", "float8", "float8 per token", None, "bfloat16"
        ),
    )
}


def find_recipe(name: str, option: str = "recipe") -> QuantRecipe:
    """The recipe of a name; `ConfigError` with the nearest one for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(unknown(option, name, RECIPES))
    return RECIPES[name]
