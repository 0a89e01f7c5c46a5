"""The rules on the choice of the optimizer and on its step inside the backward pass.

Owns: our own rules of these options. Does not own: those of the option reference (rules_pairs).
"""

from __future__ import annotations

from typing import Any

from headway.config.optimizers import (
    DECAY_KINDS,
    OPTIMIZER_NAMES,
    OPTIMIZERS_WITH_BETAS,
    canonical_name,
    check_optim_args,
)
from headway.config.rules import Rule, default_of
from headway.config.rules_values import one_of

_FUSE = "fuse_optim_with_backward"
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


def _fuse_with_rescue(args: Any) -> str | None:
    if not (args.fuse_optim_with_backward and args.save_on_error):
        return None
    return (
        f"{_FUSE} cannot be used with save_on_error: an error in the backward pass leaves some "
        f"parameters updated and others not"
    )


def _fuse_with_global_batch(args: Any) -> str | None:
    whole, part = args.global_batch_size, args.per_device_train_batch_size
    if not args.fuse_optim_with_backward or whole is None or whole <= part:
        return None
    return (
        f"{_FUSE} cannot be used with global_batch_size={whole}, which makes several micro-batches "
        f"of per_device_train_batch_size={part} in a step: the gradient has to be whole before the "
        f"update"
    )


def _not_of_the_optimizer(args: Any) -> str | None:
    if canonical_name(args.optim) in OPTIMIZERS_WITH_BETAS:
        return None
    given = [
        f"{name}={getattr(args, name)!r}"
        for name in _ADAM
        if getattr(args, name) != default_of(args, name)
    ]
    if not given:
        return None
    return f"{' and '.join(given)}: without effect, since optim={args.optim!r} has no such setting"


# fmt: off
RULES: list[Rule] = [
    Rule("H90", ("optim",), "args", f"optim is one of {', '.join(OPTIMIZER_NAMES)}.",
         one_of("optim", OPTIMIZER_NAMES)),
    Rule("H91", ("optim_args", "optim"), "args",
         "optim_args holds arguments of the optimizer that have no option of their own.",
         check_optim_args),
    Rule("H92", ("no_decay_on",), "args", f"no_decay_on names some of {', '.join(DECAY_KINDS)}.",
         one_of("no_decay_on", DECAY_KINDS)),
    Rule("H93", (_FUSE, "save_on_error"), "args",
         "No fused optimizer with save_on_error.", _fuse_with_rescue),
    Rule("H94", (_FUSE, "global_batch_size"), "args",
         "No fused optimizer with several micro-batches in a step.", _fuse_with_global_batch,
         strategies=("single", "pipeline")),
    Rule("H95", (_FUSE, "pipeline_size"), "prepare",
         "No fused optimizer with several pipelines side by side."),
    Rule("H96", (*_ADAM, "optim"), "args",
         "adam_beta1, adam_beta2 and adam_epsilon are for the optimizers of Adam's kind.",
         _not_of_the_optimizer, "warn"),
]
# fmt: on
