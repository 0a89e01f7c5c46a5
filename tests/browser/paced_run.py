"""A training run that takes its time, for a browser to watch: started as a process of its own.

`python paced_run.py FOLDER STEPS PACE_S`
"""

from __future__ import annotations

import sys
import time
from typing import Any

from headway.callbacks import JsonLogger, TrainerControlCallback
from headway.engine.events import TrainerCallback
from headway.testing import tiny_trainer


class Pace(TrainerCallback):
    """Steps as slow as those of a large model."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s

    def on_step_begin(self, args: Any, state: Any, control: Any) -> None:
        time.sleep(self._pace_s)


def main(folder: str, max_steps: int, pace_s: float) -> None:
    trainer = tiny_trainer(
        folder,
        [JsonLogger(), TrainerControlCallback(job_id="watched"), Pace(pace_s)],
        max_steps=max_steps,
        learning_rate=0.001,
        lr_scheduler_type="constant",
        run_name="watched",
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
