"""A run ends before its time is up, early enough for the checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from headway import ConfigError, TrainerCallback
from headway.callbacks import TimeLimitCallback
from headway.callbacks.guard.time_limit import read_limit
from headway.config.duration import Duration
from headway.testing import tiny_trainer


class Leap(TrainerCallback):
    """Lets the monotonic clock leap ahead after a step."""

    priority = -10

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: dict[int, float]) -> None:
        self.at, self.ahead_s = at, 0.0
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.ahead_s)

    def on_step_end(self, state: Any) -> None:
        self.ahead_s += self.at.get(state.global_step, 0.0)


def train(folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    options = {"max_steps": 12, "num_samples": 64, "save_strategy": "steps", "save_steps": 5}
    trainer = tiny_trainer(folder, callbacks, **{**options, **arguments})
    return trainer, trainer.train()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("01:30:05", 5405), ("2-00:00:10", 172810), ("100:00:00", 360000), (90, 90), (0.5, 0.5),
        ("71h", 255600), (Duration.seconds(60), 60),
    ],
)  # fmt: skip
def test_a_limit_is_read(given: Any, seconds: float) -> None:
    assert read_limit(given) == seconds


def test_it_stops_with_a_checkpoint_when_the_time_is_nearly_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leap = Leap(monkeypatch, {3: 500.0, 7: 50.0})
    trainer, output = train(tmp_path, [leap, TimeLimitCallback("00:10:00", margin_s=60)])
    assert (output.global_step, output.interrupted_by) == (7, "stop_at")
    assert trainer.state.outcome == "interrupted"
    assert (tmp_path / "out" / "checkpoint-7").is_dir()
    _, rest = train(tmp_path, [])
    assert rest.global_step == 12


def test_a_slow_save_makes_it_stop_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowDisk(TrainerCallback):
        """As if the save at step 5 had taken 100 seconds."""

        def on_step_end(self, state: Any, trainer: Any) -> None:
            if state.global_step == 5:
                trainer.record_metric("checkpoint/save_async_duration_s", 100.0, "max", None, "max")

    leap = Leap(monkeypatch, {8: 450.0})  # 150 seconds are left: enough for the margin alone
    limit = TimeLimitCallback(600, margin_s=60, safety_factor=2)
    trainer, output = train(tmp_path, [leap, SlowDisk(), limit], save_steps=100)
    assert output.global_step == 8
    assert limit.longest_save_s == 100.0 and limit.needed_s >= 200
    again = TimeLimitCallback(600, margin_s=60)
    again.load_state_dict(limit.state_dict())
    assert again.needed_s >= 200, "a resumed run knows how long saves take"


def test_it_measures_real_saves(tmp_path: Path) -> None:
    limit = TimeLimitCallback("01:00:00")
    train(tmp_path, [limit])
    assert 0 < limit.longest_save_s < 60


def test_an_evaluation_does_not_run_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leap = Leap(monkeypatch, {})
    batches = []

    class Late(TrainerCallback):
        def on_prediction_step(self, state: Any) -> None:
            batches.append(state.global_step)
            leap.ahead_s = 590.0

    _, output = train(
        tmp_path, [leap, Late(), TimeLimitCallback(600)], eval_strategy="steps", eval_steps=4
    )
    assert output.global_step == 4 and len(batches) == 1


def test_slurm_says_when_the_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 600))
    leap = Leap(monkeypatch, {6: 545.0})
    _, output = train(tmp_path, [leap, TimeLimitCallback("slurm")])
    assert output.global_step == 6
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME"):
        train(tmp_path / "b", [TimeLimitCallback("slurm")])


def test_a_run_that_saves_nothing_is_told(tmp_path: Path, caplog: Any) -> None:
    train(tmp_path, [TimeLimitCallback(3600)], save_strategy="no", max_steps=1)
    assert "save_strategy='no'" in caplog.text


def test_too_little_time_for_any_step_is_told(tmp_path: Path, caplog: Any) -> None:
    limit = TimeLimitCallback(600)
    train(tmp_path, [limit], max_steps=1)
    assert "stops at once" not in caplog.text
    limit.load_state_dict({"longest_save_s": 400.0})
    _, output = train(tmp_path / "again", [limit], max_steps=3)
    assert output.global_step == 0 and output.interrupted_by == "stop_at"
    assert "800 s are needed" in caplog.text and "stops at once" in caplog.text
