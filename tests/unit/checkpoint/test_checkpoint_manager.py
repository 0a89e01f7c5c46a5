"""Save, find, load, retire: what a run relies on."""

import json
import logging
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_faults import Counter, TiedModel, make_contents, train
from torch import nn

import headway.checkpoint as checkpoint
from headway.checkpoint import (
    CheckpointError,
    CheckpointManager,
    RNGState,
    SharingPattern,
    StateComponent,
    committed,
    find_latest_checkpoint,
    read_manifest,
    validate_checkpoint,
    verify,
)
from headway.errors import ConfigError


def test_resume_is_bitwise_with_dropout_momentum_and_generators(tmp_path):
    contents = make_contents(value=4)
    train(contents, 3)
    path = CheckpointManager(tmp_path).save(contents, 3)
    expected = train(contents, 3), random.random(), np.random.rand(), torch.rand(2)

    resumed = make_contents(seed=9)
    loaded = CheckpointManager(tmp_path).load(resumed)
    found = train(resumed, 3), random.random(), np.random.rand(), torch.rand(2)
    assert (loaded.path, loaded.step) == (path, 3)
    assert found[:3] == expected[:3] and torch.equal(found[3], expected[3])
    for a, b in zip(contents.model.state_dict().values(), resumed.model.state_dict().values()):
        assert torch.equal(a, b)
    assert resumed.model.lm_head.weight is resumed.model.embed.weight
    assert resumed.components[1].stateful.value == 4
    assert loaded.trainer_state == contents.trainer_state


def test_layout_and_manifest(tmp_path):
    contents = make_contents(
        run_config={"lr": 0.1},
        model_config={"model_type": "x"},
        generation_config={"eos_token_id": 0},
        save_tokenizer=lambda folder: Path(folder, "tokenizer.json").write_text("{}") and None,
    )
    train(contents, 1)
    manager = CheckpointManager(tmp_path, digest="sha256", topology={"world_size": 1})
    path = manager.save(
        contents,
        7,
        metrics={"eval_loss": 1.5, "eval_x": float("inf")},
        metric=1.5,
        before_commit=lambda folder: (folder / "note.txt").write_text("hello") and None,
    )
    assert path == tmp_path / "checkpoint-7"
    names = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    assert names == {
        "checkpoint_manifest.json",
        "config.json",
        "eval_metrics.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "note.txt",
        "optimizer-00001-of-00001.safetensors",
        "optimizer.safetensors.index.json",
        "run/config.json",
        "state/counter.json",
        "state/counter.safetensors",
        "state/optimizer.json",
        "state/rng.rank00000.json",
        "state/rng.rank00000.safetensors",
        "tokenizer.json",
        "trainer_state.json",
    }
    manifest = read_manifest(path)
    assert set(manifest.files) == names - {"checkpoint_manifest.json"}
    assert (manifest.kind, manifest.step, manifest.save_counter) == ("training", 7, 1)
    assert manifest.metric == 1.5 and manifest.config_digest
    patterns = {c["key"]: c["sharing_pattern"] for c in manifest.components}
    assert patterns == {
        "model": "global",
        "optimizer": "global",
        "rng": "per_rank",
        "counter": "global",
    }

    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    for name in names:
        if name.endswith(".json"):
            json.loads((path / name).read_text(), parse_constant=refuse)
    assert json.loads((path / "trainer_state.json").read_text()) == contents.trainer_state


def test_tied_weights_are_stored_once_and_load_into_untied_models(tmp_path):
    contents = make_contents()
    path = CheckpointManager(tmp_path).save(contents, 1)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert index["metadata"]["headway_aliases"] == {"lm_head.weight": "embed.weight"}
    untied = TiedModel(seed=5)
    untied.lm_head.weight = nn.Parameter(torch.zeros(7, 4))
    CheckpointManager(tmp_path).load_model(untied, path)
    assert torch.equal(untied.lm_head.weight, contents.model.embed.weight)
    assert untied.lm_head.weight is not untied.embed.weight


def test_untied_weights_do_not_load_into_a_tie_unless_equal(tmp_path):
    untied = make_contents(optimizer=None)
    untied.model.lm_head.weight = nn.Parameter(torch.zeros(7, 4))
    manager = CheckpointManager(tmp_path)
    path = manager.save(untied, 1)
    with pytest.raises(CheckpointError, match=r"one tensor in the model.*different values"):
        manager.load_model(TiedModel(), path)


def test_transformers_reads_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    contents = checkpoint.CheckpointContents(
        model, torch.optim.AdamW(model.parameters()), model_config=config.to_dict()
    )
    path = CheckpointManager(tmp_path, max_shard_bytes=4000).save(contents, 1)
    assert len(list(path.glob("model-*.safetensors"))) > 1
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert "model.embed_tokens.weight" in index["weight_map"]
    assert index["metadata"]["headway_aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)


def test_compiled_wrappers_do_not_change_names(tmp_path):
    model = make_contents(optimizer=None)
    path = CheckpointManager(tmp_path).save(model, 1)
    plain = set(read_index(path))
    wrapped = make_contents(seed=4, optimizer=None)
    wrapped.model.layer = torch.compile(wrapped.model.layer, backend="eager")
    CheckpointManager(tmp_path).load(wrapped, path)
    assert torch.equal(wrapped.model.layer.weight, model.model.layer.weight)
    path = CheckpointManager(tmp_path).save(wrapped, 2)
    assert set(read_index(path)) == plain


def read_index(path):
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


class WithExtra(nn.Linear):
    scale = 1

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_extra_state_of_modules_returns(tmp_path):
    contents = checkpoint.CheckpointContents(nn.Sequential(WithExtra(2, 2)))
    contents.model[0].scale = 17
    manager = CheckpointManager(tmp_path)
    manager.save(contents, 1)
    contents.model[0].scale = 1
    manager.load(contents)
    assert contents.model[0].scale == 17


def test_extra_state_returns_to_a_module_that_is_compiled_no_more(tmp_path):
    saved = checkpoint.CheckpointContents(nn.Sequential(torch.compile(WithExtra(2, 2))))
    saved.model[0].scale = 17
    CheckpointManager(tmp_path).save(saved, 1)
    contents = checkpoint.CheckpointContents(nn.Sequential(WithExtra(2, 2)))
    CheckpointManager(tmp_path).load(contents)
    assert contents.model[0].scale == 17


def test_a_tensor_that_a_hook_makes_for_the_state_dict_returns(tmp_path):
    def build(value):
        model = nn.Linear(2, 2)
        model.register_buffer("seen", torch.full((2,), value))

        def store_wide(module, state, prefix, _):
            state[f"{prefix}seen"] = module.seen.double()

        model.register_state_dict_post_hook(store_wide)
        return checkpoint.CheckpointContents(model)

    manager = CheckpointManager(tmp_path)
    manager.save(build(3.0), 1)
    contents = build(0.0)
    manager.load(contents)
    assert contents.model.seen.tolist() == [3.0, 3.0]


# -- order and retention ----------------------------------------------------------------------


def test_save_counter_beats_step_and_time(tmp_path):
    manager = CheckpointManager(tmp_path, save_total_limit=None)
    contents = make_contents()
    for step in (900, 100, 200):
        manager.save(contents, step)
    os.utime(tmp_path / "checkpoint-900", (2**32, 2**32))
    assert [c.step for c in manager.list()] == [900, 100, 200]
    assert manager.find_latest() == tmp_path / "checkpoint-200"
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-200")
    # A new process goes on counting where the last one stopped.
    CheckpointManager(tmp_path, save_total_limit=None).save(contents, 50)
    assert [c.save_counter for c in manager.list()] == [1, 2, 3, 4]


def test_same_step_is_replaced_and_nothing_else_stays(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(make_contents(value=1), 5)
    manager.save(make_contents(value=2), 5)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-5"]
    contents = make_contents()
    manager.load(contents)
    assert contents.components[1].stateful.value == 2
    assert manager.list()[0].save_counter == 2


def test_retention_keeps_best_permanent_pinned_and_newest(tmp_path):
    manager = CheckpointManager(tmp_path, save_total_limit=1, preserve_n_best=1)
    contents = make_contents()
    manager.save(contents, 1, permanent=True)
    manager.save(contents, 2)
    manager.pinned.add("checkpoint-2")
    for step, loss in ((3, 3.0), (4, 0.0), (5, 2.0), (6, float("nan"))):
        manager.save(contents, step, metric=loss)
    assert [c.step for c in manager.list()] == [1, 2, 4, 6]
    assert manager.best() == tmp_path / "checkpoint-4"
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"checkpoint-{n}" for n in (1, 2, 4, 6)]


def test_other_kinds_have_their_own_names_and_do_not_resume(tmp_path):
    manager = CheckpointManager(tmp_path, save_total_limit=1)
    contents = make_contents()
    manager.save(contents, 5)
    export = manager.save(contents, 5, kind="export")
    assert export.name == "export-5"
    assert manager.find_latest() == manager.resolve(True) == tmp_path / "checkpoint-5"
    with pytest.raises(ConfigError, match="of kind 'export'"):
        manager.resolve(str(export))


def test_a_foreign_directory_of_the_same_name_is_kept(tmp_path, caplog):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "pytorch_model.bin").write_bytes(b"precious")
    manager = CheckpointManager(tmp_path, save_total_limit=1)
    assert manager.list() == []
    manager.save(make_contents(), 5)
    manager.save(make_contents(), 6)
    kept = list(tmp_path.glob("checkpoint-5.foreign-*/pytorch_model.bin"))
    assert [p.read_bytes() for p in kept] == [b"precious"]
    assert "was not deleted" in caplog.text


# -- damage -----------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path):
    real = path.with_name("moved")
    path.rename(real)
    path.symlink_to(real)


@pytest.mark.parametrize("damage", [truncate, flip, os.remove, link])
@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00001.safetensors",
        "optimizer.safetensors.index.json",
        "state/rng.rank00000.safetensors",
        "trainer_state.json",
        "checkpoint_manifest.json",
    ],
)
def test_damage_falls_back_to_the_previous_and_names_the_file(tmp_path, caplog, damage, name):
    manager = CheckpointManager(tmp_path)
    good = manager.save(make_contents(value=1), 1)
    bad = manager.save(make_contents(value=2), 2)
    assert manager.resolve(True) == bad
    damage(bad / name)
    with caplog.at_level(logging.WARNING):
        assert CheckpointManager(tmp_path).resolve(True) == good
    if (damage, name) != (os.remove, "checkpoint_manifest.json"):
        assert str(bad / name) in caplog.text
    assert not validate_checkpoint(bad) and validate_checkpoint(good)
    contents = make_contents()
    with pytest.raises(CheckpointError, match=name):
        manager_fresh = CheckpointManager(tmp_path)
        manager_fresh.load(contents, bad)
    assert CheckpointManager(tmp_path).load(contents).path == good


def test_extra_weight_files_are_a_problem(tmp_path):
    path = CheckpointManager(tmp_path).save(make_contents(), 1)
    (path / "notes.txt").write_text("fine")
    assert verify(path) == []
    (path / "model.safetensors").write_bytes(b"")
    assert verify(path) == [f"{path / 'model.safetensors'} is not listed in the manifest"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(step=99), "does not match its digest"),
        (lambda m: m.update(format_version=2), "format version 2; this Headway reads up to 1"),
        (lambda m: m.pop("kind"), "missing or unknown fields: kind"),
        (lambda m: m.update(files=[]), "files is a list"),
        (lambda m: m["files"].update({"../x": {"size": 0, "digest": ""}}), "plain file name"),
    ],
)
def test_manifest_is_validated(tmp_path, change, message):
    path = CheckpointManager(tmp_path).save(make_contents(), 1)
    file = path / "checkpoint_manifest.json"
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=message):
        read_manifest(path)
    assert committed(tmp_path) == []


def test_a_moved_checkpoint_is_still_whole(tmp_path):
    path = CheckpointManager(tmp_path / "a").save(make_contents(value=3), 1)
    shutil.copytree(path, tmp_path / "b" / "elsewhere")
    contents = make_contents()
    CheckpointManager(tmp_path / "c").load(contents, tmp_path / "b" / "elsewhere")
    assert contents.components[1].stateful.value == 3
    assert find_latest_checkpoint(tmp_path / "b" / "elsewhere") is not None


# -- resolving --------------------------------------------------------------------------------


def test_resolve(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path / "run")
    assert manager.resolve(True) is None and manager.resolve(False) is None
    path = manager.save(make_contents(), 1)
    assert manager.resolve(False) is None
    assert manager.resolve(str(path)) == path == manager.resolve("checkpoint-1")
    monkeypatch.chdir(tmp_path)
    assert manager.resolve("run/checkpoint-1") == path
    with pytest.raises(ConfigError, match=rf"'nowhere'.*does not exist.*there: {path}"):
        manager.resolve("nowhere")
    with pytest.raises(ConfigError, match=rf"not a committed checkpoint.*there: {path}"):
        CheckpointManager(tmp_path / "other").resolve(str(tmp_path / "run"))


def test_loading_without_any_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        CheckpointManager(tmp_path).load(make_contents())


# -- strictness -------------------------------------------------------------------------------


def test_model_misfits_are_named_and_nothing_is_loaded(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(make_contents(), 1)
    renamed = TiedModel(seed=8)
    renamed.layers = renamed.layer
    del renamed.layer
    before = renamed.embed.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"missing in it: layers\.bias \(nearest: layer\.bias\)"
    ):
        manager.load_model(renamed, path)
    assert torch.equal(renamed.embed.weight, before)
    with pytest.raises(CheckpointError, match=r"layer\.bias is \[4\] there, \[6\] here"):
        manager.load_model(TiedModel(width=6), path)
    with torch.device("meta"):
        meta = TiedModel()
    with pytest.raises(CheckpointError, match="still on the meta device"):
        manager.load_model(meta, path)


class Stubborn(Counter):
    def load_state_dict(self, state_dict):
        raise KeyError("nope")


def test_components_missing_failing_and_skipped(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)
    manager.save(make_contents(value=3), 1)

    def contents_with(component):
        return make_contents(components=[component])

    extra = StateComponent("extra", Counter(), SharingPattern.GLOBAL)
    with pytest.raises(CheckpointError, match="no state for the required component 'extra'"):
        manager.load(contents_with(extra))
    extra.required = False
    manager.load(contents_with(extra))
    assert "no state for 'extra'" in caplog.text
    assert "nothing in this run takes: counter, rng" in caplog.text

    stubborn = StateComponent("counter", Stubborn(), SharingPattern.GLOBAL, required=False)
    with pytest.raises(CheckpointError, match=r"'counter' could not take its state.*nope"):
        manager.load(contents_with(stubborn))
    manager.load(contents_with(stubborn), components=["model", "optimizer"])
    with pytest.raises(ConfigError, match="component 'optimiser'; did you mean 'optimizer'"):
        manager.load(contents_with(stubborn), components=["optimiser"])
    moved = StateComponent("counter", Counter(), SharingPattern.PER_RANK)
    with pytest.raises(CheckpointError, match="per_rank here and global in"):
        manager.load(contents_with(moved))


def test_optimizer_is_required_when_the_run_has_one(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(make_contents(optimizer=None), 1)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        manager.load(make_contents())
    manager.load(make_contents(), components=["model"])


class Greedy(Counter):
    def load_state_dict(self, state_dict):
        torch.rand(100), random.random()


def test_generators_are_restored_last(tmp_path):
    def contents():
        return make_contents(
            components=[
                StateComponent("rng", RNGState(), SharingPattern.PER_RANK),
                StateComponent("greedy", Greedy(), SharingPattern.GLOBAL),
            ]
        )

    manager = CheckpointManager(tmp_path)
    first = contents()
    manager.save(first, 1)
    expected = torch.rand(3), random.random()
    manager.load(first)
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]


def test_bad_contents_are_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    twice = [StateComponent("x", Counter(), SharingPattern.GLOBAL)] * 2
    with pytest.raises(ConfigError, match="'x' is taken"):
        manager.save(make_contents(components=twice), 1)
    with pytest.raises(ConfigError, match="trainer state: t is a tensor"):
        manager.save(make_contents(trainer_state={"t": torch.ones(1)}), 1)
    with pytest.raises(ConfigError, match=r"config\.json cannot be written"):
        manager.save(make_contents(model_config={"dtype": torch.float32}), 1)
    for options in ({"digest": "md5"}, {"save_total_limit": 0}, {"max_shard_bytes": 0}):
        with pytest.raises(ConfigError):
            CheckpointManager(tmp_path, **options)
    with pytest.raises(ConfigError, match="checkpoint kind 'train'; did you mean 'training'"):
        manager.save(make_contents(), 1, kind="train")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"sharing_pattern": SharingPattern.PER_GROUP},
        {"sharing_pattern": SharingPattern.GLOBAL, "validate_replication": True},
        {"sharing_pattern": SharingPattern.GLOBAL, "validation_level": "most"},
    ],
)
def test_component_rules(options):
    with pytest.raises(ValueError, match="'k'"):
        StateComponent("k", Counter(), **options)


def test_odd_component_names_stay_inside(tmp_path):
    odd = StateComponent("../a b/ü", Counter(5), SharingPattern.GLOBAL)
    contents = make_contents(components=[odd])
    manager = CheckpointManager(tmp_path)
    path = manager.save(contents, 1)
    assert verify(path) == [] and len(list((path / "state").glob("*a%20b*"))) == 2
    odd.stateful.value = 0
    manager.load(contents)
    assert odd.stateful.value == 5
