"""Edits and replacements that are cut short at any operation leave the old or the new, whole."""

import json
import shutil

import pytest
import torch
from checkpoint_faults import make_contents

from headway.checkpoint import (
    CheckpointError,
    CheckpointManager,
    committed,
    find_latest_checkpoint,
    load_checkpoint,
    read_manifest,
    verify,
)
from headway.checkpoint.draft import Draft
from headway.checkpoint.rewrite import rewrite
from headway.testing.faults import Died, Fault, FaultyStorage, enumerate_operations

STATE = "trainer_state.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "run"
    CheckpointManager(path).save(make_contents(), 4)
    CheckpointManager(path).save(make_contents(), 5)
    return path


@pytest.mark.parametrize("backup", [True, False])
@pytest.mark.parametrize("kind", ["die", "error"])
def test_an_edit_is_all_or_nothing(kind, backup, made, tmp_path):
    new = b'{"global_step": 77}\n'

    def edit(storage, root):
        rewrite(root / "checkpoint-5", {STATE: new}, backup=backup, storage=storage)

    shutil.copytree(made, tmp_path / "count")
    total = len(enumerate_operations(lambda s: edit(s, tmp_path / "count"), tmp_path / "count"))
    assert total > 15
    seen = set()
    for number in range(1, total + 1):
        run = tmp_path / "run"
        shutil.copytree(made, run)
        with pytest.raises((Died, OSError, CheckpointError)):
            edit(FaultyStorage(run, Fault(kind, number)), run)
            raise OSError("the space could not be freed, which is only logged")
        found = CheckpointManager(run).resolve(True)
        assert found is not None and not verify(found)
        step = json.loads((found / STATE).read_text())["global_step"]
        seen.add(step)
        assert found.name.startswith("checkpoint-5"), number
        CheckpointManager(run).clean_leftovers()
        names = {c.path.name for c in committed(run)}
        assert {"checkpoint-4"} < names and all(not verify(c.path) for c in committed(run))
        shutil.rmtree(run)
    assert 77 in seen and len(seen) == 2


@pytest.mark.parametrize("kind", ["die", "error"])
def test_a_replacement_under_any_name_is_all_or_nothing(kind, tmp_path):
    def save(storage, root, value):
        with Draft(root / "model", storage=storage) as draft:
            files = draft.write_shards("model", {"a": torch.full((3,), float(value))})
            draft.add_component("model", files)
            draft.commit(draft.describe(kind="export", step=value), replace=True)

    (tmp_path / "count").mkdir()
    save(None, tmp_path / "count", 1)
    total = len(enumerate_operations(lambda s: save(s, tmp_path / "count", 2), tmp_path / "count"))
    seen = set()
    for number in range(1, total + 1):
        run = tmp_path / "run"
        run.mkdir()
        save(None, run, 1)
        with pytest.raises((Died, OSError, CheckpointError)):
            save(FaultyStorage(run, Fault(kind, number)), run, 2)
            raise OSError("the space could not be freed, which is only logged")
        found = find_latest_checkpoint(run)
        assert found is not None and not verify(found)
        step = read_manifest(found).step
        seen.add(step)
        value = load_checkpoint(run / "model")["a"]
        assert value.tolist() == [float(step)] * 3
        shutil.rmtree(run)
    assert seen == {1, 2}
