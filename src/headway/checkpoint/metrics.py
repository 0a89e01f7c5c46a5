"""The evaluation results of a checkpoint.

Owns: reading and writing `eval_metrics.json` of a checkpoint that exists. Does not own: which
metric ranks checkpoints (best.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.manifest import finite_or_text
from headway.checkpoint.rewrite import rewrite
from headway.errors import ConfigError

EVAL_METRICS_NAME = "eval_metrics.json"
_NOT_FINITE = {"nan", "inf", "-inf"}


def save_checkpoint_metrics(checkpoint_path: str | Path, metrics: Mapping[str, Any]) -> None:
    """Give a committed checkpoint its evaluation results, or new ones; it is committed anew."""
    finite = {key: finite_or_text(value) for key, value in metrics.items()}
    try:
        text = json.dumps(finite, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the evaluation metrics cannot be written as JSON: {error}") from error
    rewrite(checkpoint_path, {EVAL_METRICS_NAME: text}, fields={"metrics": dict(metrics)})


def load_checkpoint_metrics(checkpoint_path: str | Path) -> dict[str, Any] | None:
    """The evaluation results of a checkpoint, or None if it has none."""
    path = Path(checkpoint_path) / EVAL_METRICS_NAME
    if not path.exists():
        return None
    return {
        key: float(value) if isinstance(value, str) and value in _NOT_FINITE else value
        for key, value in read_json_object(path).items()
    }
