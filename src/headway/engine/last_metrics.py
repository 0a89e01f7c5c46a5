"""The last metrics of a run that fails, before they reach anyone: one file for each rank.

Owns: the file `last_metrics-rank{R}.json`. Does not own: which metrics are pending (flushing).

No rank asks another for anything here, and nobody waits long: the device may never answer again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from headway.checkpoint.manifest import finite_or_text
from headway.engine.metrics import Steps
from headway.engine.state import TrainerState

logger = logging.getLogger(__name__)

_READING_S = 2.0


def dump_last_metrics(
    folder: str | Path, steps: Steps, state: TrainerState, rank: int, reason: str
) -> Path | None:
    """Write what is pending, as this rank recorded it; None where there is nothing or no way to."""
    if not steps:
        return None
    path = Path(folder) / f"last_metrics-rank{rank}.json"
    record = {
        "run_id": state.run_id,
        "rank": rank,
        "global_step": state.global_step,
        "timestamp": time.time(),
        "error": reason.partition("\n")[0],
        "metrics": _read(steps),
    }
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)
    except OSError as problem:
        logger.error("the last metrics cannot be written to %s: %s", path, problem)
        return None
    logger.warning("the metrics of the last steps, not delivered before the error, are in %s", path)
    return path


def _read(steps: Steps) -> dict[str, dict[str, Any]]:
    """The numbers by step; null for those that the device does not give in time."""
    numbers: dict[str, dict[str, Any]] = {
        str(step): dict.fromkeys(steps[step]) for step in sorted(steps)
    }

    def read() -> None:
        for step in sorted(steps):
            for name, entry in steps[step].items():
                try:
                    number = float(entry.value)
                except RuntimeError:  # a device that failed answers nothing any more
                    return
                numbers[str(step)][name] = finite_or_text(number)

    reader = threading.Thread(target=read, name="headway-last-metrics", daemon=True)
    reader.start()
    reader.join(_READING_S)
    return {step: dict(metrics) for step, metrics in numbers.items()}
