"""The length of a run, where it is given in tokens and an epoch does not divide into full steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import Trainer, TrainingArguments
from headway.data import SyntheticDataset
from headway.testing import tiny_decoder


@pytest.mark.parametrize(("batch", "steps"), [(4, 7), (8, 4), (64, 4)])
def test_a_token_budget_is_planned_in_the_steps_it_takes(
    tmp_path: Path, batch: int, steps: int
) -> None:
    # Epochs of 6 samples: 4 + 2, or all of them where a batch is larger.
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=batch,
        train_for=f"{20 * 8} tokens",
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
    )
    data = SyntheticDataset(num_samples=6, sequence_length=8, vocab_size=258)
    trainer = Trainer(model_init=tiny_decoder, args=args, train_dataset=data)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == steps
    assert all(r["learning_rate"] > 0 for r in trainer.state.log_history if "loss" in r)
