"""`save_checkpoint`, `load_checkpoint` and the functions around them."""

import json
import logging
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import headway.checkpoint as checkpoint
from headway.checkpoint import (
    AsyncCheckpointSaver,
    CheckpointError,
    CheckpointMeta,
    TrainState,
    create_pretrained_symlinks,
    create_sharing_metadata,
    find_latest_checkpoint,
    get_checkpoint_metadata,
    load_checkpoint,
    load_checkpoint_metrics,
    load_shard_index,
    load_sharded_checkpoint,
    make_shard_index,
    maybe_delete_oldest_checkpoint,
    next_checkpoint_path,
    pin,
    read_manifest,
    retie_parameters,
    save_checkpoint,
    save_checkpoint_metrics,
    save_shard_index,
    save_sharded_checkpoint,
    validate_checkpoint,
    validate_output_dir,
    verify,
)
from headway.errors import ConfigError


class Tied(nn.Module):
    def __init__(self, seed=0, width=4):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(2))

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def same(a, b):
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_weights_round_trip_with_ties_stored_once(tmp_path):
    path = next_checkpoint_path(tmp_path, 5)
    model = Tied()
    assert save_checkpoint(path, model, {"note": "x"}) == path
    index = load_shard_index(path)
    assert index["metadata"]["note"] == "x"
    assert index["metadata"]["param_sharing"] == [["embed.weight", "head.weight"]]
    assert "head.weight" not in index["weight_map"]
    assert index["metadata"]["total_size"] == 4 * (24 + 16 + 4 + 2)
    assert find_latest_checkpoint(tmp_path) == path and validate_checkpoint(path)

    other = Tied(seed=1)
    report = load_checkpoint(path, other)
    assert same(model, other) and other.head.weight is other.embed.weight
    assert report == ([], [])
    assert other.body.weight._is_hf_initialized
    tensors = load_checkpoint(path)
    assert tensors["head.weight"] is tensors["embed.weight"]
    Tied(seed=2).load_state_dict(tensors)
    assert list(load_checkpoint(path, keys=["head.weight"])) == ["head.weight"]
    with pytest.raises(CheckpointError, match=r"body\.wieght \(nearest: body\.weight\)"):
        load_checkpoint(path, keys=["body.wieght", "scale"])
    with pytest.raises(ConfigError, match="keys"):
        load_checkpoint(path, keys="scale")


def test_small_shards_respect_the_limit_and_explicit_sharing_wins(tmp_path):
    model = Tied()
    save_checkpoint(tmp_path / "a", model, max_shard_size=64, include_param_sharing=False)
    index = load_shard_index(tmp_path / "a")
    assert "head.weight" in index["weight_map"] and "param_sharing" not in index["metadata"]
    for name in {*index["weight_map"].values()}:
        tensors = load_file(tmp_path / "a" / name)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 64
    save_checkpoint(tmp_path / "b", model, param_sharing_metadata=[["head.weight", "embed.weight"]])
    assert "embed.weight" not in load_shard_index(tmp_path / "b")["weight_map"]
    other = Tied(seed=1)
    load_checkpoint(tmp_path / "b", other)
    assert same(model, other)


def test_a_raw_dict_and_a_view_of_a_large_storage(tmp_path):
    base = torch.arange(1000.0)
    save_checkpoint(tmp_path / "raw", {"view": base[10:20], "whole": base})
    found = load_checkpoint(tmp_path / "raw")
    assert torch.equal(found["view"], base[10:20]) and torch.equal(found["whole"], base)
    assert load_shard_index(tmp_path / "raw")["metadata"]["total_size"] == 4 * 1010


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda p, m: save_checkpoint(p, model=m), "by position"),
        (lambda p, m: save_checkpoint(output_dir=p, module=m, optimizer=None), "module"),
        (lambda p, m: load_checkpoint(p, model=m, optimizer=None), "by position"),
        (lambda p, m: load_checkpoint(checkpoint_dir=p, model=m, strict=False), "strict"),
        (lambda p, m: save_checkpoint(p), "module"),
        (lambda p, m: save_checkpoint(p, m, colour=1), "colour"),
        (lambda p, m: save_checkpoint(output_dir=p, model=m, optimizer=None), "state"),
        (lambda p, m: save_checkpoint(p, 5), "int"),
    ],
)
def test_a_mixture_of_the_spellings_is_a_type_error(call, names, tmp_path):
    with pytest.raises(TypeError, match=names):
        call(tmp_path / "x", Tied())
    assert not list(tmp_path.iterdir())


def write_forms(model, folder):
    """The same weights in the four forms."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    forms = {name: folder / name for name in ("safe_index", "safe", "bin_index", "bin")}
    for path in forms.values():
        path.mkdir()
    save_checkpoint(forms["safe_index"], state)
    (forms["safe_index"] / "checkpoint_manifest.json").unlink()
    save_file(state, forms["safe"] / "model.safetensors")
    torch.save(state, forms["bin"] / "pytorch_model.bin")
    halves = {
        "pytorch_model-00001-of-00002.bin": dict(list(state.items())[:2]),
        "pytorch_model-00002-of-00002.bin": dict(list(state.items())[2:]),
    }
    for name, half in halves.items():
        torch.save(half, forms["bin_index"] / name)
    index = {"metadata": {}, "weight_map": {k: n for n, half in halves.items() for k in half}}
    (forms["bin_index"] / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return forms


def test_all_four_forms_load_alike_and_are_equally_strict(tmp_path):
    model = Tied()
    for name, path in write_forms(model, tmp_path).items():
        meta = get_checkpoint_metadata(path)
        assert (meta.is_index, meta.safetensors) == ("index" in name, "safe" in name)
        assert validate_checkpoint(path)
        if not meta.safetensors:
            with pytest.raises(ConfigError, match="allow_legacy=True"):
                load_checkpoint(path)
        other = Tied(seed=1)
        load_checkpoint(path, other, allow_legacy=True)
        assert same(model, other), name
        for changed, wrong in (
            (nn.Sequential(nn.Linear(4, 4)), "missing in it: 0.bias"),
            (nn.ModuleDict({"body": nn.Linear(4, 4)}), "not in the model: embed.weight"),
            (Tied(width=8), r"body.weight is \[4, 4\] there, \[8, 8\] here"),
        ):
            before = {k: v.clone() for k, v in changed.state_dict().items()}
            with pytest.raises(CheckpointError, match=wrong):
                load_checkpoint(path, changed, allow_legacy=True)
            assert all(torch.equal(v, before[k]) for k, v in changed.state_dict().items())
        part = nn.ModuleDict({"body": nn.Linear(4, 4), "new": nn.Linear(1, 1)})
        report = load_checkpoint(path, part, strict=False, allow_legacy=True)
        assert report.missing_keys == ["new.bias", "new.weight"]
        assert "scale" in report.unexpected_keys
        assert torch.equal(part["body"].weight, model.body.weight)
        found = load_checkpoint(path, keys=["scale"], allow_legacy=True)
        assert torch.equal(found["scale"], model.scale)


def test_assign_gives_a_meta_model_its_weights_and_its_tie(tmp_path):
    model = Tied()
    save_checkpoint(tmp_path / "x", model)
    with torch.device("meta"):
        empty = Tied()
    with pytest.raises(CheckpointError, match="assign=True"):
        load_checkpoint(tmp_path / "x", empty)
    empty.body.weight.requires_grad_(False)
    load_checkpoint(tmp_path / "x", empty, assign=True)
    assert same(model, empty) and empty.head.weight is empty.embed.weight
    assert not empty.body.weight.requires_grad and empty.body.bias.requires_grad
    # Without assign the module keeps its own dtype and tensors.
    half = Tied(seed=3).to(torch.bfloat16)
    kept = half.body.weight
    load_checkpoint(tmp_path / "x", half)
    assert half.body.weight is kept and kept.dtype is torch.bfloat16


@pytest.mark.gpu
def test_device_cuda_is_honoured(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert load_checkpoint(tmp_path, device="cuda")["a"].device.type == "cuda"


def test_the_device_is_where_tensors_arrive(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert load_checkpoint(tmp_path, device="meta")["a"].is_meta


def test_two_sets_of_weights_are_not_guessed_between(tmp_path, caplog):
    model = Tied()
    save_checkpoint(tmp_path / "x", model)
    save_file({"a": torch.ones(1)}, tmp_path / "x" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"two sets of weights.*model\.safetensors"):
        load_checkpoint(tmp_path / "x")
    folder = tmp_path / "both"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING):
        assert load_checkpoint(folder)["a"] == 1
    assert "not pytorch_model.bin" in caplog.text
    assert get_checkpoint_metadata(folder) == CheckpointMeta("model.safetensors", False, True)


def test_nothing_there_is_file_not_found(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match=str(path)):
            load_checkpoint(path)
        with pytest.raises(FileNotFoundError, match=str(path)):
            get_checkpoint_metadata(path)
    with pytest.raises(FileNotFoundError, match="absent"):
        load_checkpoint(checkpoint_dir=tmp_path / "absent", model=Tied(), optimizer=None)
    assert find_latest_checkpoint(tmp_path) is None and not validate_checkpoint(tmp_path)


def test_a_damaged_shard_is_named_before_anything_is_loaded(tmp_path):
    path = Path(save_checkpoint(tmp_path / "x", Tied()))
    shard = path / "model-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    other = Tied(seed=1)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors is damaged"):
        load_checkpoint(path, other)
    assert same(other, Tied(seed=1)) and not validate_checkpoint(path)


def test_saving_again_replaces_the_whole_and_keeps_what_is_not_ours(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "tokenizer.json").write_text("{}")
    save_checkpoint(target, Tied(), max_shard_size=64)
    save_checkpoint(target, Tied(seed=1))
    assert sorted(p.name for p in target.iterdir()) == [
        "checkpoint_manifest.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["model"] and not verify(target)
    other = Tied()
    load_checkpoint(target, other)
    assert same(other, Tied(seed=1))


@pytest.mark.parametrize("kind", ["training", "foreign", "folders", "file"])
def test_save_does_not_destroy_what_it_did_not_make(kind, tmp_path):
    target = tmp_path / "x"
    if kind == "training":
        save_checkpoint(output_dir=target, model=Tied(), optimizer=None, state=TrainState())
    elif kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        if kind == "foreign":
            save_file({"a": torch.ones(1)}, target / "model.safetensors")
        else:
            (target / "checkpoint-3").mkdir()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=str(target)):
        save_checkpoint(target, Tied())
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_pickles_are_not_written(tmp_path):
    with pytest.raises(ConfigError, match="convert SRC DST --to bin"):
        save_checkpoint(tmp_path / "x", Tied(), safetensors=False)
    assert not list(tmp_path.iterdir())


def test_data_parallel_wrappers_leave_no_trace(tmp_path):
    model = Tied()
    save_checkpoint(tmp_path / "x", nn.DataParallel(model))
    assert "body.weight" in load_shard_index(tmp_path / "x")["weight_map"]
    other = nn.DataParallel(Tied(seed=1))
    load_checkpoint(tmp_path / "x", other)
    assert same(model, other.module)


# -- step by step -----------------------------------------------------------------------------


def test_stages_write_their_own_files_under_one_index(tmp_path):
    stages = [{"a": torch.ones(4), "b": torch.zeros(2)}, {"c": torch.ones(3)}]
    metas = [{k: v.to("meta") for k, v in s.items()} for s in stages]
    index = make_shard_index(metas, {"k": 1}, max_shard_size=2**20)
    assert len(set(index["weight_map"].values())) == 2
    for stage in stages:
        save_sharded_checkpoint(tmp_path, index, stage)
    save_shard_index(index, tmp_path)
    assert load_shard_index(tmp_path) == index
    found = load_sharded_checkpoint(tmp_path, index, keys=["c", "a"])
    assert torch.equal(found["a"], torch.ones(4)) and set(found) == {"a", "c"}
    module = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4)), "z": nn.Parameter(torch.ones(1))})
    assert load_sharded_checkpoint(tmp_path, index, module, strict=False) == {"z"}
    assert torch.equal(module["a"], torch.ones(4))
    with pytest.raises(ConfigError, match="more than one"):
        make_shard_index([stages[0], stages[0]])
    with pytest.raises(ConfigError, match="needs 'b'"):
        save_sharded_checkpoint(tmp_path / "x", index, {"a": torch.ones(4)})


def test_ties_are_listed_in_a_stable_order_and_restored(tmp_path):
    model = Tied()
    groups = create_sharing_metadata(model)
    assert groups == [["embed.weight", "head.weight"]]
    model.head.weight = nn.Parameter(torch.zeros(6, 4))
    retie_parameters(model, [*groups, ["embed.weight", "elsewhere"]])
    assert model.head.weight is model.embed.weight and model.embed.weight.any()
    with pytest.raises(CheckpointError, match=r"body\.weight"):
        retie_parameters(model, [["embed.weight", "body.weight"]])


def test_metrics_of_a_checkpoint_are_committed_with_it(tmp_path):
    path = save_checkpoint(tmp_path / "checkpoint-1", Tied())
    pin(path)
    counter = read_manifest(path).save_counter
    assert load_checkpoint_metrics(path) is None
    save_checkpoint_metrics(path, {"eval_loss": 0.0, "worst": float("nan")})
    found = load_checkpoint_metrics(path)
    assert found["eval_loss"] == 0.0 and found["worst"] != found["worst"]
    manifest = read_manifest(path)
    assert "eval_metrics.json" in manifest.files and not verify(path)
    assert manifest.save_counter == counter and checkpoint.is_pinned(path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_rotation_keeps_the_newest_the_pinned_and_the_preserved(tmp_path):
    for step in (9, 1, 2, 3, 4):  # the order is that of the saves, not of the numbers
        save_checkpoint(next_checkpoint_path(tmp_path, step), {"a": torch.ones(1)})
    pin(tmp_path / "checkpoint-1")
    deleted = maybe_delete_oldest_checkpoint(
        tmp_path, 1, preserved_checkpoints=[str(tmp_path / "." / "checkpoint-2")]
    )
    assert [Path(p).name for p in deleted] == ["checkpoint-9", "checkpoint-3"]
    assert {p.name for p in tmp_path.iterdir()} == {f"checkpoint-{n}" for n in (1, 2, 4)}
    assert find_latest_checkpoint(tmp_path).endswith("checkpoint-4")
    with pytest.raises(ConfigError, match="0"):
        maybe_delete_oldest_checkpoint(tmp_path, 0)


def test_an_output_dir_with_a_checkpoint_needs_overwrite(tmp_path):
    validate_output_dir(tmp_path)
    validate_output_dir(tmp_path / "absent")
    save_checkpoint(tmp_path / "checkpoint-1", {"a": torch.ones(1)})
    with pytest.raises(ConfigError, match="checkpoint-1"):
        validate_output_dir(tmp_path)
    with pytest.raises(ConfigError, match="already holds"):
        validate_output_dir(tmp_path / "checkpoint-1")
    validate_output_dir(tmp_path, overwrite=True)


def test_links_show_the_newest_weights_in_the_root(tmp_path):
    save_checkpoint(next_checkpoint_path(tmp_path, 1), Tied(), max_shard_size=64)
    planned = create_pretrained_symlinks(tmp_path, dry_run=True)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert create_pretrained_symlinks(tmp_path) == planned
    save_checkpoint(next_checkpoint_path(tmp_path, 2), Tied(seed=1))
    create_pretrained_symlinks(tmp_path)
    links = {p.name: str(p.readlink()) for p in tmp_path.iterdir() if p.is_symlink()}
    assert links == {
        name: f"checkpoint-2/{name}"
        for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json")
    }
    other = Tied()
    load_checkpoint(tmp_path, other)
    assert same(other, Tied(seed=1))
    index = tmp_path / "model.safetensors.index.json"
    index.unlink()
    index.write_text("mine")
    with pytest.raises(FileExistsError, match=r"index\.json"):
        create_pretrained_symlinks(tmp_path)
    assert index.read_text() == "mine"
    create_pretrained_symlinks(tmp_path, force_overwrite=True)
    assert index.is_symlink()
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        create_pretrained_symlinks(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("bad", ["latest", "-1", "1.5", "../x", ""])
def test_a_checkpoint_id_is_a_number(bad, tmp_path):
    with pytest.raises(ConfigError, match="checkpoint_id"):
        next_checkpoint_path(tmp_path, bad)


# -- training states --------------------------------------------------------------------------


def make_run(seed=0):
    model = Tied(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(run, steps):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        ids = torch.randint(0, 6, (8,), generator=generator)
        loss = nn.functional.cross_entropy(run["model"](ids), ids)
        loss.backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        run["scheduler"].step()
    return loss.item()


def test_a_training_state_comes_back_to_the_bit(tmp_path):
    run = make_run()
    train(run, 3)
    metrics = {"loss": torch.tensor(0.5), "odd": object()}
    state = TrainState(step=3, epoch=1, global_step=3, num_epochs=2, metrics=metrics)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    path = save_checkpoint(output_dir=tmp_path / "step_3", state=state, scaler=scaler, **run)
    assert not verify(path) and find_latest_checkpoint(tmp_path) == str(tmp_path / "step_3")
    expected = train(run, 3)

    other, again = make_run(1), torch.amp.GradScaler("cpu")
    found = load_checkpoint(checkpoint_dir=path, scaler=again, **other)
    assert isinstance(found, TrainState)
    assert (found.step, found.epoch, found.global_step, found.num_epochs) == (3, 1, 3, 2)
    assert found.metrics["loss"] == 0.5 and again.get_scale() == 8.0
    assert train(other, 3) == expected and same(run["model"], other["model"])

    # A component that the checkpoint lacks is an error, not a fresh start.
    save_checkpoint(output_dir=path, model=run["model"], optimizer=None, state=state)
    with pytest.raises(CheckpointError, match="optimizer"):
        load_checkpoint(checkpoint_dir=path, model=Tied(), optimizer=other["optimizer"])


def test_the_newest_training_state_is_the_last_saved(tmp_path):
    for step in (20, 10):
        state = TrainState(global_step=step)
        save_checkpoint(output_dir=tmp_path / f"s{step}", model=Tied(), optimizer=None, state=state)
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "s10")


def test_the_state_classes_are_one(tmp_path):
    from headway.compat.xaytune import TrainState as compat_state

    assert compat_state is TrainState


def test_async_saves_are_not_torn_by_steps_that_follow(tmp_path, monkeypatch):
    from headway.checkpoint import async_saver

    run = make_run()
    train(run, 2)
    expected = make_run()
    train(expected, 2)
    may_write = threading.Event()
    write = async_saver.save_state

    def held_back(*args, **options):
        assert may_write.wait(30)
        return write(*args, **options)

    monkeypatch.setattr(async_saver, "save_state", held_back)
    with AsyncCheckpointSaver() as saver:
        saver.save(output_dir=tmp_path / "a", state=TrainState(global_step=2), **run)
        train(run, 3)  # in place, moments included
        assert not (tmp_path / "a").exists()
        may_write.set()
    found = make_run(1)
    load_checkpoint(checkpoint_dir=tmp_path / "a", **found)
    assert same(found["model"], expected["model"])
    assert train(found, 2) == train(expected, 2)
    assert saver.last_checkpoint == str(tmp_path / "a")


def test_an_error_of_an_async_save_is_raised_once_and_not_lost(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    given = {"model": Tied(), "optimizer": None, "state": TrainState()}
    saver = AsyncCheckpointSaver()
    saver.save(output_dir=blocked, **given)
    with pytest.raises(ConfigError, match="not a directory"):
        saver.save(output_dir=tmp_path / "next", **given)
    assert not (tmp_path / "next").exists()
    saver.wait()
    with pytest.raises(ConfigError, match="not a directory"), AsyncCheckpointSaver() as saver:
        saver.save(output_dir=blocked, **given)
    with pytest.raises(KeyError), AsyncCheckpointSaver() as saver:
        saver.save(output_dir=blocked, **given)
        raise KeyError("the block's own")
    assert blocked.read_text() == "mine"


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    path = Path(save_checkpoint(tmp_path / "model", Tied()))
    path.rename(tmp_path / "model.old-0a1b2c3d-1-1-00000000")
    other = Tied(seed=1)
    load_checkpoint(path, other)
    assert same(other, Tied())


def test_every_public_name_can_be_imported():
    for name in checkpoint.__all__:
        assert getattr(checkpoint, name) is not None


def test_a_pinned_checkpoint_is_moved_aside_not_replaced(tmp_path):
    path = tmp_path / "weights"
    first, second = Tied(0), Tied(1)
    save_checkpoint(path, first)
    pin(path)
    save_checkpoint(path, second)
    [aside] = tmp_path.glob("weights.old-*")
    assert not verify(aside) and not verify(path)
    found = Tied(2)
    load_checkpoint(aside, found)
    assert same(found, first)
    load_checkpoint(path, found)
    assert same(found, second) and not checkpoint.is_pinned(path)
    # Nothing is pinned any more: the next save replaces the last one.
    save_checkpoint(path, first)
    assert [p.name for p in tmp_path.glob("weights.old-*")] == [aside.name]
