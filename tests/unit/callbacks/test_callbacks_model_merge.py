"""The mean of weights over windows of steps: against one computed from what each step left."""

from __future__ import annotations

import logging
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway import TrainerCallback
from headway.callbacks import (
    ModelMergeCallback,
    compute_merge_steps_from_decay_schedule,
    compute_merge_window_starts,
)
from headway.callbacks.save.averages import exchanged
from headway.checkpoint import CheckpointManager, read_manifest, validate_checkpoint
from headway.checkpoint.tensors import read_shards
from headway.errors import ConfigError
from headway.testing import tiny_trainer

RUN: dict[str, Any] = {"num_samples": 32, "max_steps": 8, "learning_rate": 1e-2}


class Weights(TrainerCallback):
    """What the model held after each step, and on which of them it was stopped."""

    priority = 100

    def __init__(self, stop_at: int | None = None) -> None:
        self.by_step: dict[int, dict[str, Tensor]] = {}
        self.stop_at = stop_at

    def on_step_end(self, state: Any, model: Any, control: Any) -> None:
        held = model.state_dict()
        self.by_step[state.global_step] = {name: t.detach().clone() for name, t in held.items()}
        control.should_training_stop = state.global_step == self.stop_at

    def mean(self, first: int, last: int, name: str) -> Tensor:
        """Computed as a float32 sum in the order of the steps, divided once."""
        total = torch.zeros_like(self.by_step[first][name], dtype=torch.float32)
        for step in range(first, last + 1):
            total += self.by_step[step][name]
        return total / (last - first + 1)


def read(folder: Path, name: str) -> dict[str, Tensor]:
    return read_shards(folder / "out" / name, "model")


def assert_merged(folder: Path, seen: Weights, first: int, last: int) -> None:
    stored = read(folder, f"checkpoint-{last}-merged")
    assert set(stored) <= set(seen.by_step[last]) and stored
    for name, value in stored.items():
        assert torch.equal(value, seen.mean(first, last, name)), name
        assert not torch.equal(value, seen.by_step[last][name]), name


def final_weights(trainer: Any) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_it_is_the_mean_of_what_the_steps_left(tmp_path: Path) -> None:
    seen = Weights()
    merge = ModelMergeCallback(merge_step=[7, 4], merge_last_n_steps=3)
    trainer = tiny_trainer(tmp_path, [merge, seen], **RUN)
    trainer.train()
    assert_merged(tmp_path, seen, 2, 4)
    assert_merged(tmp_path, seen, 5, 7)
    alone = tiny_trainer(tmp_path / "alone", **RUN)
    alone.train()
    for own, expected in zip(final_weights(trainer), final_weights(alone), strict=True):
        assert torch.equal(own, expected), "training went on with other weights"
    assert merge.parameter_state() == {}, "the memory is given back"


def test_an_interval_merges_at_its_multiples(tmp_path: Path) -> None:
    seen = Weights()
    tiny_trainer(
        tmp_path, [ModelMergeCallback(merge_interval=4, merge_last_n_steps=4), seen], **RUN
    ).train()
    assert_merged(tmp_path, seen, 1, 4)
    assert_merged(tmp_path, seen, 5, 8)


def test_the_merged_checkpoint_is_whole_and_not_one_to_resume_from(tmp_path: Path) -> None:
    merge = ModelMergeCallback(merge_step=8, merge_last_n_steps=2, output_suffix="soup")
    saved: list[tuple[int, str]] = []

    class Told(TrainerCallback):
        def on_save(self, checkpoint_path: str, step: int) -> None:
            saved.append((step, Path(checkpoint_path).name))

    trainer = tiny_trainer(
        tmp_path, [merge, Told()], save_strategy="steps", save_steps=3, save_total_limit=1, **RUN
    )
    trainer.train()
    path = tmp_path / "out" / "checkpoint-8-soup"
    assert validate_checkpoint(path)
    manifest = read_manifest(path)
    assert (manifest.kind, manifest.step) == ("merged", 8)
    assert manifest.metadata == {"permanent": True}
    assert [entry["key"] for entry in manifest.components] == ["model"]
    assert {"config.json", "trainer_state.json", "run/config.json"} <= set(manifest.files)
    assert (8, "checkpoint-8-soup") in saved and saved[-1] == (8, "checkpoint-8")
    manager = CheckpointManager(tmp_path / "out")
    newest = manager.resolve(True)
    assert newest is not None and newest.name == "checkpoint-8"
    assert [(c.path.name, c.kind) for c in manager.list()] == [
        ("checkpoint-8-soup", "merged"),
        ("checkpoint-8", "training"),
    ]
    copytree(newest, tmp_path / "out" / "checkpoint-8-copy")  # somebody's own: not of the run
    assert len(manager.list()) == 2
    # Only the run's own count for save_total_limit.
    left = {p.name for p in (tmp_path / "out").glob("checkpoint-*")}
    assert left == {path.name, newest.name, "checkpoint-8-copy"}
    other = tiny_trainer(tmp_path / "other", max_steps=1)
    other.load_checkpoint(str(path))
    stored = read(tmp_path, "checkpoint-8-soup")
    for name, value in other.model.state_dict().items():
        if name in stored:
            assert torch.equal(value, stored[name])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Weights:
    """What each step of an uninterrupted run leaves."""
    seen = Weights()
    tiny_trainer(tmp_path_factory.mktemp("whole"), [seen], **RUN).train()
    return seen


@pytest.mark.parametrize(("stop_at", "save_async"), [(2, True), (3, False), (4, True), (5, False)])
def test_a_run_resumed_around_a_window_merges_the_same(
    stop_at: int, save_async: bool, tmp_path: Path, whole: Weights
) -> None:
    """At the step before it, at its first, inside of it, and at its last."""
    options: dict[str, Any] = {**RUN, "save_strategy": "steps", "save_steps": 100}
    options["save_async"] = save_async
    merge = {"merge_step": 5, "merge_last_n_steps": 3}
    tiny_trainer(tmp_path, [ModelMergeCallback(**merge), Weights(stop_at)], **options).train()
    assert (tmp_path / "out" / f"checkpoint-{stop_at}").is_dir()
    seen = Weights()
    again = tiny_trainer(tmp_path, [ModelMergeCallback(**merge), seen], **options)
    again.train(resume_from_checkpoint=True)
    assert sorted(seen.by_step) == list(range(stop_at + 1, 9))
    assert_merged(tmp_path, whole, 3, 5)


class SaveEarly(TrainerCallback):
    """Saves before other callbacks have seen the end of the step."""

    priority = 50

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: Any, trainer: Any) -> None:
        if state.global_step == self.step:
            trainer.save_checkpoint()


@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_save_made_while_a_step_ends_loses_nothing(
    step: int, tmp_path: Path, whole: Weights
) -> None:
    merge = {"merge_step": 5, "merge_last_n_steps": 3}
    early = SaveEarly(step)
    tiny_trainer(tmp_path, [ModelMergeCallback(**merge), early, Weights(step)], **RUN).train()
    for path in (tmp_path / "out").glob("*-merged"):
        path.rename(tmp_path / "first")
    again = tiny_trainer(tmp_path, [ModelMergeCallback(**merge)], **RUN)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{step}"))
    assert_merged(tmp_path, whole, 3, 5)


def test_weights_that_a_save_still_copies_are_not_exchanged_before_that_is_through() -> None:
    own, found = torch.zeros(2), []
    strategy = SimpleNamespace(before_apply=lambda: found.append(own.tolist()))
    with exchanged(SimpleNamespace(strategy=strategy), {"w": own}, {"w": torch.ones(2)}):
        assert own.tolist() == [1, 1]
    assert found == [[0, 0]] and own.tolist() == [0, 0]


def test_a_start_inside_of_a_window_without_sums_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_trainer(tmp_path, [Weights(4)], save_strategy="steps", save_steps=100, **RUN).train()
    merge = ModelMergeCallback(merge_interval=4, merge_last_n_steps=4)
    late = ModelMergeCallback(merge_step=6, merge_last_n_steps=3, output_suffix="late")
    cut = ModelMergeCallback(merge_step=6, merge_last_n_steps=4, output_suffix="cut")
    with caplog.at_level(logging.WARNING):
        tiny_trainer(tmp_path, {"a": merge, "late": late, "cut": cut}.values(), **RUN).train(
            resume_from_checkpoint=True
        )
    told = [r.getMessage() for r in caplog.records if "no merge at step" in r.getMessage()]
    assert len(told) == 1 and "no merge at step 6" in told[0] and "3 to 3" in told[0]
    names = {p.name for p in (tmp_path / "out").glob("checkpoint-*-*")}
    assert names == {"checkpoint-8-merged", "checkpoint-6-late"}


def test_another_setting_does_not_go_on_with_the_sums_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**RUN, "save_strategy": "steps", "save_steps": 100}
    first = ModelMergeCallback(merge_step=6, merge_last_n_steps=4)
    tiny_trainer(tmp_path, [first, Weights(4)], **options).train()
    seen = Weights()
    again = ModelMergeCallback(merge_step=8, merge_last_n_steps=3)
    tiny_trainer(tmp_path, [again, seen], **options).train(resume_from_checkpoint=True)
    assert_merged(tmp_path, seen, 6, 8)


def test_a_failure_while_it_evaluates_leaves_the_weights_of_training(tmp_path: Path) -> None:
    seen = Weights()

    class Fails(TrainerCallback):
        def on_prediction_step(self) -> None:
            raise RuntimeError("power")

    trainer = tiny_trainer(
        tmp_path,
        [ModelMergeCallback(merge_step=3, merge_last_n_steps=3), seen, Fails()],
        eval_strategy="steps",
        eval_steps=100,
        **RUN,
    )
    with pytest.raises(RuntimeError, match="power"):
        trainer.train()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, seen.by_step[3][name])
    assert_merged(tmp_path, seen, 1, 3)


def test_it_is_evaluated_where_the_run_evaluates(tmp_path: Path) -> None:
    evaluated: list[dict[str, float]] = []
    performed: list[str] = []

    class Watch(TrainerCallback):
        def on_evaluate(self, metrics: dict[str, float]) -> None:
            evaluated.append(metrics)

        def perform_eval(self, prefix: str = "eval") -> None:
            performed.append(prefix)

    options = {**RUN, "eval_strategy": "steps", "eval_steps": 8}
    merge = ModelMergeCallback(merge_step=4, merge_last_n_steps=4)
    trainer = tiny_trainer(tmp_path, [merge, Watch()], **options)
    trainer.train()
    (record,) = [r for r in trainer.state.log_history if "eval/merged_loss" in r]
    assert record["step"] == 4
    assert [set(m) & {"eval_loss"} for m in evaluated] == [{"eval_loss"}], "on_evaluate is another"
    assert performed == ["eval/merged"]
    other = tiny_trainer(tmp_path / "other", max_steps=1)
    other.load_checkpoint(str(tmp_path / "out" / "checkpoint-4-merged"))
    assert other.evaluate()["eval_loss"] == record["eval/merged_loss"]
    quiet = tiny_trainer(tmp_path / "quiet", [ModelMergeCallback(4, None, 4)], **RUN)
    quiet.train()
    assert not any("eval/merged_loss" in r for r in quiet.state.log_history)


def test_frozen_weights_and_constant_buffers_come_out_as_they_are(tmp_path: Path) -> None:
    merge = ModelMergeCallback(merge_step=7, merge_last_n_steps=7)

    class Freeze(TrainerCallback):
        """One parameter never moves, one only from the fifth step on."""

        def on_train_begin(self, model: Any) -> None:
            model.register_buffer("factor", torch.rand(50) * 3)
            model.register_buffer("ticks", torch.zeros((), dtype=torch.int64))
            self.parameters = list(model.parameters())[:2]
            for parameter in self.parameters:
                parameter.requires_grad_(False)

        def on_step_begin(self, state: Any, model: Any) -> None:
            model.ticks += 1
            if state.global_step == 4:
                self.parameters[1].requires_grad_(True)

    seen = Weights()
    trainer = tiny_trainer(tmp_path, [merge, seen, Freeze()], **RUN)
    trainer.train()
    stored, last = read(tmp_path, "checkpoint-7-merged"), seen.by_step[7]
    names = [name for name, _ in trainer.model.named_parameters()]
    assert torch.equal(stored[names[0]], last[names[0]])
    assert torch.equal(stored["factor"], last["factor"])
    assert stored["ticks"] == 7
    thawed = torch.stack([seen.by_step[step][names[1]] for step in range(1, 8)])
    torch.testing.assert_close(stored[names[1]], thawed.mean(0), rtol=1e-6, atol=1e-7)
    assert not torch.equal(thawed[4], thawed[3]) and torch.equal(thawed[3], thawed[0])


def test_weights_of_two_bytes_are_added_up_in_four(tmp_path: Path) -> None:
    merge = ModelMergeCallback(merge_step=6, merge_last_n_steps=6)

    class Half(TrainerCallback):
        def on_init_end(self, model: Any) -> None:
            model.bfloat16()

    seen = Weights()
    trainer = tiny_trainer(tmp_path, [merge, seen, Half()], **RUN)
    trainer.train()
    for name, value in read(tmp_path, "checkpoint-6-merged").items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, seen.mean(1, 6, name).bfloat16()), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "exactly one"),
        ({"merge_step": 4, "merge_interval": 4}, "exactly one"),
        ({"merge_step": 0}, "merge_step: 0 given"),
        ({"merge_step": [4, "5"]}, "merge_step: [4, '5'] given"),
        ({"merge_step": "4"}, "merge_step: '4' given"),
        ({"merge_interval": 0}, "merge_interval: 0 given"),
        ({"merge_step": 4, "merge_last_n_steps": 0}, "merge_last_n_steps: 0 given"),
        ({"merge_step": [10, 12], "merge_last_n_steps": 3}, "the windows of 10 and 12 overlap"),
        ({"merge_interval": 4, "merge_last_n_steps": 5}, "overlap"),
        ({"merge_step": 4, "merge_last_n_steps": 5}, "merge steps from 5 up"),
        ({"merge_step": 4, "merge_last_n_steps": 1, "output_suffix": "a/b"}, "output_suffix"),
        ({"merge_step": 4, "enabled": "no"}, "enabled: 'no' given"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelMergeCallback(**arguments)
    assert str(caught.value).startswith("ModelMergeCallback: ") and words in str(caught.value)


def test_one_that_is_not_enabled_is_not_looked_at(tmp_path: Path) -> None:
    off = ModelMergeCallback(merge_step=-3, enabled=False)
    trainer = tiny_trainer(tmp_path, [off], max_steps=2)
    trainer.train()
    assert not list((tmp_path / "out").glob("*merged"))


def test_two_of_one_suffix_are_refused_before_the_first_step(tmp_path: Path) -> None:
    two = [ModelMergeCallback(4, None, 2), ModelMergeCallback(8, None, 2)]
    seen = Weights()
    with pytest.raises(ConfigError, match="output_suffix: 'merged' given to two"):
        tiny_trainer(tmp_path, [*two, seen], **RUN).train()
    assert seen.by_step == {}


def test_steps_before_decays_and_the_first_steps_of_windows() -> None:
    assert compute_merge_steps_from_decay_schedule([1000, 2000], 10, decay=100) == [90, 290]
    assert compute_merge_steps_from_decay_schedule([1005, 2000], 10, decay_fraction=0.1) == [
        90,
        280,
    ]
    with pytest.raises(ConfigError, match="exactly one"):
        compute_merge_steps_from_decay_schedule([1000], 10)
    with pytest.raises(ConfigError, match="longer than a period"):
        compute_merge_steps_from_decay_schedule([1000], 10, decay=1001)
    assert compute_merge_window_starts([100, 300], 50) == [51, 251]
    assert compute_merge_window_starts([300, 100, 140], 50) == [51, 251]
    with pytest.raises(ConfigError, match="merge_steps: 20 given"):
        compute_merge_window_starts([20], 50)
