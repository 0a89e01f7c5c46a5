"""A run file's trainer: what it makes of the arguments, and what the run keeps of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState

from headway.config import load_run, resolved_config
from headway.trainers.from_config import build_trainer

RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
trainer: accelerate
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 8, sequence_length: 16, vocab_size: 258}
args: {output_dir: out, use_cpu: true, max_steps: 1, mixed_precision: bf16}
"""


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_the_accelerator_has_the_precision_of_the_run_file_and_nothing_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    run = load_run("run.yaml")
    with caplog.at_level(logging.WARNING, "headway"):
        trainer = build_trainer(run)
    assert trainer._accelerator.mixed_precision == "bf16"
    assert not caplog.records
    assert not [w for w in recwarn if "mixed_precision" in str(w.message)]
    assert resolved_config(run)["args"]["mixed_precision"] == "bf16", "it is run again from this"
