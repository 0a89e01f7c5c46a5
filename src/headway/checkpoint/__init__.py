"""Checkpoints: one directory that is a Hugging Face model folder and the full training state.

Owns: the on-disk layout, its commit, verification, loading and retention.
Does not own: when to save (engine), what a strategy shares between ranks (strategies).
The names below are imported on first use, so that this package costs nothing to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.checkpoint.api import load_checkpoint, save_checkpoint
    from headway.checkpoint.async_saver import AsyncCheckpointSaver
    from headway.checkpoint.best import is_better, lookup_metric
    from headway.checkpoint.component import SharingPattern, StateComponent, Stateful
    from headway.checkpoint.contents import CheckpointContents
    from headway.checkpoint.discovery import (
        find_latest_checkpoint,
        list_checkpoints,
        next_checkpoint_path,
        validate_checkpoint,
    )
    from headway.checkpoint.errors import CheckpointError, DamagedError
    from headway.checkpoint.links import create_pretrained_symlinks
    from headway.checkpoint.manager import CheckpointManager, LoadedCheckpoint
    from headway.checkpoint.manifest import (
        CommittedCheckpoint,
        Manifest,
        committed,
        read_manifest,
        verify,
    )
    from headway.checkpoint.meta import (
        CHECKPOINT_MANIFEST_FILENAME,
        MODEL_EXCLUDED_MARKER,
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        WEIGHTS_INDEX_NAME,
        WEIGHTS_NAME,
        CheckpointMeta,
        get_checkpoint_metadata,
    )
    from headway.checkpoint.metrics import load_checkpoint_metrics, save_checkpoint_metrics
    from headway.checkpoint.pins import is_pinned, pin, unpin
    from headway.checkpoint.protocols import CheckpointInterface, StatefulProvider
    from headway.checkpoint.provided import ProviderCheckpoints
    from headway.checkpoint.retention import Entry, choose_deletions
    from headway.checkpoint.rng import RNGState
    from headway.checkpoint.rotation import maybe_delete_oldest_checkpoint, validate_output_dir
    from headway.checkpoint.sharded import (
        ShardIndex,
        StateDictLike,
        index_file_name,
        load_shard_index,
        load_sharded_checkpoint,
        make_shard_index,
        save_shard_index,
        save_sharded_checkpoint,
    )
    from headway.checkpoint.sharing import (
        SharingMetadata,
        create_sharing_metadata,
        retie_parameters,
    )
    from headway.checkpoint.train_state import TrainState
    from headway.checkpoint.weights import LoadReport
    from headway.models.ties import split_ties

__all__ = [
    "CHECKPOINT_MANIFEST_FILENAME",
    "MODEL_EXCLUDED_MARKER",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "AsyncCheckpointSaver",
    "CheckpointContents",
    "CheckpointError",
    "CheckpointInterface",
    "CheckpointManager",
    "CheckpointMeta",
    "CommittedCheckpoint",
    "DamagedError",
    "Entry",
    "LoadReport",
    "LoadedCheckpoint",
    "Manifest",
    "ProviderCheckpoints",
    "RNGState",
    "ShardIndex",
    "SharingMetadata",
    "SharingPattern",
    "StateComponent",
    "StateDictLike",
    "Stateful",
    "StatefulProvider",
    "TrainState",
    "choose_deletions",
    "committed",
    "create_pretrained_symlinks",
    "create_sharing_metadata",
    "find_latest_checkpoint",
    "get_checkpoint_metadata",
    "index_file_name",
    "is_better",
    "is_pinned",
    "list_checkpoints",
    "load_checkpoint",
    "load_checkpoint_metrics",
    "load_shard_index",
    "load_sharded_checkpoint",
    "lookup_metric",
    "make_shard_index",
    "maybe_delete_oldest_checkpoint",
    "next_checkpoint_path",
    "pin",
    "read_manifest",
    "retie_parameters",
    "save_checkpoint",
    "save_checkpoint_metrics",
    "save_shard_index",
    "save_sharded_checkpoint",
    "split_ties",
    "unpin",
    "validate_checkpoint",
    "validate_output_dir",
    "verify",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        ".models.ties": ("split_ties",),
        "api": ("load_checkpoint", "save_checkpoint"),
        "async_saver": ("AsyncCheckpointSaver",),
        "best": ("is_better", "lookup_metric"),
        "component": ("SharingPattern", "StateComponent", "Stateful"),
        "contents": ("CheckpointContents",),
        "discovery": (
            "find_latest_checkpoint",
            "list_checkpoints",
            "next_checkpoint_path",
            "validate_checkpoint",
        ),
        "errors": ("CheckpointError", "DamagedError"),
        "links": ("create_pretrained_symlinks",),
        "manager": ("CheckpointManager", "LoadedCheckpoint"),
        "manifest": ("CommittedCheckpoint", "Manifest", "committed", "read_manifest", "verify"),
        "meta": (
            "CHECKPOINT_MANIFEST_FILENAME",
            "CheckpointMeta",
            "MODEL_EXCLUDED_MARKER",
            "SAFE_WEIGHTS_INDEX_NAME",
            "SAFE_WEIGHTS_NAME",
            "WEIGHTS_INDEX_NAME",
            "WEIGHTS_NAME",
            "get_checkpoint_metadata",
        ),
        "metrics": ("load_checkpoint_metrics", "save_checkpoint_metrics"),
        "pins": ("is_pinned", "pin", "unpin"),
        "protocols": ("CheckpointInterface", "StatefulProvider"),
        "provided": ("ProviderCheckpoints",),
        "retention": ("Entry", "choose_deletions"),
        "rng": ("RNGState",),
        "rotation": ("maybe_delete_oldest_checkpoint", "validate_output_dir"),
        "sharded": (
            "ShardIndex",
            "StateDictLike",
            "index_file_name",
            "load_shard_index",
            "load_sharded_checkpoint",
            "make_shard_index",
            "save_shard_index",
            "save_sharded_checkpoint",
        ),
        "sharing": ("SharingMetadata", "create_sharing_metadata", "retie_parameters"),
        "train_state": ("TrainState",),
        "weights": ("LoadReport",),
    },
)
