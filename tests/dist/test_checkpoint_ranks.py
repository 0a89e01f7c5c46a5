"""Checkpoints that several ranks write and read together; one that fails ends the save for all."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from headway.checkpoint import (
    CheckpointContents,
    CheckpointError,
    CheckpointManager,
    RNGState,
    SharingPattern,
    StateComponent,
    committed,
    read_manifest,
    verify,
)
from headway.checkpoint.background import BackgroundSaver
from headway.checkpoint.distributed import DistributedRanks
from headway.checkpoint.replication import check_replication
from headway.checkpoint.staged import TensorSlice
from headway.checkpoint.storage import Storage
from headway.errors import ConfigError
from headway.testing import RankFailure, run_ranks

FRESH = {"on_missing_rank": "fresh"}


class Value:
    """One number and a tensor."""

    def __init__(self, value):
        self.value, self.tensor = value, torch.full((2,), float(value), dtype=torch.bfloat16)

    def state_dict(self):
        return {"value": self.value, "nested": {"deep": [self.tensor]}}

    def load_state_dict(self, state):
        self.value, self.tensor = state["value"], state["nested"]["deep"][0]


class Table:
    """Named tensors, whole or in slices."""

    def __init__(self, tensors):
        self.tensors, self.loaded = tensors, None

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.loaded = state


def whole_tensors():
    generator = torch.Generator().manual_seed(3)
    return {
        "a": torch.randn(8, 6, generator=generator),
        "b": torch.randn(5, 4, generator=generator).to(torch.bfloat16),
        "c": torch.randn(3, 8, generator=generator),
        "scalar": torch.tensor(7, dtype=torch.int64),
    }


def table_of(rank, world_size):
    """`a` in slices of rows, `c` in slices of columns, `b` on the last rank, `scalar` on all."""
    whole = whole_tensors()
    rows, columns = 8 // world_size, 8 // world_size
    held = {
        "a": TensorSlice(whole["a"][rank * rows :][:rows], (8, 6), (rank * rows, 0)),
        "c": TensorSlice(whole["c"][:, rank * columns :][:, :columns], (3, 8), (0, rank * columns)),
        "scalar": whole["scalar"],
    }
    if rank == world_size - 1:
        held["b"] = whole["b"]
    return Table(held)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def make_groups(world_size):
    """Two groups of half the ranks each: even and odd."""
    halves = [list(range(start, world_size, 2)) for start in (0, 1)]
    made = [dist.new_group(half, backend="gloo") for half in halves]
    return {"half": made[dist.get_rank() % 2]}


def make_contents(rank, world_size, base=100):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.manual_seed(rank)
    pattern = SharingPattern
    components = [
        StateComponent("global", Value(base if rank == 0 else -1), pattern.GLOBAL),
        StateComponent("own", Value(base + rank), pattern.PER_RANK),
        StateComponent("rng", RNGState(), pattern.PER_RANK, metadata=FRESH),
        StateComponent("equal", Value(base + 7), pattern.REPLICATED, validate_replication=True),
        StateComponent("node", Value(base + 10 + rank // 2), pattern.PER_NODE),
        StateComponent("table", table_of(rank, world_size), pattern.SHARDED),
    ]
    if world_size > 1:
        components.append(
            StateComponent("half", Value(base + 20 + rank % 2), pattern.PER_GROUP, "half")
        )
    return CheckpointContents(model, optimizer, components, {"global_step": 5})


def values_of(contents):
    return {c.key: c.stateful.value for c in contents.components if isinstance(c.stateful, Value)}


def make_ranks(world_size, **options):
    return DistributedRanks(make_groups(world_size), node=dist.get_rank() // 2, **options)


def save_all(root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    manager = CheckpointManager(root, ranks=make_ranks(world_size))
    path = manager.save(make_contents(rank, world_size), 5, metrics={"eval_loss": 1.0}, metric=1.0)
    drawn = torch.rand(1).item()

    again = make_contents(rank, world_size, base=0)
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    loaded = manager.load(again)
    assert loaded.path == path and loaded.trainer_state == {"global_step": 5}
    assert torch.rand(1).item() == drawn
    expected = {
        "global": 100,
        "own": 100 + rank,
        "equal": 107,
        "node": 110 + rank // 2,
        "half": 120 + rank % 2,
    }
    assert values_of(again) == expected
    original = make_contents(rank, world_size)
    for a, b in zip(again.model.parameters(), original.model.parameters()):
        assert torch.equal(a, b)
        for key, value in original.optimizer.state[b].items():
            assert torch.equal(again.optimizer.state[a][key], value)
    table = next(c.stateful for c in again.components if c.key == "table")
    for name, held in table.tensors.items():
        part = held.tensor if isinstance(held, TensorSlice) else held
        assert torch.equal(table.loaded[name], part), name
    return str(path)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_pattern_is_saved_and_loaded(tmp_path, num_ranks):
    paths = run_ranks(save_all, num_ranks, str(tmp_path))
    path = Path(paths[0])
    assert set(paths) == {str(tmp_path / "checkpoint-5")}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-5"] and verify(path) == []
    manifest = read_manifest(path)
    assert manifest.topology["world_size"] == num_ranks
    assert len(manifest.topology["groups"]["half"]) == 2
    files = {entry["key"]: entry["files"] for entry in manifest.components}
    assert [f for f in files["own"] if f.endswith(".json")] == [
        f"state/own.rank{rank:05d}.json" for rank in range(num_ranks)
    ]
    assert [f for f in files["half"] if f.endswith(".json")] == [
        "state/half.group-half-00000.json",
        "state/half.group-half-00001.json",
    ]
    assert len([f for f in files["node"] if f.endswith(".json")]) == num_ranks // 2
    listed = {name for names in files.values() for name in names}
    assert set(manifest.files) - listed == {"trainer_state.json", "eval_metrics.json"}
    # Dealt: several ranks wrote a part of the weights, and nobody wrote a tensor twice.
    for prefix in ("model", "optimizer", "state/table"):
        index = json.loads((path / f"{prefix}.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) == num_ranks, prefix


def test_one_process_reads_what_ranks_saved_and_the_other_way_round(tmp_path):
    run_ranks(save_all, 4, str(tmp_path))
    contents = make_contents(0, 1, base=0)
    with pytest.raises(CheckpointError, match="'own' is per_rank: it was saved by 4 ranks"):
        CheckpointManager(tmp_path).load(contents)
    others = ["model", "optimizer", "global", "equal", "table", "rng"]
    CheckpointManager(tmp_path).load(contents, components=others)
    assert values_of(contents)["equal"] == 107
    table = next(c.stateful for c in contents.components if c.key == "table")
    for name, tensor in whole_tensors().items():
        assert torch.equal(table.loaded[name], tensor), name
    original = make_contents(0, 1)
    assert all(
        torch.equal(a, b) for a, b in zip(contents.model.parameters(), original.model.parameters())
    )
    CheckpointManager(tmp_path / "solo").save(make_contents(0, 1), 1)
    for root in (tmp_path / "solo", tmp_path):
        (first, drawn), (second, drawn_too) = run_ranks(load_elsewhere, 2, str(root))
        assert first == second == 107
        assert drawn != drawn_too, "a rank without a stored generator keeps its own"


def load_elsewhere(root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    contents = make_contents(rank, world_size, base=0)
    manager = CheckpointManager(root, ranks=make_ranks(world_size))
    with pytest.raises(CheckpointError, match=r"per_rank|rank \d failed"):
        manager.load(contents)
    torch.manual_seed(1000 + rank)
    names = ["model", "optimizer", "global", "equal", "table", "rng"]
    manager.load(contents, components=names)
    drawn = torch.rand(1).item()
    whole = whole_tensors()
    table = next(c.stateful for c in contents.components if c.key == "table")
    assert torch.equal(table.loaded["c"], whole["c"][:, rank * 4 : rank * 4 + 4])
    return values_of(contents)["equal"], drawn


class BadStorage(Storage):
    """Fails, or ends the process, when a file whose name holds `text` is created."""

    def __init__(self, root, text, *, dies=False):
        super().__init__(root)
        self.text, self.dies = text, dies

    def create(self, path):
        if self.text in path.name:
            if self.dies:
                os._exit(7)
            raise OSError(28, "No space left on device")
        return super().create(path)


def save_with_bad_ranks(root, cases):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = make_ranks(world_size, timeout_s=60)
    good = CheckpointManager(root, ranks=ranks, save_total_limit=None)
    good.save(make_contents(rank, world_size), 1)
    results = []
    for culprit, text, asynchronous in cases:
        storage = BadStorage(root, text) if rank == culprit else None
        manager = CheckpointManager(root, ranks=ranks, storage=storage)
        saver = BackgroundSaver(manager, asynchronous=asynchronous)
        started = time.monotonic()
        try:
            saver.start(manager.stage(make_contents(rank, world_size, base=500), 2))
            saver.collect()
        except (OSError, CheckpointError) as error:
            results.append((f"{type(error).__name__}: {error}", time.monotonic() - started))
        else:
            results.append(("saved", 0.0))
    # The ranks are in step again: the next save works.
    good.save(make_contents(rank, world_size), 3)
    return results


CASES = {
    2: [(1, "own.rank00001.json", True), (0, "trainer_state", False), (1, "table-", True)],
    4: [
        (2, "own.rank00002.json", False),
        (3, "table-", True),
        (0, "checkpoint_manifest", True),
        (1, "half.group", True),
    ],
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_fails_in_the_middle(tmp_path, num_ranks):
    cases = CASES[num_ranks]
    results = run_ranks(save_with_bad_ranks, num_ranks, str(tmp_path), cases)
    for rank, of_rank in enumerate(results):
        for (culprit, *_), (message, seconds) in zip(cases, of_rank, strict=True):
            assert "No space left" in message and seconds < 20, (rank, culprit, message)
            if rank != culprit:
                assert f"rank {culprit} failed while" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]
    assert [c.step for c in committed(tmp_path)] == [1, 3]
    assert verify(tmp_path / "checkpoint-1") == []


def save_with_a_dying_rank(root, culprit, text):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = make_ranks(world_size, timeout_s=60)
    storage = BadStorage(root, text, dies=True) if rank == culprit else None
    manager = CheckpointManager(root, ranks=ranks, storage=storage)
    started = time.monotonic()
    try:
        manager.save(make_contents(rank, world_size), 2)
    except CheckpointError as error:
        said = [time.monotonic() - started, str(error)]
        Path(root, f"rank-{rank}.txt").write_text(json.dumps(said))
    raise RuntimeError("over")


@pytest.mark.parametrize(("num_ranks", "culprit"), [(2, 1), (4, 2), (4, 0)])
def test_a_rank_that_dies_is_named_and_nothing_is_committed(tmp_path, num_ranks, culprit):
    text = "own.rank" if culprit else "trainer_state"
    with pytest.raises(RankFailure):
        run_ranks(save_with_a_dying_rank, num_ranks, str(tmp_path), culprit, text)
    for rank in set(range(num_ranks)) - {culprit}:
        seconds, message = json.loads((tmp_path / f"rank-{rank}.txt").read_text())
        assert f"rank {culprit}" in message and seconds < 20
    assert committed(tmp_path) == []


def check_levels(root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = DistributedRanks(node=0)
    model = nn.Linear(300, 10).to(torch.bfloat16)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    messages = {}

    def check(name, level, **options):
        try:
            check_replication(ranks, "optimizer", optimizer.state_dict(), level, **options)
            messages[name, level] = None
        except CheckpointError as error:
            messages[name, level] = str(error)

    for level in ("none", "quick", "tensor", "full"):
        check("equal", level)
    moments = optimizer.state[model.weight]["exp_avg"]
    if rank == world_size - 1:  # one bit of one bfloat16 element, not one that is sampled
        moments.view(torch.int16)[4, 77] ^= 1
    for level in ("none", "tensor", "full"):
        check("bit", level)
    check("optional", "tensor", required=False)
    if rank == world_size - 1:
        moments.view(torch.int16)[4, 77] ^= 1
    optimizer.param_groups[0]["lr"] = 0.5 if rank == 0 else 0.1
    for level in ("quick", "tensor", "full"):
        check("value", level)
    manager = CheckpointManager(root, ranks=ranks)
    contents = CheckpointContents(make_model(seed=rank), validation_level="tensor")
    with pytest.raises(CheckpointError, match="'model' should be equal on all ranks"):
        manager.save(contents, 1)
    component = StateComponent(
        "v", Value(rank), SharingPattern.REPLICATED, validate_replication=True
    )
    with pytest.raises(CheckpointError, match="'v' should be equal on all ranks"):
        manager.save(CheckpointContents(make_model(), components=[component]), 1)
    with pytest.raises(ConfigError, match="did you mean 'tensor'"):
        manager.save(CheckpointContents(make_model(), validation_level="tensors"), 1)
    return {f"{name} {level}": text for (name, level), text in messages.items()}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replication_is_checked_at_every_level_and_the_verdict_is_shared(tmp_path, num_ranks):
    results = run_ranks(check_levels, num_ranks, str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "refused before anything is written"
    assert all(result == results[0] for result in results), "one verdict for all ranks"
    found = results[0]
    for name in ("equal none", "equal quick", "equal tensor", "equal full", "bit none"):
        assert found[name] is None, name
    for level in ("tensor", "full"):
        assert f"differs on rank {num_ranks - 1} in state/0/exp_avg" in found[f"bit {level}"]
    assert found["optional tensor"] is None
    for level in ("quick", "tensor", "full"):
        # With two ranks nobody can say which one is right.
        culprit = 0 if num_ranks > 2 else 1
        assert f"differs on rank {culprit} in plain values" in found[f"value {level}"]


def save_stages(root):
    """Every rank holds one layer, as a pipeline stage does."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = nn.Sequential(*(nn.Linear(3, 3) for _ in range(world_size)))
    for number, layer in enumerate(whole):
        nn.init.constant_(layer.weight, float(number))
    stage = nn.Module()
    stage.add_module(str(rank), whole[rank])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    whole(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    manager = CheckpointManager(root, ranks=DistributedRanks(node=0))
    manager.save(CheckpointContents(stage, optimizer), 1)
    saved = {name: t.clone() for name, t in stage.state_dict().items()}
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.fill_(-5)
    manager.load(CheckpointContents(stage, optimizer))
    assert all(torch.equal(t, saved[name]) for name, t in stage.state_dict().items())
    return {name: t.tolist() for name, t in stage.state_dict().items()}


def test_stages_write_what_they_hold_and_one_process_loads_the_whole(tmp_path):
    stages = run_ranks(save_stages, 4, str(tmp_path))
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    CheckpointManager(tmp_path).load(CheckpointContents(model, optimizer))
    for name, tensor in model.state_dict().items():
        assert tensor.tolist() == stages[int(name[0])][name]
    assert len(optimizer.state) == 8 and optimizer.param_groups[0]["lr"] == 0.1
