"""`TrainerConfig`: the fields of xaytune's trainer, checked when the object is made.

Owns names, defaults and rules. Does not own what they become in Headway (plan).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from headway.config.typecheck import conform_fields, field_types, unknown_keys
from headway.errors import ConfigError, unknown

_CHOICES = {
    "strategy": ("auto", "none", "ddp", "fsdp", "deepspeed"),
    "mixed_precision": ("bf16", "fp16", "fp32"),
    "scheduler": ("constant", "constant_with_warmup", "linear", "cosine"),
}
_LEAST = {
    "batch_size": 1,
    "gradient_accumulation": 1,
    "num_epochs": 1,
    "warmup_steps": 0,
    "warmup_ratio": 0,
    "learning_rate": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "seed": 0,
    "checkpoint_every_n_steps": 0,
}


@dataclass
class TrainerConfig:
    """How to train. A value that cannot be meant is a ConfigError."""

    strategy: str = "auto"
    """`none`: one device. `ddp`, `fsdp`, `deepspeed`: the ranks that a launcher started.
    `auto`: `none` alone; on several ranks `ddp`, or `fsdp` where the model is too large for it."""
    mixed_precision: str = "bf16"
    """Autocast to `bf16`, or to `fp16` with loss scaling; `fp32`: the precision of the weights."""
    batch_size: int = 4
    """Samples per batch where the data loader does not tell; the loader is used as it is."""
    gradient_accumulation: int = 1
    """Batches per optimizer step."""
    learning_rate: float = 2e-4
    """Peak rate of the default optimizer, AdamW."""
    num_epochs: int = 3
    """Passes over the data loader."""
    max_steps: int = -1
    """Most optimizer steps, however many epochs that is. -1: no limit."""
    warmup_steps: int = 0
    """Steps over which the rate climbs; exclusive with `warmup_ratio`."""
    warmup_ratio: float = 0.0
    """The same as a share of all steps."""
    scheduler: str = "cosine"
    """`constant`, `constant_with_warmup`, `linear` or `cosine`."""
    weight_decay: float = 0.01
    """Decay of the default optimizer; norms and biases have none."""
    max_grad_norm: float = 1.0
    """Clip the gradient's norm to this. 0: no clipping."""
    seed: int = 42
    """Seed of every generator; a resumed run goes on with the one it was started with."""
    checkpoint_every_n_steps: int = 500
    """Optimizer steps between checkpoints. 0: none in between."""
    save_last: bool = True
    """Write a checkpoint when training ends."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    async_checkpoint: bool = False
    """Write checkpoints in the background; `checkpoint_saved` then fires when one is committed."""
    output_dir: str = "output"
    """Folder of the checkpoints (Headway's addition)."""
    save_total_limit: int | None = None
    """Newest checkpoints to keep (Headway's addition). None: all."""

    def __post_init__(self) -> None:
        problems = [problem.message for problem in conform_fields(self)]
        # Comparing values of the wrong type would only hide the first mistake behind a second.
        problems = problems or _find_problems(self)
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Build from a dict; an unknown key is refused with the nearest one."""
        problems = unknown_keys(given, list(field_types(cls)))
        if problems:
            raise ConfigError([problem.message for problem in problems])
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


def _find_problems(config: TrainerConfig) -> list[str]:
    problems = [
        f"{name}: " + unknown("value", getattr(config, name), allowed)
        for name, allowed in _CHOICES.items()
        if getattr(config, name) not in allowed
    ]
    for name, least in _LEAST.items():
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= least):
            problems.append(f"{name} must be at least {least}, got {value}")
    if config.learning_rate == 0:
        problems.append("learning_rate must be above 0, got 0")
    if config.warmup_ratio > 1:
        problems.append(f"warmup_ratio is a share from 0 to 1, got {config.warmup_ratio}")
    if config.warmup_steps and config.warmup_ratio:
        problems.append(
            f"warmup_steps={config.warmup_steps} and warmup_ratio={config.warmup_ratio} exclude "
            f"each other; give one"
        )
    if config.max_steps != -1 and config.max_steps < 1:
        problems.append(f"max_steps must be at least 1, or -1 for no limit, got {config.max_steps}")
    if "://" in config.output_dir:
        problems.append(
            f"output_dir={config.output_dir!r} is an address; a folder is needed (Headway's own "
            "trainers take an address as checkpoint_address)"
        )
    if config.save_total_limit is not None and config.save_total_limit < 1:
        problems.append(f"save_total_limit must be at least 1, got {config.save_total_limit}")
    return problems
