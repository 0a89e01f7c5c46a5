"""The detector in a run: what it watches, what it does, what it remembers."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest

from headway import ConfigError, TrainerCallback
from headway.callbacks import (
    CheckpointerCallback,
    DivergenceDetector,
    ModelMergeCallback,
    NaNGuardCallback,
)
from headway.checkpoint import committed
from headway.testing import tiny_trainer
from headway.testing.poisoned import Poison, final_loss, poisoned_trainer, sample_at

BAD = 25
"""The step of the poisoned batch."""
CALM = [2.0] * 6
QUICK = {"warmup": 2, "patience": 2, "smoothing": 1.0}


class Script(TrainerCallback):
    """Puts other losses into the records, before the detector sees them."""

    priority = 100

    def __init__(self, losses: list[float], key: str = "loss") -> None:
        self.losses, self.key = losses, key

    def on_log_step(self, logs: dict[str, Any], state: Any) -> None:
        if self.key in logs or self.key == "score":
            logs[self.key] = self.losses[min(state.global_step, len(self.losses)) - 1]

    def on_evaluate(self, metrics: dict[str, Any], state: Any) -> None:
        if self.key in metrics:
            metrics[self.key] = self.losses[min(state.global_step, len(self.losses)) - 1]


def steps_on_disk(folder: Path) -> list[int]:
    return sorted(c.step for c in committed(folder / "out"))


def scripted(folder: Path, losses: list[float], detector: Any, **arguments: Any) -> Any:
    options = {"max_steps": 12, "num_samples": 64, **arguments}
    return tiny_trainer(folder, [Script(losses), detector], **options)


def test_stop_ends_the_run_with_a_save_and_keeps_the_good_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = scripted(
        tmp_path, [*CALM, 9.0], DivergenceDetector(**{**QUICK, "patience": 4}),
        save_strategy="steps", save_steps=1, save_total_limit=1, save_async=False,
    )  # fmt: skip
    output = trainer.train()
    assert output.global_step == 10 and trainer.state.outcome == "stopped"
    assert trainer.bus.stopped_by == ("DivergenceDetector", "on_log", "stop")
    # The record of step 6 was measured before its update: it speaks for the state after step 5.
    assert steps_on_disk(tmp_path) == [5, 10], "the limit of 1 would leave the diverged one only"
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(told) == 1
    assert "9" in told[0] and "threshold=1" in told[0] and "checkpoint-5" in told[0]


def test_an_average_of_weights_is_no_checkpoint_to_return_to(tmp_path: Path) -> None:
    merge = ModelMergeCallback(merge_step=5, merge_last_n_steps=2)
    trainer = scripted(
        tmp_path, [*CALM, 9.0], DivergenceDetector(**{**QUICK, "patience": 4}),
        save_strategy="steps", save_steps=4, save_total_limit=1, save_async=False,
    )  # fmt: skip
    trainer.add_callback(merge)
    trainer.train()
    there = {c.path.name for c in committed(tmp_path / "out")}
    assert there == {"checkpoint-4", "checkpoint-5-merged", "checkpoint-10"}


def test_abort_ends_it_and_writes_nothing(tmp_path: Path) -> None:
    trainer = scripted(
        tmp_path, [*CALM, 9.0], DivergenceDetector(action="abort", **QUICK),
        save_strategy="steps", save_steps=5,
    )  # fmt: skip
    assert trainer.train().global_step == 8
    assert trainer.state.outcome == "aborted" and steps_on_disk(tmp_path) == [5]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_acts_at_once(tmp_path: Path, value: float) -> None:
    detector = DivergenceDetector(warmup=100)
    assert scripted(tmp_path, [2.0, value], detector).train().global_step == 2
    assert detector.rule.observation_count == 1 and detector.rule.smoothed == 2.0


def test_a_metric_in_records_and_evaluations_is_observed_once(tmp_path: Path) -> None:
    detector = DivergenceDetector(use_eval_loss=True)
    trainer = tiny_trainer(tmp_path, [detector], max_steps=4, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert detector.rule.observation_count == 2


def test_evaluations_speak_for_the_state_they_were_made_on(tmp_path: Path) -> None:
    detector = DivergenceDetector(use_eval_loss=True, action="rollback", **QUICK)
    losses = [2.0] * 6 + [9.0] * 2
    asked = []

    class Listen(TrainerCallback):
        priority = -1

        def on_evaluate(self, control: Any) -> None:
            if control.rollback and not asked:
                asked.append((control.rollback_before_step, control.rollback_skip_data))
                control.should_abort_without_save = True

    tiny_trainer(
        tmp_path, [Script(losses, "eval_loss"), detector, Listen()], max_steps=12,
        num_samples=64, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=3,
    ).train()  # fmt: skip
    assert asked == [(6, False)]


def test_every_step_is_watched_between_records(tmp_path: Path) -> None:
    detector = DivergenceDetector(every_step=True)
    tiny_trainer(tmp_path, [detector], max_steps=7, num_samples=64, logging_steps=50).train()
    assert detector.rule.observation_count == 7


def test_who_watches_evaluations_leaves_bad_steps_to_the_option() -> None:
    assert DivergenceDetector(action="rollback").decides_nonfinite
    assert not DivergenceDetector().decides_nonfinite
    assert not DivergenceDetector(action="rollback", use_eval_loss=True).decides_nonfinite


def test_a_bad_step_that_the_watched_figure_does_not_show_is_left_to_the_option(
    tmp_path: Path,
) -> None:
    class BadGradient(TrainerCallback):
        def on_gradients(self, model: Any) -> None:
            next(model.parameters()).grad.fill_(math.nan)

    def run(guard: Any) -> Any:
        trainer = tiny_trainer(
            tmp_path, [BadGradient(), guard], max_steps=4, nonfinite_action="stop"
        )
        trainer.train()
        return trainer.bus.stopped_by

    assert run(DivergenceDetector(action="rollback")) == ("loop", "nonfinite", "stop")
    assert run(NaNGuardCallback("skip", watch_grad_norm=False)) == ("loop", "nonfinite", "stop")
    assert run(NaNGuardCallback("skip")) is None


def test_a_metric_of_another_callback(tmp_path: Path) -> None:
    class Records(TrainerCallback):
        def on_step_end(self, trainer: Any, state: Any) -> None:
            trainer.record_metric("mine/score", 1.0 if state.global_step < 9 else 0.2, "max")

    detector = DivergenceDetector(
        metric_key="mine/score", threshold=0.5, greater_is_better=True, **QUICK
    )
    trainer = tiny_trainer(
        tmp_path, [Records(), detector], max_steps=20, num_samples=64, logging_steps=1
    )
    assert trainer.train().global_step == 10


class MeasureOther(TrainerCallback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.evaluate(trainer.train_dataset, metric_key_prefix="other")


@pytest.mark.parametrize("others", [[], [MeasureOther()]])
@pytest.mark.parametrize("watched", [{}, {"use_eval_loss": True}])
def test_evaluations_may_come_before_the_first_record(
    tmp_path: Path, watched: dict[str, Any], others: list[Any]
) -> None:
    trainer = tiny_trainer(
        tmp_path, [*others, DivergenceDetector(**watched)], max_steps=4, logging_steps=4,
        eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    assert trainer.train().global_step == 4


def test_a_name_that_neither_records_nor_evaluations_have_is_told(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path, [DivergenceDetector(metric_key="los")], max_steps=4, logging_steps=2,
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"los'; did you mean 'loss'.*"):
        trainer.train()


def test_names_that_do_not_exist_are_told_with_the_nearest(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path / "a", [DivergenceDetector(metric_key="grad_nrm")], max_steps=3)
    with pytest.raises(ConfigError, match=r"grad_nrm.*did you mean 'grad_norm'"):
        trainer.train()
    trainer = tiny_trainer(
        tmp_path / "b", [DivergenceDetector(metric_key="eval_los")], max_steps=3,
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="eval_los'; did you mean 'eval_loss'"):
        trainer.train()


def test_an_end_that_was_acted_on_does_not_come_again_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(limit: int) -> Any:
        detector = DivergenceDetector(cooldown=5, **QUICK)
        trainer = scripted(
            tmp_path, [*CALM, 9.0], detector, save_strategy="steps", save_steps=50, max_steps=limit
        )
        trainer.train()
        return trainer

    assert run(30).state.global_step == 8
    caplog.clear()
    assert run(30).state.global_step == 8 + 5 + 2, "a pause, then the run is as bad as before"


def test_its_state_is_that_of_the_run(tmp_path: Path) -> None:
    losses = [5.0, 4.0, 3.0, 2.0, 2.5, 2.0]
    whole = DivergenceDetector()
    scripted(tmp_path / "a", losses, whole, max_steps=6, save_strategy="steps").train()
    options = {"max_steps": 6, "save_strategy": "steps"}
    scripted(tmp_path / "b", losses, DivergenceDetector(), stop_at=3, **options).train()
    resumed = DivergenceDetector()
    scripted(tmp_path / "b", losses, resumed, **options).train()
    ours, theirs = resumed.state_dict(), whole.state_dict()
    for key in ("smoothed_loss", "best_smoothed_loss", "observation_count", "consecutive_above"):
        assert ours[key] == theirs[key]
    json.dumps(ours, allow_nan=False)


# Rollback


@pytest.fixture(scope="module")
def clean(tmp_path_factory: Any) -> float:
    """What a run without poison ends at."""
    trainer = poisoned_trainer(tmp_path_factory.mktemp("clean"), [Poison(None)])
    trainer.train()
    return final_loss(trainer)


def test_the_poison_ruins_a_run_without_a_guard(tmp_path: Path, clean: float) -> None:
    poison = Poison(sample_at(BAD))
    trainer = poisoned_trainer(tmp_path, [poison])
    trainer.train()
    assert poison.hits == [BAD] and final_loss(trainer) > 1.5 * clean


def test_a_run_with_a_poisoned_batch_ends_where_one_without_ends(
    tmp_path: Path, clean: float, caplog: pytest.LogCaptureFixture
) -> None:
    poison, detector = Poison(sample_at(BAD)), DivergenceDetector(action="rollback")
    trainer = poisoned_trainer(tmp_path, [poison, detector])
    trainer.train()
    assert poison.hits == [BAD], "the batch is not read a second time"
    assert detector.recovery.num_rollbacks == 1
    assert abs(final_loss(trainer) / clean - 1) < 0.01
    assert trainer.state.global_step == 64 and trainer.state.outcome == "completed"
    (told,) = [r.getMessage() for r in caplog.records if "rolled back" in r.getMessage()]
    found = re.search(r"from step (\d+) to step (\d+)", told)
    assert found is not None and int(found[2]) == 20 and BAD < int(found[1]) <= BAD + 7
    gone = [step for step in range(21, 65) if step not in poison.steps[int(found[1]) :]]
    assert gone == list(range(BAD, int(found[1]) + 1)), "just the offending steps are left out"


def test_records_of_many_steps_find_the_offending_ones_all_the_same(tmp_path: Path) -> None:
    poison = Poison(sample_at(BAD))
    detector = DivergenceDetector(action="rollback", warmup=1, patience=1, smoothing=0.9)
    trainer = poisoned_trainer(tmp_path, [poison, detector], logging_steps=10, max_steps=45)
    trainer.train()
    assert poison.hits == [BAD] and detector.recovery.skip_steps == [(BAD, 31)]
    assert trainer.state.num_input_tokens_skipped == 6 * 4 * 16


def test_a_resume_in_the_middle_still_leaves_the_offending_steps_out(
    tmp_path: Path, clean: float
) -> None:
    first = Poison(sample_at(BAD))
    poisoned_trainer(
        tmp_path, [first, DivergenceDetector(action="rollback"), StopAfterReturn(23)]
    ).train()
    assert first.steps[-3:] == [21, 22, 23]
    second, detector = Poison(sample_at(BAD)), DivergenceDetector(action="rollback")
    trainer = poisoned_trainer(tmp_path, [second, detector])
    trainer.train()
    assert second.hits == [] and second.steps[0] == 24
    assert detector.recovery.num_rollbacks == 1
    assert abs(final_loss(trainer) / clean - 1) < 0.01


class StopAfterReturn(TrainerCallback):
    """Stops the run at a step of its second time."""

    def __init__(self, step: int) -> None:
        self.step, self.returned = step, False

    def on_load(self) -> None:
        self.returned = True

    def on_step_end(self, state: Any, control: Any) -> None:
        if self.returned and state.global_step == self.step:
            control.should_training_stop = True


def test_a_kill_right_after_a_rollback_resumes_from_there(tmp_path: Path) -> None:
    """Checkpoints of the time that was given up are newer by their step, not by their save."""

    class Kill(TrainerCallback):
        def __init__(self) -> None:
            self.returned = False

        def on_load(self) -> None:
            self.returned = True

        def on_step_end(self) -> None:
            if self.returned:
                raise RuntimeError("killed")

    detector = DivergenceDetector(action="rollback", patience=8, learning_rate_factor=0.5)
    trainer = poisoned_trainer(
        tmp_path, [Poison(sample_at(BAD)), detector, Kill()], save_total_limit=None,
        save_on_error=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="killed"):
        trainer.train()
    assert max(steps_on_disk(tmp_path)) == 30, "one was saved after the poison"
    again = DivergenceDetector(action="rollback", patience=8, learning_rate_factor=0.5)
    poison, starts = Poison(sample_at(BAD)), []

    class Start(TrainerCallback):
        def on_train_begin(self, state: Any, optimizer: Any) -> None:
            starts.append((state.global_step, state.rate_factor, again.recovery.num_rollbacks))
            starts.append(optimizer.param_groups[0]["initial_lr"])

    poisoned_trainer(tmp_path, [poison, again, Start()], stop_at=33).train()
    assert starts == [(20, 0.5, 1), 0.5]
    assert poison.hits == []


class Ruin(TrainerCallback):
    """Records of a run that goes wrong at a step, whatever is done about it."""

    priority = 100

    def __init__(self, step: int) -> None:
        self.step = step

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "train/CE loss" in metrics:
            metrics["train/CE loss"] = 2.0 if step < self.step else 9.0


def test_rollbacks_have_a_limit_and_grow_harsher(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    class Listen(TrainerCallback):
        priority = -1

        def on_metrics(self, control: Any) -> None:
            if control.rollback:
                asked.append((control.rollback_before_step, control.rollback_skip_data))

    detector = DivergenceDetector(
        action="rollback", every_step=True, max_rollbacks=2, learning_rate_factor=0.5, **QUICK
    )
    trainer = tiny_trainer(
        tmp_path, [Ruin(8), detector, Listen()], num_samples=128, max_steps=30,
        save_strategy="steps", save_steps=4, learning_rate=0.8, lr_scheduler_type="constant",
        optim="sgd", save_total_limit=None,
    )  # fmt: skip
    output = trainer.train()
    assert asked == [(6, False), (5, True)], "first the offending steps, then all data since"
    assert trainer.state.outcome == "aborted" and output.global_step < 30
    assert "max_rollbacks=2 is used up" in caplog.text
    assert trainer.state.rate_factor == 0.25
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_the_checkpoint_of_a_resume_is_there_to_return_to(tmp_path: Path) -> None:
    def run(**arguments: Any) -> DivergenceDetector:
        detector = DivergenceDetector(
            action="rollback", every_step=True, warmup=2, patience=4, smoothing=1.0
        )
        tiny_trainer(
            tmp_path, [Ruin(5), detector], num_samples=64, max_steps=8, save_strategy="steps",
            save_steps=3, save_total_limit=1, save_async=False, **arguments,
        ).train()  # fmt: skip
        return detector

    run(stop_at=3)
    assert run().recovery.skip_steps == [(4, 9)] and 3 in steps_on_disk(tmp_path)


def test_without_a_checkpoint_to_return_to_it_says_which_are_there(tmp_path: Path) -> None:
    detector = DivergenceDetector(action="rollback", every_step=True, **QUICK)
    trainer = tiny_trainer(
        tmp_path, [Ruin(5), detector], num_samples=64, max_steps=20, save_strategy="steps",
        save_steps=6, metrics_collect_interval=6, logging_steps=6,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"step 3 or an earlier one.*there: none"):
        trainer.train()


def test_a_rollback_without_planned_saves_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def begin(*callbacks: Any) -> bool:
        caplog.clear()
        detector = DivergenceDetector(action="rollback")
        tiny_trainer(tmp_path, [detector, *callbacks], max_steps=1, save_strategy="no").train()
        return "plans none" in caplog.text

    assert begin() and not begin(CheckpointerCallback(save_interval=1))


def test_a_rollback_needs_whole_checkpoints(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path, [DivergenceDetector(action="rollback")], save_strategy="steps",
        checkpoint_components=["model", "trainer"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"action='rollback'.*checkpoint_components=\['model'"):
        trainer.train()


def test_what_one_guard_lets_go_another_still_keeps(tmp_path: Path) -> None:
    def run(**arguments: Any) -> NaNGuardCallback:
        quick = DivergenceDetector(action="rollback", every_step=True, warmup=0)
        slow = NaNGuardCallback("rollback", parameter_interval=100)
        tiny_trainer(
            tmp_path, [quick, slow], num_samples=64, save_strategy="steps", save_steps=2,
            save_total_limit=1, save_async=False, **arguments,
        ).train()  # fmt: skip
        return slow

    run(max_steps=4)
    slow = run(max_steps=10)
    assert slow.recovery.good == (4, "checkpoint-4"), "no later one is known to be sound"
    assert 4 in steps_on_disk(tmp_path) and 6 not in steps_on_disk(tmp_path)


def test_a_checkpoint_that_was_the_best_goes_like_others_once_a_newer_one_is_good(
    tmp_path: Path,
) -> None:
    # Saved more often than evaluated: each of 4, 8, 12 is the best when a newer one is found good.
    better = Script([20.0 - step for step in range(1, 17)], key="eval_loss")
    guard = NaNGuardCallback("rollback")
    tiny_trainer(
        tmp_path, [better, guard], num_samples=64, max_steps=16, save_strategy="steps",
        save_steps=2, save_total_limit=1, save_async=False, eval_strategy="steps", eval_steps=4,
    ).train()  # fmt: skip
    assert guard.recovery.good == (14, "checkpoint-14")
    assert steps_on_disk(tmp_path) == [14, 16]


def test_a_second_run_of_one_object_begins_anew(tmp_path: Path) -> None:
    """Else its first losses are measured by the best of the run before, and steps left out that
    went wrong there."""
    detector = DivergenceDetector(action="rollback", threshold=1.0, **QUICK)
    first = scripted(
        tmp_path / "one", [*CALM, 9.0, 9.0, *CALM], detector,
        save_strategy="steps", save_steps=2,
    )  # fmt: skip
    first.train()
    assert detector.recovery.num_rollbacks == 1 and detector.recovery.skip_steps
    second = scripted(tmp_path / "two", [8.0] * 12, detector, save_strategy="steps")
    second.train()
    assert second.state.global_step == 12 and second.state.outcome == "completed"
    assert detector.recovery.num_rollbacks == 0 and not detector.recovery.skip_steps
    again = scripted(tmp_path / "two", [8.0] * 14, detector, max_steps=14)
    again.train(resume_from_checkpoint=True)
    assert detector.rule.observation_count == 14  # what was stored is that run's own
