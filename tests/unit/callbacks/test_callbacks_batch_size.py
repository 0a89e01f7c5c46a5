"""Batch sizes that change as a run goes on."""

from __future__ import annotations

import logging
import math
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from schedule_loops import (
    RATE,
    Samples,
    assert_close,
    assert_same_bits,
    make_trainer,
    read_samples,
    resume_at,
    train_by_hand,
    weights_of,
)
from torch.utils.data import DataLoader, IterableDataset

from headway import AccelTrainer, ConfigError, Trainer, TrainerCallback
from headway.callbacks import (
    BatchSizeSchedulerCallback,
    FreezeCallback,
    SequenceLengthSchedulerCallback,
    SpeedMonitorCallback,
)
from headway.config.duration import Duration
from headway.testing import tiny_dataset, tiny_trainer

SIZES, STEPS = [2, 4, 12, 3], 8
SCHEDULE = [0, 2, "4 steps", Duration.steps(6)]
OF_STEP = [2, 2, 4, 4, 12, 12, 3, 3]


def make(folder: Path, **args: Any) -> Any:
    changes = BatchSizeSchedulerCallback(SIZES, SCHEDULE)
    return make_trainer(folder, [changes], **{"max_steps": STEPS, **args})


def expected_rates() -> list[float]:
    return [RATE * (1 - n / STEPS) * math.sqrt(size / 2) for n, size in enumerate(OF_STEP)]


def test_losses_rates_and_tokens_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    trainer, curve = make(tmp_path)
    trainer.train()
    batches, position = [], 0
    for size in OF_STEP:
        batches.append(read_samples(position, size))
        position += size
    losses, weights = train_by_hand(batches, expected_rates())
    assert curve.losses == pytest.approx(losses, rel=1e-6)
    assert curve.rates == pytest.approx(expected_rates(), rel=1e-12)
    assert_close(weights_of(trainer), weights)
    assert curve.of("train/global batch size") == OF_STEP
    counted = [sum(OF_STEP[: n + 1]) * 16 for n in range(STEPS)]
    assert curve.tokens == counted


@pytest.mark.parametrize("step", [2, 5])
def test_a_resume_has_the_same_bits(step: int, tmp_path: Path) -> None:
    whole, curve = make(tmp_path / "whole")
    whole.train()
    resumed, (before, after) = resume_at(tmp_path / "two", step, make, STEPS)
    assert before.losses + after.losses == curve.losses
    assert before.rates + after.rates == curve.rates
    assert before.tokens + after.tokens == curve.tokens
    assert_same_bits(weights_of(resumed), weights_of(whole))
    assert resumed.callbacks["BatchSizeSchedulerCallback"].state_dict() == {
        "version": 1,
        "batch_size": 3,
    }


def test_a_resume_tells_nothing_of_rates_that_are_as_scheduled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "headway"):
        resume_at(tmp_path, 5, make, STEPS)
    told = [record.getMessage() for record in caplog.records]
    assert not [line for line in told if "samples" in line or "lr" in line], told


def test_entries_that_were_passed_while_away_are_taken_up_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run before had no schedule and is past two entries."""
    plain, _ = make_trainer(tmp_path, [], max_steps=STEPS, stop_at=5, save_strategy="steps")
    plain.train()
    resumed, curve = make(tmp_path, save_strategy="steps", save_steps=STEPS)
    resumed.train(resume_from_checkpoint=True)
    assert curve.of("train/global batch size") == OF_STEP[5:]
    assert curve.rates == pytest.approx(expected_rates()[5:], rel=1e-12)
    # And one that ends before them goes back to the first size.
    back, curve = make_trainer(
        tmp_path, [BatchSizeSchedulerCallback([2, 4], [0, 100])], max_steps=STEPS + 1
    )
    with caplog.at_level(logging.WARNING, "headway"):
        back.train(resume_from_checkpoint=True)
    assert "it took 3" in caplog.text
    assert curve.rates == pytest.approx([RATE / (STEPS + 1)])


def test_schedules_in_tokens_and_in_epochs(tmp_path: Path) -> None:
    for number, (second, changes_after) in enumerate((("100 tokens", 4), ("0.25 epochs", 8))):
        changes = BatchSizeSchedulerCallback([2, 4], [0, second])
        trainer, curve = make_trainer(tmp_path / str(number), [changes], max_steps=10)
        trainer.train()
        assert curve.of("train/global batch size") == [
            2 if step < changes_after else 4 for step in range(10)
        ]


class Stop(TrainerCallback):
    def __init__(self) -> None:
        self.positions: list[int] = []

    def on_step_end(self, state: Any, train_dataloader: Any, trainer: Any) -> None:
        self.positions.append(train_dataloader.position)
        assert trainer.state.train_batch_size == train_dataloader.deal.batch_size


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_sample_is_read_once_across_epochs(num_workers: int, tmp_path: Path) -> None:
    """Also where the size does not divide the data, and workers have read ahead."""
    seen: list[list[int]] = []

    class Watch(Stop):
        def on_window(self, window: Any) -> None:
            seen.append(list(map(int, window.sample_ids)))

    changes = BatchSizeSchedulerCallback([2, 6, 3], [0, 3, 7])
    watch = Watch()
    trainer, _ = make_trainer(
        tmp_path,
        [changes, watch],
        tiny_dataset(20, sequence_length=16),
        max_steps=9,
        dataloader_num_workers=num_workers,
        dataloader_persistent_workers=num_workers > 0,
    )
    trainer.train()
    assert [len(ids) for ids in seen] == [2, 2, 2, 6, 6, 2, 6, 3, 3]
    assert sorted(number for ids in seen[:6] for number in ids) == list(range(20))
    assert watch.positions[:6] == [2, 4, 6, 12, 18, 20]
    assert trainer.state.epoch == pytest.approx(1 + 12 / 20)


def test_speed_starts_anew_at_each_change(tmp_path: Path) -> None:
    speed = SpeedMonitorCallback()
    calls: list[int] = []
    plain = speed.reset
    trainer, _ = make_trainer(
        tmp_path, [speed, BatchSizeSchedulerCallback([2, 4], [0, 3])], max_steps=5
    )
    speed.reset = lambda: (calls.append(trainer.state.global_step), plain())[1]
    trainer.train()
    assert calls == [0, 3]  # when training begins, and at the change


@pytest.mark.parametrize(
    ("rule", "factor"), [("sqrt", math.sqrt(2)), ("linear", 2.0), ("none", 1.0)]
)
def test_rules_for_the_rate(rule: str, factor: float, tmp_path: Path) -> None:
    changes = BatchSizeSchedulerCallback([2, 4], [0, 2], lr_scaling=rule)
    trainer, curve = make_trainer(
        tmp_path, [changes], max_steps=3, optim="sgd", lr_scheduler_type="constant"
    )
    trainer.train()
    assert curve.rates == pytest.approx([RATE, RATE, RATE * factor])


# What is refused, before anything is changed


def refuse(folder: Path, callback: Any, told: str, dataset: Any = None, **args: Any) -> None:
    trainer, curve = make_trainer(folder, [callback], dataset, **{"max_steps": 4, **args})
    with pytest.raises(ConfigError, match=told):
        trainer.train()
    assert curve.tokens == []
    assert trainer.bus.kwargs["train_dataloader"].deal.window_samples == 2
    assert not (folder / "out" / "checkpoint-4").exists()


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield from tiny_dataset(8, sequence_length=16)


def test_what_does_not_fit_the_run_is_refused_before_the_first_step(tmp_path: Path) -> None:
    changes = BatchSizeSchedulerCallback([2, 4], [0, 2])
    refuse(tmp_path, changes, "SGD.*'linear'", optim="sgd")
    refuse(tmp_path, changes, "epochs", max_steps=-1)
    refuse(
        tmp_path,
        changes,
        "lr_scheduler_unit",
        max_steps=-1,
        train_for="999 tokens",
        dataset=Samples(),
    )
    refuse(
        tmp_path,
        changes,
        "fuse_optim_with_backward",
        fuse_optim_with_backward=True,
        max_grad_norm=None,
    )
    batches = DataLoader(tiny_dataset(8, sequence_length=16), batch_size=2, collate_fn=collate)
    refuse(tmp_path, changes, "DataLoader makes its own", batches)
    odd = BatchSizeSchedulerCallback([2, 3], [0, 2])
    refuse(tmp_path, odd, "3 given.*multiples of 2", Endless())


def collate(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([item[key] for item in items]) for key in items[0]}


def test_two_are_refused_before_the_first_step(tmp_path: Path) -> None:
    two = [BatchSizeSchedulerCallback(SIZES, SCHEDULE), BatchSizeSchedulerCallback([2, 8], [0, 5])]
    with pytest.raises(ConfigError, match="two of them given"):
        make_trainer(tmp_path, two, max_steps=3)[0].train()
    off = BatchSizeSchedulerCallback([2, 8], [0, 5], enabled=False)
    make_trainer(tmp_path, [two[0], off], max_steps=3)[0].train()


def test_a_stream_changes_its_number_of_micro_batches(tmp_path: Path) -> None:
    changes = BatchSizeSchedulerCallback([2, 6], [0, 2])
    trainer, curve = make_trainer(tmp_path, [changes], Endless(), max_steps=4)
    trainer.train()
    assert curve.tokens == [32, 64, 160, 256]


def test_disabled_or_empty_it_changes_nothing(tmp_path: Path) -> None:
    off = [BatchSizeSchedulerCallback([2, 4], [0, 1], enabled=False), BatchSizeSchedulerCallback()]
    trainer, curve = make_trainer(tmp_path, off, max_steps=3, optim="sgd")
    trainer.train()
    assert curve.tokens == [32, 64, 96]
    assert curve.of("train/global batch size") == []


class RollBack(TrainerCallback):
    """Asks once to return to the newest checkpoint."""

    def __init__(self) -> None:
        self.asked = False

    def on_step_end(self, state: Any, control: Any) -> None:
        if state.global_step == 3 and not self.asked:
            self.asked = control.rollback = True


class SaveAt(TrainerCallback):
    def on_step_end(self, state: Any, control: Any) -> None:
        control.should_save = state.global_step == 1


def test_a_rollback_returns_to_the_batch_of_its_step(tmp_path: Path) -> None:
    whole, curve = make(tmp_path / "whole")
    whole.train()
    again, seen = make_trainer(
        tmp_path / "back",
        [RollBack(), SaveAt(), BatchSizeSchedulerCallback(SIZES, SCHEDULE)],
        max_steps=STEPS,
        save_strategy="no",
    )
    again.train()
    assert seen.tokens == [*curve.tokens[:3], *curve.tokens[1:]]
    assert seen.losses == curve.losses and seen.rates == curve.rates
    assert_same_bits(weights_of(again), weights_of(whole))


def test_a_rollback_that_goes_on_with_the_data_has_the_batch_of_their_epoch(tmp_path: Path) -> None:
    class Skip(RollBack):
        def on_step_end(self, state: Any, control: Any) -> None:
            super().on_step_end(state, control)
            control.rollback_skip_data = control.rollback

    samples: list[int] = []

    class Windows(TrainerCallback):
        def on_window(self, window: Any) -> None:
            samples.append(window.num_samples)

    changes = BatchSizeSchedulerCallback([2, 4], [0, "1 epochs"], lr_scaling="none")
    tiny_trainer(
        tmp_path, [changes, Skip(), SaveAt(), Windows()], 4, max_steps=4, save_strategy="no"
    ).train()
    assert samples == [2, 2, 4, 4, 4, 4], "step 2 comes again with data of the second epoch"


def test_a_resume_without_the_schedule_keeps_the_rates_of_its_batch(tmp_path: Path) -> None:
    """As it keeps the base rates of the checkpoint: the run goes on with the batch it had."""
    first, _ = make(tmp_path, stop_at=5, save_strategy="steps", save_steps=5)
    first.train()
    second, curve = make_trainer(tmp_path, [], max_steps=STEPS, gradient_accumulation_steps=6)
    second.train(resume_from_checkpoint=True)
    expected = [RATE * (1 - n / STEPS) * math.sqrt(12 / 2) for n in (5, 6, 7)]
    assert curve.rates == pytest.approx(expected, rel=1e-12)


def test_a_run_by_tokens_has_rates_by_tokens(tmp_path: Path) -> None:
    def run(folder: Path, **args: Any) -> Any:
        changes = BatchSizeSchedulerCallback([2, 4], [0, "128 tokens"])
        options = {"max_steps": -1, "train_for": "384 tokens", "lr_scheduler_unit": "tokens"}
        return make_trainer(folder, [changes], Samples(), **{**options, **args})

    trainer, curve = run(tmp_path)
    trainer.train()
    assert curve.tokens == [32, 64, 96, 128, 192, 256, 320, 384]
    seen = [0, 32, 64, 96, 128, 192, 256, 320]
    expected = [RATE * (1 - n / 384) * (math.sqrt(2) if n >= 128 else 1) for n in seen]
    assert curve.rates == pytest.approx(expected, rel=1e-12)


def test_many_small_micro_batches_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = BatchSizeSchedulerCallback([4, 13], [0, 5])
    trainer, _ = make_trainer(tmp_path, [changes], max_steps=1, per_device_train_batch_size=4)
    with caplog.at_level(logging.WARNING, "headway"):
        trainer.train()
    assert "13 makes 13 micro-batches of 1" in caplog.text


def test_under_accelerate_all_schedules_together_give_the_same_bits(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    found = []
    for kind, options in (
        (Trainer, {}),
        (AccelTrainer, {"accelerator": accelerate.Accelerator(cpu=True)}),
    ):
        callbacks = [
            BatchSizeSchedulerCallback([2, 4, 2], [0, 2, 4]),
            SequenceLengthSchedulerCallback(4, 3, max_sequence_length=16),
            FreezeCallback("mlp", 1, 3),
        ]
        make_kind = type(
            kind.__name__, (kind,), {"__init__": partialmethod(kind.__init__, **options)}
        )
        trainer, curve = make_trainer(
            tmp_path / kind.__name__, callbacks, trainer=make_kind, max_steps=5
        )
        trainer.train()
        found.append(curve.losses)
    assert found[0] == found[1]
