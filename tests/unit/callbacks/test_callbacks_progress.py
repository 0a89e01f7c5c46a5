"""What ProgressCallback prints, in a terminal and elsewhere."""

from __future__ import annotations

import io
import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.callbacks import ProgressCallback
from headway.callbacks.log import progress
from headway.callbacks.log.pacing import TextPace
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError
from headway.testing import tiny_trainer

ARGS: Any = SimpleNamespace(disable_tqdm=None, max_eval_steps=-1)
RECORD = {"epoch": 0.5, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 100}
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_state(**fields: Any) -> TrainerState:
    return TrainerState(**{"global_step": 0, "max_steps": 100, **fields})


def log_steps(callback: ProgressCallback, *records: dict[str, Any]) -> list[str]:
    """The lines that a run with these records prints, one step apart."""
    state = a_state()
    callback.on_train_begin(ARGS, state, TrainerControl())
    for record in records:
        state.global_step += 1
        callback.on_step_end(ARGS, state, TrainerControl())
        callback.on_log(ARGS, state, TrainerControl(), record)
    callback.on_train_end(ARGS, state, TrainerControl())
    return str(callback.stream.getvalue()).splitlines()


def test_a_run_into_a_file_is_a_table_with_a_summary(tmp_path: Path) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(output_stream=stream)
    tiny_trainer(tmp_path, [callback], max_steps=2, eval_strategy="steps", eval_steps=2).train()
    lines = stream.getvalue().splitlines()
    assert all(re.match(STAMP + " ", line) for line in lines)
    assert lines[0].split()[2:] == [
        "step",
        "epoch",
        "loss",
        "grad",
        "lr",
        "tokens",
        "total_tok",
        "ETA",
    ]
    assert "step 1/2 " in lines[1] and "step 2/2 " in lines[2]
    assert lines[1].index("step 1/2") + len("step 1/2") == lines[0].index("step") + len("step")
    assert re.search(r"step 2  epoch 0\.50  eval_loss: \d\.\d{5}  eval_perplexity", lines[3])
    assert lines[4].endswith("Training summary") and lines[5].split()[2] == "Runtime"
    assert any("Total steps                 2" in line for line in lines)
    assert "\r" not in stream.getvalue()


def test_the_header_returns_at_its_interval_and_when_columns_change() -> None:
    stream = io.StringIO()
    callback = ProgressCallback(output_stream=stream, header_interval=2, show_eta=False)
    callback._pace = TextPace(1 << 20)
    lines = log_steps(callback, *[RECORD] * 4, {**RECORD, "mfu": 0.5}, {"epoch": 1.0}, {"epoch": 2})
    kinds = ["h" if "loss" in line else "r" for line in lines]
    assert "".join(kinds) == "hrrhrrhr"
    assert "50.0%" in lines[-1]


def test_a_bar_is_drawn_on_a_terminal_with_timed_rows_above_it() -> None:
    lines = log_steps(ProgressCallback(output_stream=Screen()), RECORD)
    text = "\n".join(lines)
    assert "1/100" in text and re.search(STAMP + " {3} +step", text) and "ETA" not in text


@pytest.mark.parametrize(
    ("use_tqdm", "disable_tqdm", "stream", "bar"),
    [
        (None, None, Screen, True), (None, None, io.StringIO, False),
        (False, None, Screen, False), (None, True, Screen, False),
        (True, True, io.StringIO, True), (None, False, io.StringIO, True),
    ],
)  # fmt: skip
def test_where_bars_are_drawn(use_tqdm: Any, disable_tqdm: Any, stream: Any, bar: bool) -> None:
    callback = ProgressCallback(use_tqdm, output_stream=stream())
    args = SimpleNamespace(disable_tqdm=disable_tqdm, max_eval_steps=-1)
    callback.on_train_begin(args, a_state(), TrainerControl())
    assert (callback._bar is not None) == bar
    callback.on_close(args, a_state(), TrainerControl())
    assert callback._bar is None


def test_a_notebook_gets_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert ProgressCallback()._draws(ARGS)
    assert not ProgressCallback(output_stream=io.StringIO())._draws(ARGS)


def test_other_ranks_print_nothing() -> None:
    stream = io.StringIO()
    callback = ProgressCallback(use_tqdm=True, output_stream=stream)
    state = a_state(is_world_process_zero=False)
    callback.on_train_begin(ARGS, state, TrainerControl())
    callback.on_prediction_step(ARGS, state, TrainerControl(), [1])
    callback.on_log(ARGS, state, TrainerControl(), RECORD)
    callback.on_evaluate(ARGS, state, TrainerControl(), {"eval_loss": 1.0}, None)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("interval_s", [0.02, 1.0, 7.0, 45.0])
def test_a_file_gets_at_most_a_kilobyte_in_any_minute(
    monkeypatch: pytest.MonkeyPatch, interval_s: float
) -> None:
    now_s = 0.0
    written: list[tuple[float, int]] = []

    class Timed(io.StringIO):
        def write(self, text: str) -> int:
            written.append((now_s, len(text.encode())))
            return super().write(text)

    callback = ProgressCallback(output_stream=Timed())
    callback._pace = TextPace(clock=lambda: now_s)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    state = a_state(max_steps=10**9)
    callback.on_train_begin(ARGS, state, TrainerControl())
    while now_s < 1200:
        now_s += interval_s
        state.global_step += 1
        callback.on_log(ARGS, state, TrainerControl(), RECORD)
        if state.global_step % 5 == 0:
            callback.on_evaluate(ARGS, state, TrainerControl(), {"eval_loss": 2.0}, None)
    for began_s, _ in written:
        assert sum(size for at, size in written if began_s <= at < began_s + 60) <= 1024
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(written)]
    assert max(gaps) < 60 and len(written) >= 25
    # Nor does a burst at the beginning leave the rest of the first minute without a line.
    assert interval_s > 10 or max(gaps[:8]) < 20
    if interval_s >= 45:
        assert len(written) == state.global_step + state.global_step // 5, "nothing is held back"


def test_two_instances_do_not_double_each_others_lines() -> None:
    first, second = io.StringIO(), io.StringIO()
    one = ProgressCallback(output_stream=first)
    two = ProgressCallback(output_stream=second)
    assert len(log_steps(one, RECORD)) == 2 and len(log_steps(two, RECORD)) == 2
    assert len(first.getvalue().splitlines()) == 2


class Endless:
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "most", "total"),
    [([1] * 7, -1, 7), ([1] * 7, 3, 3), ([1] * 2, 3, 2), (Endless(), 4, 4), (Endless(), -1, None)],
)
def test_the_bar_of_an_evaluation(loader: Any, most: int, total: int | None) -> None:
    callback = ProgressCallback(output_stream=Screen())
    args = SimpleNamespace(disable_tqdm=None, max_eval_steps=most)
    state = a_state()
    for _ in range(2):
        callback.on_prediction_step(args, state, TrainerControl(), loader)
    assert callback._eval_bar.total == total and callback._eval_bar.n == 2
    assert callback._eval_bar.leave, "there is no other bar"
    callback.on_evaluate(args, state, TrainerControl(), {"eval_loss": 1.234567}, loader)
    assert callback._eval_bar is None and "eval_loss: 1.23457" in callback.stream.getvalue()
    callback.on_prediction_step(args, state, TrainerControl(), loader)
    known = hasattr(loader, "__len__")
    assert callback._eval_bar.total == (total if known else 2), "it was read before"


def test_evaluations_without_eval_loss_or_batches_are_shown() -> None:
    stream = io.StringIO()
    callback = ProgressCallback(use_tqdm=True, output_stream=stream)
    metrics = {"val_accuracy": 0.5, "val_loss": float("nan"), "val_runtime": 3.0}
    callback.on_evaluate(ARGS, a_state(), TrainerControl(), metrics, None)
    assert "val_accuracy: 0.5  val_loss: nan" in stream.getvalue()
    assert "runtime" not in stream.getvalue()


def test_the_total_follows_the_length_of_the_run() -> None:
    callback = ProgressCallback(output_stream=Screen())
    state = a_state(max_steps=0)
    callback.on_train_begin(ARGS, state, TrainerControl())
    assert callback._bar.total is None
    state.max_steps = 7
    callback.on_log(ARGS, state, TrainerControl(), RECORD)
    assert callback._bar.total == 7
    callback.on_close(ARGS, state, TrainerControl())


def test_odd_values_are_shown_and_the_time_left_is_told() -> None:
    stream = io.StringIO()
    odd = {"epoch": None, "loss": float("nan"), "grad_norm": None, "peak_mem": [2**30, 2**31]}
    lines = log_steps(ProgressCallback(output_stream=stream), odd)
    assert lines[0].split()[-2:] == ["peak_mem", "ETA"]
    assert "nan" in lines[1] and "None" in lines[1] and "2.000 GiB" in lines[1]
    assert re.search(r"\d:\d\d:\d\d$", lines[1])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"header_interval": 0}, "header_interval must be an integer of at least 1, got 0"),
        ({"header_interval": 2.5}, "header_interval"),
        ({"header_interval": True}, "header_interval"),
        ({"output_stream": "stdot"}, "did you mean 'stdout'"),
        ({"output_stream": 3}, "output_stream must be stderr, stdout or an object"),
        ({"use_tqdm": "yes"}, "use_tqdm must be true, false or None"),
        ({"show_eta": 3}, "show_eta"),
        ({"step_columns": {"los": {"width": 5}}}, "did you mean 'loss'"),
        ({"final_metrics": {"runtime": None}}, "did you mean 'train_runtime'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ProgressCallback(**arguments)


def test_the_last_row_is_shown_although_it_came_too_soon() -> None:
    callback = ProgressCallback(output_stream=io.StringIO())
    lines = log_steps(
        callback, *[RECORD] * 50, {"train_runtime": 1.0, "train_samples": 9, "step": 50}
    )
    rows = [line for line in lines if "/100 " in line]
    assert 4 <= len(rows) < 12 and "step 50/100 " in rows[-1]
    assert lines[-4].endswith("Training summary") and lines[-5] == rows[-1]
