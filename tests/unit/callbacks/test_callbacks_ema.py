"""The moving average of weights: against a loop by hand, through resumes, in evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway import TrainerCallback
from headway.callbacks import EMACallback, ModelMergeCallback
from headway.callbacks.save.host_average import HostMover
from headway.checkpoint import read_manifest, validate_checkpoint
from headway.checkpoint.tensors import read_shards
from headway.errors import ConfigError
from headway.testing import tiny_trainer

RUN: dict[str, Any] = {"num_samples": 32, "max_steps": 8, "learning_rate": 1e-2}


class Weights(TrainerCallback):
    """What the model held at the start and after each step."""

    priority = 100

    def __init__(self, stop_at: int | None = None) -> None:
        self.by_step: dict[int, dict[str, Tensor]] = {}
        self.stop_at = stop_at

    def on_train_begin(self, state: Any, model: Any) -> None:
        self._take(state, model)

    def on_step_end(self, state: Any, model: Any, control: Any) -> None:
        self._take(state, model)
        control.should_training_stop = state.global_step == self.stop_at

    def _take(self, state: Any, model: Any) -> None:
        held = model.state_dict()
        self.by_step[state.global_step] = {name: t.detach().clone() for name, t in held.items()}


def by_hand(seen: Weights, decays: dict[int, float], first: int = 0) -> dict[str, Tensor]:
    """`decays`: the factor of the old average at each step at which it moves."""
    average = {name: value.float() for name, value in seen.by_step[first].items()}
    for step, decay in decays.items():
        for name, value in seen.by_step[step].items():
            average[name] = average[name].lerp(value.float(), 1 - decay)
    return average


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def average_of(ema: EMACallback) -> dict[str, Tensor]:
    return ema.parameter_state()["ema"]


@pytest.mark.parametrize(
    ("options", "decays", "first"),
    [
        ({"decay": 0.9}, dict.fromkeys(range(1, 9), 0.9), 0),
        ({"decay": 0.5, "update_every": 3}, {3: 0.5**3, 6: 0.5**3}, 0),
        ({"decay": 0.9, "start_step": 2, "update_every": 2}, dict.fromkeys((4, 6, 8), 0.9**2), 2),
        (
            {"decay": 0.3, "decay_warmup": True},
            {n: min(0.3, (1 + n) / (10 + n)) for n in range(1, 9)},
            0,
        ),
        ({"decay": 0.9, "device": "cpu"}, dict.fromkeys(range(1, 9), 0.9), 0),
    ],
)
def test_it_is_what_a_loop_by_hand_gives(
    options: dict[str, Any], decays: dict[int, float], first: int, tmp_path: Path
) -> None:
    seen, ema = Weights(), EMACallback(**options)
    trainer = tiny_trainer(tmp_path, [ema, seen], **RUN)
    trainer.train()
    assert_equal(average_of(ema), by_hand(seen, decays, first))
    # The model's own weights are those of a run without it.
    assert_equal({n: p.detach() for n, p in trainer.model.named_parameters()}, seen.by_step[8])


@pytest.mark.parametrize("stop_at", [1, 3, 4])
def test_a_resumed_run_has_the_same_average(stop_at: int, tmp_path: Path) -> None:
    options = {"decay": 0.8, "start_step": 1, "update_every": 2, "decay_warmup": True}
    settings = {**RUN, "save_strategy": "steps", "save_steps": 100}
    whole = EMACallback(**options)
    tiny_trainer(tmp_path / "whole", [whole], **RUN).train()
    tiny_trainer(tmp_path, [EMACallback(**options), Weights(stop_at)], **settings).train()
    again = EMACallback(**options)
    tiny_trainer(tmp_path, [again], **settings).train(resume_from_checkpoint=True)
    assert_equal(average_of(again), average_of(whole))


def test_a_checkpoint_without_it_lets_it_begin_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**RUN, "save_strategy": "steps", "save_steps": 100}
    tiny_trainer(tmp_path, [Weights(4)], **settings).train()
    seen, ema = Weights(), EMACallback(decay=0.5)
    tiny_trainer(tmp_path, [ema, seen], **settings).train(resume_from_checkpoint=True)
    assert "it begins anew as the weights of step 4" in caplog.text
    assert_equal(average_of(ema), by_hand(seen, dict.fromkeys(range(5, 9), 0.5), 4))


def test_a_run_that_goes_back_takes_the_average_of_then(tmp_path: Path) -> None:
    class Back(TrainerCallback):
        def __init__(self) -> None:
            self.done = False

        def on_step_end(self, state: Any, control: Any) -> None:
            if state.global_step == 5 and not self.done:
                self.done = control.rollback = True

    settings = {**RUN, "save_strategy": "steps", "save_steps": 3}
    ema, seen = EMACallback(decay=0.5), Weights()
    tiny_trainer(tmp_path, [ema, seen, Back()], **settings).train()
    assert_equal(average_of(ema), by_hand(seen, dict.fromkeys(range(1, 9), 0.5)))


def test_evaluations_see_it_and_training_does_not(tmp_path: Path) -> None:
    options = {**RUN, "eval_strategy": "steps", "eval_steps": 4}
    during: list[Tensor] = []
    after: list[Tensor] = []

    class Look(TrainerCallback):
        def on_prediction_step(self, model: Any) -> None:
            during.append(next(model.parameters()).detach().clone())

        def on_evaluate(self, model: Any) -> None:
            after.append(next(model.parameters()).detach().clone())

    seen, ema = Weights(), EMACallback(decay=0.9, use_for_eval=True, swap_at_end=True)
    trainer = tiny_trainer(tmp_path, [ema, seen, Look()], **options)
    trainer.train()
    name = next(iter(dict(trainer.model.named_parameters())))
    half = by_hand(seen, dict.fromkeys(range(1, 5), 0.9))
    assert torch.equal(during[0], half[name])
    assert torch.equal(after[0], seen.by_step[4][name])
    alone = Weights()
    tiny_trainer(tmp_path / "alone", [alone], **options).train()
    assert_equal(seen.by_step[8], alone.by_step[8])
    # The model is the average in the end, and is evaluated as that.
    expected = by_hand(seen, dict.fromkeys(range(1, 9), 0.9))
    assert_equal({n: p.detach() for n, p in trainer.model.named_parameters()}, expected)
    last = [r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r][-1]
    assert trainer.evaluate()["eval_loss"] == last
    assert_equal(average_of(ema), expected)


def test_evaluations_of_weights_that_were_loaded_see_these(tmp_path: Path) -> None:
    ema = EMACallback(decay=0.9, use_for_eval=True)
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = tiny_trainer(tmp_path, [ema], load_best_model_at_end=True, **RUN, **options)
    trainer.train()
    own = tiny_trainer(tmp_path / "own", **RUN)
    own.load_checkpoint(trainer.state.best_model_checkpoint)
    assert trainer.evaluate()["eval_loss"] == own.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-6"))
    assert trainer.state.global_step == 8
    assert trainer.state.log_history[-2]["eval_loss"] != own.evaluate()["eval_loss"]


def test_a_checkpoint_that_no_step_follows_brings_its_average(tmp_path: Path) -> None:
    class ReturnAndStop(TrainerCallback):
        def on_step_end(self, state: Any, control: Any) -> None:
            control.rollback = state.global_step == 5

        def on_epoch_begin(self, state: Any, control: Any) -> None:
            control.should_training_stop = state.global_step == 4

    ema = EMACallback(decay=0.5, use_for_eval=True, export=True)
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = tiny_trainer(tmp_path, [ema, ReturnAndStop()], **RUN, **options)
    trainer.train()
    told = {r["step"]: r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r}
    assert (trainer.state.global_step, trainer.state.outcome) == (4, "stopped")
    assert validate_checkpoint(tmp_path / "out/checkpoint-4-ema")
    trainer.load_checkpoint(str(tmp_path / "out/checkpoint-2"))
    assert trainer.evaluate()["eval_loss"] == told[2] != told[4]


def test_a_failing_evaluation_leaves_the_weights_of_training(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_prediction_step(self) -> None:
            raise RuntimeError("power")

    seen, ema = Weights(), EMACallback(decay=0.9, use_for_eval=True)
    trainer = tiny_trainer(
        tmp_path, [ema, seen, Fails()], eval_strategy="steps", eval_steps=2, **RUN
    )
    with pytest.raises(RuntimeError, match="power"):
        trainer.train()
    assert_equal({n: p.detach() for n, p in trainer.model.named_parameters()}, seen.by_step[2])
    assert_equal(average_of(ema), by_hand(seen, {1: 0.9, 2: 0.9}))


def test_weights_of_two_bytes_have_an_average_of_four(tmp_path: Path) -> None:
    class Half(TrainerCallback):
        def on_init_end(self, model: Any) -> None:
            model.bfloat16()

    options = {**RUN, "eval_strategy": "steps", "eval_steps": 2}
    seen, ema = Weights(), EMACallback(decay=0.9, use_for_eval=True)
    trainer = tiny_trainer(tmp_path, [ema, seen, Half()], **options)
    trainer.train()
    assert_equal(average_of(ema), by_hand(seen, dict.fromkeys(range(1, 9), 0.9)))
    assert_equal({n: p.detach() for n, p in trainer.model.named_parameters()}, seen.by_step[8])


def test_it_is_written_out_as_a_model_folder(tmp_path: Path) -> None:
    seen, ema = Weights(), EMACallback(decay=0.9, export=True)
    tiny_trainer(tmp_path, [ema, seen], **RUN).train()
    path = tmp_path / "out" / "checkpoint-8-ema"
    assert validate_checkpoint(path)
    manifest = read_manifest(path)
    assert manifest.kind == "merged" and manifest.metadata == {"permanent": True}
    expected = by_hand(seen, dict.fromkeys(range(1, 9), 0.9))
    assert_equal(read_shards(path, "model"), expected)


def test_what_thaws_joins_in(tmp_path: Path) -> None:
    class Freeze(TrainerCallback):
        def on_init_end(self, model: Any) -> None:
            self.parameter = next(iter(model.parameters()))
            self.parameter.requires_grad_(False)

        def on_step_begin(self, state: Any) -> None:
            if state.global_step == 4:
                self.parameter.requires_grad_(True)

    seen, ema = Weights(), EMACallback(decay=0.9)
    trainer = tiny_trainer(tmp_path, [ema, seen, Freeze()], **RUN)
    trainer.train()
    name = next(iter(dict(trainer.model.named_parameters())))
    assert not torch.equal(seen.by_step[5][name], seen.by_step[4][name])
    assert name in average_of(ema)
    assert_equal(average_of(ema), by_hand(seen, dict.fromkeys(range(1, 9), 0.9)))


def test_a_mover_tells_what_it_failed_with() -> None:
    mover = HostMover()
    averages = {"a": torch.zeros(3)}
    mover.move(averages, {"a": torch.ones(3)}, 0.25)
    mover.wait()
    assert averages["a"].tolist() == [0.25] * 3
    mover.move(averages, {"a": torch.ones(4)}, 0.25)
    with pytest.raises(RuntimeError):
        mover.close()
    mover.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"decay": 1.0}, "decay: 1.0 given"),
        ({"decay": -0.1}, "decay: -0.1 given"),
        ({"decay": "0.9"}, "decay: '0.9' given"),
        ({"update_every": 0}, "update_every: 0 given"),
        ({"start_step": -1}, "start_step: -1 given"),
        ({"device": "cuda"}, "unknown device 'cuda'"),
        ({"export": 1}, "export: 1 given"),
        ({"output_suffix": ""}, "output_suffix: '' given"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EMACallback(**arguments)
    assert str(caught.value).startswith("EMACallback: ") and words in str(caught.value)


def test_two_that_want_the_model_are_refused_before_the_first_step(tmp_path: Path) -> None:
    two = [EMACallback(use_for_eval=True), EMACallback(use_for_eval=True)]
    with pytest.raises(ConfigError, match="use_for_eval=true given to two"):
        tiny_trainer(tmp_path, two, **RUN).train()
    two = [EMACallback(export=True), EMACallback(decay=0.5, export=True)]
    with pytest.raises(ConfigError, match="output_suffix: 'ema' given to two"):
        tiny_trainer(tmp_path, two, **RUN).train()


def test_a_merge_cannot_have_the_suffix_of_an_average(tmp_path: Path) -> None:
    merge = ModelMergeCallback(merge_step=8, merge_last_n_steps=2, output_suffix="ema")
    tiny_trainer(tmp_path / "a", [merge, EMACallback()], **RUN).train()  # it writes nothing
    for callbacks in ([merge, EMACallback(export=True)], [EMACallback(export=True), merge]):
        trainer = tiny_trainer(tmp_path / "b", callbacks, **RUN)
        with pytest.raises(ConfigError, match=r"suffix: 'ema' given to it and to \w+Callback"):
            trainer.train()
        assert trainer.state.global_step == 0
