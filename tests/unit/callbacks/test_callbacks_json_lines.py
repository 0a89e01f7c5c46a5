"""The log file itself: whole after a kill, cut where the checkpoint was made, never emptied."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.callbacks.log.json_lines import JsonLogWriter, log_folder
from headway.callbacks.log.json_reader import read_json_log
from headway.errors import ConfigError

FORMS = ["lines", "array"]


def write_steps(writer: JsonLogWriter, *steps: int, **data: Any) -> None:
    for step in steps:
        writer.write_record(step, step / 10, {"loss": 1.0 / step, **data})


def steps_in(path: Path) -> list[int]:
    return [record["global_step"] for record in read_json_log(path)]


def bytes_read() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


@pytest.mark.parametrize("form", FORMS)
def test_a_resume_drops_exactly_what_came_after_the_checkpoint(tmp_path: Path, form: str) -> None:
    writer = JsonLogWriter("log.json", form)
    writer.open(tmp_path)
    write_steps(writer, 1, 2, 3)
    state = json.loads(json.dumps(writer.state_dict()))
    writer.write_record(3, 0.3, {"eval_loss": 1.0}, type="eval")  # same step, after the save
    write_steps(writer, 4, 5)
    writer.close()

    again = JsonLogWriter("log.json", form)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.open(tmp_path, 3)
    assert again.state_dict() == {**state, "last_step": -1}
    write_steps(again, 4)
    again.close()
    assert steps_in(tmp_path / "log.json") == [1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["log.json"]
    if form == "array":
        assert len(json.loads((tmp_path / "log.json").read_text())) == 4


@pytest.mark.parametrize("form", FORMS)
def test_records_are_strict_json_whatever_they_hold(tmp_path: Path, form: str) -> None:
    writer = JsonLogWriter("log.json", form)
    writer.write_record(1, 0.0, {"loss": 1.0})  # closed: nothing happens
    writer.open(tmp_path)
    odd = {
        "nan": float("nan"), "inf": -float("inf"), "tensor": torch.tensor(2.5),
        "bf16": torch.ones(2, dtype=torch.bfloat16, requires_grad=True), "np": np.float32(0.5),
        "np_nan": np.array([1.0, np.nan]), "path": Path("x"), "set": {2, 1}, "none": None,
        1: "key", "line": "a\nb\u2028", "epoch": 7,
    }  # fmt: skip
    writer.write_record(3, 0.5, odd, type="eval")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    (line,) = [x for x in (tmp_path / "log.json").read_text().splitlines() if "{" in x]
    record = json.loads(line, parse_constant=refuse)
    assert record["nan"] == "nan" and record["inf"] == "-inf" and record["np_nan"] == [1.0, "nan"]
    assert record["tensor"] == 2.5 and record["bf16"] == [1.0, 1.0] and record["np"] == 0.5
    assert record["set"] == [1, 2] and record["1"] == "key" and record["line"] == "a\nb\u2028"
    assert record["epoch"] == 7 and record["type"] == "eval" and record["global_step"] == 3
    assert record["timestamp"] > 1e9


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", """
import itertools, sys
from headway.callbacks.log.json_lines import JsonLogWriter
writer = JsonLogWriter("log.jsonl")
writer.open(sys.argv[1])
for step in itertools.count(1):
    writer.write_record(step, 0.0, {"loss": 1.0, "text": "x" * (step % 700)})
    if step == 2000:
        print("go", flush=True)
""", str(tmp_path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    lines = (tmp_path / "log.jsonl").read_bytes().split(b"\n")
    steps = [json.loads(line)["global_step"] for line in lines[:-1]]
    assert lines[-1] == b"" and len(steps) >= 2000 and steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_state", [True, False])
def test_a_resume_reads_no_more_than_the_end_of_a_large_file(
    tmp_path: Path, form: str, with_state: bool
) -> None:
    path = tmp_path / "log.json"
    line = json.dumps({"global_step": 1, "epoch": 0.0, "loss": 1.0, "filler": "x" * 900})
    joint, end = ("\n", "\n") if form == "lines" else (",\n", "\n]")
    path.write_text(("[\n" if form == "array" else "") + joint.join([line] * 20_000) + end)
    inode, size = path.stat().st_ino, path.stat().st_size
    assert size > 18_000_000
    writer = JsonLogWriter("log.json", form)
    writer.open(tmp_path, 1)
    write_steps(writer, 2, 3)
    state = writer.state_dict()
    write_steps(writer, *range(4, 300))
    writer.close()

    again = JsonLogWriter("log.json", form)
    if with_state:
        again.load_state_dict(state)
    before = bytes_read()
    again.open(tmp_path, 3)
    taken = bytes_read() - before
    assert taken < (4_000 if with_state else 200_000)
    assert path.stat().st_ino == inode
    write_steps(again, 4)
    assert steps_in(path)[-4:] == [1, 2, 3, 4]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("torn", ['{"global_step": 4, "lo', "\0" * 5000, '{"a": 1', "\n"])
def test_a_torn_end_is_dropped_also_without_state(tmp_path: Path, form: str, torn: str) -> None:
    writer = JsonLogWriter("log.json", form)
    writer.open(tmp_path)
    write_steps(writer, 1, 2, 3)
    writer.close()
    path = tmp_path / "log.json"
    if form == "array":
        path.write_bytes(path.read_bytes()[:-2])
        torn = ",\n" + torn
    with path.open("a") as file:
        file.write(torn)
    assert steps_in(path) == [1, 2, 3]
    again = JsonLogWriter("log.json", form)
    again.open(tmp_path, 3)
    write_steps(again, 4)
    assert steps_in(path) == [1, 2, 3, 4]
    if form == "array":
        assert len(json.loads(path.read_text())) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["log.json"]


def test_a_file_shorter_than_the_checkpoint_knew_goes_on_where_it_ends(tmp_path: Path) -> None:
    writer = JsonLogWriter("log.jsonl")
    writer.open(tmp_path)
    write_steps(writer, 1, 2, 3)
    state = writer.state_dict()
    writer.close()
    path = tmp_path / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # what a power cut may lose
    again = JsonLogWriter("log.jsonl")
    again.load_state_dict(state)
    again.open(tmp_path, 3)
    write_steps(again, 4)
    assert steps_in(path) == [1, 2, 4]


@pytest.mark.parametrize("content", [b"garbage\nmore\n", b"\xff\xfe\x00" * 99, b'{"a": 1}\nx\ny\n'])
def test_a_damaged_file_is_kept_aside_and_never_emptied(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log.jsonl"
    for number in (1, 2):
        path.write_bytes(content)
        writer = JsonLogWriter("log.jsonl")
        writer.load_state_dict({"offset": 7, "last_size": 7, "last_crc": 1})
        writer.open(tmp_path, 5)
        write_steps(writer, 6)
        writer.close()
        assert (tmp_path / f"log.damaged-{number}.jsonl").read_bytes() == content
        assert writer.kept_aside == tmp_path / f"log.damaged-{number}.jsonl"
        assert steps_in(path) == [6]


@pytest.mark.parametrize("state", [{}, {"offset": "7"}, {"offset": 10**9, "last_size": 5}])
def test_records_dropped_without_the_checkpoints_word_are_kept(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    writer = JsonLogWriter("log.jsonl")
    writer.open(tmp_path)
    write_steps(writer, 1, 2, 3, 4)
    writer.close()
    again = JsonLogWriter("log.jsonl")
    again.load_state_dict(state)
    again.open(tmp_path, 2)
    write_steps(again, 3)
    assert steps_in(tmp_path / "log.jsonl") == [1, 2, 3]
    assert steps_in(tmp_path / "log.dropped-1.jsonl") == [3, 4]


def test_a_fresh_run_keeps_the_log_of_the_one_before(tmp_path: Path) -> None:
    for _ in range(3):
        writer = JsonLogWriter("log.jsonl")
        writer.open(tmp_path)
        write_steps(writer, 1)
        writer.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["log.jsonl", "log.old-1.jsonl", "log.old-2.jsonl"]


@pytest.mark.parametrize("form", FORMS)
def test_rewinding_an_open_log(tmp_path: Path, form: str) -> None:
    writer = JsonLogWriter("log.json", form)
    writer.rewind(3)  # closed: nothing happens
    writer.open(tmp_path)
    write_steps(writer, 1, 2)
    state = writer.state_dict()
    write_steps(writer, 3, 4)
    writer.load_state_dict(state)
    writer.rewind(2)
    write_steps(writer, 3)
    assert steps_in(tmp_path / "log.json") == [1, 2, 3]
    # The state was used up: a second start from here keeps all of it.
    writer.close()
    writer.open(tmp_path, 3)
    assert steps_in(tmp_path / "log.json") == [1, 2, 3]


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_leaves_whole_records(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = JsonLogWriter("log.json", form)
    writer.open(tmp_path)
    write_steps(writer, 1, 2)
    write = os.write

    def fill(file: int, data: bytes) -> int:
        write(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match="No space"):
        write_steps(writer, 3)
    assert steps_in(tmp_path / "log.json") == [1, 2]
    monkeypatch.undo()
    write_steps(writer, 4)
    writer.close()
    assert steps_in(tmp_path / "log.json") == [1, 2, 4]


def test_the_array_of_another_writer_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    records = [{"global_step": step, "loss": 1.0} for step in (1, 2, 3)]
    path.write_text("[\n" + ",\n".join(map(json.dumps, records)))  # not closed: it was killed
    assert steps_in(path) == [1, 2, 3]
    writer = JsonLogWriter("log.json", "array")
    writer.open(tmp_path, 2)
    write_steps(writer, 3)
    assert [record["global_step"] for record in json.loads(path.read_text())] == [1, 2, 3]
    path.write_text(json.dumps(records, indent=2))
    assert steps_in(path) == [1, 2, 3]


def test_reading_leaves_out_what_cannot_be_read_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"global_step": 1}\nbroken\n{"global_step": 2}\n{"global_st')
    assert steps_in(path) == [1, 2]
    assert "1 places cannot be read" in caplog.text
    path.write_text("")
    assert read_json_log(path) == []


def test_the_folder_is_one_that_a_resumed_run_has_too() -> None:
    from headway.args import TrainingArguments

    assert log_folder(TrainingArguments(output_dir="out")) == Path("out")
    assert log_folder(TrainingArguments(output_dir="out", logging_dir="logs")) == Path("logs")


@pytest.mark.parametrize("given", [("a/b.jsonl",), ("",), ("..",), ("log.json", "lins")])
def test_bad_arguments_are_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"file_name|did you mean 'lines'"):
        JsonLogWriter(*given)
