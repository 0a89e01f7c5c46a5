"""Columns and final rows: defaults, overrides, formats, mistakes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from headway.callbacks.log.columns import (
    ColumnSpec,
    FinalMetricSpec,
    default_final_metrics,
    default_step_columns,
    format_value,
    header_line,
    merge_columns,
    merge_final_metrics,
    reduce_value,
    row_line,
    summary_lines,
)
from headway.engine.state import TrainerState
from headway.errors import ConfigError
from headway.trainers.outputs import RunStart


def test_every_row_of_a_summary_can_be_left_out() -> None:
    start = RunStart(at_s=0.0, step=0, tokens=0, flos=0)
    summary = start.summary(TrainerState(), loss=1.0, num_samples=1, batch_size=1)
    assert not summary_lines(merge_final_metrics(dict.fromkeys(summary)), summary)


def test_the_defaults() -> None:
    assert list(default_step_columns()) == [
        "epoch", "loss", "grad_norm", "learning_rate", "tokens", "total_tokens", "tok_per_sec",
        "mfu", "peak_mem",
    ]  # fmt: skip
    assert list(default_final_metrics()) == [
        "train_runtime", "step", "train_samples", "effective_batch_size",
        "train_samples_per_second", "train_steps_per_second", "epoch", "total_tokens",
        "tokens_per_second", "total_flops", "flops_per_second", "train_loss",
    ]  # fmt: skip
    columns = merge_columns(None)
    assert columns["learning_rate"] == ColumnSpec("learning_rate", "lr", 10, ".2e")
    assert columns["peak_mem"] == ColumnSpec("peak_mem", "peak_mem", 11, "gib", "max")


@pytest.mark.parametrize(
    ("value", "fmt", "text"),
    [
        (1.23456, "", "1.235"), (1234567, "", "1,234,567"), ("word", "", "word"),
        (1234567.0, ",d", "1,234,567"), (0.5, ".1%", "50.0%"), (255, "x", "ff"),
        (None, ".5f", "None"), (None, "si", "None"), (math.nan, ",d", "nan"),
        (-math.inf, "si", "-inf"), ("nan", ".5f", "nan"), (3 * 1024**3, "gib", "3.000 GiB"),
        (12_345, "si", "12.3K"), (999_999, "si", "1M"), (1.5e12, "si", "1.5T"), (12, "si", "12"),
        (torch.tensor(2.0), ".2f", "2.00"), (torch.tensor([2.0]), ".2f", "2.00"),
        (torch.tensor([1.0, 2.5]), ".2f", "[1.0, 2.5]"), (np.array([[1], [2]]), "", "[[1], [2]]"),
        (True, "", "True"), (3, lambda v: f"<{v}>", "<3>"),
    ],
)  # fmt: skip
def test_formats(value: Any, fmt: Any, text: str) -> None:
    assert format_value(value, fmt) == text


@pytest.mark.parametrize(
    ("reduce", "result"),
    [(None, 3), ("max", 3), ("min", 1), ("mean", 2), ("sum", 6), ("all", "1/3/2"), (len, 3)],
)
def test_reductions(reduce: Any, result: Any) -> None:
    assert reduce_value([1, 3, 2], reduce) == result
    assert reduce_value(7, reduce) == 7


def test_an_empty_list_is_zero() -> None:
    assert reduce_value([], None) == 0 and reduce_value([None], "max") == 0


def test_overrides_remove_change_replace_and_append() -> None:
    columns = merge_columns(
        {
            "mfu": None,
            "loss": {"width": 12},
            "tokens": ColumnSpec("tokens", "n"),
            "weight_norm": {"fmt": ".3f"},
            "tps": {"key": "throughput/device/TPS", "label": "TPS"},
        }
    )
    assert list(columns)[-2:] == ["weight_norm", "tps"] and "mfu" not in columns
    assert columns["loss"] == ColumnSpec("loss", "loss", 12, ".5f")
    assert columns["tokens"].label == "n" and columns["weight_norm"].label == "weight_norm"
    assert columns["tps"].key == "throughput/device/TPS"
    rows = merge_final_metrics({"epoch": None, "train_loss": {"label": "Loss", "fmt": ".3f"}})
    assert "epoch" not in rows and rows["train_loss"] == FinalMetricSpec(
        "train_loss", "Loss", ".3f"
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"los": {"width": 9}}, "did you mean 'loss'"),
        ({"lerning_rate": {"fmt": ".1e"}}, "did you mean 'learning_rate'"),
        ({"mfuu": None}, "nothing to remove.*did you mean 'mfu'"),
        ({"loss": {"widht": 9}}, "loss: unknown field 'widht'; did you mean 'width'"),
        ({"loss": {"fmt": "gb"}}, "unknown fmt 'gb'; did you mean 'gib'"),
        ({"loss": {"fmt": ".5q"}}, "loss: unknown fmt '.5q'"),
        ({"loss": {"fmt": 5}}, "unknown fmt 5"),
        ({"peak_mem": {"reduce": "maxx"}}, "peak_mem: unknown reduce 'maxx'; did you mean 'max'"),
        ({"loss": {"width": 0}}, "width must be an integer of at least 1"),
    ],
)
def test_mistakes_are_refused_with_the_nearest_name(overrides: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        merge_columns(overrides)


def test_a_spec_of_the_wrong_kind_is_a_type_error_that_names_the_key() -> None:
    with pytest.raises(TypeError, match=r"step_columns: loss must be a mapping.*got str"):
        merge_columns({"loss": ".5f"})
    with pytest.raises(ConfigError, match="final_metrics must be a mapping"):
        merge_final_metrics(["loss"])  # type: ignore[arg-type]


def test_a_metric_whose_name_is_close_to_another_can_be_asked_for() -> None:
    assert "losss" in merge_columns({"losss": {"key": "losss"}})


def test_wide_values_keep_the_columns_apart() -> None:
    columns = [ColumnSpec("step", width=4), ColumnSpec("a", "a long heading", 6), ColumnSpec("b")]
    header = header_line(columns)
    assert header == "step a lon…          b" and len(header) == 22
    row = row_line(columns, {"step": 1, "a": 123456789, "b": "text that is long\nand goes on"})
    assert row == "   1 123,456,789 text that…"
    assert row_line(columns, {"step": 2, "a": None, "b": math.nan}) == "   2   None        nan"


def test_the_summary_has_its_rows_in_order_and_others_last() -> None:
    rows = merge_final_metrics({"total_flops": None})
    record = {"extra": 0.12345, "total_flops": 1e9, "step": 1200, "train_runtime": 61.234}
    assert summary_lines(rows, record) == [
        "Runtime".ljust(28) + "61.23 s",
        "Total steps".ljust(28) + "1,200",
        "extra".ljust(28) + format(0.12345, ".4g"),
    ]  # fmt: skip
