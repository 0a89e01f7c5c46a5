"""Evaluators on a GPU: the figures of the host, in full precision and close to them in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway import Trainer, TrainingArguments
from headway.callbacks import DownstreamEvaluatorCallbackConfig, LMEvaluatorCallbackConfig
from headway.data.tokenizer import ByteTokenizer
from headway.data.tokens import TokenFileWriter
from headway.testing import tiny_dataset, tiny_decoder

pytestmark = pytest.mark.gpu


def measure(folder: Path, **args: Any) -> dict[str, float]:
    tokenizer = ByteTokenizer()
    with TokenFileWriter(folder / "text.hwt", tokenizer=tokenizer) as writer:
        for n in range(9):
            writer.add_document(tokenizer.encode(f"{n} boats on the tide. " * n, add_eos=True))
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder / "out"), max_steps=1, per_device_train_batch_size=2,
            learning_rate=0.0, lr_scheduler_type="constant", save_strategy="no", seed=0, **args,
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(8, sequence_length=8),
        processing_class=tokenizer,
        callbacks=[
            LMEvaluatorCallbackConfig(
                {"text": str(folder / "text.hwt")}, sequence_length=32, batch_size=3,
                eval_interval=1,
            ),
            DownstreamEvaluatorCallbackConfig(["opposites", "continuations"], eval_interval=1),
        ],
        default_callbacks=False,
    )  # fmt: skip
    trainer.train()
    history = trainer.state.log_history
    return {k: v for record in history for k, v in record.items() if k.startswith("eval/")}


def test_a_gpu_gives_the_figures_of_the_host(tmp_path: Path) -> None:
    on_host = measure(tmp_path, use_cpu=True)
    on_device = measure(tmp_path, device="cuda")
    assert len(on_host) == 3 + 4 + 3
    assert on_device == pytest.approx(on_host, rel=1e-5)
    roughly = measure(tmp_path, device="cuda", mixed_precision="bf16")
    losses = {k: v for k, v in on_host.items() if "accuracy" not in k and "PPL" not in k}
    assert {k: roughly[k] for k in losses} == pytest.approx(losses, rel=1e-2)
