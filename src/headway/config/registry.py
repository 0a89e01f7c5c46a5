"""Short names of components: what `class_path: AdamW` means in which slot.

Owns: the table, and which module tells a component's signature without importing torch.
Does not own: importing or checking a component (components).
"""

from __future__ import annotations

import importlib

SLOTS = ("model", "data", "collator", "optimizer", "lr_scheduler", "callbacks")

_TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon",
    "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_TORCH_SCHEDULES = (
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts",
    "CyclicLR", "ExponentialLR", "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR",
    "SequentialLR", "StepLR",
)  # fmt: skip
_DATASETS = ("MixedDataset", "PromptDataset", "SyntheticDataset", "TextDataset", "TokenDataset")

_TABLE: dict[str, dict[str, str]] = {
    "model": {"Decoder": "headway.models.Decoder", "pretrained": "headway.models.load_causal_lm"},
    "data": {name: f"headway.data.{name}" for name in _DATASETS},
    "collator": {"PadCollator": "headway.data.PadCollator"},
    "optimizer": {name: f"torch.optim.{name}" for name in _TORCH_OPTIMIZERS},
    "lr_scheduler": {name: f"torch.optim.lr_scheduler.{name}" for name in _TORCH_SCHEDULES},
}

# Slots whose short names are the public classes of a package: a class path like any other, so it
# is imported by name when a run file asks for it.
_PUBLIC_CLASSES = {"callbacks": "headway.callbacks"}

# What the caller supplies when a component of the slot is built; a run file need not name it.
GIVEN: dict[str, tuple[str, ...]] = {
    "data": ("tokenizer",),
    "optimizer": ("params",),
    "lr_scheduler": ("optimizer",),
}

# Components built from one torch-free dataclass, which is therefore their signature.
BUILT_FROM: dict[str, str] = {"headway.models.Decoder": "headway.models.config.DecoderConfig"}

# Components of ours whose module imports torch: their parameters (True: required), so that a
# misspelt one is told at once. Types are looked at when they are built.
NEEDS_TORCH: dict[str, dict[str, bool]] = {
    "headway.models.load_causal_lm": {
        "directory": True,
        "device": False,
        "dtype": False,
        "config_overrides": False,
    },
    "headway.data.PadCollator": dict.fromkeys(
        ("pad_token_id", "label_pad", "max_length", "pad_to_multiple_of", "causal_labels"), False
    ),
}

DEFAULT_MODEL = "Decoder"


def short_names(slot: str) -> dict[str, str]:
    """Short name -> dotted path for one slot."""
    package = _PUBLIC_CLASSES.get(slot)
    if package is None:
        return _TABLE[slot]
    module = importlib.import_module(package)
    others = getattr(module, "SETTINGS", ())
    names = [name for name in getattr(module, "__all__", ()) if name not in others]
    return {name: f"{package}.{name}" for name in names if name[:1].isupper()}


def resolve_name(class_path: str, slot: str) -> str:
    """The dotted path a class path stands for; a path with dots stands for itself."""
    return class_path if "." in class_path else short_names(slot).get(class_path, class_path)
