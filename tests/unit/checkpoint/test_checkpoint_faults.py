"""Whatever happens during a save, a whole checkpoint is found afterwards."""

import shutil

import pytest
import torch
from checkpoint_faults import make_contents

from headway.checkpoint import CheckpointManager, verify
from headway.checkpoint.storage import Storage
from headway.testing.faults import Died, Fault, FaultyStorage, enumerate_operations


def manager_at(path, fail_at=None, *, dies=True, **options):
    fault = None if fail_at is None else Fault("die" if dies else "error", fail_at)
    storage = FaultyStorage(path, fault)
    return CheckpointManager(path, storage=storage, **options), storage


def list_operations(path, contents, **options):
    """The operations of a save over an earlier one of the same step."""
    CheckpointManager(path, **options).save(contents, 5)

    def save(storage):
        CheckpointManager(path, storage=storage, **options).save(contents, 5)

    return enumerate_operations(save, path)


@pytest.fixture(scope="module")
def old_and_new():
    return make_contents(seed=1, value=1), make_contents(seed=2, value=2)


@pytest.fixture(scope="module")
def old_run(tmp_path_factory, old_and_new):
    """A run directory that holds the old checkpoint at step 5, to be copied."""
    path = tmp_path_factory.mktemp("old") / "run"
    CheckpointManager(path).save(old_and_new[0], 5)
    return path


def found_value(path):
    """The value in the checkpoint a fresh process would resume from, after loading all of it."""
    manager = CheckpointManager(path)
    resumed = make_contents(seed=3, value=-1)
    resolved = manager.resolve(True)
    assert resolved is not None and verify(resolved) == []
    loaded = manager.load(resumed, resolved)
    value = resumed.components[1].stateful.value
    assert loaded.trainer_state["global_step"] == value
    expected = make_contents(seed=value, value=value)
    assert torch.equal(resumed.model.embed.weight, expected.model.embed.weight)
    return value


def test_death_at_every_operation_of_a_same_step_save(tmp_path, old_and_new, old_run):
    old, new = old_and_new
    total = len(list_operations(tmp_path / "count", old))
    assert total > 40
    values = []
    for number in range(1, total + 1):
        path = tmp_path / f"died-{number}"
        shutil.copytree(old_run, path)
        manager, _ = manager_at(path, number)
        with pytest.raises(Died):
            manager.save(new, 5)
        values.append(found_value(path))
    assert values == sorted(values), "once the new one is found it stays found"
    assert {values[0], values[-1]} == {1, 2}


def test_death_at_every_operation_of_a_save_with_retention(tmp_path, old_and_new, old_run):
    old, new = old_and_new
    counting, storage = manager_at(tmp_path / "count", save_total_limit=1)
    counting.save(old, 5)
    before = storage.num_operations
    counting.save(new, 6)
    total = storage.num_operations - before
    values = []
    for number in range(1, total + 1):
        path = tmp_path / f"died-{number}"
        shutil.copytree(old_run, path)
        manager, _ = manager_at(path, number, save_total_limit=1)
        with pytest.raises(Died):
            manager.save(new, 6)
        values.append(found_value(path))
    assert values == sorted(values) and {values[0], values[-1]} == {1, 2}


def test_an_error_at_any_operation_propagates_and_leaves_nothing_half_written(
    tmp_path, old_and_new, old_run
):
    old, new = old_and_new
    operations = list_operations(tmp_path / "count", old)
    total = len(operations)
    num_raised = 0
    for number in range(1, total + 1):
        path = tmp_path / f"failed-{number}"
        shutil.copytree(old_run, path)
        manager, storage = manager_at(path, number, dies=False)
        try:
            manager.save(new, 5)
        except OSError as error:
            assert "No space left" in str(error)
            num_raised += 1
        assert storage.struck
        assert found_value(path) in (1, 2)
        names = [entry.name for entry in path.iterdir()]
        assert not [name for name in names if ".tmp-" in name]
        assert "checkpoint-5" in names
    # Only freeing the space of the replaced checkpoint may fail without failing the save.
    num_freeing = sum(o.kind in ("unlink", "remove_dir") for o in operations) + 1
    assert num_raised == total - num_freeing


def test_error_in_a_callback_removes_the_temporary_directory(tmp_path, old_and_new):
    def fail(directory):
        assert (directory / "model.safetensors.index.json").exists()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CheckpointManager(tmp_path).save(old_and_new[0], 1, before_commit=fail)
    assert list(tmp_path.iterdir()) == []


class FullDisk(Storage):
    def create(self, path):
        return open("/dev/full", "wb", buffering=0)


def test_a_full_disk_is_told_with_the_file_that_found_it_full(tmp_path, old_and_new):
    manager = CheckpointManager(tmp_path / "run", storage=FullDisk(tmp_path / "run"))
    with pytest.raises(OSError, match=r"No space left on device: '.*run/checkpoint-5\.tmp-"):
        manager.save(old_and_new[0], 5)
    assert not any((tmp_path / "run").iterdir())
