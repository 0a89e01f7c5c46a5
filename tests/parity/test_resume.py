"""A resumed run equals an uninterrupted one, bit for bit."""

from __future__ import annotations

import pytest
import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.testing import tiny_dataset, tiny_decoder


class Ledger(TrainerCallback):
    def __init__(self):
        self.samples, self.losses = [], []

    def on_window(self, window):
        self.samples.append(window.sample_ids.tolist())

    def on_train_metrics(self, loss, grad_norm):
        self.losses.append((loss.item(), grad_norm.item()))


def train(tmp_path, workers=0, **arguments):
    ledger = Ledger()
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2,
            gradient_accumulation_steps=2, num_train_epochs=3, learning_rate=1e-2,
            logging_steps=2, warmup_steps=2, lr_scheduler_type="cosine",
            max_grad_norm=1.0, dataloader_num_workers=workers, seed=11, use_cpu=True,
            **{"save_strategy": "no", "save_total_limit": None, **arguments},
        ),
        model_init=lambda: tiny_decoder(dropout=0.2),
        train_dataset=tiny_dataset(18, sequence_length=12),
        callbacks=[ledger],
        default_callbacks=False,
    )  # fmt: skip
    trainer.train()
    return trainer, ledger


def state_of(trainer):
    tensors = dict(trainer.model.state_dict())
    for index, state in trainer.optimizer.state_dict()["state"].items():
        tensors.update({f"{index}.{key}": value for key, value in state.items()})
    tensors["rng"] = torch.get_rng_state()
    return tensors


def assert_equal_states(left, right):
    left, right = state_of(left), state_of(right)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# 18 samples in windows of 4: 5 steps an epoch, 15 in all; 5 is the epoch's edge.
@pytest.mark.parametrize("stop", [1, 4, 5, 6, 12])
def test_resume_anywhere(tmp_path, stop):
    whole, all_of_it = train(tmp_path / "whole")
    first, before = train(tmp_path / "parts", save_strategy="steps", stop_at=stop)
    assert first.state.global_step == stop
    second, after = train(tmp_path / "parts", save_strategy="steps")
    assert before.samples + after.samples == all_of_it.samples
    assert before.losses + after.losses == all_of_it.losses
    assert_equal_states(second, whole)
    assert second.state.num_input_tokens_seen == whole.state.num_input_tokens_seen
    assert second.state.epoch == whole.state.epoch == 3.0


def test_five_resumes_in_a_row(tmp_path):
    whole, all_of_it = train(tmp_path / "whole")
    samples, losses = [], []
    for stop in (2, 5, 7, 8, 13, None):
        trainer, ledger = train(tmp_path / "parts", save_strategy="steps", stop_at=stop)
        samples += ledger.samples
        losses += ledger.losses
    assert samples == all_of_it.samples and losses == all_of_it.losses
    assert_equal_states(trainer, whole)


def test_resume_with_loader_workers(tmp_path):
    _, all_of_it = train(tmp_path / "whole")
    _, before = train(tmp_path / "parts", workers=2, save_strategy="steps", stop_at=7)
    _, after = train(tmp_path / "parts", workers=2, save_strategy="steps")
    assert before.samples + after.samples == all_of_it.samples
    assert before.losses + after.losses == all_of_it.losses


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(tiny_dataset(18, sequence_length=12))


def train_on_stream(folder, workers, **arguments):
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=2, max_steps=12, seed=11,
            dataloader_num_workers=workers, learning_rate=1e-2, use_cpu=True, **arguments,
        ),
        model_init=lambda: tiny_decoder(dropout=0.2),
        train_dataset=Stream(),
        eval_dataset=Stream(),
        default_callbacks=False,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_a_stream_read_by_a_worker_takes_no_random_numbers_from_training(tmp_path):
    """Neither where it is opened again after a resume, nor for an evaluation."""
    whole = train_on_stream(tmp_path / "whole", 0, save_strategy="no")
    train_on_stream(tmp_path / "parts", 1, stop_at=4)
    assert_equal_states(train_on_stream(tmp_path / "parts", 1), whole)
    evaluated = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 3}
    assert_equal_states(train_on_stream(tmp_path / "evaluated", 1, **evaluated), whole)


def test_a_drawn_seed_is_kept(tmp_path):
    first, before = train(tmp_path, save_strategy="steps", stop_at=3)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=4, use_cpu=True
    )
    second = Trainer(
        args=arguments,
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(18, sequence_length=12),
        default_callbacks=False,
    )
    second.train()
    assert second.state.seed == first.state.seed == 11


def test_epoch_saves_resume_at_the_next_epoch(tmp_path):
    whole, all_of_it = train(tmp_path / "whole")
    _, before = train(tmp_path / "parts", save_strategy="epoch", stop_at="2 epochs")
    second, after = train(tmp_path / "parts", save_strategy="epoch")
    assert before.samples + after.samples == all_of_it.samples
    assert_equal_states(second, whole)
