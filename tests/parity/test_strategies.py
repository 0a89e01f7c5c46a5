"""The same job gives the same numbers, however it is spread over ranks."""

from __future__ import annotations

import pytest
from strategy_jobs import SCHEDULES, Job, launch

REL = 1e-5
TIED = {"tie_embeddings": True}
IN_PARTS = {"gradient_accumulation_steps": 2}
PLAIN = [
    ["ddp2", "ddp2-own", "fsdp2"],
    ["accel2"],
    ["ddp4", "fsdp4", "hsdp2x2", "dp2pp2"],
    [f"pp2-{name}" for name in SCHEDULES],
    pytest.param([f"pp4-{name}" for name in SCHEDULES], marks=pytest.mark.slow, id="pp4"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The job on one device: plain, with tied weights, and with accumulation."""
    folder = str(tmp_path_factory.mktemp("single"))
    jobs = [
        Job("single", folder=f"{folder}/plain"),
        Job("single", folder=f"{folder}/tied", max_steps=6, model=TIED),
        Job("single", folder=f"{folder}/parts", max_steps=6, arguments=IN_PARTS),
    ]
    plain, tied, parts = (outcomes[0] for outcomes in launch(jobs))
    return {"plain": plain, "tied": tied, "parts": parts}


def check_equal(found, wanted):
    assert found.step == wanted.step
    assert found.tokens == wanted.tokens
    assert found.losses == pytest.approx(wanted.losses, rel=REL)
    assert found.norms == pytest.approx(wanted.norms, rel=REL)
    assert found.eval_loss == pytest.approx(wanted.eval_loss, rel=REL)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", PLAIN, ids=lambda names: names[0])
def test_every_strategy_trains_as_one_device_does(names, alone, tmp_path):
    if "accel2" in names:
        pytest.importorskip("accelerate")
    jobs = [Job(name, folder=str(tmp_path / name)) for name in names]
    for name, outcomes in zip(names, launch(jobs, timeout_s=500), strict=True):
        for outcome in outcomes:
            check_equal(outcome, alone["plain"])
            assert outcome.losses == outcomes[0].losses, f"{name}: ranks differ"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        ["ddp2", "fsdp2", "pp2"],
        pytest.param(
            ["hsdp2x2", "dp2pp2", "pp4-ScheduleZBVZeroBubble"], marks=pytest.mark.slow, id="hsdp2x2"
        ),
    ],
    ids=lambda names: names[0],
)
def test_tied_weights_and_accumulation(names, alone, tmp_path):
    jobs = []
    for name in names:
        jobs.append(Job(name, folder=str(tmp_path / f"{name}-tied"), max_steps=6, model=TIED))
        folder = str(tmp_path / f"{name}-parts")
        jobs.append(Job(name, folder=folder, max_steps=6, arguments=IN_PARTS))
    found = launch(jobs, timeout_s=500)
    for tied, parts in zip(found[::2], found[1::2], strict=True):
        check_equal(tied[0], alone["tied"])
        check_equal(parts[0], alone["parts"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        ["ddp2", "fsdp2"],
        ["accel2"],
        [f"pp2-{name}" for name in SCHEDULES],
        pytest.param(
            ["ddp4", "fsdp4", "hsdp2x2", "pp4", "dp2pp2"], marks=pytest.mark.slow, id="ddp4"
        ),
    ],
    ids=lambda names: names[0],
)
def test_two_runs_are_bitwise_equal(names, tmp_path):
    if "accel2" in names:
        pytest.importorskip("accelerate")
    jobs = [
        Job(name, folder=str(tmp_path / f"{name}-{run}"), max_steps=6, model={"dropout": 0.1})
        for name in names
        for run in range(2)
    ]
    found = launch(jobs, timeout_s=500)
    for name, first, second in zip(names, found[::2], found[1::2], strict=True):
        assert first == second, name
        assert len(first[0].losses) == 6


@pytest.mark.timeout(300)
def test_the_order_of_samples_is_that_of_one_device(tmp_path):
    (alone,) = launch([Job("single", folder=str(tmp_path / "one"), watch_windows=True)])
    own = {"dispatch_batches": False}
    jobs = [
        Job(name, folder=str(tmp_path / name), watch_windows=True, arguments=own)
        for name in ("ddp2", "fsdp2")
    ]
    for outcomes in launch(jobs):
        for step, wanted in enumerate(alone[0].samples):
            together = [sample for outcome in outcomes for sample in outcome.samples[step]]
            assert together == wanted
        check_equal(outcomes[0], alone[0])
