"""The finders on a CUDA device: nothing more on it than training needs, and its own limit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.data import SyntheticDataset
from headway.models import Decoder, DecoderConfig
from headway.testing import tiny_dataset, tiny_decoder

pytestmark = pytest.mark.gpu


def make_trainer(folder, callbacks=(), model=None, dataset=None, **arguments):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "seed": 0,
        **arguments,
    }
    return Trainer(
        args=TrainingArguments(**settings),
        model_init=model or (lambda: tiny_decoder(dropout=0.1)),
        train_dataset=dataset or tiny_dataset(64, sequence_length=32),
        callbacks=list(callbacks),
        default_callbacks=False,
    )


class Finder(TrainerCallback):
    """Searches in the middle of a run, and notes how much memory that took."""

    peak = before = 0

    def on_step_end(self, state, trainer):
        if state.global_step == 3:
            self.before = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            trainer.lr_find(num_iterations=6, num_seeds=2)
            self.peak = torch.cuda.max_memory_allocated()


def result_of(trainer):
    trainer.train()
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    return losses, {k: v.cpu() for k, v in trainer.model.state_dict().items()}


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_a_run_does_not_notice_a_search(precision, tmp_path):
    plain, weights = result_of(make_trainer(tmp_path / "a", mixed_precision=precision))
    before = make_trainer(tmp_path / "b", mixed_precision=precision)
    before.lr_find(num_iterations=6)
    within = make_trainer(tmp_path / "c", [Finder()], mixed_precision=precision)
    for losses, found in (result_of(before), result_of(within)):
        assert losses == plain
        assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_search_takes_no_memory_of_the_device_beyond_training(tmp_path):
    config = DecoderConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=6, num_heads=8
    )
    finder = Finder()
    dataset = SyntheticDataset(64, 128, config.vocab_size, seed=0)
    make_trainer(tmp_path, [finder], lambda: Decoder(config), dataset).train()
    assert 0 < finder.peak < 1.05 * finder.before


def test_batch_find_keeps_to_a_part_of_the_device(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model: {vocab_size: 8192, hidden_size: 512, num_layers: 4, num_heads: 8}\n"
        "data:\n  train:\n    class_path: SyntheticDataset\n"
        "    init_args: {num_samples: 64, sequence_length: 512, vocab_size: 8192}\n"
        "args:\n  output_dir: out\n  per_device_train_batch_size: 2\n"
        "  gradient_accumulation_steps: 32\n  max_steps: 10\n"
    )
    words = ["batch-find", "run.yaml", "--memory-limit", "3GiB", "--max-batch", "256", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "headway", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert 2 <= facts["largest"] < 256
    trials = {trial["size"]: trial for trial in facts["trials"]}
    assert trials[facts["largest"] + 1]["reason"] == "out of memory"
    assert trials[facts["largest"]]["peak_bytes"] <= 3 * 2**30
