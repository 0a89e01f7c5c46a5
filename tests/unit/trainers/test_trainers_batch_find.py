"""The search for a batch size: which sizes it tries and what follows from the largest."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.cli.batch_trial import TrialPlan, limited_memory, parse_bytes, taken_bytes
from headway.config.schema import Component, DataConfig, RunConfig
from headway.errors import ConfigError
from headway.trainers.batch_find import (
    Fit,
    Longest,
    Trial,
    fit_global_batch,
    is_out_of_memory,
    prepare_trial,
    run_trial,
    samples_per_device,
    search,
    why_not_accumulate,
)


def sizes_of(largest: int, start: int, most: int, unit: int = 1) -> list[int]:
    trials = search(lambda size: Trial(size, size <= largest), start, most, unit)
    return [trial.size for trial in trials]


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("start", [1, 3, 16, 100])
@pytest.mark.parametrize("most", [1, 7, 64, 100])
def test_the_largest_is_found_whatever_it_is(start: int, most: int, unit: int) -> None:
    for largest in range(most * unit + 3):
        tried = sizes_of(largest, start * unit, most * unit, unit)
        fitting = [size for size in tried if size <= largest]
        assert max(fitting, default=0) == min(largest, most * unit) // unit * unit
        assert all(0 < size <= most * unit and size % unit == 0 for size in tried)
        assert len(tried) == len(set(tried)) <= 16


def test_it_doubles_and_then_halves_the_gap() -> None:
    assert sizes_of(11, 2, 100) == [2, 4, 8, 16, 12, 10, 11]
    assert sizes_of(3, 16, 100) == [16, 8, 4, 2, 3]
    assert sizes_of(0, 4, 100) == [4, 2, 1]
    assert sizes_of(1000, 8, 20) == [8, 16, 20]


@pytest.mark.parametrize(
    ("samples", "largest", "unit", "expected"),
    [
        (12, 5, 1, Fit(4, 3)),
        (12, 100, 1, Fit(12, 1)),
        (7, 6, 1, Fit(1, 7)),
        (24, 11, 4, Fit(8, 3)),
        (6, 8, 4, None),
    ],
)
def test_the_samples_of_a_step_stay(
    samples: int, largest: int, unit: int, expected: Fit | None
) -> None:
    assert fit_global_batch(samples, largest, unit) == expected
    whole = Fit(samples, 1) if largest >= samples and samples % unit == 0 else None
    assert fit_global_batch(samples, largest, unit, accumulates=False) == whole


@pytest.mark.parametrize(
    "options",
    [
        {"fuse_optim_with_backward": True, "max_grad_norm": 0},
        {"torch_compile": True, "torch_compile_mode": "max-autotune"},
    ],
)
def test_what_forbids_to_accumulate_is_known_before_the_search(
    options: dict[str, Any], tmp_path: Path
) -> None:
    assert why_not_accumulate(make_run(tmp_path)) is None
    run = make_run(tmp_path, gradient_accumulation_steps=1, **options)
    assert "gradient_accumulation_steps=2" in str(why_not_accumulate(run))
    assert run.args.gradient_accumulation_steps == 1
    prepare_trial(run, 1, 1, str(tmp_path))  # no rule is broken
    for accumulates, expected in ((True, [2, 1]), (False, [1, 1])):
        plan = TrialPlan("run.yaml", [], None, 4, 3, None, accumulates)
        assert [plan.accumulation_of(size) for size in (2, 4)] == expected


def test_memory_is_limited_only_for_a_while() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = (taken_bytes("cpu") or 0) + 2**30
    with pytest.raises(ArithmeticError), limited_memory(limit, "cpu"):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == limit
        raise ArithmeticError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (ImportError("No module named x"), False),
        (RuntimeError("shapes do not fit"), False),
        (ConfigError("out of memory is a bad name for an option"), False),
    ],
)
def test_what_counts_as_no_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    outer = ValueError("while something else was done")
    outer.__cause__ = error
    assert is_out_of_memory(outer) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GiB", 2 * 2**30), ("1.5 gib", 3 * 2**29), ("500MB", 500_000_000), ("4096", 4096)],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "2 gigs", "-1GiB", "GiB"])
def test_other_words_are_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory-limit: .*2GiB"):
        parse_bytes(text)


class Ragged:
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"number": number, "input_ids": list(range(self.lengths[number]))}


class Stream:
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from ({"input_ids": torch.zeros(n, dtype=torch.int64)} for n in (3, 9, 5))


def test_trials_get_the_longest_samples() -> None:
    longest = Longest(Ragged([5, 2, 40, 7]), 6)
    assert len(longest) == 6 and {len(longest[n]["input_ids"]) for n in range(6)} == {40}
    assert len(Longest(Stream(), 2)[1]["input_ids"]) == 9
    with pytest.raises(ConfigError, match=r"data.train: it holds no sample"):
        Longest([], 2)


def make_run(tmp_path: Path, **args: Any) -> RunConfig:
    from headway.args import TrainingArguments

    settings = {
        "output_dir": str(tmp_path / "real"),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "eval_strategy": "steps",
        "warmup_steps": 5,
        "max_steps": 50,
        **args,
    }
    data = {"num_samples": 4, "sequence_length": 16, "vocab_size": 50}
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    dataset = Component("SyntheticDataset", data)
    return RunConfig(
        model=Component("headway.testing.tiny_decoder", sizes),
        data=DataConfig(train=dataset, eval=dataset),
        args=TrainingArguments(**settings),
        callbacks=[Component("JsonLogger")],
    )


def test_a_trial_trains_the_run_and_leaves_its_folder_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    trial = prepare_trial(run, 8, 2, str(tmp_path / "trial"))
    assert (trial.args.per_device_train_batch_size, trial.args.max_steps) == (8, 50)
    assert run.args.per_device_train_batch_size == 2  # the run itself is as it was
    facts = run_trial(trial, 3)
    assert facts["tokens_per_s"] > 0 and facts["peak_bytes"] > 2**20
    assert not (tmp_path / "real").exists()


def test_samples_of_a_step_come_from_whatever_sets_them(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert samples_per_device(run, [], 1) == 6
    tokens = make_run(tmp_path, gradient_accumulation_steps=1, global_batch_size=16)
    assert samples_per_device(tokens, [], 2) == 8
