"""Tensors that somebody keeps for a model's parameters: into a checkpoint and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headway.checkpoint import (
    CheckpointContents,
    CheckpointError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
)
from headway.checkpoint.parameter_state import ParameterState
from headway.checkpoint.ranks import SoloRanks
from headway.checkpoint.staging import Stager


class Keeper:
    max_parameter_slots = 1

    def __init__(self, slots: dict[str, dict[str, Tensor]] | None = None) -> None:
        self.slots = slots or {}
        self.loaded: list[dict[str, dict[str, Tensor]]] = []

    def parameter_state(self) -> dict[str, dict[str, Tensor]]:
        return self.slots

    def load_parameter_state(self, slots: dict[str, dict[str, Tensor]]) -> None:
        self.loaded.append(slots)
        self.slots = slots


def make(keeper: Keeper, width: int = 32) -> CheckpointContents:
    model = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width))
    component = StateComponent(
        "kept", ParameterState(keeper, model), SharingPattern.SHARDED, required=False
    )
    return CheckpointContents(model=model, components=[component])


def kept_for(contents: CheckpointContents) -> dict[str, dict[str, Tensor]]:
    return {"sum": {n: torch.rand(p.shape) for n, p in contents.model.named_parameters()}}


def test_they_come_back_into_the_memory_that_is_there(tmp_path: Path) -> None:
    contents = make(keeper := Keeper())
    keeper.slots = kept_for(contents)
    expected = {name: value.clone() for name, value in keeper.slots["sum"].items()}
    manager = CheckpointManager(tmp_path)
    manager.save(contents, 3)
    before = {name: value.data_ptr() for name, value in keeper.slots["sum"].items()}
    for value in keeper.slots["sum"].values():
        value.zero_()
    manager.load(contents)
    assert keeper.slots["sum"].keys() == expected.keys()
    for name, value in keeper.slots["sum"].items():
        assert torch.equal(value, expected[name]) and value.data_ptr() == before[name]
    fresh = Keeper()
    manager.load(make(fresh))
    assert all(torch.equal(fresh.slots["sum"][name], expected[name]) for name in expected)


def test_a_checkpoint_made_when_nothing_was_kept_says_so(tmp_path: Path) -> None:
    contents = make(keeper := Keeper())
    manager = CheckpointManager(tmp_path)
    manager.save(contents, 3)
    keeper.slots = kept_for(contents)
    manager.load(contents)
    assert keeper.slots == {} and keeper.loaded == [{}]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    contents = make(keeper := Keeper())
    keeper.slots = kept_for(contents)
    manager = CheckpointManager(tmp_path)
    manager.save(contents, 3)
    with pytest.raises(CheckpointError, match=r"sum.0.bias is \[32\] there, \[16\] here"):
        manager.load(make(Keeper(), width=16), components=["kept"])


def test_a_damaged_file_of_theirs_is_found(tmp_path: Path) -> None:
    contents = make(keeper := Keeper())
    keeper.slots = kept_for(contents)
    manager = CheckpointManager(tmp_path)
    path = manager.save(contents, 3)
    (file,) = (path / "state").glob("kept-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=file.name):
        manager.load(make(Keeper()), path)


def test_saves_have_room_for_them_from_the_start() -> None:
    contents = make(keeper := Keeper())
    stager = Stager(SoloRanks())
    stager.reserve(contents)
    reserved = stager.host_bytes
    without = Stager(SoloRanks())
    without.reserve(CheckpointContents(model=contents.model))
    kept = kept_for(contents)
    size = sum(4 * value.numel() for value in kept["sum"].values())
    assert size <= reserved - without.host_bytes <= 1.2 * size
    for slots in ({}, kept, {}):  # no memory is allocated anew, nor given up in between
        keeper.slots = slots
        stager.stage(contents)
        assert stager.host_bytes == reserved
