"""Copies on every node: what a fault at any moment leaves that all nodes have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_faults import make_contents

from headway.checkpoint import CheckpointManager, nodes, verify
from headway.checkpoint.manifest import committed
from headway.testing.faults import Fault, FaultyStorage
from headway.testing.threadranks import ThreadRanks, run_thread_ranks

NODES = (0, 1)


def places(root: Path) -> list[Path]:
    return [root / f"node{node}" for node in NODES]


def save(root: Path, step: int, fault: Fault | None = None) -> tuple[list[Any], list[int]]:
    """Save on two nodes of a rank each: how the ranks ended, and how much each one did."""
    storages = [
        FaultyStorage(place, fault if fault and fault.rank == rank else None, rank=rank)
        for rank, place in enumerate(places(root))
    ]

    def act(ranks: ThreadRanks) -> None:
        ranks.nodes, ranks.each_node = NODES, True
        manager = CheckpointManager(
            places(root)[ranks.rank], storage=storages[ranks.rank], ranks=ranks, save_total_limit=1
        )
        manager.save(make_contents(value=step), step)

    ends = run_thread_ranks(act, storages)
    return ends, [storage.num_operations for storage in storages]


def find(root: Path) -> list[int | None]:
    """The step that each node would go on from."""
    found: list[int | None] = [None] * len(NODES)

    def act(ranks: ThreadRanks) -> None:
        ranks.nodes, ranks.each_node = NODES, True
        place = places(root)[ranks.rank]
        path = CheckpointManager(place, ranks=ranks).find_intact()[0]
        found[ranks.rank] = None if path is None else int(path.name.split("-")[1])

    ends = run_thread_ranks(act, [FaultyStorage(place) for place in places(root)])
    assert ends == [None, None]
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "CHUNK_BYTES", 1000)


def test_files_travel_in_pieces_and_arrive_whole(tmp_path: Path, small_chunks: None) -> None:
    ends, _ = save(tmp_path, 1)
    assert ends == [None, None]
    first, second = (place / "checkpoint-1" for place in places(tmp_path))
    assert verify(first) == verify(second) == []
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def check_fault(root: Path, fault: Fault) -> int:
    """Save, save again with a fault: the step that all nodes go on from."""
    assert save(root, 1)[0] == [None, None]
    ends, _ = save(root, 2, fault)
    (step,) = set(find(root))
    assert step in (1, 2), fault
    if ends == [None, None]:
        assert step == 2, fault
    has = [{c.step for c in committed(place)} for place in places(root)]
    assert step in has[0] & has[1], fault
    return step


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_node_leaves_a_checkpoint_that_all_nodes_have(
    rank: int, tmp_path: Path
) -> None:
    save(tmp_path / "count", 1)
    _, counts = save(tmp_path / "count", 2)
    last = counts[rank]
    # Some of the operations that write files, and all of those around the commit.
    chosen = sorted({*range(1, last, 12), *range(last - 12, last + 1)})
    seen = {check_fault(tmp_path / str(at), Fault("die", at, rank=rank)) for at in chosen}
    assert seen == {1, 2}


@pytest.mark.parametrize("kind", ["make_dir", "create", "write", "sync_file", "sync_dir", "rename"])
def test_an_error_of_the_disk_of_one_node_is_raised_on_all(kind: str, tmp_path: Path) -> None:
    for rank in NODES:
        root = tmp_path / str(rank)
        assert check_fault(root, Fault("error", 1, operation=kind, rank=rank)) == 1
        ends, _ = save(root, 2, Fault("error", 1, operation=kind, rank=rank))
        assert all(ends), "both ranks raise"
        assert save(root, 3)[0] == [None, None] and find(root) == [3, 3]
