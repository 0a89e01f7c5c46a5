"""The shape of a run file: what to train, on which data, with which arguments.

Owns: `RunConfig`, `DataConfig`, `Component`. Does not own: reading a file (load) or building what
a component names (components).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headway.args import (
    AccelTrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    PipelineTrainingArguments,
    TrainingArguments,
)

ARGUMENT_CLASSES: dict[str, type[TrainingArguments]] = {
    "single": TrainingArguments,
    "accelerate": AccelTrainingArguments,
    "ddp": DDPTrainingArguments,
    "fsdp2": FSDP2TrainingArguments,
    "pipeline": PipelineTrainingArguments,
}


@dataclass
class Component:
    """Something to import and build: a class (or function) and what to call it with."""

    class_path: str
    """Dotted path of the class or function, or a short name of its slot."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the call; a value may itself be a class_path with init_args."""


@dataclass
class DataConfig:
    """The data of a run."""

    train: Component | None = None
    """Training dataset: TokenDataset, TextDataset, PromptDataset, SyntheticDataset, ..."""
    eval: Component | None = None
    """Evaluation dataset."""
    collator: Component | None = None
    """What turns samples into a batch. None: tokens are padded."""


@dataclass
class RunConfig:
    """One run, as a run file describes it."""

    model: Component
    """The model: a class_path with init_args, or the sizes of the reference decoder directly."""
    tokenizer: str | None = None
    """`bytes` for the built-in byte tokenizer, or the path or name of another one."""
    data: DataConfig = field(default_factory=DataConfig)
    """The datasets and the collator."""
    trainer: str = "single"
    """How the work is spread over devices."""
    args: TrainingArguments = field(default_factory=TrainingArguments)
    """The training arguments."""
    optimizer: Component | None = None
    """The optimizer. None: AdamW from the training arguments."""
    optimizer_groups: dict[str, dict[str, Any] | None] | None = None
    """Parameter groups by name: a `regex` over parameter names and a `config` to override."""
    lr_scheduler: Component | None = None
    """The learning-rate scheduler. None: `args.lr_scheduler_type`."""
    callbacks: list[Component] | dict[str, Component | None] = field(default_factory=list)
    """Callbacks, as a list or by name; added to the default ones."""
    default_callbacks: bool = True
    """Whether the default callbacks take part."""
