"""Finding and judging checkpoints without a manager.

Owns: two convenience functions over the manifest. Does not own: fallback to older checkpoints
(manager.py).
"""

from __future__ import annotations

import logging
from pathlib import Path

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manifest import committed, read_manifest, verify

logger = logging.getLogger(__name__)


def find_latest_checkpoint(model_dir: str | Path) -> str | None:
    """The newest committed training checkpoint in a run directory, by save counter.

    A directory that is itself a training checkpoint is returned as it is.
    """
    training = [c.path for c in committed(model_dir) if c.kind == "training"]
    if training:
        return str(training[-1])
    try:
        manifest = read_manifest(model_dir)
    except CheckpointError:
        return None
    return str(model_dir) if manifest.kind == "training" else None


def validate_checkpoint(checkpoint_path: str | Path) -> bool:
    """Whether a checkpoint is committed and every file is as it was written; logs what is not."""
    problems = verify(checkpoint_path)
    for problem in problems:
        logger.warning("%s", problem)
    return not problems
