"""The rules about FP8 training and quantization that arguments alone decide.

Owns: our own rules for these options. Does not own: the reference's (rules_values, rules_pairs).
"""

from __future__ import annotations

import re
from typing import Any

from headway.config.rules import Check, Rule, idle

_FP8 = ("fp8_dim_alignment", "fp8_exclude")
_WITHOUT_GROUPS = "float8-dynamic-act-float8-weight"


def _patterns(option: str) -> Check:
    def check(args: Any) -> str | None:
        for pattern in getattr(args, option):
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{option}: {pattern!r} is no regular expression: {error}"
        return None

    return check


def _group_size(args: Any) -> str | None:
    size, recipe = args.qat_group_size, args.qat_recipe
    if size is None:
        return None
    if size < 2:
        return f"qat_group_size must be 2 or more, got {size}"
    if recipe is None:
        return f"qat_group_size={size} needs qat_recipe, which is not set"
    if recipe == _WITHOUT_GROUPS:
        return f"qat_group_size={size}: qat_recipe={recipe!r} has a scale for each row, no groups"
    return None


def _accelerate_fp8(args: Any) -> str | None:
    if args.fp8_recipe is None:
        return None
    return (
        f"fp8_recipe={args.fp8_recipe!r} cannot be used in AccelTrainer, where precision is the "
        "Accelerator's: pass it mixed_precision='fp8' with kwargs_handlers=[AORecipeKwargs(...)], "
        "or use Trainer, DDPTrainer, FSDP2Trainer or PipelineTrainer"
    )


# fmt: off
RULES: list[Rule] = [
    *(Rule("H110", (option,), "args", f"{option} holds regular expressions.", _patterns(option))
      for option in ("fp8_exclude", "qat_exclude")),
    Rule("H111", ("qat_group_size", "qat_recipe"), "args",
         "A group size is for a qat_recipe that has groups.", _group_size),
    Rule("H112", ("fp8_recipe",), "args", "No fp8_recipe in AccelTrainer.", _accelerate_fp8,
         strategies=("accelerate",)),
    Rule("H113", (*_FP8, "fp8_recipe"), "args", "Options of FP8 need fp8_recipe.",
         idle("fp8_recipe", *_FP8), "warn"),
    Rule("H114", ("qat_exclude", "qat_recipe"), "args", "qat_exclude needs qat_recipe.",
         idle("qat_recipe", "qat_exclude"), "warn"),
]
# fmt: on
