"""`headway checkpoint ...` and `headway finalize`: answers, exit codes, and what they leave."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.checkpoint import (
    CheckpointManager,
    committed,
    find_latest_checkpoint,
    is_pinned,
    load_checkpoint,
    read_manifest,
    validate_checkpoint,
    verify,
)
from headway.checkpoint.contents import CheckpointContents
from headway.cli.main import main
from headway.models.hf import hf_config_of
from headway.testing import assert_no_import, tiny_decoder

ACTIONS = [
    "ls",
    "inspect",
    "components",
    "list",
    "verify",
    "diff",
    "prune",
    "link",
    "pin",
    "unpin",
    "modify",
    "convert",
]


def make_contents(seed=0):
    torch.manual_seed(seed)
    model = tiny_decoder(tie_embeddings=True)
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        (rest if "norm" in name else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    from headway.checkpoint import RNGState, SharingPattern, StateComponent

    return CheckpointContents(
        model=model,
        optimizer=optimizer,
        components=[
            StateComponent("scheduler", schedule, SharingPattern.GLOBAL),
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK),
        ],
        trainer_state={"global_step": 0, "epoch": 0.5, "log_history": [{"loss": 1.0}]},
        model_config=hf_config_of(model),
        run_config={"args": {"learning_rate": 0.01}},
    )


def advance(contents):
    for parameter in contents.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    contents.optimizer.step()
    contents.components[0].stateful.step()
    contents.trainer_state["global_step"] += 1


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = tmp_path_factory.mktemp("made") / "run"
    contents = make_contents()
    manager = CheckpointManager(run, save_total_limit=None)
    for metric in (3.0, 1.0, 2.0):
        advance(contents)
        step = contents.trainer_state["global_step"]
        manager.save(contents, step, metrics={"eval_loss": metric}, metric=metric)
    return run


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "run"))


def tree(folder):
    """Names, kinds and digests of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "dir"
    return found


def headway(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["checkpoint", *map(str, words)]) == code
    captured = capsys.readouterr()
    return captured.err if code == 2 else captured.out


def ask(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["checkpoint", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_looking_changes_nothing_and_answers_in_json(run, capsys):
    before = tree(run)
    found = ask(capsys, "ls", run)["checkpoints"]
    assert [(c["name"], c["step"], c["metric"]) for c in found] == [
        ("checkpoint-1", 1, 3.0),
        ("checkpoint-2", 2, 1.0),
        ("checkpoint-3", 3, 2.0),
    ]
    facts = ask(capsys, "inspect", run)
    assert facts["path"].endswith("checkpoint-3") and facts["resumes"]
    assert facts["hugging_face_readable"] and facts["topology"]["world_size"] == 1
    parts = {part["key"]: part for part in ask(capsys, "components", run / "checkpoint-2")}
    assert set(parts) == {"model", "optimizer", "scheduler", "rng"}
    assert parts["rng"]["sharing_pattern"] == "per_rank"
    assert sum(part["bytes"] for part in parts.values()) < facts["bytes"]
    assert ask(capsys, "verify", run)["ok"]
    differences = ask(capsys, "diff", run / "checkpoint-1", run / "checkpoint-2", code=1)
    assert differences["counters"]["trainer_state.json.global_step"] == [1, 2]
    assert differences["max_abs_difference"] > 0 and not differences["only_first"]
    for action in ("ls", "inspect", "components", "verify"):
        assert "checkpoint" in headway(capsys, action, run) or action == "components"
    text = headway(capsys, "diff", run / "checkpoint-1", run / "checkpoint-2", code=1)
    assert "max abs difference" in text and "global_step: 1 -> 2" in text
    assert tree(run) == before


def test_verify_names_every_bad_file_and_exits_1(run, capsys):
    flip(run / "checkpoint-2" / "state" / "scheduler.json")
    (run / "checkpoint-2" / "trainer_state.json").unlink()
    found = ask(capsys, "verify", run, code=1)
    problems = found["checkpoints"][str(run / "checkpoint-2")]
    assert len(problems) == 2 and "scheduler.json" in " ".join(problems)
    assert "trainer_state.json is missing" in " ".join(problems)
    assert found["checkpoints"][str(run / "checkpoint-3")] == []
    assert "damaged" in headway(capsys, "verify", run / "checkpoint-2", code=1)
    assert "ok" in headway(capsys, "verify", run / "checkpoint-1")
    flip(run / "checkpoint-3" / "checkpoint_manifest.json")
    found = ask(capsys, "verify", run, code=1)
    assert "checkpoint_manifest.json" in found["checkpoints"][str(run / "checkpoint-3")][0]
    shutil.rmtree(run / "checkpoint-1" / "state")
    (run / "checkpoint-1" / "checkpoint_manifest.json").unlink()
    assert "not a committed checkpoint" in headway(capsys, "verify", run / "checkpoint-1", code=1)


def test_equal_checkpoints_compare_equal(run, capsys):
    shutil.copytree(run / "checkpoint-1", run.parent / "other")
    assert "equal" in headway(capsys, "diff", run / "checkpoint-1", run.parent / "other")
    assert headway(capsys, "diff", run / "checkpoint-1", run / "checkpoint-1", code=2)


def test_a_run_directory_is_pinned_by_its_newest_checkpoint(run, capsys):
    assert "checkpoint-3: pinned" in headway(capsys, "pin", run)
    assert [is_pinned(run / f"checkpoint-{step}") for step in (1, 2, 3)] == [False, False, True]
    assert ask(capsys, "unpin", run)["paths"] == [str(run / "checkpoint-3")]
    assert not is_pinned(run / "checkpoint-3")


@pytest.mark.parametrize("words", [["prune", "--keep", "1", "--yes"], ["pin"], ["link"]])
def test_a_folder_that_cannot_be_changed_is_told_in_a_line(run, capsys, monkeypatch, words):
    really_open = os.open

    def refuse(path, *rest, **options):
        raise OSError(30, "Read-only file system", str(path))

    def open_to_read(path, flags, *rest, **options):
        refuse(path) if flags & os.O_CREAT else None
        return really_open(path, flags, *rest, **options)

    before = tree(run)
    for name, act in (("rename", refuse), ("symlink", refuse), ("open", open_to_read)):
        monkeypatch.setattr(os, name, act)
    capsys.readouterr()
    assert main(["checkpoint", words[0], str(run), *words[1:]]) == 1
    said = capsys.readouterr().err
    monkeypatch.undo()
    assert said.startswith("error: [Errno 30] Read-only file system: '") and said.count("\n") == 1
    assert tree(run) == before


def test_prune_leaves_the_last_whole_checkpoint(run, capsys):
    for step, name in ((3, "model-00001-of-00001.safetensors"), (2, "trainer_state.json")):
        file = run / f"checkpoint-{step}" / name
        file.write_bytes(file.read_bytes()[:-1] + b"~")
    assert ask(capsys, "prune", run, "--keep", "1", "--yes")["deleted"] == []
    (run / "checkpoint-2" / "trainer_state.json").write_bytes(b"")
    shutil.copytree(run / "checkpoint-1", run / "checkpoint-0")
    assert ask(capsys, "prune", run, "--keep", "1", "--yes")["deleted"] == ["checkpoint-0"]


def test_prune_follows_the_rule_and_needs_a_yes(run, capsys):
    before = tree(run)
    words = ["prune", run, "--keep", "1", "--keep-best", "1"]
    planned = ask(capsys, *words)
    assert planned["deleted"] == ["checkpoint-1"] and planned["dry_run"]
    assert tree(run) == before and "say --yes" in headway(capsys, *words)
    assert "pinned" in headway(capsys, "pin", run / "checkpoint-1")
    assert ask(capsys, *words)["deleted"] == []
    assert ask(capsys, "ls", run)["checkpoints"][0]["flags"] == ["pinned"]
    headway(capsys, "unpin", run / "checkpoint-1")
    assert tree(run) == before
    assert ask(capsys, "prune", run, "--keep", "1", "--keep-every", "1")["deleted"] == []
    ask(capsys, *words, "--yes")
    assert [c.path.name for c in committed(run)] == ["checkpoint-2", "checkpoint-3"]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert "--keep: 0 given; allowed: 1 or more" in headway(
        capsys, "prune", run, "--keep", "0", code=2
    )
    assert headway(capsys, "prune", run, code=2)


def test_pins_are_honoured_by_training_saves(run, capsys):
    headway(capsys, "pin", run / "checkpoint-1")
    contents = make_contents()
    CheckpointManager(run, save_total_limit=1).save(contents, 9)
    assert {p.name for p in run.iterdir()} == {"checkpoint-1", "checkpoint-9"}


def test_link_makes_the_run_a_model_folder(run, capsys):
    transformers = pytest.importorskip("transformers")
    before = tree(run)
    planned = ask(capsys, "link", run, "--dry-run")["links"]
    assert tree(run) == before
    assert ask(capsys, "link", run)["links"] == planned
    model = transformers.AutoModelForCausalLM.from_pretrained(run)
    stored = load_checkpoint(run / "checkpoint-3")
    for name, value in model.state_dict().items():
        assert torch.equal(value, stored[name])
    assert "optimizer.safetensors.index.json" not in planned
    (run / "config.json").unlink()
    (run / "config.json").write_text("mine")
    assert "--force" in headway(capsys, "link", run, code=2)
    assert (run / "config.json").read_text() == "mine"
    headway(capsys, "link", run, "--force")
    assert (run / "config.json").is_symlink()


def learning_rates(path):
    groups = json.loads((path / "state/optimizer.json").read_text())["rest"]["param_groups"]
    return [group["lr"] for group in groups]


def test_modify_edits_commits_and_keeps_a_backup(run, capsys):
    path = run / "checkpoint-3"
    counter, before = read_manifest(path).save_counter, tree(run)
    old = learning_rates(path)
    words = ["modify", path, "--scale", "lr=0.5", "--set", "weight_decay=0.3", "--param-group", "0"]
    planned = ask(capsys, *words, "--dry-run")
    assert tree(run) == before and planned["backup"] is None
    done = ask(capsys, *words)
    assert done["changes"] == planned["changes"]
    assert learning_rates(path) == [old[0] * 0.5, old[1]]
    assert not verify(path) and read_manifest(path).save_counter == counter
    backup = Path(done["backup"])
    unchanged = {n: d for n, d in before.items() if n.startswith("checkpoint-3/")}
    assert {f"checkpoint-3/{n}": d for n, d in tree(backup).items()} == unchanged
    assert [c.path.name for c in committed(run)] == [f"checkpoint-{n}" for n in (1, 2, 3)]
    assert find_latest_checkpoint(run) == str(path)
    # The weights are the same files, not copies.
    shard = "model-00001-of-00001.safetensors"
    assert (path / shard).samefile(backup / shard)

    # A schedule goes on from the edited rate instead of undoing the edit.
    contents, plain = make_contents(), make_contents()
    CheckpointManager(run).load(contents, path)
    CheckpointManager(run).load(plain, run / "checkpoint-2")
    advance(contents)
    rates = [group["lr"] for group in contents.optimizer.param_groups]
    assert rates == pytest.approx([0.01 * 0.5**4 * 0.5, 0.01 * 0.5**4])


def test_modify_counters_and_other_components(run, capsys):
    path = run / "checkpoint-3"
    headway(capsys, "modify", run, "--set", "global_step=7", "--no-backup")
    assert json.loads((path / "trainer_state.json").read_text())["global_step"] == 7
    headway(
        capsys, "modify", path, "--component", "scheduler", "--set", "last_epoch=5", "--no-backup"
    )
    assert json.loads((path / "state/scheduler.json").read_text())["last_epoch"] == 5
    assert not verify(path) and len(list(run.iterdir())) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "lrr=1"], "did you mean 'lr'"),
        (["--set", "global_step=soon"], "global_step is a int"),
        (["--set", "lr=fast"], "lr"),
        (["--set", "lr"], "KEY=VALUE"),
        (["--scale", "lr=NaN"], "finite"),
        (["--scale", "global_step=0.5"], "whole number"),
        (["--scale", "lr=x"], "a factor is a number"),
        (["--set", "log_history=1"], "not a plain value"),
        (["--set", "lr=1", "--param-group", "5"], "2 groups"),
        (["--set", "lr=1", "--component", "schedule"], "did you mean 'scheduler'"),
        (["--set", "lr=1", "--component", "model"], "model"),
        (["--set", "global_step=-5"], "global_step would be -5; allowed: 0 or more"),
        (["--set", "lr=-1"], "lr would be -1.0"),
        (["--scale", "weight_decay=-2", "--param-group", "0"], "weight_decay would be -0.2"),
        (["--set", "base_lrs.0=-1", "--component", "scheduler"], "base_lrs.0 would be -1.0"),
        ([], "--set"),
    ],
)
def test_a_wrong_edit_is_explained_and_changes_nothing(words, says, run, capsys):
    before = tree(run)
    assert says in headway(capsys, "modify", run / "checkpoint-3", *words, code=2)
    assert tree(run) == before


def test_modify_says_as_much_as_it_is_asked_to(run, capsys):
    words = ("modify", run / "checkpoint-3", "--set", "weight_decay=0.5", "--dry-run")
    assert headway(capsys, *words, "-q") == ""
    usual = headway(capsys, *words)
    assert "weight_decay" in usual and "2 values in 1 files" not in usual
    assert "2 values in 1 files" in headway(capsys, *words, "-v")
    assert headway(capsys, "modify", run, "--set", "weight_decay=-1", "-f", "--dry-run")
    for both in (["-v", "-q"], ["-q", "--verbose"]):
        assert "not allowed with" in headway(capsys, *words, *both, code=2)


def test_list_shows_values_by_the_names_that_modify_takes(run, capsys):
    found = ask(capsys, "list", run)
    assert set(found) == {"trainer", "optimizer", "scheduler", "rng"}
    group = found["optimizer"]["state/optimizer.json"]["param_groups"][1]
    assert group["weight_decay"] == 0.0
    text = headway(capsys, "list", run / "checkpoint-2", "--component", "optimizer")
    assert "class = AdamW" in text and "param_groups[0].weight_decay = 0.1" in text
    assert "global_step" not in text and "exp_avg" not in text
    words = ("modify", run / "checkpoint-2", "--set", "param_groups[0].weight_decay=0.2")
    text = headway(capsys, *words, "--dry-run")
    assert "param_groups[0].weight_decay: 0.1 -> 0.2" in text and "param_groups[1]" not in text
    assert "two groups" in headway(capsys, *words, "--param-group", "1", code=2)
    text = headway(capsys, "list", run / "checkpoint-2", "--component", "trainer")
    assert "global_step = 2" in text and "log_history.0.loss = 1.0" in text
    assert "base_lrs = [0.01, 0.01]" in headway(capsys, "list", run, "--component", "scheduler")
    words = ("list", run, "--component", "rng")
    assert "tensor" not in headway(capsys, *words) and "-v shows them" in headway(capsys, *words)
    assert "tensor torch" in headway(capsys, *words, "-v")
    assert "scheduler" in headway(capsys, "list", run, "--component", "schedule", code=2)
    flip(run / "checkpoint-2" / "trainer_state.json")
    assert main(["checkpoint", "list", str(run / "checkpoint-2")]) == 1
    assert "trainer_state.json" in capsys.readouterr().err


def test_inspect_validates_on_request_and_shows_files(run, capsys):
    path = run / "checkpoint-2"
    assert ask(capsys, "inspect", path, "--validate")["problems"] == []
    assert "all as they were written" in headway(capsys, "inspect", path, "--validate")
    text = headway(capsys, "inspect", path, "-v")
    assert (
        "state/optimizer.json" in text and read_manifest(path).files["config.json"].digest in text
    )
    assert "state/optimizer.json" not in headway(capsys, "inspect", path)
    assert "files" in ask(capsys, "inspect", path, "-v")
    flip(path / "optimizer-00001-of-00001.safetensors")
    assert ask(capsys, "inspect", path)["step"] == 2
    assert ask(capsys, "inspect", path, "--validate", code=1)["problems"]
    assert "is damaged" in headway(capsys, "inspect", path, "--validate", code=1)


def test_verbosity_goes_before_or_after_the_action(run, capsys):
    for words in (["components", run, "-v"], ["-v", "components", run]):
        assert "state/optimizer.json" in headway(capsys, *words)
    told = headway(capsys, "ls", run, "--verbos", code=2)
    assert "did you mean --verbose?" in told
    assert main(["data", "info", "x", "-q"]) == 2
    told = capsys.readouterr().err
    assert "did you mean -q" not in told


def test_link_takes_its_place_in_either_spelling(run, capsys):
    expected = ask(capsys, "link", run, "--dry-run")
    assert ask(capsys, "link", "--output-path", run, "--dry-run") == expected
    assert "--output-path" in headway(capsys, "link", code=2)
    assert "not allowed with" in headway(capsys, "link", run, "--output-path", run, code=2)
    headway(capsys, "link", "--output-path", run)
    assert (run / "model.safetensors.index.json").is_symlink()


def test_a_folder_without_a_checkpoint_is_a_mistake(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for action in ("inspect", "components", "list", "verify"):
        told = headway(capsys, action, tmp_path / "empty", code=2)
        assert "is not a committed checkpoint" in told
    assert "not a committed" in headway(
        capsys, "modify", tmp_path / "empty", "--set", "lr=1", code=2
    )


def test_a_run_whose_checkpoints_are_all_damaged_is_no_mistake_of_the_user(run, tmp_path, capsys):
    for step in (1, 2, 3):
        (run / f"checkpoint-{step}" / "model-00001-of-00001.safetensors").unlink()
    for words in (
        ["checkpoint", "inspect", run],
        ["checkpoint", "pin", run],
        ["checkpoint", "link", run],
        ["finalize", run, tmp_path / "final"],
        ["generate", run, "--prompt", "a"],
    ):
        assert main([str(word) for word in words]) == 1
        told = capsys.readouterr().err
        assert "holds no whole checkpoint" in told and "checkpoint-3" in told


def test_an_unknown_recipe_is_refused_by_name(run, tmp_path, capsys):
    words = ["finalize", str(run), str(tmp_path / "x"), "--quantize", "int8"]
    assert main(words) == 2
    assert "unknown --quantize 'int8'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_modify_refuses_a_damaged_checkpoint(run, capsys):
    flip(run / "checkpoint-3" / "optimizer-00001-of-00001.safetensors")
    before = tree(run)
    assert main(["checkpoint", "modify", str(run / "checkpoint-3"), "--set", "lr=1.0"]) == 1
    assert "optimizer-00001-of-00001.safetensors" in capsys.readouterr().err
    assert tree(run) == before


# -- convert ----------------------------------------------------------------------------------


def test_exports_hold_the_same_weights(run, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    stored = load_checkpoint(run / "checkpoint-3")
    before = tree(run)
    assert ask(capsys, "convert", run, tmp_path / "hf")["to"] == "hf"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    assert validate_checkpoint(tmp_path / "hf") and read_manifest(tmp_path / "hf").kind == "export"
    assert not (tmp_path / "hf" / "trainer_state.json").exists()

    headway(capsys, "convert", run, tmp_path / "one.safetensors")
    single = load_file(tmp_path / "one.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in single.items())
    headway(capsys, "convert", run, tmp_path / "one.pt")
    headway(capsys, "convert", run, tmp_path / "bin", "--to", "bin", "--dtype", "bfloat16")
    pickled = torch.load(tmp_path / "one.pt", weights_only=True)
    assert set(pickled) == set(stored)
    assert pickled["lm_head.weight"].data_ptr() == pickled["model.embed_tokens.weight"].data_ptr()
    halved = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert {t.dtype for t in halved.values()} == {torch.bfloat16}
    settings = json.loads((tmp_path / "bin" / "config.json").read_text())
    assert settings["dtype"] == settings["torch_dtype"] == "bfloat16"
    assert tree(run) == before
    assert "exists" in headway(capsys, "convert", run, tmp_path / "hf", code=2)
    assert "dtype" in headway(capsys, "convert", run, tmp_path / "x", "--dtype", "int8", code=2)
    assert not (tmp_path / "x").exists()


def test_raw_pytorch_files_come_in_only_on_request(tmp_path, capsys):
    weights = {"module.a": torch.arange(3.0), "module.b": torch.ones(2, 2)}
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "raw.pt")
    words = ["convert", tmp_path / "raw.pt", tmp_path / "out"]
    assert "--allow-legacy" in headway(capsys, *words, code=2)
    headway(capsys, *words, "--allow-legacy")
    found = load_checkpoint(tmp_path / "out")
    assert torch.equal(found["a"], torch.arange(3.0)) and set(found) == {"a", "b"}
    headway(capsys, "convert", tmp_path / "raw.pt", tmp_path / "o.safetensors", "--allow-legacy")
    assert set(load_file(tmp_path / "o.safetensors")) == {"a", "b"}
    save_file(found, tmp_path / "in.safetensors")
    headway(capsys, "convert", tmp_path / "in.safetensors", tmp_path / "again")
    assert set(load_checkpoint(tmp_path / "again")) == {"a", "b"}


def raw_state(kind=torch.optim.AdamW, **options):
    """A script's model, with buffers and a tie, its optimizer after two steps, and a copy."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 4),
        torch.nn.BatchNorm1d(4),
        torch.nn.Linear(4, 4),
        torch.nn.Linear(4, 5, bias=False),
    )
    model[3].weight = model[0].weight
    optimizer = kind(model.parameters(), lr=0.05, **options)
    for _ in range(2):
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_a_raw_training_state_comes_in_whole(kind, options, as_folder, tmp_path, capsys):
    model, optimizer = raw_state(kind, **options)
    source = tmp_path / ("raw" if as_folder else "raw.pt")
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if as_folder:
        source.mkdir()
        for name, value in held.items():
            torch.save(value, source / f"{name}.pt")
        torch.save({"scale": 2.0}, source / "scaler.pt")
        (source / "metadata.json").write_text('{"global_step": 7, "epoch": 1, "step": 3}')
    else:
        torch.save({**held, "step": 7, "epoch": 1, "scaler": {"scale": 2.0}}, source)
    target = tmp_path / "run" / "checkpoint-7"
    target.parent.mkdir()
    assert main(["checkpoint", "convert", str(source), str(target), "--allow-legacy"]) == 0
    assert "left out of" in (told := capsys.readouterr().err) and "scaler" in told
    assert "optimizer" not in told.partition("left out")[2]
    manifest = read_manifest(target)
    assert (manifest.kind, manifest.step) == ("training", 7) and not verify(target)

    other, fresh = raw_state(kind, **options)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fresh.state.clear()
    contents = CheckpointContents(model=other, optimizer=fresh)
    loaded = CheckpointManager(target.parent).load(contents)
    assert loaded.trainer_state["global_step"] == 7 and loaded.trainer_state["epoch"] == 1
    assert same_state(model, other)
    for mine, theirs in zip(other.parameters(), model.parameters()):
        assert optimizer.state[theirs].keys() == fresh.state[mine].keys()
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(fresh.state[mine][key]))


def test_what_of_a_raw_file_is_left_out_is_said(tmp_path, capsys):
    model, optimizer = raw_state()
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 9}
    torch.save({**held, "config": {"a": 1}}, tmp_path / "raw.pt")
    words = ["checkpoint", "convert", str(tmp_path / "raw.pt")]
    for number, options in enumerate((["--no-optimizer"], ["--to", "hf"], ["--dtype", "float64"])):
        target = tmp_path / str(number)
        assert main([*words, str(target), "--allow-legacy", *options]) == 0
        told = capsys.readouterr().err
        assert "left out" in told and "optimizer" in told and "config" in told
        assert read_manifest(target).step == 9 and read_manifest(target).kind == "export"
    # An optimizer of another model is refused, not guessed at.
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    torch.save({**held, "optimizer": optimizer.state_dict()}, tmp_path / "odd.pt")
    words[2] = str(tmp_path / "odd.pt")
    assert main([*words, str(tmp_path / "x"), "--allow-legacy"]) == 1
    assert "convert without the optimizer" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


class Explodes:
    def __reduce__(self):
        return (os.system, ("touch exploded",))


def test_a_pickle_with_code_is_not_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(1), "b": Explodes()}, "evil.pt")
    assert main(["checkpoint", "convert", "evil.pt", "out", "--allow-legacy"]) == 1
    assert "evil.pt holds more than tensors" in capsys.readouterr().err
    assert not Path("exploded").exists() and not Path("out").exists()


@pytest.fixture(scope="module")
def hf_trainer(tmp_path_factory):
    """A checkpoint as transformers' Trainer writes it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        save_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        learning_rate=0.01,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    return folder / "checkpoint-2"


def test_a_hugging_face_trainer_checkpoint_is_imported_whole(hf_trainer, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    before = tree(hf_trainer)
    target = tmp_path / "run" / "checkpoint-2"
    target.parent.mkdir()
    assert "optimizer.pt" in headway(capsys, "convert", hf_trainer, target, code=2)
    assert ask(capsys, "convert", hf_trainer, target, "--allow-legacy")["to"] == "checkpoint"
    assert tree(hf_trainer) == before and not verify(target)
    assert read_manifest(target).step == 2

    # Loaded into a live model and optimizer, every moment is where the Trainer had it.
    model = transformers.LlamaForCausalLM.from_pretrained(hf_trainer)
    decay = [p for n, p in model.named_parameters() if "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1.0)
    theirs.load_state_dict(torch.load(hf_trainer / "optimizer.pt", weights_only=True))
    other = transformers.LlamaForCausalLM(model.config)
    named = dict(other.named_parameters())
    ours = torch.optim.AdamW(list(named.values()), lr=1.0)
    from headway.checkpoint import RNGState, SharingPattern, StateComponent

    contents = CheckpointContents(
        model=other,
        optimizer=ours,
        components=[StateComponent("rng", RNGState(), SharingPattern.PER_RANK)],
    )
    loaded = CheckpointManager(target.parent).load(contents)
    assert loaded.trainer_state["global_step"] == 2 and loaded.trainer_state["log_history"]
    assert same_state(model, other)
    for name, parameter in model.named_parameters():
        for key, value in theirs.state[parameter].items():
            assert torch.equal(value, ours.state[named[name]][key]), (name, key)
    drawn = torch.rand(3)
    held = torch.load(hf_trainer / "rng_state.pth", weights_only=False)
    torch.set_rng_state(held["cpu"])
    assert torch.equal(drawn, torch.rand(3))

    headway(capsys, "convert", hf_trainer, tmp_path / "w", "--to", "hf")
    assert same_state(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "w"), model)
    (tmp_path / "bare").mkdir()
    for name in ("model.safetensors", "config.json", "trainer_state.json", "optimizer.pt"):
        shutil.copy(hf_trainer / name, tmp_path / "bare")
    state = torch.load(tmp_path / "bare" / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(state, tmp_path / "bare" / "optimizer.pt")
    words = ["checkpoint", "convert", str(tmp_path / "bare"), str(tmp_path / "y")]
    assert main([*words, "--allow-legacy"]) == 1
    assert "optimizer.pt" in capsys.readouterr().err and not (tmp_path / "y").exists()
    assert main([*words, "--allow-legacy", "--no-optimizer"]) == 0


def test_a_hugging_face_trainer_checkpoint_resumes_in_ours(hf_trainer, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    from headway import Trainer, TrainingArguments

    target = tmp_path / "run" / "checkpoint-2"
    target.parent.mkdir()
    headway(capsys, "convert", hf_trainer, target, "--allow-legacy")
    theirs = torch.load(hf_trainer / "scheduler.pt", weights_only=True)
    assert len(theirs["base_lrs"]) == 2, "two groups there, one here"
    data = [{"input_ids": list(range(8)), "labels": list(range(8))} for _ in range(16)]
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(target.parent),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=0.01,
            lr_scheduler_type="linear",
            save_strategy="no",
            use_cpu=True,
            load_components=["model", "optimizer", "scheduler", "trainer", "rng"],
        ),
        model_init=lambda: transformers.LlamaForCausalLM.from_pretrained(hf_trainer),
        train_dataset=data,
        default_callbacks=False,
    )
    output = trainer.train()
    assert output.global_step == 4 and len(trainer.state.log_history) > 2
    # 4 steps of the schedule are done, by the rate that it was saved with.
    assert trainer.lr_scheduler.last_epoch == 4
    assert trainer.lr_scheduler.base_lrs == theirs["base_lrs"][:1] == [0.01]
    assert len(trainer.lr_scheduler.get_last_lr()) == 1


def same_state(a, b):
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# -- finalize ---------------------------------------------------------------------------------


def test_finalize_makes_a_clean_folder(run, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    before = tree(run)
    assert main(["finalize", str(run), str(tmp_path / "final"), "--dtype", "bfloat16"]) == 0
    assert sorted(p.name for p in (tmp_path / "final").iterdir()) == [
        "checkpoint_manifest.json",
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert model.dtype is torch.bfloat16
    capsys.readouterr()
    words = ["finalize", str(run / "checkpoint-1"), str(tmp_path / "kept"), "--keep-optimizer"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert (tmp_path / "kept/state/optimizer.json").exists() and not verify(tmp_path / "kept")
    assert main(["finalize", str(run), str(tmp_path / "kept")]) == 2
    assert tree(run) == before


def test_finalize_of_a_damaged_checkpoint_writes_nothing(run, tmp_path, capsys):
    flip(run / "checkpoint-3" / "model-00001-of-00001.safetensors")
    before = tree(tmp_path)
    assert main(["finalize", str(run / "checkpoint-3"), str(tmp_path / "final")]) == 1
    assert "model-00001-of-00001.safetensors" in capsys.readouterr().err
    assert tree(tmp_path) == before


# -- the command line itself ------------------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS)
def test_a_path_that_is_not_there_is_a_usage_error(action, tmp_path, capsys):
    words = {
        "diff": ["absent", "absent"],
        "prune": ["absent", "--keep", "1"],
        "convert": ["absent", str(tmp_path / "x")],
        "modify": ["absent", "--set", "lr=1"],
    }.get(action, ["absent"])
    assert "absent" in headway(capsys, action, *words, code=2)
    assert headway(capsys, action, "--no-such-option", code=2)


def test_help_and_usage_errors_do_not_import_torch():
    assert_no_import(
        "from headway.cli.main import main\n"
        "assert main(['checkpoint', '--help']) == 0\n"
        "assert main(['checkpoint', 'prune', '--help']) == 0\n"
        "assert main(['finalize', '--help']) == 0\n"
        "assert main(['checkpoint', 'nothing']) == 2\n"
    )


def test_the_commands_take_an_address(run, tmp_path, capsys):
    address = f"file://{run}"
    for given in (address, f"{address}/checkpoint-3"):
        assert main(["finalize", given, str(tmp_path / "final"), "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["source"] == f"{address}/checkpoint-3"
    assert len(ask(capsys, "ls", address)["checkpoints"]) == 3
    assert ask(capsys, "verify", address)["ok"]
    assert ask(capsys, "inspect", f"{address}/checkpoint-2")["step"] == 2
    headway(capsys, "pin", f"{address}/checkpoint-1")
    ask(capsys, "prune", address, "--keep", "1", "--yes")
    assert [c.path.name for c in committed(run)] == ["checkpoint-1", "checkpoint-3"]
    assert "does not exist" in headway(capsys, "inspect", f"{address}/checkpoint-9", code=2)
