"""What the ranks of a run do together while a save of theirs is still being written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from headway import TrainerCallback
from headway.args import DDPTrainingArguments
from headway.checkpoint import CheckpointManager, verify
from headway.models import load_pretrained
from headway.testing import run_ranks, tiny_dataset, tiny_decoder
from headway.trainers.parallel import DDPTrainer


class ActDuringSave(TrainerCallback):
    """Calls a function of the trainer between two steps, while the save of the first is written."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name_of_act, self.options = name, options
        self.under_way: int | None = None

    def on_step_begin(self, state: Any, trainer: Any) -> None:
        if state.global_step == 2:
            self.under_way = trainer._saver.background.under_way
            getattr(trainer, self.name_of_act)(**self.options)


def _train(folder: Path, name: str, options: dict[str, Any]) -> tuple[int | None, float]:
    write = CheckpointManager.write

    def write_late(self: CheckpointManager, pending: Any) -> Path:
        # The save thread of one rank waits for that of the other one meanwhile.
        if trainer.env.rank == 1 and pending.step == 2:
            threading.Event().wait(1.0)
        return write(self, pending)

    CheckpointManager.write = write_late  # type: ignore[method-assign]
    act = ActDuringSave(name, options)
    trainer = DDPTrainer(
        args=DDPTrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=2,
            use_cpu=True,
            seed=0,
            max_steps=4,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="steps",
            save_steps=2,
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(64, sequence_length=8),
        callbacks=[act],
        default_callbacks=False,
    )
    trainer.train()
    return act.under_way, trainer.learning_rate


def _run(folder: Path, name: str, **options: Any) -> list[float]:
    told = run_ranks(_train, 2, folder, name, options, timeout_s=60)
    assert [under_way for under_way, _ in told] == [2, 2], "a save was under way"
    for step in (2, 4):
        verify(folder / "out" / f"checkpoint-{step}")
    return [rate for _, rate in told]


def test_the_learning_rate_is_changed_while_a_save_is_written(tmp_path: Path) -> None:
    assert _run(tmp_path, "change_learning_rate", scale=0.5) == [5e-3, 5e-3]


def test_a_model_folder_is_written_while_a_save_is_written(tmp_path: Path) -> None:
    _run(tmp_path, "save_model", output_dir=str(tmp_path / "model"))
    load_pretrained(tmp_path / "model")
