"""Names of optimizers that `optim` takes, and the arguments that `optim_args` may hold.

Owns: the table, which needs no torch. Does not own: building an optimizer (optim/build.py).
"""

from __future__ import annotations

from typing import Any

from headway.errors import nearest, unknown

_ADAM = ("amsgrad", "capturable", "foreach", "fused", "maximize")
_LOW_BIT = ("amsgrad", "block_size")

# Name -> arguments beside those that have an option of their own.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adam": (*_ADAM, "decoupled_weight_decay"),
    "adamw": _ADAM,
    "adamw_4bit": _LOW_BIT,
    "adamw_8bit": _LOW_BIT,
    "adamw_bf16": ("moment_dtype", "seed"),
    "adamw_fp8": _LOW_BIT,
    "muon": (
        "adamw_lr", "adamw_weight_decay", "adjust_lr_fn", "eps", "exclude", "momentum", "nesterov",
        "ns_coefficients", "ns_steps",
    ),
    "sgd": ("dampening", "foreach", "fused", "maximize", "momentum", "nesterov"),
}  # fmt: skip

# Spellings of transformers that mean the same.
SPELLINGS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_torch_4bit": "adamw_4bit",
}
OPTIMIZERS_WITH_BETAS = tuple(name for name in OPTIMIZERS if name != "sgd")
OPTIMIZER_NAMES = (*OPTIMIZERS, *SPELLINGS)

# Kinds of parameters that `no_decay_on` may name.
DECAY_KINDS = ("bias", "embedding", "head", "norm", "vector")

_OPTIONS = {
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1 and adam_beta2",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
}


def canonical_name(optim: str) -> str:
    """The name in the table that a spelling stands for."""
    return SPELLINGS.get(optim, optim)


def check_optim_args(args: Any) -> str | None:
    """What is wrong with the names in `optim_args`."""
    name = canonical_name(args.optim)
    if not args.optim_args or name not in OPTIMIZERS:
        return None
    allowed = OPTIMIZERS[name]
    for key in args.optim_args:
        if key in allowed:
            continue
        if key in _OPTIONS:
            return f"optim_args.{key} of optim={args.optim!r} has an option: set {_OPTIONS[key]}"
        others = [other for other, takes in OPTIMIZERS.items() if key in takes]
        if others and nearest(key, allowed) is None:
            return (
                f"optim_args.{key} is not for optim={args.optim!r} but for {', '.join(others)}; "
                f"allowed here: {', '.join(allowed)}"
            )
        return f"optim_args of optim={args.optim!r}: {unknown('argument', key, allowed)}"
    return None
