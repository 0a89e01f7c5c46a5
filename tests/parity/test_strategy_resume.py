"""What one strategy saved, any other goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from strategy_jobs import Job, launch

from headway.checkpoint.tensors import read_shards

NAMES = ("single", "ddp2", "fsdp2", "fsdp4", "pp2", "pp4")
# On over the ends of two epochs, each with a short window.
SAVED_AT, GO_ON_TO = 7, 20
# One layer for each of four stages.
SMALL = {"num_layers": 4}
SAVES = {"save_strategy": "steps", "save_steps": SAVED_AT}
STOPS = {**SAVES, "stop_at": f"{SAVED_AT} steps"}


def checkpoint_of(folder: Path) -> Path:
    return folder / "out" / f"checkpoint-{SAVED_AT}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By strategy: a folder with the checkpoint that it wrote."""
    root = tmp_path_factory.mktemp("saved")
    for names in (["single"], ["ddp2", "fsdp2", "pp2"], ["fsdp4", "pp4"]):
        launch(
            [
                Job(name, GO_ON_TO, str(root / name), STOPS, model=SMALL, evaluate=False)
                for name in names
            ]
        )
    return {name: root / name for name in NAMES}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    job = Job("single", GO_ON_TO, str(folder), model=SMALL, evaluate=False)
    return launch([job])[0][0]


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}/{name}": tensor
        for prefix in ("model", "optimizer")
        for name, tensor in read_shards(directory, prefix).items()
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("loader", NAMES)
def test_any_strategy_goes_on_with_what_any_other_saved(loader, saved, uninterrupted, tmp_path):
    jobs = []
    rest = {"model": SMALL, "evaluate": False}
    for saver in NAMES:
        source = str(checkpoint_of(saved[saver]))
        # Saved again before any step: what was loaded, gathered and written.
        again = str(tmp_path / f"{saver}-again")
        jobs.append(Job(loader, SAVED_AT, again, SAVES, resume=source, **rest))
        on = str(tmp_path / f"{saver}-on")
        jobs.append(Job(loader, GO_ON_TO, on, resume=source, **rest))
    found = launch(jobs, timeout_s=500)
    wanted = uninterrupted.losses[SAVED_AT:]
    assert len(wanted) == GO_ON_TO - SAVED_AT
    for saver, continued in zip(NAMES, found[1::2], strict=True):
        before = tensors_of(checkpoint_of(saved[saver]))
        after = tensors_of(checkpoint_of(tmp_path / f"{saver}-again"))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), f"{saver} -> {loader}: {name}"
        assert continued[0].losses == pytest.approx(wanted, rel=1e-5), f"{saver} -> {loader}"
        assert continued[0].tokens == uninterrupted.tokens


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        ["ddp2", "fsdp2", "pp2"],
        ["accel2"],
        ["ddp4", "fsdp4", "pp4"],
        pytest.param(
            ["hsdp2x2", "dp2pp2", "pp4-ScheduleZBVZeroBubble"], marks=pytest.mark.slow, id="hsdp2x2"
        ),
    ],
    ids=lambda names: names[0],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(names, tmp_path):
    if "accel2" in names:
        pytest.importorskip("accelerate")
    jobs = []
    for name in names:
        whole, parts = str(tmp_path / f"{name}-whole"), tmp_path / f"{name}-parts"
        dropout = {"dropout": 0.1}
        jobs += [
            Job(name, 12, whole, model=dropout),
            Job(name, 12, str(parts), STOPS, model=dropout, evaluate=False),
            Job(name, 12, str(parts), SAVES, model=dropout, resume=str(checkpoint_of(parts))),
        ]
    found = launch(jobs, timeout_s=500)
    triples = zip(found[::3], found[1::3], found[2::3], strict=True)
    for name, (whole, first, second) in zip(names, triples, strict=True):
        for rank, outcome in enumerate(whole):
            assert first[rank].losses + second[rank].losses == outcome.losses, name
            assert first[rank].norms + second[rank].norms == outcome.norms, name
            assert second[rank].eval_loss == outcome.eval_loss, name
