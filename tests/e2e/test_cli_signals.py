"""Signals to a real `headway train`: the first finishes the step and saves, the second stops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 1000000, sequence_length: 16, vocab_size: 258}
args: {output_dir: out, seed: 1, use_cpu: true, max_steps: 1000000, logging_steps: 1,
       lr_scheduler_type: constant, save_steps: 1000000, per_device_train_batch_size: 2}
"""

# Says that a step is done and waits for the gate to open, so that a signal falls inside the run.
HOLD = """\
import sys
from headway import TrainerCallback

class Hold(TrainerCallback):
    def on_step_end(self, args, state, control):
        if state.global_step == 2:
            print("holding", file=sys.stderr, flush=True)
            open("gate").read()
"""


@contextmanager
def training(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "run.yaml").write_text(RUN)
    (folder / "hold.py").write_text(HOLD)
    program = Path(sys.executable).parent / "headway"
    process = subprocess.Popen(
        [str(program), "train", "run.yaml", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return
    raise AssertionError(f"{words!r} did not come:\n{''.join(lines)}")


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("out/checkpoint-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_stops_and_the_run_goes_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with training(tmp_path) as process:
        wait_for(process, "step 3/")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    (step,) = checkpoints(tmp_path)
    assert step >= 3
    assert f"stopped at step {step:,} by {number.name}" in out
    assert "go on with: headway train run.yaml" in out
    assert "Traceback" not in err
    with training(tmp_path, f"--args.stop_at={step + 2}") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"from {step:,}" in err
    assert checkpoints(tmp_path) == [step, step + 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(number: signal.Signals, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with training(tmp_path, "--callbacks=[hold.Hold]") as process:
        wait_for(process, "holding")
        process.send_signal(number)
        wait_for(process, "Once more stops at once")
        process.send_signal(number)
        assert process.wait(timeout=60) == -number
    assert checkpoints(tmp_path) == []


def test_sigusr1_saves_and_goes_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with training(tmp_path, "--callbacks=[hold.Hold]", "--args.stop_at=4") as process:
        wait_for(process, "holding")
        process.send_signal(signal.SIGUSR1)
        (tmp_path / "gate").write_text("open")
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert checkpoints(tmp_path) == [2, 4]
