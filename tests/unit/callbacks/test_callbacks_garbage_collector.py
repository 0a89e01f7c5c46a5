"""Garbage is collected at chosen steps, and Python's collector is as before after the run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import Trainer, TrainerCallback
from headway.callbacks import GarbageCollectorCallback
from headway.testing import tiny_decoder, tiny_trainer


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    gc.enable() if was_on else gc.disable()


class Cycle:
    def __init__(self) -> None:
        self.me = self


class Litter(TrainerCallback):
    """Leaves a cycle in every step and sees when it goes; the first one is old."""

    priority = 10

    def __init__(self) -> None:
        self.left: dict[int, Any] = {}
        self.gone_at: dict[int, int] = {}
        self.was_on: list[bool] = []
        self.metrics: dict[int, float] = {}

    def on_step_begin(self, state: Any) -> None:
        self.was_on.append(gc.isenabled())
        for made, reference in self.left.items():
            if reference() is None:
                self.gone_at.setdefault(made, state.global_step)
        self.left[state.global_step + 1] = weakref.ref(Cycle())

    def on_metrics(self, step: int, metrics: Any) -> None:
        if "garbage_collector/duration_s" in metrics:
            self.metrics[step] = metrics["garbage_collector/duration_s"]


def test_it_collects_at_its_steps_and_after_saves_only(tmp_path: Path) -> None:
    gc.enable()
    litter = Litter()
    trainer = tiny_trainer(
        tmp_path, [litter, GarbageCollectorCallback(4)], num_samples=64, max_steps=12,
        save_strategy="steps", save_steps=6, save_async=False,
    )  # fmt: skip
    trainer.train()
    assert litter.was_on == [False] * 12
    assert gc.isenabled()
    assert {n: litter.gone_at[n] for n in (1, 4, 5, 6, 7, 8)} == {
        1: 4, 4: 4, 5: 6, 6: 6, 7: 8, 8: 8,
    }  # fmt: skip
    assert set(litter.metrics) == {4, 6, 8, 12}
    assert all(seconds > 0 for seconds in litter.metrics.values())


def test_objects_that_became_old_go_with_a_full_collection(tmp_path: Path) -> None:
    class Old(TrainerCallback):
        def on_train_begin(self) -> None:
            cycle = Cycle()
            self.reference = weakref.ref(cycle)
            gc.collect()  # from here on it belongs to the oldest generation
            self.gone_at: int | None = None

        def on_step_begin(self, state: Any) -> None:
            if self.gone_at is None and self.reference() is None:
                self.gone_at = state.global_step

    old = Old()
    collector = GarbageCollectorCallback(2, full_every=3)
    tiny_trainer(tmp_path, [old, collector], num_samples=64, max_steps=8).train()
    assert old.gone_at == 6


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_before_also_after_an_error(tmp_path: Path, was_on: bool) -> None:
    class Fail(TrainerCallback):
        def on_step_end(self) -> None:
            raise RuntimeError("power")

    gc.enable() if was_on else gc.disable()
    with pytest.raises(RuntimeError, match="power"):
        tiny_trainer(tmp_path, [GarbageCollectorCallback(), Fail()], max_steps=2).train()
    assert gc.isenabled() is was_on


def test_switched_off_it_changes_nothing(tmp_path: Path) -> None:
    gc.enable()
    litter = Litter()
    off = GarbageCollectorCallback(1, enabled=False)
    tiny_trainer(tmp_path, [litter, off], max_steps=2).train()
    assert litter.was_on == [True, True] and not litter.metrics


def test_it_is_in_every_run_and_a_given_one_takes_its_place(tmp_path: Path) -> None:
    args = {"output_dir": str(tmp_path), "use_cpu": True}
    default = Trainer(args=args, model_init=tiny_decoder).callbacks["GarbageCollectorCallback"]
    assert default.gc_interval == 1000 and default.enabled
    mine = GarbageCollectorCallback(7)
    trainer = Trainer(args=args, model_init=tiny_decoder, callbacks=[mine])
    assert [c for c in trainer.callbacks.values() if isinstance(c, type(mine))] == [mine]
