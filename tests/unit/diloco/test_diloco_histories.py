"""Every parameter after every step of small runs, compared with stored ones, bit for bit.

With HEADWAY_REWRITE_FIXTURES=1 the stored histories are written anew: then look at what changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.testing.diloco import ToyWorker, serving, stopped, toy_model, train_together

STORED = Path(__file__).parents[2] / "fixtures" / "diloco"
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9, "accumulate": "float64"}


def make_workers(server: Any, num: int, **options: Any) -> list[ToyWorker]:
    return [
        ToyWorker(server.address, n, model=toy_model(2, 2), step_s=1.0 + n, **options).start()
        for n in range(num)
    ]


def run_sync(folder: Path) -> list[ToyWorker]:
    with serving(folder, num_workers=2, **OUTER) as server:
        workers = make_workers(server, 2, sync_every=3, comm="bf16")
        with stopped(*workers):
            train_together(workers, 10)
        return workers


def run_async(folder: Path) -> list[ToyWorker]:
    """Steps of the workers in turn: a submission never waits for another worker's."""
    with serving(folder, num_workers=2, mode="async", async_delay=2, **OUTER) as server:
        workers = make_workers(server, 2, sync_every=3)
        with stopped(*workers):
            workers[1].train(1)
            for _ in range(10):
                for worker in workers:
                    worker.train(1)
        return workers


def run_fragments(folder: Path) -> list[ToyWorker]:
    with serving(folder, num_workers=2, num_fragments=2, **OUTER) as server:
        workers = make_workers(server, 2, sync_every=6, num_fragments=2, overlap_steps=2)
        with stopped(*workers):
            train_together(workers, 14)
        return workers


def run_dylu(folder: Path) -> list[ToyWorker]:
    options = {"num_workers": 2, "sync_every": 4, "dylu": True, **OUTER}
    with serving(folder, **options) as server:
        workers = make_workers(server, 2, sync_every=4, dylu=True)
        with stopped(*workers):
            train_together(workers, 4, last=False)
            # From now on the second does half as many steps in a round.
            for _ in range(3):
                train = [lambda: workers[0].train(4), lambda: workers[1].train(2)]
                _together(train)
        return workers


def _together(acts: list[Callable[[], Any]]) -> None:
    from headway.testing.diloco import together

    together(*acts)


RUNS = {"sync": run_sync, "async": run_async, "fragments": run_fragments, "dylu": run_dylu}


def spell(workers: list[ToyWorker]) -> list[list[list[str]]]:
    """Worker, step, parameter: the numbers as hexadecimal floats, exactly."""
    return [
        [
            [" ".join(float(x).hex() for x in tensor.reshape(-1)) for tensor in values.values()]
            for values in worker.history
        ]
        for worker in workers
    ]


@pytest.mark.parametrize("name", RUNS)
def test_parameters_after_every_step_are_those_stored(tmp_path: Path, name: str) -> None:
    found, file = spell(RUNS[name](tmp_path)), STORED / f"{name}.json"
    if os.environ.get("HEADWAY_REWRITE_FIXTURES"):
        file.write_text(json.dumps(found, indent=0) + "\n")
    stored = json.loads(file.read_text())
    assert [len(history) for history in found] == [len(history) for history in stored]
    for worker, (mine, theirs) in enumerate(zip(found, stored)):
        for step, (now, then) in enumerate(zip(mine, theirs)):
            assert now == then, f"worker {worker}, step {step + 1}"
