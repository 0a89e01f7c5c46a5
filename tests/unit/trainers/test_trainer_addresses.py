"""Checkpoints at an address: the trainer keeps them there, and its own files in a folder."""

from __future__ import annotations

import json
import uuid

import pytest
import torch

from headway import Trainer, TrainerCallback
from headway.callbacks import DivergenceDetector
from headway.checkpoint import CheckpointError, find_latest_checkpoint, list_checkpoints
from headway.checkpoint.errors import MisfitError
from headway.checkpoint.remote import RemoteStorage
from headway.cli.main import main
from headway.engine.metrics import TRAIN_LOSS
from headway.errors import ConfigError
from headway.testing import tiny_trainer
from headway.trainers.preparation import check_arguments

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["memory", "file"])
def address(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a folder called `memory:` would be
    yield f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/far"
    fsspec.filesystem("memory").store.clear()


class Listener(TrainerCallback):
    def __init__(self):
        self.heard = []

    def on_save(self, checkpoint_path):
        self.heard.append(checkpoint_path)

    def on_load(self, path):
        self.heard.append(path)

    on_load_model_weights = on_load


def make(address, steps, callbacks=(), **arguments):
    return tiny_trainer(
        ".",
        callbacks,
        checkpoint_address=address,
        max_steps=steps,
        save_strategy="steps",
        save_steps=2,
        **{"save_total_limit": None, **arguments},
    )


def steps_at(address):
    return [found.step for found in list_checkpoints(address)]


def test_a_run_leaves_its_checkpoints_there_and_its_files_here(address, tmp_path):
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    first = make(address, 4, **evaluated)
    first.train()
    assert steps_at(address) == [2, 4]
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "far"}
    assert not list(tmp_path.glob("out/checkpoint-*"))
    assert (tmp_path / "out" / "run" / "config.json").is_file()
    best = first.state.best_model_checkpoint
    assert best in (f"{address}/checkpoint-2", f"{address}/checkpoint-4")

    listener = Listener()
    second = make(address, 6, [listener], save_total_limit=1)
    assert second.train().global_step == 6
    assert listener.heard == [f"{address}/checkpoint-4", f"{address}/checkpoint-6"]
    assert steps_at(address) == [6]


def test_checkpoints_are_saved_and_loaded_on_request(address, tmp_path):
    trainer = make(address, 2)
    trainer.train()
    assert trainer.save_checkpoint(checkpoint_id=7) == f"{address}/checkpoint-7"
    assert trainer.save_checkpoint(f"{address}-else/checkpoint-9") == f"{address}-else/checkpoint-9"
    again = trainer.save_checkpoint()
    assert again.startswith(f"{address}/checkpoint-2.again-"), "nothing there is overwritten"
    assert trainer.resolve_checkpoint_path(None) == again
    trainer.set_best_checkpoint(f"{address}/checkpoint-7")
    expected = [value.clone() for value in trainer.model.parameters()]
    for path in (None, f"{address}/checkpoint-7"):
        with torch.no_grad():
            for value in trainer.model.parameters():
                value.zero_()
        trainer.load_checkpoint(path)
        assert all(map(torch.equal, trainer.model.parameters(), expected))
    weights = make(address, 2)
    weights.load_checkpoint()
    assert all(map(torch.equal, weights.model.parameters(), expected))
    with pytest.raises(ConfigError, match="is an address; a model folder is written to a disk"):
        trainer.save_model(f"{address}/model")
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "far", "far-else"}


class Spoil(TrainerCallback):
    """Damages a checkpoint once the last one is written."""

    def __init__(self, step):
        self.step = step

    def on_run_settled(self, trainer):
        trainer._saver.deliver()
        fs, base = fsspec.core.url_to_fs(trainer.args.checkpoint_address)
        shard = f"{base}/checkpoint-{self.step}/model-00001-of-00001.safetensors"
        fs.pipe_file(shard, fs.cat_file(shard)[:-1] + b"!")


def test_nothing_is_told_of_the_folder_through_which_checkpoints_go(address, tmp_path, caplog):
    caplog.set_level("INFO")
    listener = Listener()
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    make(address, 6, [Spoil(6), listener], **evaluated).train()
    best = f"{address}/checkpoint-4"
    assert listener.heard[-1] == best and f"loading the best model, {best}" in caplog.text
    damaged = f"{address}/checkpoint-6/model-00001-of-00001.safetensors is damaged"
    assert f"load_best_model_at_end: passing over a damaged checkpoint: {damaged}" in caplog.text
    with pytest.raises(CheckpointError) as caught:
        make(address, 8, on_damaged_checkpoint="stop").train()
    assert damaged in str(caught.value)
    with pytest.raises(ConfigError, match="checkpoint-9 does not exist") as missing:
        make(address, 8, resume_from_checkpoint=f"{address}/checkpoint-9").train()
    with pytest.raises(
        ConfigError, match=r"/else/checkpoint-4' is an address, and no checkpoint in "
    ):
        make(address, 8, resume_from_checkpoint=f"{address}/else/checkpoint-4").train()
    with pytest.raises(CheckpointError) as named:
        make(address, 8, resume_from_checkpoint=f"{address}/checkpoint-6").train()
    assert damaged in str(named.value) and str(named.value) == "\n".join(named.value.problems)
    with pytest.raises(MisfitError) as misfit:
        make(address, 8, optim="sgd").train()
    assert f"{address}/checkpoint-4/optimizer.safetensors" in str(misfit.value)
    trainer = make(address, 8)
    trainer.train()
    assert trainer.save_weights("average", wait=True) == f"{address}/checkpoint-8-average"
    weights = make(address, 8)
    weights.load_checkpoint(f"{address}/checkpoint-8-average")
    assert all(map(torch.equal, weights.model.parameters(), trainer.model.parameters()))
    report = (tmp_path / "out" / "run" / "resume-4.json").read_text()
    assert json.loads(report)["checkpoint"] == best
    errors = [str(one.value) for one in (caught, missing, named, misfit)]
    for told in (caplog.text, report, *errors):
        assert "headway-remote" not in told


def test_an_address_of_no_known_kind_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = (
        "^checkpoint_address='memry://run' cannot be opened: unknown protocol 'memry'; "
        "did you mean 'memory'"
    )
    with pytest.raises(ConfigError, match=told):
        make("memry://run", 2)


@pytest.mark.parametrize(("act", "policy"), [("fetch", "fallback"), ("refresh", "stop")])
def test_a_best_model_out_of_reach_does_not_make_a_failure_of_a_complete_run(
    address, tmp_path, monkeypatch, act, policy
):
    class Cut(Listener):
        def on_run_settled(self, trainer):
            trainer._saver.deliver()
            patch.setattr(RemoteStorage, act, fail)

        def on_error(self):
            self.heard.append("error")

        def on_train_end(self, state):
            self.heard.append(state.outcome)

    def fail(self, *given):
        raise OSError("the network is gone")

    evaluated = {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "on_damaged_checkpoint": policy,
    }  # fmt: skip
    cut = Cut()
    trainer = make(address, 4, [cut], **evaluated)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as caught:
        trainer.train()
    assert f"could not be fetched from {address}: the network is gone" in str(caught.value)
    assert cut.heard[-1] == "completed" and "error" not in cut.heard
    assert not list(tmp_path.glob("out/post_mortem*"))
    again = make(address, 4, **evaluated)
    again.train()
    assert again.state.best_model_checkpoint in map(f"{address}/checkpoint-{{}}".format, (2, 4))


class Spike(TrainerCallback):
    """Makes one loss of the first time through look like a run that went wrong."""

    priority = 100

    def __init__(self, step):
        self.step = step

    def on_metrics(self, step, metrics):
        if step == self.step:
            self.step = -1
            metrics[TRAIN_LOSS] = 1e6


def watch(address, steps, spike, **arguments):
    guard = DivergenceDetector(
        action="rollback", threshold=1e3, patience=1, warmup=1, smoothing=1.0, every_step=True
    )
    listener = Listener()
    trainer = make(
        address, steps, [Spike(spike), guard, listener], metrics_collect_interval=1,
        num_samples=32, save_async=False, **arguments,
    )  # fmt: skip
    assert trainer.train().global_step == steps
    return guard.recovery.good, listener.heard


def test_a_guard_returns_to_a_checkpoint_at_an_address(address):
    good, heard = watch(address, 8, 6)
    assert heard[:3] == [f"{address}/checkpoint-{step}" for step in (2, 4, 4)], "saved and loaded"
    assert good == (6, "checkpoint-6"), "it knows the run's checkpoints"


def test_a_guard_keeps_a_checkpoint_that_was_saved_again_at_an_address(address):
    trainer = make(address, 4)
    trainer.train()
    again = trainer.save_checkpoint()
    assert again.startswith(f"{address}/checkpoint-4.again-")
    good, heard = watch(address, 8, 7, save_total_limit=1)
    assert heard[:3] == [again, f"{address}/checkpoint-6", again], "it was resumed from, and kept"
    assert heard[4].startswith(f"{address}/checkpoint-6.again-") and good == (6, "checkpoint-6")
    assert steps_at(address) == [6, 8]


def test_several_ranks_are_refused_by_the_name_of_the_option():
    args = tiny_trainer(".", checkpoint_address="memory://bucket/run").args
    args._world_size = 2
    with pytest.raises(ConfigError, match="checkpoint_address='memory://bucket/run': an address"):
        check_arguments(args, torch.nn.Linear(1, 1), None, torch.device("cpu"))


def test_checkpoints_in_the_folder_are_not_left_behind_without_a_word(address):
    trainer = tiny_trainer(".", max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    there = find_latest_checkpoint(trainer.args.output_dir)
    with pytest.raises(ConfigError) as caught:
        make(address, 4).train()
    assert f"set resume_from_checkpoint='{there}'" in str(caught.value)
    assert list_checkpoints(address) == []
    assert make(address, 4).train(resume_from_checkpoint=there).global_step == 4
    assert find_latest_checkpoint(address) == f"{address}/checkpoint-4"
    assert make(address, 5).train().global_step == 5  # the address has its own now


RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 100, sequence_length: 16, vocab_size: 258}
args: {output_dir: out, seed: 1, use_cpu: true, max_steps: 2, per_device_train_batch_size: 2}
"""


def test_the_command_says_where_the_checkpoint_is(address, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(RUN)
    assert main(["train", "run.yaml", f"--args.output_dir={address}"]) == 2
    told = capsys.readouterr().err
    assert f"set checkpoint_address='{address}'" in told and "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert main(["train", "run.yaml", f"--args.checkpoint_address={address}"]) == 0
    assert f"headway finalize {address}/checkpoint-2" in capsys.readouterr().out
    assert main(["train", "run.yaml", "--json", f"--args.checkpoint_address={address}"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == find_latest_checkpoint(address)


def test_another_model_or_optimizer_is_told_by_its_option_also_where_the_run_is_at_an_address(
    address, tmp_path, capsys
):
    (tmp_path / "run.yaml").write_text(RUN)
    words = ["train", "run.yaml", "--quiet", f"--args.checkpoint_address={address}"]
    assert main(words) == 0
    for word, part, change in (
        ("--model.hidden_size=32", "model", "model.init_args.hidden_size was 16 and is now 32"),
        ("--args.optim=sgd", "optimizer", "args.optim was 'adamw' and is now 'sgd'"),
    ):
        assert main([*words, word]) == 2
        told = capsys.readouterr().err
        assert f"{part}: not the one of the checkpoint to go on from ({change})" in told
        assert f"{address}/checkpoint-2/{part}.safetensors" in told


def test_a_run_that_is_complete_is_no_failure_where_the_address_cannot_be_reached_any_more(
    address, tmp_path, monkeypatch, capsys
):
    def fail(self):
        raise OSError("the network is gone")

    def train(self, *given, **named):
        try:
            return once(self, *given, **named)
        finally:
            monkeypatch.setattr(RemoteStorage, "refresh", fail)

    once = Trainer.train
    (tmp_path / "run.yaml").write_text(RUN)
    words = ["train", "run.yaml", "--quiet", f"--args.checkpoint_address={address}"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", train)
        assert main(words) == 0
    assert f"checkpoints are in {address}, where nobody could look" in capsys.readouterr().out


class Fail(TrainerCallback):
    def on_step_end(self, state):
        if state.global_step == 3:
            raise ValueError("the third step is wrong")


def test_a_post_mortem_names_the_checkpoint_at_the_address(address, tmp_path):
    with pytest.raises(ValueError, match="third step"):
        make(address, 4, [Fail()]).train()
    told = json.loads((tmp_path / "out" / "post_mortem.json").read_text())
    assert told["checkpoint"] == {"path": f"{address}/checkpoint-2", "step": 2}


def test_a_post_mortem_does_not_say_that_nothing_is_saved_where_nobody_could_look(
    address, tmp_path, monkeypatch
):
    def fail(self):
        raise OSError("the network is gone")

    class FailWithoutNetwork(TrainerCallback):
        def on_step_end(self, state, trainer):
            if state.global_step == 3:
                trainer._saver.deliver()
                monkeypatch.setattr(RemoteStorage, "refresh", fail)
                raise ValueError("the third step is wrong")

    with pytest.raises(ValueError, match="third step"):
        make(address, 4, [FailWithoutNetwork()]).train()
    told = json.loads((tmp_path / "out" / "post_mortem.json").read_text())
    assert told["checkpoint"] == {"path": address, "step": None}
    assert "begins anew" not in (tmp_path / "out" / "post_mortem.txt").read_text()
