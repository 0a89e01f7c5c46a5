"""Checkpoints: one directory that is a Hugging Face model folder and the full training state.

Owns: the on-disk layout, its commit, verification, loading and retention.
Does not own: when to save (engine), what a strategy shares between ranks (strategies).
The names below are imported on first use, so that this package costs nothing to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.checkpoint.best import is_better, lookup_metric
    from headway.checkpoint.component import SharingPattern, StateComponent, Stateful
    from headway.checkpoint.discovery import find_latest_checkpoint, validate_checkpoint
    from headway.checkpoint.errors import CheckpointError
    from headway.checkpoint.manager import CheckpointManager, LoadedCheckpoint
    from headway.checkpoint.manifest import (
        CommittedCheckpoint,
        Manifest,
        committed,
        read_manifest,
        verify,
    )
    from headway.checkpoint.retention import Entry, choose_deletions
    from headway.checkpoint.rng import RNGState
    from headway.checkpoint.contents import CheckpointContents
    from headway.models.ties import split_ties

_MODULES = {
    "CheckpointContents": "contents",
    "CheckpointError": "errors",
    "CheckpointManager": "manager",
    "CommittedCheckpoint": "manifest",
    "Entry": "retention",
    "LoadedCheckpoint": "manager",
    "Manifest": "manifest",
    "RNGState": "rng",
    "SharingPattern": "component",
    "StateComponent": "component",
    "Stateful": "component",
    "choose_deletions": "retention",
    "committed": "manifest",
    "find_latest_checkpoint": "discovery",
    "is_better": "best",
    "lookup_metric": "best",
    "read_manifest": "manifest",
    "split_ties": ".models.ties",
    "validate_checkpoint": "discovery",
    "verify": "manifest",
}

__all__ = [
    "CheckpointContents",
    "CheckpointError",
    "CheckpointManager",
    "CommittedCheckpoint",
    "Entry",
    "LoadedCheckpoint",
    "Manifest",
    "RNGState",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "choose_deletions",
    "committed",
    "find_latest_checkpoint",
    "is_better",
    "lookup_metric",
    "read_manifest",
    "split_ties",
    "validate_checkpoint",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
