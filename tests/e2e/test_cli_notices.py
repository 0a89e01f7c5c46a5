"""Notices of preemption to a real `headway train`, with one process and with two."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launched import TRAIN, checkpoints, started, wait_for

RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
trainer: ddp
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 1000000, sequence_length: 16, vocab_size: 258}
args: {output_dir: out, seed: 1, use_cpu: true, max_steps: 1000000, logging_steps: 1000,
       lr_scheduler_type: constant, save_strategy: steps, save_steps: 1000000,
       per_device_train_batch_size: 2}
callbacks:
  tell: tell.Tell
  preemption: {class_path: PreemptionCallback, init_args: {signals: [SIGUSR2, SIGHUP, SIGXCPU]}}
"""
TELL = """\
import sys
from headway import TrainerCallback

class Tell(TrainerCallback):
    def on_step_end(self, state):
        if state.global_step == 3 and state.is_world_process_zero:
            print("three steps", file=sys.stderr, flush=True)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "tell.py").write_text(TELL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *_given_path()]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def _given_path() -> list[str]:
    return [path for path in [os.environ.get("PYTHONPATH", "")] if path]


@pytest.mark.parametrize(
    ("name", "nproc"),
    [
        ("SIGUSR2", 1),
        ("SIGUSR2", 2),
        ("SIGXCPU", 2),
        pytest.param("SIGHUP", 1, marks=pytest.mark.slow),
        pytest.param("SIGHUP", 2, marks=pytest.mark.slow),
        pytest.param("SIGXCPU", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(120)
def test_a_notice_saves_and_stops(run: Path, name: str, nproc: int) -> None:
    number = signal.Signals[name]
    with started(*TRAIN, *(["--nproc", str(nproc)] if nproc > 1 else [])) as process:
        wait_for(process, "three steps")
        process.send_signal(number)
        if name == "SIGXCPU":  # it comes again and again
            process.send_signal(number)
        _, told = process.communicate(timeout=90)
    assert process.returncode == 143, told
    assert len(checkpoints(run)) == 1 and checkpoints(run)[0] >= 3
    assert "Traceback" not in told
