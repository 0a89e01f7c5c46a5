"""A pause that moves the run's state to the host gives the GPU back, and changes no bit."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("aiohttp")

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import TrainerControlCallback
from headway.control.client import Client
from headway.control.discovery import find_job
from headway.models import Decoder, DecoderConfig
from headway.testing import tiny_dataset

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
NUM_STEPS = 12
PAUSE_AT = 5
WORKSPACE_BYTES = 80 << 20


class Visitor(TrainerCallback):
    """Pauses the run at a step, looks at the device meanwhile, and lets it go on."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.thread: threading.Thread | None = None

    def on_step_end(self, state: Any) -> None:
        if state.global_step == PAUSE_AT:
            self.seen["before"] = torch.cuda.memory_allocated()
            self.thread = threading.Thread(target=self._visit)
            self.thread.start()

    def _visit(self) -> None:
        client = Client(find_job("kite"))
        client.pause(offload=True)
        while client.status()["status"] != "paused":
            pass
        self.seen["paused"] = torch.cuda.memory_allocated()
        self.seen["reserved"] = torch.cuda.memory_reserved()
        client.resume()


def train(folder: Any, *callbacks: Any, **arguments: Any) -> Trainer:
    config = DecoderConfig(
        vocab_size=256, hidden_size=1024, num_layers=8, num_heads=16, max_seq_len=64, dropout=0.1
    )
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=4,
            mixed_precision="bf16",
            save_strategy="no",
            seed=0,
            **arguments,
        ),
        model_init=lambda: Decoder(config),
        train_dataset=tiny_dataset(256, sequence_length=32),
        callbacks=list(callbacks),
        default_callbacks=False,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gpu_is_free_in_a_pause_and_the_result_is_the_same(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))
    gc.collect()  # an earlier trainer is a cycle and may still hold its model
    visitor = Visitor()
    paused = train(
        tmp_path / "paused",
        TrainerControlCallback(job_id="kite"),
        visitor,
        torch_compile=compiled,
    )
    assert visitor.thread is not None
    visitor.thread.join(60)
    assert paused.state.global_step == NUM_STEPS
    state_bytes = 3 * 4 * sum(p.numel() for p in paused.model.parameters())
    assert visitor.seen["before"] > state_bytes
    # What is left does not grow with the model: the workspace of torch's matrix products.
    assert visitor.seen["paused"] < WORKSPACE_BYTES, visitor.seen
    assert visitor.seen["reserved"] < 2 * WORKSPACE_BYTES, visitor.seen
    plain = train(tmp_path / "plain", torch_compile=compiled)
    for (name, one), other in zip(paused.model.named_parameters(), plain.model.parameters()):
        assert torch.equal(one, other), name
