"""Schedules in a training: per group, in tokens, across a resume."""

import json
import logging

import pytest

from headway import ConfigError, Trainer, TrainingArguments
from headway.data import SyntheticDataset
from headway.testing import tiny_decoder

GROUPS = {
    "norms": {
        "regex": "norm",
        "config": {"lr": 1e-3, "lr_scheduler": {"type": "constant", "warmup_steps": 2}},
    },
    "heads": {"regex": "head|embed", "config": {"lr_scheduler": {"kwargs": {"min_ratio": 0.5}}}},
}
# 2 samples of 8 tokens make a step.
STEP_TOKENS = 16


class Rates:
    def __init__(self):
        self.rates = []

    def on_step_begin(self, optimizer):
        self.rates.append(tuple(group["lr"] for group in optimizer.param_groups))


def run(folder, *, groups=None, **arguments):
    watch = Rates()
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "seed": 3,
        "use_cpu": True,
        **arguments,
    }
    trainer = Trainer(
        args=TrainingArguments(**settings),
        model_init=tiny_decoder,
        train_dataset=SyntheticDataset(20, 8, 258),
        optimizer_groups=groups,
        default_callbacks=False,
        callbacks=[watch],
    )
    trainer.train()
    return trainer, watch.rates


def test_groups_follow_their_own_schedules_also_across_a_resume(tmp_path):
    settings = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.5}
    trainer, whole = run(tmp_path / "a", groups=GROUPS, **settings)
    names = [group["group_name"] for group in trainer.optimizer.param_groups]
    norms = [rates[names.index("norms")] for rates in whole]
    assert norms == pytest.approx([5e-4, *[1e-3] * 7])
    heads = [rates[names.index("heads")] for rates in whole]
    assert heads[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2]) and heads[7] > 5e-3
    rest = [rates[names.index("__default__")] for rates in whole]
    assert rest[:4] == pytest.approx(heads[:4]) and rest[7] < 2e-3
    for stop in (2, 5):
        folder = tmp_path / f"stop-{stop}"
        _, first = run(folder, groups=GROUPS, stop_at=stop, **settings)
        second_run, second = run(folder, groups=GROUPS, **settings)
        assert [*first, *second] == whole
        assert second_run.lr_scheduler.changes == []


@pytest.mark.parametrize("length", [{"max_steps": 8}, {"train_for": "128 tokens", "max_steps": -1}])
def test_tokens_of_one_length_give_the_curve_of_the_steps(tmp_path, length):
    kinds = {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_ratio": 0.5}}
    _, in_steps = run(tmp_path / "a", **kinds, warmup_steps=2)
    kinds |= {"lr_scheduler_unit": "tokens", **length}
    _, in_tokens = run(tmp_path / "b", **kinds, warmup_tokens=2 * STEP_TOKENS)
    assert [rate for (rate,) in in_tokens] == pytest.approx([rate for (rate,) in in_steps])
    # An epoch of 20 samples ends exactly with a step, here; a resume goes on with the count.
    folder = tmp_path / "c"
    _, first = run(folder, **kinds, warmup_tokens=2 * STEP_TOKENS, stop_at=3)
    _, second = run(folder, **kinds, warmup_tokens=2 * STEP_TOKENS)
    assert [*first, *second] == in_tokens


def test_the_tokens_of_epochs_whose_last_step_is_a_smaller_one(tmp_path):
    # 20 samples in steps of 8: 3 steps an epoch, the last of them of 4 samples.
    trainer, rates = run(
        tmp_path,
        lr_scheduler_unit="tokens",
        max_steps=6,
        gradient_accumulation_steps=4,
        save_strategy="no",
    )
    assert trainer.state.num_input_tokens_seen == 320
    seen = (0, 64, 128, 160, 224, 288)
    assert [rate for (rate,) in rates] == pytest.approx([1e-2 * (1 - n / 320) for n in seen])
    assert trainer.lr_scheduler.get_last_lr() == [pytest.approx(0, abs=1e-12)]


def test_a_changed_length_is_reported_on_resume(tmp_path, caplog):
    run(tmp_path, stop_at=4)
    with caplog.at_level(logging.WARNING):
        _, rates = run(tmp_path, max_steps=16, stop_at=6)
    report = json.loads((tmp_path / "run" / "resume-4.json").read_text())
    text = (
        "the learning-rate schedule is not the one of the checkpoint: length 8 -> 16 steps; "
        "at 4 steps the learning rate was 0.005 and is 0.0075"
    )
    assert report["schedule"] == [text] and caplog.text.count(text) == 1
    assert rates[0] == (pytest.approx(7.5e-3),)


def test_an_unchanged_schedule_is_not_reported(tmp_path):
    run(tmp_path, stop_at=4)
    run(tmp_path, stop_at=6)
    assert json.loads((tmp_path / "run" / "resume-4.json").read_text())["schedule"] == []


def test_a_schedule_left_behind_starts_anew_in_tokens_too(tmp_path):
    for unit in ("steps", "tokens"):
        folder = tmp_path / unit
        run(folder, stop_at=4, lr_scheduler_unit=unit)
        _, rates = run(
            folder, stop_at=6, lr_scheduler_unit=unit, load_components=["model", "trainer"]
        )
        assert [rate for (rate,) in rates] == pytest.approx([1e-2, 1e-2 * 7 / 8]), unit


def test_a_group_s_schedule_beside_a_scheduler_object_is_refused(tmp_path):
    import torch

    trainer = Trainer(
        args=TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True),
        model_init=tiny_decoder,
        train_dataset=SyntheticDataset(20, 8, 258),
        optimizer_groups=GROUPS,
        lr_scheduler_factory=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer),
        default_callbacks=False,
    )
    with pytest.raises(ConfigError, match=r"norms\.config\.lr_scheduler has no effect"):
        trainer.train()


def test_a_warm_up_longer_than_what_the_data_gives_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="warmup_steps=11 is longer than the training of 10"):
        run(tmp_path, max_steps=-1, num_train_epochs=1, warmup_steps=11)
