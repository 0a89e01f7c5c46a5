"""`checkpoint_components`: what a run's checkpoints hold, and weights that come from elsewhere."""

import json

import pytest
import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.checkpoint import CheckpointError, read_manifest, verify
from headway.errors import ConfigError
from headway.testing import tiny_dataset, tiny_decoder

ALL = {"dataset", "model", "optimizer", "rng", "scheduler", "trainer"}


class Counts(TrainerCallback):
    """A callback with state: how many steps it has seen, also before a restart."""

    def __init__(self):
        self.seen = 0

    def on_step_end(self):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Weights(TrainerCallback):
    """Keeps the weights of each save and brings them back, but for those it `forgets`."""

    def __init__(self, folder, forgets=(), assign=False):
        self.folder, self.forgets, self.assign = folder, forgets, assign

    def on_save(self, model, step):
        torch.save(model.state_dict(), self.folder / f"weights-{step}.pt")

    def on_load_model_weights(self, path, model):
        kept = torch.load(self.folder / f"weights-{path.rpartition('-')[2]}.pt")
        kept = {name: value for name, value in kept.items() if name not in self.forgets}
        model.load_state_dict(kept, strict=False, assign=self.assign)


def make(folder, steps, parts, *callbacks, **changes):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "stop_at": steps,
        "seed": 3,
        "use_cpu": True,
        "checkpoint_components": parts,
    }
    given = {"model_init": lambda: tiny_decoder(dropout=0.1)}
    given |= {key: changes.pop(key) for key in ("model", "model_init") if key in changes}
    return Trainer(
        args=TrainingArguments(**{**settings, **changes}),
        train_dataset=tiny_dataset(48, sequence_length=8),
        default_callbacks=False,
        callbacks=list(callbacks),
        **given,
    )


def train(folder, steps, parts, *callbacks, **changes):
    trainer = make(folder, steps, parts, *callbacks, **changes)
    trainer.train()
    return trainer


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def stored(folder, step):
    keys = {entry["key"] for entry in read_manifest(folder / f"checkpoint-{step}").components}
    if json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text()):
        keys.add("trainer")
    return keys


@pytest.mark.parametrize("left_out", sorted(ALL - {"model"}))
def test_a_part_left_out_is_neither_saved_nor_missed(left_out, tmp_path):
    parts = sorted(ALL - {left_out})
    first = train(tmp_path, 4, parts, Counts())
    gone = {left_out, "callbacks"} if left_out == "trainer" else {left_out}
    assert stored(tmp_path, 4) == (ALL | {"callbacks"}) - gone
    assert not verify(tmp_path / "checkpoint-4")
    assert len(first.get_state_components()) == 6 - len(gone - {"trainer"})

    # The part that is left out is as in a run that has not begun; all others go on.
    resumed = make(tmp_path, 4 if left_out == "trainer" else 5, parts, Counts())
    output = resumed.train()
    started_at = 0 if left_out == "trainer" else 4
    assert resumed.callbacks["Counts"].seen == output.global_step
    assert output.global_step - started_at == (4 if left_out == "trainer" else 1)
    report = json.loads((tmp_path / "run" / "resume-4.json").read_text())
    assert set(report["left_out"]) == gone
    assert report["left_out_by"] == "checkpoint_components"


def test_what_is_kept_is_restored_and_what_is_not_starts_fresh(tmp_path):
    parts = ["model", "trainer", "dataset", "rng", "scheduler"]
    first = train(tmp_path, 4, parts)
    resumed = make(tmp_path, 4, parts)
    resumed.train()  # is at its end already: what was loaded stays as it is
    assert same(weights(first), weights(resumed))
    assert resumed.state.global_step == 4
    assert resumed.optimizer.state == {} and first.optimizer.state
    rates = [t.optimizer.param_groups[0]["lr"] for t in (first, resumed)]
    assert rates[0] == rates[1]  # the scheduler's, though the optimizer is new


def test_all_parts_are_the_same_as_none_named(tmp_path):
    whole = train(tmp_path / "whole", 8, None)
    train(tmp_path / "parts", 3, sorted(ALL))
    second = train(tmp_path / "parts", 8, sorted(ALL))
    assert same(weights(whole), weights(second))


def test_a_checkpoint_that_lacks_a_wanted_part_is_refused_by_name(tmp_path):
    train(tmp_path, 2, ["model", "dataset", "rng", "scheduler"])
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="does not hold callbacks, optimizer, trainer: name"):
        train(tmp_path, 4, None)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    resumed = train(tmp_path, 1, None, load_components=["model"])
    assert resumed.state.global_step == 1


def test_a_save_under_a_name_of_its_own_keeps_to_the_parts(tmp_path):
    trainer = train(tmp_path, 2, ["model", "trainer"])
    trainer.save_checkpoint(str(tmp_path / "mine"))
    keys = {entry["key"] for entry in read_manifest(tmp_path / "mine").components}
    assert keys == {"model", "callbacks"}
    trainer.load_checkpoint(str(tmp_path / "mine"))
    assert trainer.state.global_step == 2


def test_a_rollback_needs_every_part(tmp_path):
    class Asks(TrainerCallback):
        def on_step_end(self, state, control):
            control.rollback = state.global_step == 3

    with pytest.raises(RuntimeError, match=r"do not hold rng \(checkpoint_components\)"):
        train(tmp_path, 4, sorted(ALL - {"rng"}), Asks())


# Weights from outside

NO_MODEL = sorted(ALL - {"model"})


def test_a_run_whose_weights_come_from_outside_goes_on_in_the_same_bits(tmp_path):
    whole = train(tmp_path / "whole", 8, None)
    folder = tmp_path / "parts"
    train(folder, 4, NO_MODEL, Weights(folder))
    assert stored(folder, 4) == {*NO_MODEL, "callbacks"}
    assert not any(path.name.startswith("model") for path in (folder / "checkpoint-4").iterdir())
    second = train(folder, 8, NO_MODEL, Weights(folder))
    assert same(weights(whole), weights(second))


def test_weights_from_outside_need_someone_to_make_and_bring_them(tmp_path):
    model = tiny_decoder()
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, 4, NO_MODEL, model=model, model_init=None)
    assert "give model_init" in caught.value.problems[0]
    assert "no callback has on_load_model_weights" in caught.value.problems[1]
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_nobody_brings_are_named(tmp_path):
    train(tmp_path, 2, NO_MODEL, Weights(tmp_path))
    names = list(tiny_decoder().state_dict())
    with pytest.raises(CheckpointError, match="without values") as caught:
        train(tmp_path, 4, NO_MODEL, Weights(tmp_path, forgets=names[2:4]))
    assert all(name in str(caught.value) for name in names[2:4])
    assert names[4] not in str(caught.value)


def test_a_tensor_without_nan_counts_as_brought_only_if_it_was_written(tmp_path):
    def build():
        model = tiny_decoder()
        model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        return model

    train(tmp_path, 2, NO_MODEL, Weights(tmp_path), model_init=build)
    train(tmp_path, 3, NO_MODEL, Weights(tmp_path), model_init=build)
    with pytest.raises(CheckpointError, match=r"without values.*: calls;"):
        train(tmp_path, 4, NO_MODEL, Weights(tmp_path, forgets=["calls"]), model_init=build)


def test_parameters_that_the_optimizer_does_not_know_are_refused(tmp_path):
    train(tmp_path, 2, NO_MODEL, Weights(tmp_path))
    with pytest.raises(CheckpointError, match="replaced tensors of the model"):
        train(tmp_path, 4, NO_MODEL, Weights(tmp_path, assign=True))


def test_weights_that_are_not_there_cannot_be_loaded_alone(tmp_path):
    trainer = train(tmp_path, 2, NO_MODEL, Weights(tmp_path))
    trainer.save_checkpoint(str(tmp_path / "mine"))
    assert not (tmp_path / "mine" / "model.safetensors.index.json").exists()
    with pytest.raises(ConfigError, match="come from outside"):
        make(tmp_path, 4, NO_MODEL, Weights(tmp_path)).load_checkpoint()
    with pytest.raises(CheckpointError, match="holds no model"):
        make(tmp_path, 4, None).load_checkpoint(str(tmp_path / "checkpoint-2"))
