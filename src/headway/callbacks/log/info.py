"""What is about to be trained, in a few lines."""

from __future__ import annotations

import sys
from typing import Any

from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState


class InfoCallback(TrainerCallback):
    """Prints model size, batch, length, device and output directory when training begins."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any,
        train_dataloader: Any,
        trainer: Any,
    ) -> None:
        if not state.is_world_process_zero:
            return
        total = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # Sharding renames the class; a rank of a pipeline knows of its own part only.
        name = type(model).__name__.removeprefix("FSDP")
        if name == "ModelPart":
            name = "this rank's part of the model"
        deal = train_dataloader.deal
        batch = args.per_device_train_batch_size * deal.accumulation * deal.world_size
        parts = f"{deal.accumulation} micro-batches"
        if deal.world_size > 1:
            parts += f" on each of {deal.world_size}"
        steps = f"{state.max_steps:,}" if state.max_steps else "as long as data and clock allow"
        lines = [
            ("model", f"{name}, {total:,} parameters ({trainable:,} trained)"),
            ("batch", f"{batch:,} samples a step ({parts})"),
            ("steps", f"{steps}, from {state.global_step:,}"),
            ("device", _devices(trainer.strategy, args.world_size)),
            ("seed", str(state.seed)),
            ("output", str(args.output_dir)),
        ]
        if self.verbose:
            lines += [("arguments", args.to_json_string()), ("modules", repr(model))]
        for label, text in lines:
            print(f"{label:>8}  {text}", file=sys.stderr, flush=True)


def _devices(strategy: Any, world_size: int) -> str:
    if world_size == 1:
        return str(strategy.device)
    return f"{strategy.device} and {world_size - 1} more ranks ({strategy.name})"
