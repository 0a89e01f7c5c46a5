"""The log for `log_kills` that TensorBoard's own reader reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.testing.proofs.log_kills import LogSink

_TAG = "train/CE loss"


def make_tensorboard_logger(folder: str) -> list[Any]:
    from headway.callbacks import TBLogger

    return [TBLogger(Path(folder) / "out" / "curves")]


def read_tensorboard_steps(output_dir: Path) -> list[int]:
    """The steps of a curve, as the reader behind TensorBoard's pages sees them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    found = EventAccumulator(str(output_dir / "curves"), {"tensors": 0}, {"scalars": 0})
    if not (output_dir / "curves").is_dir():
        return []
    found.Reload()
    tags = found.Tags()["tensors"]
    return [event.step for event in found.Tensors(_TAG)] if _TAG in tags else []


TENSORBOARD_SINK = LogSink(
    "TensorBoard", f"{__name__}:make_tensorboard_logger", read_tensorboard_steps
)
