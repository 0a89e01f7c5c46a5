"""What one save writes and one load fills, and the names of the files it goes to.

Owns: `CheckpointContents` and the fixed file names. Does not own: the copy of it that a save works
on (staged.py, staging.py), nor the bytes (writer.py, reader.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headway.checkpoint.component import StateComponent
from headway.errors import ConfigError

RESERVED_KEYS = frozenset({"model", "optimizer"})
TRAINER_STATE_STEM = "trainer_state"
TRAINER_STATE_NAME = f"{TRAINER_STATE_STEM}.json"
EVAL_METRICS_NAME = "eval_metrics.json"
STATE_FOLDER = "state"
OPTIMIZER_STATE_NAME = f"{STATE_FOLDER}/optimizer.json"
MODEL_EXTRA_STEM = f"{STATE_FOLDER}/model"
RUN_FOLDER = "run"
RUN_CONFIG_NAME = f"{RUN_FOLDER}/config.json"


@dataclass
class CheckpointContents:
    """What one save writes and one load fills."""

    model: nn.Module
    """Always there: its names are those of the optimizer's state too."""
    optimizer: torch.optim.Optimizer | None = None
    components: list[StateComponent] = field(default_factory=list)
    """Scheduler, data position, RNG, callbacks: each to `state/<key>.json` and, if it has tensors,
    `state/<key>.safetensors`."""
    trainer_state: dict[str, Any] = field(default_factory=dict)
    """Goes to `trainer_state.json`."""
    model_config: dict[str, Any] | None = None
    """Goes to `config.json`, the Hugging Face model config; None: shards and index only."""
    generation_config: dict[str, Any] | None = None
    save_tokenizer: Callable[[str], Any] | None = None
    """Writes the tokenizer's files into the directory it is given. Called at the first save; the
    files are kept for the saves that follow with the same (equal) callable."""
    run_config: dict[str, Any] | None = None
    """Goes to `run/config.json`."""
    run_files: dict[str, bytes] = field(default_factory=dict)
    """More files of the main rank, by name inside the checkpoint."""
    stores_model: bool = True
    """False: a save leaves out weights, their configs and extra state; they come from elsewhere."""
    validation_level: str = "none"
    """With several ranks that each hold the whole model and optimizer: how thoroughly to check,
    before a save, that they are equal everywhere (none, quick, tensor or full)."""

    def check_keys(self) -> None:
        """Component keys must be unique and not those of the model and the optimizer."""
        seen = set(RESERVED_KEYS)
        for component in self.components:
            if component.key in seen:
                raise ConfigError(f"checkpoint component key {component.key!r} is taken already")
            seen.add(component.key)


def plain_json(value: Any, what: str) -> bytes:
    """Plain JSON text of a configuration; anything else in it is a `ConfigError`."""
    try:
        return json.dumps(value, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be written as JSON: {error}") from error
