"""One CUDA device: what differs from the CPU."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.callbacks.watch.default_metrics import DefaultMetrics
from headway.checkpoint import CheckpointContents, CheckpointManager
from headway.data import SyntheticDataset
from headway.models import Decoder, DecoderConfig
from headway.models.memory import estimate_training_memory
from headway.testing import count_host_syncs, tiny_dataset, tiny_decoder

pytestmark = pytest.mark.gpu


def trainer_on_gpu(folder, callbacks=(), **arguments):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "logging_steps": 5,
        "save_strategy": "no",
        "max_grad_norm": 1.0,
        "learning_rate": 1e-2,
        "seed": 0,
        **arguments,
    }
    return Trainer(
        args=TrainingArguments(**settings),
        model_init=lambda: tiny_decoder(dropout=0.1),
        train_dataset=tiny_dataset(256, sequence_length=32),
        eval_dataset=tiny_dataset(16, sequence_length=32, seed=1),
        callbacks=list(callbacks),
        default_callbacks=False,
    )


def test_trains_on_the_gpu_and_the_loss_falls(tmp_path):
    trainer = trainer_on_gpu(tmp_path, max_steps=40)
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    assert trainer.strategy.device.type == "cuda"
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < before - 1
    logs = [r for r in trainer.state.log_history if "peak_mem_allocated" in r]
    assert logs and logs[-1]["peak_mem_allocated"][0] > 0


def test_no_sync_between_log_steps(tmp_path):
    class Count(TrainerCallback):
        found = None

        def on_step_end(self, state):
            if state.global_step == 11:
                self.context = count_host_syncs()
                self.syncs = self.context.__enter__()
            if state.global_step == 19:
                self.context.__exit__(None, None, None)
                self.found = self.syncs.report(), self.syncs.count

    count = Count()
    trainer_on_gpu(tmp_path, [count], max_steps=25, logging_steps=10).train()
    report, number = count.found
    assert number == 0, report


class BusyUpdate(TrainerCallback):
    """Keeps the device busy after the update, and looks at every log record whether it still is."""

    def __init__(self, records=False):
        self.records, self.was_busy, self.logs = records, [], []
        self.done = torch.cuda.Event()

    def on_optimizer_step(self, trainer):
        torch.cuda._sleep(400_000_000)  # about a fifth of a second
        if self.records:
            trainer.record_metric("after the update", torch.full((), 3.0, device="cuda"))
        self.done.record()

    def on_log(self, logs):
        self.was_busy.append(not self.done.query())
        self.logs.append({key: logs[key] for key in ("loss", "grad_norm") if key in logs})


def test_a_log_record_does_not_wait_for_the_update(tmp_path):
    busy, calm = BusyUpdate(), BusyUpdate()
    trainer_on_gpu(tmp_path / "busy", [busy], max_steps=4, logging_steps=1).train()
    assert busy.was_busy[:3] == [True] * 3
    calm.on_optimizer_step = lambda trainer: None
    trainer_on_gpu(tmp_path / "calm", [calm], max_steps=4, logging_steps=1).train()
    assert busy.logs == calm.logs and len(busy.logs[0]) == 2


def test_an_update_that_outlasts_its_metrics_counts_as_training(tmp_path):
    class Seen(TrainerCallback):
        def on_log(self, logs):
            self.speed = logs.get("tok_per_sec", getattr(self, "speed", None))

    seen = Seen()
    callbacks = [DefaultMetrics(), BusyUpdate(), seen]
    trainer_on_gpu(tmp_path, callbacks, max_steps=8, logging_steps=1).train()
    # At least a tenth of a second a step is slept through, for 4 x 32 tokens.
    assert 0 < seen.speed < 4 * 32 / 0.1


def test_a_flush_waits_for_what_callbacks_computed_after_the_update(tmp_path):
    class Sink(BusyUpdate):
        found = None

        def on_metrics(self, step, metrics):
            self.found = metrics.get("after the update", self.found)

    sink = Sink(records=True)
    trainer_on_gpu(tmp_path, [sink], max_steps=2, logging_steps=1).train()
    assert sink.found == 3.0 and not any(sink.was_busy[:2])


def test_a_non_finite_step_is_withheld_on_the_device(tmp_path):
    class Poison(TrainerCallback):
        def __init__(self):
            self.weights = []

        def on_gradients(self, state, model):
            if state.global_step == 2:
                next(model.parameters()).grad.fill_(math.nan)

        def on_step_end(self, model):
            self.weights.append(next(model.parameters()).detach().clone())

    poison = Poison()
    trainer_on_gpu(tmp_path, [poison], max_steps=4, nonfinite_action="skip").train()
    assert torch.equal(poison.weights[1], poison.weights[2])
    assert not torch.equal(poison.weights[2], poison.weights[3])
    assert torch.isfinite(poison.weights[3]).all()


def test_resume_on_the_gpu_is_exact(tmp_path):
    def weights(trainer):
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    whole = trainer_on_gpu(tmp_path / "whole", max_steps=12)
    whole.train()
    trainer_on_gpu(tmp_path / "parts", max_steps=12, save_strategy="steps", stop_at=7).train()
    resumed = trainer_on_gpu(tmp_path / "parts", max_steps=12, save_strategy="steps")
    resumed.train()
    assert torch.equal(weights(resumed), weights(whole))


SIZES = [
    ({"vocab_size": 8192, "hidden_size": 512, "num_layers": 6, "num_heads": 8}, 16, 512),
    ({"vocab_size": 32768, "hidden_size": 768, "num_layers": 12, "num_heads": 12}, 16, 1024),
    ({"vocab_size": 32768, "hidden_size": 1536, "num_layers": 12, "num_heads": 12}, 4, 2048),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("shape", "batch", "length"), SIZES)
def test_memory_estimate_is_within_ten_percent(tmp_path, shape, batch, length, compiled):
    config = DecoderConfig(**shape)
    precision = "bf16" if compiled else "no"
    gc.collect()  # an earlier trainer is a cycle and may still hold its model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            max_steps=3,
            logging_strategy="no",
            save_strategy="no",
            max_grad_norm=1.0,
            mixed_precision=precision,
            torch_compile=compiled,
            seed=0,
        ),
        model_init=lambda: Decoder(config),
        train_dataset=SyntheticDataset(64, length, config.vocab_size, seed=0),
        default_callbacks=False,
    ).train()
    measured = torch.cuda.max_memory_allocated()
    estimate = estimate_training_memory(
        config, batch_size=batch, seq_len=length, mixed_precision=precision, compiled=compiled
    )
    assert estimate.total_bytes == pytest.approx(measured, rel=0.10)


def test_a_save_that_nobody_expected_holds_the_weights_of_its_step(tmp_path):
    """Steps that follow wait for its copy, though `save_strategy` is "no"."""

    class Ask(TrainerCallback):
        weights = None

        def on_step_end(self, state, control, model):
            if state.global_step == 3:
                self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
                control.should_save = True

    ask = Ask()
    trainer = trainer_on_gpu(tmp_path, [ask], max_steps=6)
    config = DecoderConfig(
        vocab_size=512, hidden_size=1024, num_layers=8, num_heads=8, max_seq_len=32
    )
    trainer.model_init = lambda: Decoder(config)
    trainer.train()
    again = Decoder(config).cuda()
    CheckpointManager(tmp_path).load(CheckpointContents(again), components=["model"])
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, ask.weights[name]), name
