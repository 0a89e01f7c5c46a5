"""The optimizer that `optim` names, with the settings of the training arguments.

Owns: what each name means. Does not own: the names (config/optimizers.py), groups (groups.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.args import TrainingArguments
from headway.config.optimizers import canonical_name
from headway.errors import ConfigError
from headway.optim.groups import Group
from headway.optim.kinds import Kinds
from headway.optim.muon import build_muon
from headway.optim.stochastic_adamw import StochasticAdamW

logger = logging.getLogger(__name__)

_LOW_BIT = {"adamw_8bit": "AdamW8bit", "adamw_4bit": "AdamW4bit", "adamw_fp8": "AdamWFp8"}


def build_named(
    args: TrainingArguments, groups: Sequence[Group], kinds: Kinds, *, sparse: bool = False
) -> Optimizer:
    """The optimizer of `args.optim`; `sparse` says that some gradients may be."""
    name, given = canonical_name(args.optim), dict(args.optim_args or {})
    rate = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    adam = {**rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    fused = _can_fuse(groups)
    if name == "muon":
        return _build_muon(groups, kinds, rate, {**adam, "fused": fused}, given)
    if name in _LOW_BIT:
        from headway.optim.low_bit import low_bit_class

        return _make(args, low_bit_class(_LOW_BIT[name]), groups, {**adam, **given})
    if name == "adamw_bf16":
        if not any(p.dtype == torch.bfloat16 for group in groups for _, p in group.members):
            logger.warning(
                "optim='adamw_bf16' rounds weights in bfloat16, and the model has none; set "
                "default_dtype='bfloat16'"
            )
        return _make(args, StochasticAdamW, groups, {**adam, **given})
    stands_still = name == "sgd" and _stands_still_fused(groups)
    if not {"foreach", "fused", "capturable"} & given.keys():
        # With momentum torch's fused SGD needs a buffer of every parameter from the first step on:
        # one that is thawed later has none.
        plain_only = sparse or _is_sharded(groups) or given.get("momentum") or stands_still
        given["fused"] = fused and not (name == "sgd" and plain_only)
    if given.get("fused") and stands_still:
        raise ConfigError(
            "optim_args: fused=True with optim='sgd' changes no weights in half precision on a CPU "
            "(a fault of torch); leave fused out"
        )
    classes: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, adam),
        "adam": (torch.optim.Adam, adam),
        "sgd": (torch.optim.SGD, rate),
    }
    cls, settings = classes[name]
    return _make(args, cls, groups, {**settings, **given})


def _make(
    args: TrainingArguments,
    cls: Callable[..., Optimizer],
    groups: Sequence[Group],
    arguments: dict[str, Any],
) -> Optimizer:
    try:
        return cls([group.as_param_group() for group in groups], **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"optim={args.optim!r}, optim_args={args.optim_args}: {error}") from error


def _build_muon(
    groups: Sequence[Group],
    kinds: Kinds,
    rate: dict[str, Any],
    adamw: dict[str, Any],
    given: dict[str, Any],
) -> Optimizer:
    exclude = given.pop("exclude", None)
    for option in ("lr", "weight_decay"):
        adamw[option] = given.pop(f"adamw_{option}", adamw[option])
    # With updates of AdamW's size one learning rate suits both.
    muon = {**rate, "adjust_lr_fn": "match_rms_adamw", **given}
    if "ns_coefficients" in muon:
        muon["ns_coefficients"] = tuple(muon["ns_coefficients"])
    return build_muon(groups, kinds, muon=muon, adamw=adamw, exclude=exclude)


def _can_fuse(groups: Sequence[Group]) -> bool:
    """The fused kernel is the fastest on CPU and CUDA alike, and the only one that can withhold a
    non-finite step without asking the host."""
    parameters = [parameter for group in groups for _, parameter in group.members]
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)


def _stands_still_fused(groups: Sequence[Group]) -> bool:
    """Whether torch's fused SGD would pass over weights: pytorch#191763, without a word."""
    return any(
        p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16)
        for group in groups
        for _, p in group.members
    )


def _is_sharded(groups: Sequence[Group]) -> bool:
    """Whether ranks hold parts of parameters, for which torch has no fused SGD."""
    return any(isinstance(p, DTensor) for group in groups for _, p in group.members)
