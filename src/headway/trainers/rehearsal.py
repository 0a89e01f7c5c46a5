"""What a trainer refuses before its first step, found without values and all at once.

Owns: which of the checks that need a model also work on one without memory. Does not own: any of
them, nor what they are for (preparation.py, preflight.py, trainer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from headway.args import TrainingArguments
from headway.errors import check_all
from headway.models.fused_loss import FusedLoss
from headway.precision.amp import Context, autocast, check_scaled
from headway.precision.quantized import require_trainable
from headway.strategies.torch_settings import check_attention
from headway.trainers.preparation import changes, check_arguments, choose_fused_loss


def rehearse(
    args: TrainingArguments,
    model: nn.Module,
    model_init: Callable[[], nn.Module],
    device: torch.device,
) -> None:
    """Do to a model that nobody will train what training would; `ConfigError` with all problems.

    `device` is the one that training would have. The model is changed by it.
    """
    # A loss that cannot be had here need not keep the rest from being looked at.
    found: dict[str, FusedLoss | None] = {}

    def choose_loss() -> None:
        found["loss"] = choose_fused_loss(args, None, device)

    def prepare() -> None:
        check_all(*changes(model, args, 0, device, None, found.get("loss")))

    def attend() -> None:
        context: Context = nullcontext
        if args.strategy_name != "accelerate":  # there, precision is the Accelerator's
            context = autocast(args.mixed_precision, device)
        check_attention(args, model, device, context)

    check_all(
        lambda: check_arguments(args, None, model_init, device),
        choose_loss,
        lambda: require_trainable(model),
        lambda: check_scaled(model) if args.mixed_precision == "fp16" else None,
        attend,
        prepare,
    )
