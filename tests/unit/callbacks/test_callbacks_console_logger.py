"""What ConsoleLoggerCallback prints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.callbacks import ConsoleLoggerCallback
from headway.callbacks.log.name_patterns import NamePatterns
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError
from headway.testing import tiny_trainer

ARGS: Any = SimpleNamespace(stop_at=None)


def test_blocks_and_lines_of_a_run_come_in_the_order_of_steps_and_tell_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = ConsoleLoggerCallback(log_interval=2, metrics_log_interval=4)
    tiny_trainer(tmp_path, [callback], max_steps=6, num_samples=24, logging_steps=6).train()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    marks = [line for line in lines if line.startswith("[")]
    assert out == ""
    assert [mark.split(",")[0] for mark in marks] == [
        "[step=1/6", "[step=2/6", "[step=4/6", "[step=6/6",
    ]  # fmt: skip
    assert [mark.split(",")[1] for mark in marks] == [
        "epoch=0.08", "epoch=0.17", "epoch=0.33", "epoch=0.50",
    ]  # fmt: skip
    blocks = err.split("[step=")
    assert "    train/CE loss=" in blocks[1] and "    train/CE loss=" in blocks[3]
    assert "=" not in blocks[2].split("]")[1] and "optim/LR (group 0)=" in blocks[1]


def test_only_the_chosen_metrics_and_all_of_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Extra(TrainerCallback):
        def on_step_end(self, trainer: Any) -> None:
            trainer.record_metric("mine [a]", 2000.0)
            trainer.record_metric("other", float("nan"))

    chosen = ConsoleLoggerCallback(metrics=["mine [a]", "oth??"])
    tiny_trainer(
        tmp_path, [chosen, Extra()], max_steps=1, eval_strategy="steps", eval_steps=1
    ).train()  # fmt: skip
    err = capsys.readouterr().err
    assert "    mine [a]=2,000\n" in err and "    other=nan\n" in err
    assert "train/CE loss" not in err and "    eval_loss=" in err


def test_brackets_are_no_classes() -> None:
    patterns = NamePatterns("metrics", ["a[bc]", "x*"])
    assert patterns.match("a[bc]") and not patterns.match("ab") and patterns.match("xyz")
    assert not NamePatterns("metrics", []).match("a")


def test_the_head_of_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    callback = ConsoleLoggerCallback()
    state = TrainerState(global_step=10, max_steps=0, epoch=1.5)
    callback.on_step_end(SimpleNamespace(stop_at="20 steps"), state, TrainerControl())
    callback.on_metrics(ARGS, state, TrainerControl(), 10, {"train/CE loss": 1e-7})
    assert capsys.readouterr().err == (
        "[step=10/???,epoch=1.50,eta=???,stop_at=20 steps]\n    train/CE loss=1e-07\n"
    )


def test_late_metrics_come_under_the_head_of_their_own_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Late(TrainerCallback):
        """Tells of an old step, as a save in the background does when it is done."""

        def on_step_end(self, state: Any, trainer: Any) -> None:
            if state.global_step == 3:
                for step in (0, 2):
                    trainer.record_metric("checkpoint/late_s", 5.0, step=step)
                trainer.record_metric("unseen", 5.0, step=1)

    options = {"max_steps": 4, "num_samples": 16, "metrics_collect_interval": 1}
    tiny_trainer(tmp_path, [ConsoleLoggerCallback(), Late()], **options).train()
    blocks = [block.splitlines() for block in capsys.readouterr().err.split("[step=")[1:]]
    late = [head for head, *lines in blocks if "    checkpoint/late_s=5" in lines]
    assert [head.rpartition(",eta")[0] for head in late] == ["0/4,epoch=0.00", "2/4,epoch=0.25"]
    assert [head.partition("/")[0] for head, *_ in blocks] == ["1", "2", "0", "2", "3", "4"]


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    callback, state = ConsoleLoggerCallback(), TrainerState(is_world_process_zero=False)
    callback.on_step_end(ARGS, state, TrainerControl())
    callback.on_metrics(ARGS, state, TrainerControl(), 1, {"train/CE loss": 1.0})
    callback.on_evaluate(ARGS, state, TrainerControl(), {"eval_loss": 1.0})
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"log_interval": 0}, "log_interval must be an integer of at least 1, got 0"),
        ({"metrics_log_interval": 0}, "metrics_log_interval must be"),
        ({"metrics": "train/*"}, "metrics must be a list of patterns"),
        ({"metrics": [1]}, "metrics must be a list of patterns"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ConsoleLoggerCallback(**arguments)
