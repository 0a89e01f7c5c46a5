"""Bad input, case by case: an error that names the file, and nothing changed on disk."""

import hashlib
import json
import os
import struct
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.checkpoint import (
    CheckpointContents,
    CheckpointError,
    CheckpointManager,
    TrainState,
    find_latest_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    validate_checkpoint,
    verify,
)
from headway.checkpoint.digest import digest_bytes
from headway.checkpoint.header import read_header
from headway.checkpoint.manifest import write_manifest
from headway.checkpoint.storage import FileRecord, Storage
from headway.checkpoint.tensors import read_tensor_file
from headway.cli.main import main
from headway.errors import ConfigError

MANIFEST = "checkpoint_manifest.json"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"


class Small(nn.Module):
    def __init__(self, width=3, extra=False):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(width, width)
        if extra:
            self.b = nn.Linear(1, 1)


def contents(model=None):
    model = model or Small()
    optimizer = torch.optim.AdamW(model.parameters())
    return CheckpointContents(model=model, optimizer=optimizer, trainer_state={"global_step": 1})


def tree(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        status = path.lstat()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = (hashlib.sha256(path.read_bytes()).hexdigest(), status.st_mtime_ns)
        else:
            found[name] = status.st_mtime_ns
    return found


@pytest.fixture
def good(tmp_path):
    """A committed checkpoint in a run directory."""
    return CheckpointManager(tmp_path / "run").save(contents(), 1)


# -- damage to a committed checkpoint ---------------------------------------------------------


def resign(path, **changes):
    """Change the manifest and give it the digest that fits, as somebody hostile would."""
    fields = json.loads((path / MANIFEST).read_text())
    del fields["digest"]
    fields.update(changes)
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    fields["digest"] = digest_bytes(canonical, "xxh3_128")
    (path / MANIFEST).write_text(json.dumps(fields))


def link_out(path, name):
    outside = path.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    target = outside / Path(name).name
    (path / name).rename(target)
    (path / name).symlink_to(target)


def nested(depth):
    return "[" * depth + "]" * depth


DAMAGE = {
    "no manifest": (lambda p: (p / MANIFEST).unlink(), MANIFEST),
    "half a manifest": (
        lambda p: (p / MANIFEST).write_bytes((p / MANIFEST).read_bytes()[:200]),
        MANIFEST,
    ),
    "empty manifest": (lambda p: (p / MANIFEST).write_text(""), MANIFEST),
    "manifest is a list": (lambda p: (p / MANIFEST).write_text("[]"), MANIFEST),
    "manifest nested deeply": (lambda p: (p / MANIFEST).write_text(nested(100_000)), MANIFEST),
    "manifest with a huge number": (
        lambda p: (p / MANIFEST).write_text('{"step": ' + "9" * 100_000 + "}"),
        MANIFEST,
    ),
    "later format version": (lambda p: resign(p, format_version=2), "format version 2"),
    "unknown kind": (lambda p: resign(p, kind="other"), "unknown kind"),
    "unknown field": (lambda p: resign(p, more=1), "more"),
    "wrong type": (lambda p: resign(p, files=[]), "files is a list"),
    "file outside": (
        lambda p: resign(p, files={"../x": {"size": 1, "digest": "0"}}),
        "'../x'",
    ),
    "absolute file": (
        lambda p: resign(p, files={"/etc/passwd": {"size": 1, "digest": "0"}}),
        "/etc/passwd",
    ),
    "unknown digest": (lambda p: resign(p, digest_algorithm="crc"), MANIFEST),
    "changed manifest": (
        lambda p: (p / MANIFEST).write_text(
            (p / MANIFEST).read_text().replace('"step": 1', '"step": 2')
        ),
        MANIFEST,
    ),
    "manifest linked out": (lambda p: link_out(p, MANIFEST), MANIFEST),
    "no shard": (lambda p: (p / SHARD).unlink(), SHARD),
    "half a shard": (
        lambda p: (p / SHARD).write_bytes((p / SHARD).read_bytes()[:100]),
        SHARD,
    ),
    "shard linked out": (lambda p: link_out(p, SHARD), SHARD),
    "folder linked out": (lambda p: link_out(p, "state"), "state/"),
    "shard is a folder": (lambda p: ((p / SHARD).unlink(), (p / SHARD).mkdir()), SHARD),
    "index nested deeply": (lambda p: (p / INDEX).write_text(nested(100_000)), INDEX),
}


def attempts(path, model):
    """Every way to use a checkpoint for training or as weights."""
    run = path.parent
    yield lambda: load_checkpoint(path, model)
    yield lambda: load_checkpoint(path)
    yield lambda: load_checkpoint(
        checkpoint_dir=path, model=model, optimizer=torch.optim.AdamW(model.parameters())
    )
    yield lambda: CheckpointManager(run).load(contents(model), path)
    yield lambda: CheckpointManager(run).resolve(path)


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(case, good, tmp_path, capsys):
    damage, says = DAMAGE[case]
    damage(good)
    before = tree(tmp_path)
    model = Small()
    values = [p.clone() for p in model.parameters()]
    only_state = says == "state/"  # the weights alone are intact then
    for number, attempt in enumerate(attempts(good, model)):
        if only_state and number < 2:
            attempt()
            continue
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            attempt()
        assert says in str(caught.value), f"attempt {number}: {caught.value}"
    assert any(says in problem for problem in verify(good))
    assert not validate_checkpoint(good)
    assert CheckpointManager(good.parent).resolve(True) is None
    for words in (
        ["checkpoint", "verify", str(good)],
        ["checkpoint", "modify", str(good), "--set", "lr=1.0"],
        ["finalize", str(good), str(tmp_path / "new"), "--keep-optimizer"],
    ):
        capsys.readouterr()
        assert main(words) == 1, words
        captured = capsys.readouterr()
        assert says in captured.out + captured.err and "Traceback" not in captured.err
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters()))
    assert tree(tmp_path) == before


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "notes.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    before = tree(tmp_path)
    for name in ("empty", "texts", "file", "absent"):
        path = tmp_path / name
        for attempt in attempts(path, Small()):
            with pytest.raises((CheckpointError, ConfigError, FileNotFoundError), match=str(path)):
                attempt()
        assert not validate_checkpoint(path) and find_latest_checkpoint(path) is None
        for action in ("inspect", "components", "verify"):
            assert main(["checkpoint", action, str(path)]) in (1, 2)
            captured = capsys.readouterr()
            assert name in captured.out + captured.err and "Traceback" not in captured.err
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3)), "missing in it: 0.bias"),
        (lambda: Small(extra=True), "missing in it: b.bias"),
        (lambda: nn.Linear(3, 3), "not in the model: a.bias"),
        (lambda: Small(width=4), "a.weight is [3, 3] there, [4, 4] here"),
    ],
)
def test_another_models_checkpoint_is_refused_by_tensor(model, says, good, tmp_path):
    before = tree(tmp_path)
    for attempt in range(3):
        other = model()
        values = [p.clone() for p in other.parameters()]
        optimizer = torch.optim.AdamW(other.parameters())
        with pytest.raises(CheckpointError) as caught:
            [
                lambda other=other: load_checkpoint(good, other),
                lambda other=other, optimizer=optimizer: load_checkpoint(
                    checkpoint_dir=good, model=other, optimizer=optimizer
                ),
                lambda other=other: CheckpointManager(good.parent).load_model(other, good),
            ][attempt]()
        assert says in str(caught.value) and str(good / INDEX) in str(caught.value)
        assert all(torch.equal(a, b) for a, b in zip(values, other.parameters()))
        assert not optimizer.state
    assert tree(tmp_path) == before


# -- hostile files without a manifest ---------------------------------------------------------


def safetensors_file(header, data=b"\0" * 64, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start=0, end=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HEADERS = {
    "longer than the file": safetensors_file({}, length=2**20),
    "absurdly long": safetensors_file({}, length=2**63),
    "length beyond 64 bits' sign": safetensors_file({}, length=2**64 - 1),
    "not JSON": safetensors_file(b"{" * 8),
    "nested deeply": safetensors_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a list": safetensors_file([]),
    "overlapping": safetensors_file({"a": entry(0, 16), "b": entry(8, 24)}, b"\0" * 24),
    "a gap": safetensors_file({"a": entry(0, 16), "b": entry(32, 48)}, b"\0" * 48),
    "negative": safetensors_file({"a": entry(-16, 0)}, b"\0" * 16),
    "backwards": safetensors_file({"a": entry(16, 0)}, b"\0" * 16),
    "beyond the end": safetensors_file({"a": entry(0, 2**40, (2**38,))}),
    "size and shape differ": safetensors_file({"a": entry(0, 16, (5,))}, b"\0" * 16),
    "shape overflows": safetensors_file({"a": entry(0, 16, (2**62, 2**62))}, b"\0" * 16),
    "negative shape": safetensors_file({"a": entry(0, 16, (-4,))}, b"\0" * 16),
    "unknown dtype": safetensors_file({"a": entry(dtype="F9")}, b"\0" * 16),
    "offsets are texts": safetensors_file(
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": ["0", "16"]}}, b"\0" * 16
    ),
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "bytes left over": safetensors_file({"a": entry(0, 16)}, b"\0" * 32),
    "a hole at the start": safetensors_file({"a": entry(16, 32)}, b"\0" * 32),
    "one tensor twice": safetensors_file(
        b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 16)).encode(),) * 2), b"\0" * 16
    ),
    "two tensors in one place": safetensors_file({"a": entry(), "b": entry()}, b"\0" * 16),
    "metadata is a list": safetensors_file({"__metadata__": [], "a": entry()}, b"\0" * 16),
    "a huge number": safetensors_file(b'{"a": ' + b"9" * 5_000 + b"}"),
    "offsets are fractions": safetensors_file({"a": entry(0.0, 16.0)}, b"\0" * 16),
    "offsets are booleans": safetensors_file(
        {"a": {"dtype": "U8", "shape": [True], "data_offsets": [False, True]}}, b"\0"
    ),
    "an entry has more": safetensors_file({"a": {**entry(), "more": 1}}, b"\0" * 16),
    "shape is missing": safetensors_file(
        {"a": {"dtype": "F32", "data_offsets": [0, 16]}}, b"\0" * 16
    ),
}
# What another reader lets pass is still refused where a run's own state is read.
LENIENT = {"one tensor twice", "an entry has more"}


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_tensor_file_is_refused_by_name(case, tmp_path, capsys):
    path = tmp_path / "folder" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(HEADERS[case])
    before, start = tree(tmp_path), time.monotonic()
    for read in (read_header, read_tensor_file):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert str(path) in str(caught.value)
    if case in LENIENT:
        return
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path.parent)
    assert str(path) in str(caught.value)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(path.parent, Small())
    assert main(["checkpoint", "convert", str(path), str(tmp_path / "new")]) == 1
    assert "model.safetensors" in capsys.readouterr().err
    assert time.monotonic() - start < 10
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", [SHARD, "optimizer-00001-of-00001.safetensors"])
@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_tensor_file_is_refused_though_its_digest_is_right(case, name, good):
    saved = contents()
    for parameter in saved.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.optimizer.step()
    path = CheckpointManager(good.parent).save(saved, 2)
    replace_signed(path, name, HEADERS[case])
    assert verify(path) == []
    model = Small()
    values = [p.clone() for p in model.parameters()]
    live = contents(model)
    with pytest.raises(CheckpointError) as caught:
        CheckpointManager(path.parent).load(live, path)
    assert str(path / name) in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters()))


INDEXES = {
    "not JSON": "{",
    "a list": "[]",
    "nested deeply": nested(100_000),
    "no map": "{}",
    "map is a list": '{"weight_map": []}',
    "files are numbers": '{"weight_map": {"a": 5}}',
    "way out": '{"weight_map": {"a": "../outside.safetensors"}}',
    "way out, absolute": '{"weight_map": {"a": "/etc/passwd"}}',
    "file is missing": '{"weight_map": {"a": "absent.safetensors"}}',
    "metadata is a list": '{"weight_map": {"a": "one.safetensors"}, "metadata": [1]}',
    "sharing is a number": (
        '{"weight_map": {"a": "one.safetensors"}, "metadata": {"param_sharing": 5}}'
    ),
    "tensor is not in its file": '{"weight_map": {"z": "one.safetensors"}}',
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_hostile_index_is_refused_by_name(case, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in (folder / "one.safetensors", tmp_path / "outside.safetensors"):
        file.write_bytes(safetensors_file({"a": entry(0, 16)}, b"\0" * 16))
    (folder / INDEX).write_text(INDEXES[case])
    before = tree(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    names = (INDEX, "outside.safetensors", "/etc/passwd", "absent.safetensors", "one.safetensors")
    assert any(name in str(caught.value) for name in names), caught.value
    assert tree(tmp_path) == before


# -- places that cannot be written ------------------------------------------------------------


def saves(target):
    model = Small()
    yield lambda: save_checkpoint(target, model)
    yield lambda: save_checkpoint(
        output_dir=target, model=model, optimizer=None, state=TrainState()
    )
    yield lambda: CheckpointManager(target).save(contents(), 1)


def test_a_place_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    for save in saves(tmp_path / "file" / "x"):
        with pytest.raises((CheckpointError, OSError), match="file"):
            save()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("number", [13, 30, 28, 122])
def test_a_directory_that_cannot_be_written_is_named(number, tmp_path, monkeypatch, capsys):
    CheckpointManager(tmp_path / "run").save(contents(), 1)
    source = str(tmp_path / "run")
    before = tree(tmp_path)

    def refuse(path, *args, **options):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    for save in saves(tmp_path / "x"):
        with pytest.raises((CheckpointError, OSError), match=str(tmp_path)):
            save()
    for words in (
        ["finalize", source, str(tmp_path / "new")],
        ["checkpoint", "convert", source, str(tmp_path / "new")],
        ["checkpoint", "modify", source, "--set", "lr=1.0"],
    ):
        assert main(words) == 1
        assert os.strerror(number) in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_named(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    for save in saves(folder / "x"):
        with pytest.raises((CheckpointError, OSError), match="closed"):
            save()
    assert not list(folder.iterdir())


def test_a_link_inside_the_run_does_not_lead_a_save_out(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-1").symlink_to(outside)
    for save in list(saves(tmp_path / "run" / "checkpoint-1"))[:2]:
        with pytest.raises(ConfigError, match="checkpoint-1"):
            save()
    assert not list(outside.iterdir())
    with pytest.raises(CheckpointError, match="checkpoint-1 is a symbolic link"):
        CheckpointManager(tmp_path / "run").save(contents(), 1)
    assert not list(outside.iterdir())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-1"]


def test_a_linked_checkpoint_is_named_and_left_alone(good, tmp_path, capsys, caplog):
    CheckpointManager(tmp_path / "other").save(contents(), 5)
    link = good.parent / "checkpoint-5"
    link.symlink_to(tmp_path / "other" / "checkpoint-5")
    before = tree(tmp_path)

    manager = CheckpointManager(good.parent)
    with caplog.at_level("WARNING"):
        assert manager.resolve(True) == good
    assert f"{link} is a symbolic link" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING"):
        assert find_latest_checkpoint(good.parent) == str(good)
    assert f"{link} is a symbolic link" in caplog.text
    assert manager.clean_leftovers() == []
    assert main(["checkpoint", "ls", str(good.parent)]) == 0
    assert f"damaged: {link}" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(good.parent)]) == 1
    assert main(["checkpoint", "modify", str(link), "--set", "lr=1.0"]) == 1
    assert "symbolic link" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="symbolic link"):
        manager.save(contents(), 5)
    assert tree(tmp_path) == before
    manager.save(contents(), 6)  # others are saved and retired as ever
    manager.save(contents(), 7)
    assert sorted(p.name for p in good.parent.iterdir()) == [
        "checkpoint-5",
        "checkpoint-6",
        "checkpoint-7",
    ]
    assert link.is_symlink() and not verify(link)


def test_a_pin_does_not_follow_a_link(good, tmp_path, capsys):
    outside = tmp_path / "outside"
    (good / ".pinned").symlink_to(outside)
    for action in ("pin", "unpin"):
        assert main(["checkpoint", action, str(good)]) == 1
        assert ".pinned is a symbolic link" in capsys.readouterr().err
    assert not outside.exists() and (good / ".pinned").is_symlink()


# -- damage that is cheap to see --------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_the_newest_is_not_one_that_lacks_a_file(damage, good, caplog):
    newest = CheckpointManager(good.parent).save(contents(), 2)
    assert find_latest_checkpoint(good.parent) == str(newest)
    shard = newest / SHARD
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    with caplog.at_level("WARNING"):
        assert find_latest_checkpoint(good.parent) == str(good)
    assert str(shard) in caplog.text
    assert find_latest_checkpoint(newest) is None


def test_a_plain_folder_with_a_cut_file_is_not_valid(good, tmp_path, caplog):
    folder = tmp_path / "plain"
    folder.mkdir()
    whole = (good / SHARD).read_bytes()
    file = folder / "model.safetensors"
    file.write_bytes(whole)
    assert validate_checkpoint(folder) and find_latest_checkpoint(folder) == str(folder)
    for cut in (0, 4, 100, len(whole) - 1):
        file.write_bytes(whole[:cut])
        caplog.clear()
        assert not validate_checkpoint(folder) and str(file) in caplog.text
        assert find_latest_checkpoint(folder) is None
    file.unlink()
    file = folder / "pytorch_model.bin"
    torch.save(Small().state_dict(), file)
    assert validate_checkpoint(folder)
    file.write_bytes(file.read_bytes()[:-100])
    assert not validate_checkpoint(folder) and str(file) in caplog.text


# -- JSON that is hostile although every digest is right --------------------------------------


def replace_signed(path, name, data):
    """Put other content into a committed checkpoint, with all digests right."""
    manifest = read_manifest(path)
    (path / name).write_bytes(data)
    record = FileRecord(len(data), digest_bytes(data, manifest.digest_algorithm))
    manifest.files[name] = record
    (path / MANIFEST).unlink()
    write_manifest(path, manifest, Storage(path.parent))


BOMBS = {
    "nested deeply": nested(200_000).encode(),
    # Deep enough for a recursive reader, and not for every parser.
    "nested less deeply": b'{"params": ' + nested(900).encode() + b"}",
    "a huge number": b'{"seed": ' + b"9" * 5_000 + b"}",
    "a list": b"[]",
    "a number": b"5",
    "not JSON": b"{",
    "not text": b"\xff\xfe",
}
STATES = ("trainer_state.json", "state/optimizer.json")


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("case", BOMBS)
def test_a_hostile_state_is_refused_by_name_though_its_digest_is_right(case, name, good):
    replace_signed(good, name, BOMBS[case])
    assert verify(good) == []
    model = Small()
    for attempt in list(attempts(good, model))[2:4]:
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert str(good / name) in str(caught.value)


OPTIMIZERS = {
    "empty": {},
    "params is a list": {"params": []},
    "a parameter is a number": {"params": {"a.weight": 5}},
    "state names are numbers": {
        "params": {"a.weight": {"shape": [3, 3], "tensors": [1], "on_host": [], "values": {}}}
    },
    "groups is a text": {"groups": "ab"},
    "rest is a list": {"rest": []},
    "fewer settings than groups": {"rest": {"param_groups": [], "shared": {}}},
    "settings are no settings": {"rest": {"param_groups": [{"$tuple": []}], "shared": {}}},
    "shared is a tuple": {"rest": {"param_groups": [{"lr": 1.0}], "shared": {"$tuple": [1]}}},
    "an unknown tag": {"rest": {"param_groups": [{"lr": {"$code": 1}}], "shared": {}}},
    "a group holds a stranger": {"groups": [["b.weight"]]},
    "class is missing": {"class": None},
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_an_optimizer_file_of_another_structure_is_refused_by_name(case, good):
    fields = json.loads((good / "state" / "optimizer.json").read_text())
    fields = {**fields, **OPTIMIZERS[case]} if OPTIMIZERS[case] else {}
    replace_signed(good, "state/optimizer.json", json.dumps(fields).encode())
    with pytest.raises(CheckpointError, match=r"optimizer\.json"):
        CheckpointManager(good.parent).load(contents(), good)


def test_a_manifest_of_countless_lists_is_refused_before_it_is_parsed(good):
    (good / MANIFEST).write_bytes(b"[" + b"[]," * 12_000_000 + b"[]]")
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="lists and objects"):
        read_manifest(good)
    assert time.monotonic() - start < 1
    (good / MANIFEST).write_bytes(b" " * (1 << 26) + b"{}")
    with pytest.raises(CheckpointError, match="larger than"):
        read_manifest(good)


def test_what_would_not_be_read_again_is_not_written(good):
    deep = []
    for _ in range(200):
        deep = [deep]
    state = {"global_step": 2, "deep": deep}
    with pytest.raises(CheckpointError, match=r"trainer_state\.json.*nested"):
        CheckpointManager(good.parent).save(
            CheckpointContents(model=Small(), optimizer=None, trainer_state=state), 2
        )
    assert [path.name for path in good.parent.iterdir()] == ["checkpoint-1"]
