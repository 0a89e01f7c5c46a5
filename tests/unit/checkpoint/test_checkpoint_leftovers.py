"""Leftovers of dead processes go, those of living ones stay, and links are not followed."""

import os
import subprocess
import sys
import time

import pytest
import torch
from checkpoint_faults import make_contents

from headway.checkpoint import CheckpointError, CheckpointManager, save_checkpoint, verify
from headway.checkpoint.owner import new_nonce, owner_state
from headway.checkpoint.storage import Storage


@pytest.fixture(scope="module")
def dead_nonce():
    code = "from headway.checkpoint.owner import new_nonce; print(new_nonce())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def leave(path, name):
    (path / name / "state").mkdir(parents=True)
    (path / name / "state" / "x.json").write_text("{}")


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_owner_state(dead_nonce):
    mine = new_nonce()
    assert owner_state(mine) == "alive"
    assert owner_state(dead_nonce) == "dead"
    machine, pid, start, rest = mine.split("-")
    assert owner_state(f"{machine}-{pid}-{int(start) + 1}-{rest}") == "dead", "pid was reused"
    assert owner_state(f"00000000-{pid}-{start}-{rest}") == "elsewhere"


def test_only_the_dead_are_cleaned(tmp_path, dead_nonce):
    alive = new_nonce()
    for nonce in (alive, dead_nonce):
        leave(tmp_path, f"checkpoint-3.tmp-{nonce}")
        leave(tmp_path, f".trash-{nonce}")
    leave(tmp_path, "checkpoint-3.tmp-mine")
    manager = CheckpointManager(tmp_path)
    assert sorted(manager.clean_leftovers()) == [
        f".trash-{dead_nonce}",
        f"checkpoint-3.tmp-{dead_nonce}",
    ]
    expected = [f".trash-{alive}", f"checkpoint-3.tmp-{alive}", "checkpoint-3.tmp-mine"]
    assert names(tmp_path) == sorted(expected)


def test_other_machines_leftovers_go_when_they_are_old(tmp_path):
    elsewhere = "00000000-1-1-abcdef"
    leave(tmp_path, f"checkpoint-3.tmp-{elsewhere}")
    manager = CheckpointManager(tmp_path)
    assert manager.clean_leftovers() == []
    old = time.time() - 90000
    for folder, _, _ in os.walk(tmp_path):
        os.utime(folder, (old, old))
    assert manager.clean_leftovers() == [f"checkpoint-3.tmp-{elsewhere}"]


def test_moved_aside_counts_and_gets_its_name_back(tmp_path, dead_nonce):
    manager = CheckpointManager(tmp_path)
    path = manager.save(make_contents(value=1), 5)
    aside = tmp_path / f"checkpoint-5.old-{dead_nonce}"
    path.rename(aside)
    assert manager.find_latest() == manager.resolve(True) == aside
    assert manager.clean_leftovers() == [aside.name]
    assert names(tmp_path) == ["checkpoint-5"] and manager.resolve(True) == path


def test_moved_aside_goes_when_its_successor_is_whole(tmp_path, dead_nonce):
    manager = CheckpointManager(tmp_path)
    path = manager.save(make_contents(value=1), 5)
    aside = tmp_path / f"checkpoint-5.old-{dead_nonce}"
    path.rename(aside)
    manager.save(make_contents(value=2), 5)
    (path / "checkpoint_manifest.json").rename(tmp_path / "hidden")
    assert manager.clean_leftovers() == [], "the successor is not committed"
    (tmp_path / "hidden").rename(path / "checkpoint_manifest.json")
    assert manager.clean_leftovers() == [aside.name]
    assert names(tmp_path) == ["checkpoint-5"]


def test_nothing_outside_the_root_is_touched(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside)
    storage = Storage(root)
    for action in (
        lambda: storage.create(root / "link" / "new"),
        lambda: storage.make_dir(root / "link" / "new"),
        lambda: storage.rename(root / "link" / "keep", root / "taken"),
        lambda: storage.create(root / ".." / "outside" / "new"),
    ):
        with pytest.raises(CheckpointError, match="leads outside"):
            action()
    (root / "file").symlink_to(outside / "keep")
    with pytest.raises(FileExistsError):
        storage.create(root / "file")
    (root / "tree").mkdir()
    (root / "tree" / "inner").symlink_to(outside)
    storage.remove_tree(root / "tree")
    assert storage.list_dirs() == []
    assert (outside / "keep").read_text() == "x"


def test_a_linked_run_directory_works(tmp_path):
    real = tmp_path / "scratch"
    real.mkdir()
    (tmp_path / "run").symlink_to(real)
    manager = CheckpointManager(tmp_path / "run", save_total_limit=1)
    manager.save(make_contents(), 1)
    manager.save(make_contents(), 2)
    assert names(real) == ["checkpoint-2"]


def test_a_killed_save_under_any_name_is_cleaned_by_the_next(tmp_path, dead_nonce):
    alive = new_nonce()
    for nonce in (dead_nonce, alive):
        leave(tmp_path, f"step_5.tmp-{nonce}")
        leave(tmp_path, f".trash-{nonce}")
    leave(tmp_path, "notes.tmp-mine")
    model = torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path / "step_6", model)
    kept = [f".trash-{alive}", "notes.tmp-mine", f"step_5.tmp-{alive}", "step_6"]
    assert names(tmp_path) == sorted(kept)
    # Cut between its two renames, the earlier one gets its name back.
    (tmp_path / "step_6").rename(tmp_path / f"step_6.old-{dead_nonce}")
    save_checkpoint(tmp_path / "step_7", model)
    assert {"step_6", "step_7"} <= set(names(tmp_path)) and not verify(tmp_path / "step_6")
