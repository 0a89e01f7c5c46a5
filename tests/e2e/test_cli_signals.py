"""Signals to a real `headway train`: the first finishes the step and saves, the second stops it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launched import HOLD, TRAIN, checkpoints, started, wait_for

RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 1000000, sequence_length: 16, vocab_size: 258}
args: {output_dir: out, seed: 1, use_cpu: true, max_steps: 1000000, logging_steps: 1,
       lr_scheduler_type: constant, save_steps: 1000000, per_device_train_batch_size: 2}
"""

# Each says where it is and waits for the gate to open, so that a signal falls into that phase.
HOLDING = (
    HOLD
    + """
from headway import TrainerCallback
from headway.data import SyntheticDataset

class Hold(TrainerCallback):
    def on_step_end(self, args, state, control):
        if state.global_step == 2:
            hold()

class Tell(TrainerCallback):
    def on_step_end(self, state):
        if state.global_step < 10:
            print("at step", state.global_step, file=sys.stderr, flush=True)
    def on_save(self):
        print("has saved", file=sys.stderr, flush=True)

class FirstStep(TrainerCallback):
    def on_forward_backward_begin(self, state):
        if state.global_step == 0:
            hold()

class Start(TrainerCallback):
    def on_train_begin(self):
        hold()

class Evaluation(TrainerCallback):
    batches = 0
    def on_prediction_step(self, state):
        self.batches += 1
        if self.batches == 3:
            hold()
    def on_evaluate(self):
        print("evaluated after", self.batches, file=sys.stderr, flush=True)

class Save(TrainerCallback):
    stepped = held = False
    def on_step_end(self):
        self.stepped = True
    def state_dict(self):
        # Also asked for its size before the first step.
        if self.stepped and not self.held:
            self.held = True
            hold()
        return {}
    def load_state_dict(self, state):
        pass

class SlowData(SyntheticDataset):
    num_read = 0
    def __getitem__(self, index):
        SlowData.num_read += 1
        if SlowData.num_read == 9:
            hold()
        return super().__getitem__(index)

class SlowToOpen(SyntheticDataset):
    def __init__(self, num_samples: int, sequence_length: int, vocab_size: int):
        super().__init__(num_samples, sequence_length, vocab_size)
        hold()

class Broken(TrainerCallback):
    def on_gradients(self, state):
        if state.global_step == 3:
            raise RuntimeError("the third step is followed by trouble")
"""
)


@contextmanager
def training(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "run.yaml").write_text(RUN)
    (folder / "hold.py").write_text(HOLDING)
    with started(*TRAIN, *words, cwd=folder, ask=False) as process:
        yield process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_stops_and_the_run_goes_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with training(tmp_path, "--callbacks=[hold.Tell]") as process:
        wait_for(process, "at step 3")
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
    assert f"start_step: {step:,}" in err
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


EVALUATED = ("--args.eval_strategy=steps", "--args.eval_steps=2", "--args.max_eval_steps=1000",
             "--data.eval.class_path=SyntheticDataset", "--data.eval.init_args.num_samples=100000",
             "--data.eval.init_args.sequence_length=16",
             "--data.eval.init_args.vocab_size=258")  # fmt: skip
PHASES = {
    # phase: words for the command, steps done when the process holds
    "start": (("--callbacks=[hold.Start]",), 0),
    "first step": (("--callbacks=[hold.FirstStep]",), 1),
    "evaluation": (("--callbacks=[hold.Evaluation]", *EVALUATED), 2),
    "save": (("--callbacks=[hold.Save]", "--args.save_steps=2"), 3),
    "data": (("--data.train.class_path=hold.SlowData",), None),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_in_any_phase_saves_at_the_next_boundary(phase: str, tmp_path: Path) -> None:
    words, step = PHASES[phase]
    os.mkfifo(tmp_path / "gate")
    with training(tmp_path, *words) as process:
        wait_for(process, "holding")
        process.send_signal(signal.SIGTERM)
        wait_for(process, "Once more stops at once")
        (tmp_path / "gate").write_text("open")
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Traceback" not in err and "evaluated after" not in err
    found = checkpoints(tmp_path)
    if step is None:
        assert len(found) == 1 and found[0] >= 1
        step = found[0]
    assert found[-1:] == ([step] if step else [])
    assert f"stopped at step {step:,} by SIGTERM" in out


@pytest.mark.parametrize("phase", ["evaluation", "data"])
def test_sigusr1_in_any_phase_saves_and_goes_on(phase: str, tmp_path: Path) -> None:
    words, _ = PHASES[phase]
    os.mkfifo(tmp_path / "gate")
    ends = ("--args.stop_at=6", "--args.save_total_limit=null", "--args.max_eval_steps=4")
    with training(tmp_path, *words, *ends) as process:
        wait_for(process, "holding")
        process.send_signal(signal.SIGUSR1)
        (tmp_path / "gate").write_text("open")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    asked_for, last = checkpoints(tmp_path)
    assert last == 6 and asked_for in {"evaluation": {3}, "data": {1, 2, 3, 4, 5}}[phase]
    if phase == "evaluation":
        assert "evaluated after 4" in err, "a save request does not cut an evaluation"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_whole_group_does_not_lose_the_loader_s_workers(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """What a terminal does on Ctrl-C, and a scheduler on cancelling a job."""
    words = ("--args.dataloader_num_workers=2", "--args.save_total_limit=null")
    words += ("--callbacks=[hold.Tell]",)
    with training(tmp_path, *words) as process:
        wait_for(process, "at step 3")
        os.killpg(process.pid, signal.SIGUSR1)
        wait_for(process, "has saved")
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    asked_for, last = checkpoints(tmp_path)
    assert 3 <= asked_for < last and f"stopped at step {last:,} by {number.name}" in out


def test_save_on_error_keeps_the_last_step_and_the_exit_code_says_failure(tmp_path: Path) -> None:
    with training(tmp_path, "--callbacks=[hold.Broken]", "--args.save_on_error=true") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the third step is followed by trouble" in err
    assert checkpoints(tmp_path) == [3]
    with training(tmp_path, "--args.stop_at=5") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "start_step: 3" in err, err
    assert checkpoints(tmp_path) == [3, 5]


def test_sigusr1_before_training_begins_does_not_end_the_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    words = ("--data.train.class_path=hold.SlowToOpen", "--args.stop_at=2")
    with training(tmp_path, *words) as process:
        wait_for(process, "holding")
        process.send_signal(signal.SIGUSR1)
        (tmp_path / "gate").write_text("open")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert checkpoints(tmp_path) == [2]
