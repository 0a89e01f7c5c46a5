"""What a run of days ends with when its best checkpoint is damaged by then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway import TrainerCallback
from headway.checkpoint import CheckpointError
from headway.testing import tiny_trainer


def weights_of(trainer):
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


class KeepWeights(TrainerCallback):
    def __init__(self):
        self.weights = []

    def on_step_end(self, model):
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))


class ScriptedLosses(TrainerCallback):
    """Evaluations that give the losses it was made with; spoils files once they are written."""

    priority = 100

    def __init__(self, losses, spoiled=()):
        self.losses, self.spoiled = losses, spoiled
        self.ends = []

    def on_evaluate(self, metrics, state):
        metrics["eval_loss"] = self.losses[state.global_step - 1]

    def on_run_settled(self, trainer):
        trainer._saver.deliver()
        for step in self.spoiled:
            folder = Path(trainer.args.output_dir, f"checkpoint-{step}")
            shard = folder / "model-00001-of-00001.safetensors"
            shard.write_bytes(shard.read_bytes()[:-1] + b"!")

    def on_error(self):
        self.ends.append("error")

    def on_train_end(self, state):
        self.ends.append(state.outcome)

    def on_close(self):
        self.ends.append("close")


def train_to_a_damaged_best(folder, spoiled, **settings):
    script, keep = ScriptedLosses([2.0, 1.0, 3.0], spoiled), KeepWeights()
    trainer = tiny_trainer(
        folder, [script, keep], max_steps=3, learning_rate=1e-2, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=None,
        load_best_model_at_end=True, **settings,
    )  # fmt: skip
    return trainer, script, keep


@pytest.mark.parametrize(("spoiled", "left"), [([2], 1), ([1, 2], 3), ([1, 2, 3], 3)])
def test_a_damaged_best_model_gives_way_to_the_next_best(tmp_path, caplog, spoiled, left):
    trainer, script, keep = train_to_a_damaged_best(tmp_path, spoiled)
    assert trainer.train().global_step == 3
    assert torch.equal(weights_of(trainer), keep.weights[left - 1])
    for step in spoiled:
        assert f"checkpoint-{step}/model-00001-of-00001.safetensors" in caplog.text
    if spoiled == [1, 2, 3]:
        assert "no evaluated one is whole; the model keeps the weights of the last step, 3" in (
            caplog.text
        )
    else:
        assert "has no whole checkpoint; of those that are there the best is taken" in caplog.text
        assert f"checkpoint-{left} ({script.losses[left - 1]})" in caplog.text
    assert script.ends == ["completed", "close"]


def test_a_run_whose_best_model_is_damaged_may_end_with_an_error_and_is_finished_all_the_same(
    tmp_path,
):
    trainer, script, keep = train_to_a_damaged_best(tmp_path, [2], on_damaged_checkpoint="stop")
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    told = str(caught.value)
    assert f"{tmp_path}/out/checkpoint-2/model-00001-of-00001.safetensors" in told
    assert "the model has the weights of its last step, 3" in told
    assert f"headway checkpoint verify {tmp_path}/out" in told
    assert torch.equal(weights_of(trainer), keep.weights[2])
    assert script.ends == ["completed", "close"] and trainer.state.outcome == "completed"
    assert not list((tmp_path / "out").glob("post_mortem*")), "nothing failed in the run"
    again, *_ = train_to_a_damaged_best(tmp_path, [])
    assert again.train().global_step == 3 and torch.equal(weights_of(again), keep.weights[0])


def test_a_best_model_whose_manifest_is_damaged_is_not_passed_over_under_stop(tmp_path):
    class Spoil(ScriptedLosses):
        def on_run_settled(self, trainer):
            trainer._saver.deliver()
            manifest = Path(trainer.args.output_dir, "checkpoint-2", "checkpoint_manifest.json")
            manifest.write_bytes(manifest.read_bytes()[:-9])

    keep = KeepWeights()
    trainer = tiny_trainer(
        tmp_path, [Spoil([2.0, 1.0, 3.0]), keep], max_steps=3, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, save_total_limit=None, load_best_model_at_end=True,
        on_damaged_checkpoint="stop", learning_rate=1e-2,
    )  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    told = str(caught.value)
    assert "checkpoint-2/checkpoint_manifest.json" in told and "checkpoint-2, is damaged" in told
    assert torch.equal(weights_of(trainer), keep.weights[2])
    assert trainer.state.outcome == "completed"


def test_what_a_moved_run_left_at_its_old_place_is_no_damage(tmp_path):
    def run(max_steps):
        return tiny_trainer(
            tmp_path, [ScriptedLosses([2.0, 1.0, 3.0, 3.0])], max_steps=max_steps,
            eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            save_total_limit=None, load_best_model_at_end=True, on_damaged_checkpoint="stop",
            output_dir=str(tmp_path / ("old" if max_steps == 3 else "new")),
        )  # fmt: skip

    run(3).train()
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "old" / "checkpoint-2").mkdir(parents=True)
    moved = run(4)
    assert moved.train().global_step == 4
    assert moved.state.best_model_checkpoint == str(tmp_path / "new" / "checkpoint-2")
