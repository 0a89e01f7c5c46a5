"""Slices of meshes are kept while a run goes on, and torch is as before afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from headway import TrainerCallback
from headway.callbacks import MonkeyPatcherCallback
from headway.callbacks.guard import monkey_patcher
from headway.callbacks.guard.monkey_patcher import is_needed
from headway.testing import tiny_trainer


class Look(TrainerCallback):
    """Slices a mesh in every step."""

    def __init__(self) -> None:
        self.slices: list[Any] = []
        self.num_kept = 0

    def on_step_end(self) -> None:
        mesh = object.__new__(DeviceMesh) if not self.slices else self.mesh
        self.mesh = mesh
        self.slices += [mesh["a"], mesh["a"], mesh["b"], mesh[["a", "b"]], mesh[("a", "b")]]
        self.num_kept = max(self.num_kept, len(monkey_patcher._cache))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def slice_mesh(mesh: Any, names: Any) -> object:
        made.append(names)
        return object()

    monkeypatch.setattr(DeviceMesh, "__getitem__", slice_mesh)
    return made


def test_it_keeps_slices_and_is_undone(tmp_path: Path, calls: list[Any]) -> None:
    found = DeviceMesh.__getitem__
    look = Look()
    for name in ("one", "two"):
        tiny_trainer(tmp_path / name, [look, MonkeyPatcherCallback(True)], max_steps=3).train()
        assert DeviceMesh.__getitem__ is found
        assert len(monkey_patcher._cache) == 0
    assert look.slices[0] is look.slices[1] is not look.slices[2]
    assert look.slices[3] is look.slices[4]
    assert len(calls) == 6, "once for each slice in each run"


def test_it_is_undone_after_an_error_and_in_any_order(tmp_path: Path, calls: list[Any]) -> None:
    found = DeviceMesh.__getitem__

    class Fail(TrainerCallback):
        def on_step_end(self) -> None:
            raise RuntimeError("power")

    first, second = MonkeyPatcherCallback(True), MonkeyPatcherCallback(True)
    with pytest.raises(RuntimeError, match="power"):
        tiny_trainer(tmp_path, [first, second, Fail()], max_steps=1).train()
    assert DeviceMesh.__getitem__ is found and not first.active


def test_it_keeps_no_more_than_it_may(tmp_path: Path, calls: list[Any]) -> None:
    look = Look()
    tiny_trainer(tmp_path, [look, MonkeyPatcherCallback(True, max_slices=2)], max_steps=2).train()
    assert look.num_kept == 2


@pytest.mark.parametrize("enabled", [None, False])
def test_this_torch_is_left_alone_unless_asked(
    tmp_path: Path, calls: list[Any], enabled: bool | None
) -> None:
    look = Look()
    tiny_trainer(tmp_path, [look, MonkeyPatcherCallback(enabled)], max_steps=2).train()
    assert len(calls) == 10
    assert is_needed("2.7.1") and is_needed("2.10.0") and not is_needed("2.11.0+cu128")
