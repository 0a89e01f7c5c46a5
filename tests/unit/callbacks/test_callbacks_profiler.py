"""Traces of steps: which, where, and that the profiler always ends."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway import TrainerCallback
from headway.callbacks import ProfilerCallback
from headway.callbacks.profile import profiler, trace_files
from headway.callbacks.profile.rank_choice import is_chosen
from headway.engine import timing
from headway.engine.state import TrainerControl, TrainerState
from headway.engine.timing import LoopTiming
from headway.errors import ConfigError
from headway.strategies.pipeline.layout import Layout
from headway.testing import tiny_trainer

FAST: dict[str, Any] = {
    "with_stack": False,
    "with_flops": False,
    "record_shapes": False,
    "table_rows": 5,
}
FOLDER = Path("out", "benchmarks", "profiles")


def profiling() -> bool:
    return bool(torch.autograd._profiler_enabled())


def traces(folder: Path) -> dict[str, list[str]]:
    """The steps that each trace holds, by the name of its file."""
    found = {}
    for path in sorted((folder / FOLDER).glob("*.chrome_trace.json*")):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = json.loads(text)["traceEvents"]
        names = {event.get("name", "") for event in events if event.get("ph") == "X"}
        assert any(name.startswith("aten::") for name in names)
        steps = {int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#")}
        found[path.name] = sorted(steps)
    return found


@pytest.fixture(autouse=True)
def never_left_on() -> Any:
    yield
    assert not profiling()


def test_one_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tiny_trainer(
        tmp_path, [ProfilerCallback(start_step=2, num_steps=2, **FAST)], max_steps=6
    ).train()
    assert traces(tmp_path) == {"rank-0-step-4.chrome_trace.json.gz": [3, 4]}
    tables = (tmp_path / FOLDER / "rank-0-step-4.tables.txt").read_text()
    assert "aten::" in tables and "own time on the host" in tables
    assert "profile of steps 3 to 4" in caplog.text and "own time on the host" in caplog.text
    assert not [p for p in (tmp_path / FOLDER).iterdir() if p.name.startswith(".")]


def test_opening_and_writing_are_no_part_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(timing, "clock", lambda: now[0])

    def slow(call: Any, seconds: float) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return call(*args, **kwargs)

        return run

    monkeypatch.setattr(profiler, "write_trace", slow(profiler.write_trace, 30.0))
    monkeypatch.setattr(profiler, "make_tables", slow(profiler.make_tables, 10.0))
    callback = ProfilerCallback(start_step=1, num_steps=1, **FAST)
    monkeypatch.setattr(callback, "_open", slow(callback._open, 2.0))
    trainer = tiny_trainer(tmp_path, [callback], max_steps=4)
    trainer.train()
    assert trainer.timing.aside_s == 42.0


def test_tables_hold_operations_and_no_lines_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(4, 4)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True
    ) as made:
        layer(torch.ones(1, 4))
    assert any(".py(" in event.key for event in made.key_averages())
    tables = trace_files.make_tables(made, has_cuda=False, num_rows=500)
    assert "aten::linear" in tables
    assert ".py(" not in tables and "built-in" not in tables and "nn.Module" not in tables
    # Nor is training held up for minutes by a trace of very many events.
    monkeypatch.setattr(trace_files, "MOST_EVENTS", 2)
    tables = trace_files.make_tables(made, has_cuda=False, num_rows=500)
    assert tables.startswith("no tables: the trace holds") and "fewer steps" in tables


def test_a_schedule_repeats(tmp_path: Path) -> None:
    callback = ProfilerCallback(
        skip_first=1, wait=1, warmup=1, active=1, repeat=2, compress=False, **FAST
    )
    tiny_trainer(tmp_path, [callback], max_steps=9, num_samples=32).train()
    assert traces(tmp_path) == {
        "rank-0-step-4.chrome_trace.json": [4],
        "rank-0-step-7.chrome_trace.json": [7],
    }
    assert callback.schedule == {"skip_first": 1, "wait": 1, "warmup": 1, "active": 1, "repeat": 2}


def test_parts_of_a_schedule_that_are_not_given_have_their_defaults() -> None:
    callback = ProfilerCallback(active=2)
    assert callback.schedule == {"skip_first": 0, "wait": 1, "warmup": 5, "active": 2, "repeat": 1}


def test_a_run_that_ends_early_still_gives_its_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, state: Any, control: Any) -> None:
            control.should_training_stop = state.global_step == 3

    callback = ProfilerCallback(start_step=1, num_steps=5, **FAST)
    tiny_trainer(tmp_path, [callback, Stop()], max_steps=8).train()
    (name, steps), *others = traces(tmp_path).items()
    assert name == "rank-0-step-3.chrome_trace.json.gz" and not others
    assert [step for step in steps if step <= 3] == [2, 3]


def test_an_error_ends_the_profiler_and_keeps_the_trace(tmp_path: Path) -> None:
    class Break(TrainerCallback):
        def on_gradients(self, state: Any) -> None:
            if state.global_step == 2:
                raise ValueError("broken")

    callback = ProfilerCallback(start_step=1, num_steps=5, **FAST)
    with pytest.raises(ValueError, match="broken"):
        tiny_trainer(tmp_path, [callback, Break()], max_steps=8).train()
    assert list(traces(tmp_path)) == ["rank-0-step-2.chrome_trace.json.gz"]


def test_a_folder_that_cannot_be_written_costs_the_trace_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("")
    callback = ProfilerCallback(
        start_step=1, num_steps=1, output_dir=str(tmp_path / "taken"), **FAST
    )
    trainer = tiny_trainer(tmp_path, [callback], max_steps=4)
    trainer.train()
    assert trainer.state.global_step == 4
    assert "ProfilerCallback" in caplog.text


def test_window_past_the_end_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_trainer(tmp_path, [ProfilerCallback(start_step=9, **FAST)], max_steps=3).train()
    assert "nothing will be profiled: steps 10 to 14 lie past the end of training" in caplog.text
    caplog.clear()
    tiny_trainer(tmp_path, [ProfilerCallback(start_step=2, **FAST)], max_steps=3).train()
    assert "cut short" in caplog.text
    assert list(traces(tmp_path)) == ["rank-0-step-3.chrome_trace.json.gz"]


def test_a_resumed_run_profiles_its_first_steps_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    arguments = {"num_samples": 32, "save_strategy": "steps", "save_steps": 2}
    tiny_trainer(tmp_path, [], max_steps=4, **arguments).train()
    callback = ProfilerCallback(start_step=1, num_steps=2, **FAST)
    tiny_trainer(
        tmp_path, [callback], max_steps=8, resume_from_checkpoint=True, **arguments
    ).train()
    assert "start_step=1 is behind step 4" in caplog.text
    assert traces(tmp_path) == {"rank-0-step-6.chrome_trace.json.gz": [5, 6]}
    again = ProfilerCallback(start_step=1, num_steps=2, **FAST)
    tiny_trainer(tmp_path, [again], max_steps=10, resume_from_checkpoint=True, **arguments).train()
    assert "not profiling again: the run has 1 of 1 traces" in caplog.text
    assert len(traces(tmp_path)) == 1


def test_traces_are_never_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        callback = ProfilerCallback(start_step=0, num_steps=1, profile_memory=True, **FAST)
        tiny_trainer(tmp_path, [callback], max_steps=1).train()
    assert list(traces(tmp_path)) == [
        "rank-0-step-1-2.chrome_trace.json.gz",
        "rank-0-step-1.chrome_trace.json.gz",
    ]


def test_off_means_off(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [ProfilerCallback(enabled=False)], max_steps=6).train()
    assert not (tmp_path / FOLDER).exists()


def test_other_ranks_than_the_chosen_do_nothing(tmp_path: Path) -> None:
    callback = ProfilerCallback(start_step=0, num_steps=1, ranks=[1], **FAST)
    args = SimpleNamespace(process_index=0, world_size=2, output_dir=str(tmp_path / "out"))
    strategy = SimpleNamespace(device=torch.device("cpu"))
    state, control = TrainerState(), TrainerControl()
    trainer = SimpleNamespace(strategy=strategy, timing=LoopTiming())
    callback.on_train_begin(args, state, control, trainer)
    callback.on_step_begin(args, state, control)
    assert not profiling()


def chosen(ranks: Any, num_ranks: int, **strategy: Any) -> list[int]:
    return [
        rank
        for rank in range(num_ranks)
        if is_chosen(
            ranks,
            SimpleNamespace(process_index=rank, world_size=num_ranks),
            SimpleNamespace(
                data_shard=lambda rank=rank: SimpleNamespace(rank=rank % 2 if strategy else rank),
                **strategy,
            ),
        )
    ]


def test_which_ranks(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(None, 4) == [0]
    assert chosen(0, 4) == [0]
    assert chosen([1, 3], 4) == [1, 3]
    assert chosen("all", 4) == [0, 1, 2, 3]
    assert chosen("dp", 4) == [0]
    assert not caplog.records
    # Two pipelines of two ranks each: ranks 0 and 2 are one, 1 and 3 the other.
    layout = Layout(num_ranks=2, num_replicas=2)
    assert chosen("dp", 4, layout=layout) == [0, 2]
    assert chosen("pp", 4, layout=layout) == [0, 1]
    for word in ("tp", "cp", "ep", "pp"):
        caplog.clear()
        assert chosen(word, 4) == [0]
        assert f"no groups of '{word}'" in caplog.text
    with pytest.raises(ConfigError, match=r"ranks: \[4\] given; allowed: 0 to 3"):
        chosen([0, 4], 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_steps": 0}, "num_steps: 0 given"),
        ({"start_step": -1}, "start_step: -1 given"),
        ({"active": 0}, "active: 0 given"),
        ({"wait": -2}, "wait: -2 given"),
        ({"with_stack": "no"}, "with_stack: 'no' given"),
        ({"ranks": "alle"}, "did you mean 'all'"),
        ({"ranks": [-1]}, r"ranks: \[-1\] given"),
        ({"ranks": []}, r"ranks: \[\] given"),
        ({"active": 1, "start_step": 7}, "active make a schedule and start_step=7"),
        ({"table_rows": 0}, "table_rows: 0 given"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ProfilerCallback(**options)


def test_a_second_run_of_one_object_is_profiled_as_well(tmp_path: Path) -> None:
    callback = ProfilerCallback(start_step=1, num_steps=1, **FAST)
    for name in ("one", "two"):
        tiny_trainer(tmp_path / name, [callback], max_steps=3).train()
        assert list(traces(tmp_path / name).values()) == [[2]]


@pytest.mark.parametrize("start_step", [1, 2])
def test_of_two_at_the_same_steps_the_first_profiles(
    start_step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two profilers of torch at once crash the process."""
    both = [
        ProfilerCallback(start_step=1, num_steps=3, **FAST),
        ProfilerCallback(start_step=start_step, num_steps=3, **FAST),
        ProfilerCallback(start_step=6, num_steps=1, **FAST),
    ]
    trainer = tiny_trainer(tmp_path, both, num_samples=64, max_steps=8)
    trainer.train()
    assert trainer.state.outcome == "completed" and not trainer.bus.disabled
    assert sorted(traces(tmp_path).values()) == [[2, 3, 4], [7]]
    assert caplog.text.count("another profiler is at work") == 1
