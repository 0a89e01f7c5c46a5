"""Checkpoints at an address: the manifest alone is the commit."""

import datetime
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid

import fsspec
import pytest
import torch
from checkpoint_faults import make_contents, train

from headway.checkpoint import (
    CheckpointError,
    CheckpointManager,
    TrainState,
    find_latest_checkpoint,
    is_pinned,
    list_checkpoints,
    load_checkpoint,
    next_checkpoint_path,
    pin,
    save_checkpoint,
    unpin,
    validate_checkpoint,
)
from headway.checkpoint.remote import RemoteStorage, check_address
from headway.errors import ConfigError


@pytest.fixture(params=["memory", "file"])
def address(request, tmp_path):
    yield f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/run"
    fsspec.filesystem("memory").store.clear()


def files_at(address):
    fs, base = fsspec.core.url_to_fs(address)
    return {path[len(base) + 1 :]: fs.cat_file(path) for path in fs.find(base)}


def test_save_find_verify_load_and_retire(address):
    contents = make_contents(value=4)
    manager = CheckpointManager(address, save_total_limit=2)
    for step in (1, 2, 3):
        train(contents, 1)
        manager.save(contents, step)
    expected = train(contents, 2)
    names = {name.partition("/")[0] for name in files_at(address)}
    assert names == {"checkpoint-2", "checkpoint-3"}
    assert find_latest_checkpoint(address) == f"{address}/checkpoint-3"
    assert validate_checkpoint(f"{address}/checkpoint-3")
    assert [found.step for found in list_checkpoints(address)] == [2, 3]

    again = make_contents(seed=9)
    loaded = CheckpointManager(address).load(again)  # another process would do the same
    assert loaded.step == 3 and train(again, 2) == expected
    assert not [name for name in files_at(address) if ".uploading" in name or ".tmp" in name]
    assert manager.load(make_contents(), manager.resolve(f"{address}/checkpoint-2")).step == 2
    assert manager.load(make_contents(), f"{address}/checkpoint-2").step == 2


def test_damage_is_named_and_the_previous_one_is_used(address, caplog):
    manager = CheckpointManager(address)
    manager.save(make_contents(value=1), 1)
    manager.save(make_contents(value=2), 2)
    fs, base = fsspec.core.url_to_fs(address)
    shard = f"{base}/checkpoint-2/model-00001-of-00001.safetensors"
    data = bytearray(fs.cat_file(shard))
    data[-1] ^= 1
    fs.pipe_file(shard, bytes(data))
    again = make_contents(seed=3)
    with caplog.at_level(logging.WARNING):
        assert CheckpointManager(address).load(again).step == 1
    assert "checkpoint-2/model-00001-of-00001.safetensors is damaged" in caplog.text
    assert not validate_checkpoint(f"{address}/checkpoint-2")
    fs.rm_file(shard)
    assert CheckpointManager(address).load(again).step == 1


def test_an_upload_that_is_cut_short_at_any_point_leaves_the_old_or_the_new(address):
    """Of the same step, so that old and new could mix."""
    CheckpointManager(address).save(make_contents(value=1), 5)

    class Cut(BaseException):
        pass

    point, values = 0, []
    while True:
        point += 1
        manager = CheckpointManager(address)
        left = [point]
        fs = manager.storage._fs

        def tick(name, fs=fs, left=left):
            original = getattr(type(fs), name)

            def counted(*args, **options):
                left[0] -= 1
                if left[0] <= 0:  # the process is gone: nothing after this happens either
                    raise Cut
                return original(fs, *args, **options)

            return counted

        for name in ("put_file", "pipe_file", "rm_file", "rm", "makedirs"):
            setattr(fs, name, tick(name))
        try:
            manager.save(make_contents(value=point + 1), 5)
            finished = True
        except Cut:
            finished = False
        finally:
            for name in ("put_file", "pipe_file", "rm_file", "rm", "makedirs"):
                delattr(fs, name)
        again = make_contents(seed=9)
        CheckpointManager(address).load(again)
        found = again.components[1].stateful.value
        assert found in (values[-1] if values else 1, point + 1)
        values.append(found)
        if finished:
            break
    assert point > 10 and values[-1] == point + 1
    assert values[0] == 1, "cut before anything was uploaded, the old one must be found"


def test_another_machines_upload_goes_when_it_is_old(address, monkeypatch):
    CheckpointManager(address).save(make_contents(), 1)
    fs, base = fsspec.core.url_to_fs(address)
    fs.makedirs(f"{base}/checkpoint-2", exist_ok=True)
    fs.pipe_file(f"{base}/checkpoint-2/config.json", b"{}")
    fs.pipe_file(f"{base}/checkpoint-2/.uploading-00000000-1-1-aaaa", b"")
    manager = CheckpointManager(address)
    assert manager.clean_leftovers() == []
    for hours, expected in ((23, []), (25, ["checkpoint-2"])):
        then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=hours)
        with monkeypatch.context() as patch:
            patch.setattr(type(fs), "modified", lambda self, path, then=then: then)
            assert manager.clean_leftovers() == expected
    assert {n.partition("/")[0] for n in files_at(address)} == {"checkpoint-1"}


def test_leftovers_go_when_their_process_is_dead(address):
    CheckpointManager(address).save(make_contents(), 1)
    fs, base = fsspec.core.url_to_fs(address)
    for step, nonce in ((2, "00000000-1-1-aaaa"), (3, None)):
        fs.makedirs(f"{base}/checkpoint-{step}", exist_ok=True)
        fs.pipe_file(f"{base}/checkpoint-{step}/config.json", b"{}")
        if nonce:
            fs.pipe_file(f"{base}/checkpoint-{step}/.uploading-{nonce}", b"")
    assert find_latest_checkpoint(address) == f"{address}/checkpoint-1"
    manager = CheckpointManager(address)
    assert manager.clean_leftovers() == []  # another machine's, and a folder of somebody else's
    from headway.checkpoint.owner import new_nonce

    machine, _, _, tail = new_nonce().split("-", 3)
    fs.rm_file(f"{base}/checkpoint-2/.uploading-00000000-1-1-aaaa")
    fs.pipe_file(f"{base}/checkpoint-2/.uploading-{machine}-999999999-1-{tail}", b"")
    assert manager.clean_leftovers() == ["checkpoint-2"]
    assert {n.partition("/")[0] for n in files_at(address)} == {"checkpoint-1", "checkpoint-3"}
    # The leftover without an owner keeps its name; a save of that step goes beside it.
    manager.save(make_contents(value=7), 3)
    again = make_contents(seed=1)
    assert CheckpointManager(address).load(again).step == 3
    assert again.components[1].stateful.value == 7
    assert files_at(address)["checkpoint-3/config.json"] == b"{}"


def test_pins_hold_at_an_address(address):
    manager = CheckpointManager(address, save_total_limit=1)
    manager.save(make_contents(), 1)
    pin(f"{address}/checkpoint-1")
    for step in (2, 3):
        manager.save(make_contents(), step)
    assert [found.step for found in list_checkpoints(address)] == [1, 3]
    assert is_pinned(manager.list()[0].path)
    unpin(f"{address}/checkpoint-1")
    manager.save(make_contents(), 4)
    assert [found.step for found in manager.list()] == [4]


def test_the_functions_take_an_address(address):
    model = torch.nn.Linear(2, 2)
    path = next_checkpoint_path(address, 3)
    assert save_checkpoint(path, model) == path == find_latest_checkpoint(address)
    save_checkpoint(path, torch.nn.Linear(2, 2))
    other = torch.nn.Linear(2, 2)
    load_checkpoint(find_latest_checkpoint(address), other)
    assert not torch.equal(other.weight, model.weight)
    state = TrainState(global_step=7)
    where = save_checkpoint(output_dir=f"{address}/s", model=model, optimizer=None, state=state)
    assert load_checkpoint(checkpoint_dir=where, model=other, optimizer=None).global_step == 7
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_checkpoint(f"{address}/nowhere", other)
    assert find_latest_checkpoint(f"{address}/nowhere") is None


def test_a_short_upload_is_an_error_and_leaves_nothing(address, monkeypatch):
    manager = CheckpointManager(address)
    fs = manager.storage._fs
    put = fs.put_file

    def short(local, remote, **options):
        put(local, remote, **options)
        if remote.endswith(".safetensors"):
            fs.pipe_file(remote, fs.cat_file(remote)[:-1])

    monkeypatch.setattr(fs, "put_file", short)
    with pytest.raises(CheckpointError, match="bytes after the upload"):
        manager.save(make_contents(), 1)
    assert files_at(address) == {} and manager.list() == []


def test_the_working_directory_is_small_and_goes_away(address):
    manager = CheckpointManager(address)
    path = manager.save(make_contents(), 1)
    assert [p.name for p in path.iterdir() if p.is_file()] == ["checkpoint_manifest.json"]
    root = manager.output_dir
    del manager
    import gc

    gc.collect()
    assert not root.exists()


def test_what_a_killed_process_kept_locally_goes_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    program = (
        "import os, signal, sys\n"
        "from headway.checkpoint.remote import RemoteStorage\n"
        "storage = RemoteStorage(sys.argv[1])\n"
        "(storage.root / 'weights').write_bytes(b'many')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    url = f"file://{tmp_path}/run"
    environ = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    done = subprocess.run([sys.executable, "-c", program, url], env=environ, timeout=100)
    assert done.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "temporary").iterdir()
    assert (left / "weights").is_file()
    first, second = RemoteStorage(url), RemoteStorage(url)
    assert {*(tmp_path / "temporary").iterdir()} == {first.root, second.root}
    assert first.root.stat().st_mode & 0o077 == 0, "nobody else looks into them"


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"headway\[remote\]"):
        RemoteStorage("memory://x")


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ConfigError, match="address nosuch://x cannot be opened: unknown protocol"):
        CheckpointManager("nosuch://x")
    with pytest.raises(ConfigError, match="unknown protocol 'nosuch'"):
        check_address("dir::nosuch://x")


def test_a_chain_of_file_systems_is_an_address_like_others():
    check_address("dir::memory://chained", "checkpoint_address")
    manager = CheckpointManager("dir::memory://chained")
    saved = manager.save(make_contents(), 1)
    assert manager.storage.locate(saved) == "dir::memory://chained/checkpoint-1"
    assert [found.step for found in CheckpointManager("dir::memory://chained").list()] == [1]


@pytest.mark.parametrize(("act", "name"), [("rm_file", "checkpoint_manifest"), ("get_file", "")])
def test_a_network_that_fails_once_does_not_end_all_later_saves(address, monkeypatch, act, name):
    manager = CheckpointManager(address, save_total_limit=1)
    manager.save(make_contents(), 1)
    if act == "get_file":
        manager = CheckpointManager(address, save_total_limit=1)
    fs = fsspec.core.url_to_fs(address)[0]
    real, failed = getattr(fs, act), []

    def fail_once(path, *rest, **options):
        if name in str(path) and not failed:
            failed.append(path)
            raise OSError(110, "timed out")
        return real(path, *rest, **options)

    monkeypatch.setattr(fs, act, fail_once)
    with pytest.raises(OSError, match="timed out"):
        manager.save(make_contents(), 2)
    manager.save(make_contents(), 3)
    assert [c.path.name for c in list_checkpoints(address)] == ["checkpoint-3"]


def test_whoever_looks_while_a_save_is_uploaded_does_not_spoil_it(address, monkeypatch):
    manager = CheckpointManager(address)
    fs = manager.storage._fs
    remove, there, looked = fs.rm_file, threading.Event(), threading.Event()

    def remove_late(path):
        if ".uploading-" in path:  # the manifest is there by now
            there.set()
            looked.wait(0.5)
        return remove(path)

    monkeypatch.setattr(fs, "rm_file", remove_late)
    saved = []
    saver = threading.Thread(target=lambda: saved.append(manager.save(make_contents(), 1)))
    saver.start()
    assert there.wait(10)
    manager.list()
    looked.set()
    saver.join()
    assert saved and [found.path for found in manager.list()] == saved
    assert validate_checkpoint(f"{address}/checkpoint-1")
