"""DiLoCo when the network and the processes on it fail: nothing lost, nothing counted twice."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.diloco.ledger import replay
from headway.testing.diloco import ToyWorker, serving, stopped, together, train_together
from headway.testing.proofs.diloco_outages import prove_outages
from headway.testing.proofs.diloco_training_kills import prove_training_kills
from headway.testing.proofs.diloco_worker_kills import PHASES, prove_worker_kills
from headway.testing.proxy import Fault, Proxy

LONG_S = 30.0
"""Other tests run beside these: how soon rounds go on is measured by the proofs of full size."""
FULL = os.environ.get("HEADWAY_FAULTS_FULL") == "1"
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9, "accumulate": "float64"}
SERVER = {"num_workers": 2, "keep_submissions": True, "max_attempts": 1000, **OUTER}
PATIENT = {"max_sync_retries": 500, "first_pause_s": 0.005, "sync_every": 3}


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for something that another thread brings about."""
    never = threading.Event()
    for _ in range(int(limit_s / 0.01)):
        if condition():
            return
        never.wait(0.01)
    raise AssertionError("it did not happen in time")


def applied(folder: Path) -> Counter[tuple[str, str]]:
    """How often each worker is in each round of a ledger."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return Counter(
        (record["round_id"], part["worker"])
        for record in lines
        if record["kind"] == "round"
        for part in record["submissions"]
    )


def undisturbed(folder: Path, num_steps: int) -> list[ToyWorker]:
    with serving(folder, **SERVER) as server:
        workers = [ToyWorker(server.address, n, **PATIENT).start() for n in range(2)]
        with stopped(*workers):
            train_together(workers, num_steps)
    return workers


def bad_plan(seed: int, share: float) -> Callable[[int], Fault | None]:
    """For a share of the connections something that goes wrong, chosen by the seed."""
    chance = random.Random(seed)

    def choose(number: int) -> Fault | None:
        if chance.random() > share:
            return None
        kind = chance.choice(
            ["refuse", "reset", "truncate", "corrupt", "lose_reply", "duplicate", "delay", "slow"]
        )
        if kind == "delay":
            return Fault(delay_s=0.05 * chance.random())
        if kind == "slow":
            return Fault(bytes_per_s=200_000)
        side = chance.choice(["request", "reply"])
        if kind == "corrupt":
            # The bytes of tensors: a changed head of a request is another request.
            side = "reply"
            return Fault(kind, side, chance.randint(700, 1800))  # type: ignore[arg-type]
        return Fault(kind, side, chance.randint(0, 1500))  # type: ignore[arg-type]

    return choose


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_bad_network_changes_no_parameter(tmp_path: Path, seed: int) -> None:
    calm = undisturbed(tmp_path / "calm", 24)
    folder = tmp_path / "server"
    with (
        serving(folder, heartbeat_s=5.0, **SERVER) as server,
        Proxy(server.address, bad_plan(seed, 0.5)) as proxy,
    ):
        workers = [ToyWorker(proxy.address, n, **PATIENT).start() for n in range(2)]
        with stopped(*workers):
            train_together(workers, 24)
        assert proxy.num_faulted >= 15
        parameters = server.core.require_state().parameters
    for worker, undone in zip(workers, calm, strict=True):
        assert worker.worker.counters.sync_count == 8
        for step, (now, then) in enumerate(zip(worker.history, undone.history, strict=True)):
            for name, value in then.items():
                assert torch.equal(now[name], value), (step, name)
    assert sum(worker.worker.counters.sync_retries for worker in workers) > 0
    again = replay(folder)
    assert all(torch.equal(again.parameters[name], value) for name, value in parameters.items())
    counts = applied(folder)
    assert len(counts) == 16 and set(counts.values()) == {1}


@pytest.mark.timeout(120)
def test_a_partition_is_lived_through_alone_and_made_good(tmp_path: Path) -> None:
    """The others go on; what the one behind it learned meanwhile counts once, when it is back."""
    folder = tmp_path / "server"
    options = {**SERVER, "min_workers": 1, "deadline_s": 0.05}
    with serving(folder, **options) as server, Proxy(server.address) as proxy:
        far = ToyWorker(
            proxy.address, 0, sync_every=3, max_sync_retries=0, timeout=0.4, first_pause_s=0.01
        ).start()
        near = ToyWorker(server.address, 1, sync_every=3, timeout=20.0).start()
        with stopped(far, near):
            train_together([far, near], 3)
            with proxy.partitioned():
                far.train(6)
                near.train(6)
            assert far.worker.counters.sync_count == 1 and near.worker.counters.sync_count == 3
            until(lambda: far.train(3).worker.counters.sync_count >= 2)
            near.train(3)
            progress = far.worker.local_step
        assert progress < 12
    counts = applied(folder)
    assert set(counts.values()) == {1}
    assert sum(worker == "worker-0" for _, worker in counts) >= 2
    assert replay(folder) is not None


@pytest.mark.timeout(120)
def test_a_server_that_restarts_while_workers_wait_gets_everything_again(tmp_path: Path) -> None:
    calm = undisturbed(tmp_path / "calm", 6)
    folder = tmp_path / "server"
    with serving(folder, **SERVER) as server:
        port, address = server.port, server.address
        first, second = (ToyWorker(address, n, **PATIENT).start() for n in range(2))
        train_together([first, second], 3, last=False)
        waiting = threading.Thread(target=first.train, args=(3,), daemon=True)
        waiting.start()
        until(lambda: len(server.core.book.rounds[0].submissions) == 1)
    assert waiting.is_alive()
    with serving(folder, port=port, **SERVER) as server, stopped(first, second):
        together(lambda: second.train(3), waiting.join)
        assert server.core.totals.num_rounds == 1
    assert first.worker.counters.reconnections >= 1
    for worker, undone in zip((first, second), calm, strict=True):
        assert worker.worker.counters.sync_count == 2
        for name, value in undone.values.items():
            assert torch.equal(worker.values[name], value), name
    assert set(applied(folder).values()) == {1} and len(applied(folder)) == 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["lose_reply", "duplicate"])
def test_a_submission_whose_answer_is_lost_or_that_comes_twice_counts_once(
    tmp_path: Path, kind: Any, mode: str
) -> None:
    with (
        serving(tmp_path / "server", **{**SERVER, "num_workers": 1, "mode": mode}) as server,
        Proxy(server.address) as proxy,
    ):
        worker = ToyWorker(proxy.address, **PATIENT).start()
        with stopped(worker):
            worker.train(2)
            proxy.next([Fault(), Fault(kind)])  # a sign of life, then the submission
            worker.train(1)
        assert proxy.num_faulted == 1
    assert worker.worker.counters.sync_count == 1
    assert list(applied(tmp_path / "server").values()) == [1]


@pytest.mark.timeout(180)
def test_a_worker_that_is_killed_anywhere_comes_back_and_counts_once() -> None:
    num_kills = 200 if FULL else 2 * len(PHASES)
    outcome = prove_worker_kills(num_kills, seed=3)
    outcome.require_success()
    assert outcome.counts["kills"] == num_kills
    assert outcome.counts["rounds with all"] >= 3


@pytest.mark.timeout(600 if FULL else 120)
def test_killed_runs_of_the_command_come_back_and_count_once() -> None:
    outcome = prove_training_kills(200 if FULL else 3, seed=4, resumed_s=LONG_S)
    outcome.require_success()
    assert outcome.counts["kills"] >= 6 and outcome.counts["rounds with all"] >= 3


@pytest.mark.timeout(600 if FULL else 120)
def test_runs_of_the_command_live_through_kills_of_their_server() -> None:
    outcome = prove_outages(100 if FULL else 3, seed=4, resumed_s=LONG_S)
    outcome.require_success()
    assert outcome.counts["reconnections"] >= 1 and outcome.counts["rounds"] >= 2
