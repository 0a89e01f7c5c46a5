"""Logs as they grow, are torn, rewound, cut and replaced; curves with fewer points."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest

from headway.callbacks.log.json_lines import JsonLogWriter
from headway.control.dashboard.columns import Columns
from headway.control.dashboard.decimation import choose_points, smooth
from headway.control.dashboard.files import open_inside, read_end, read_object
from headway.control.dashboard.tail import LogTail
from headway.control.run_log import IncidentFinder, Place, Places, find_records, number_of

NAME = "trainer_logs.jsonl"


def line(step, **more):
    return json.dumps({"type": "train", "global_step": step, **more}) + "\n"


def steps(piece):
    return [record["global_step"] for record in piece.records]


# -- following a file -------------------------------------------------------------------------


def test_only_whole_lines_count_and_each_once(tmp_path):
    log, tail = tmp_path / NAME, LogTail(tmp_path, NAME)
    assert tail.read().records == []
    text, seen = line(1) + line(2) + line(3), []
    for cut in range(len(text) + 1):
        log.write_text(text[:cut])
        seen += steps(tail.read())
        assert seen == list(range(1, text[:cut].count("\n") + 1))
    with open(log, "a") as file:
        file.write('{"type": "train", "global_st')
    assert steps(tail.read()) == []
    with open(log, "a") as file:
        file.write('ep": 4}\n')
    assert steps(tail.read()) == [4]


def test_places_that_cannot_be_read_are_passed_over(tmp_path):
    log = tmp_path / NAME
    long = b'{"text": "' + b"x" * (3 << 20) + b'"}\n'
    log.write_bytes(
        line(1).encode()
        + b"\xff\xfe not json\n[1, 2]\n7\n\0\0\0"
        + line(2).encode()
        + long
        + b'{"global_step": 3, "nested": '
        + b"[" * 5000
        + b"\n"
        + line(4).encode()
    )
    tail, found = LogTail(tmp_path, NAME), []
    for _ in range(10):
        found += steps(tail.read())
    assert found == [1, 2, 4]


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    log, tail = tmp_path / NAME, LogTail(tmp_path, NAME)
    log.write_text(line(1, loss=1.0) + line(2, loss=2.0))
    assert steps(tail.read()) == [1, 2]
    other = tmp_path / "other"
    other.write_text(line(1, loss=9.0) + line(2, loss=9.0) + line(3, loss=9.0))
    os.replace(other, log)
    found = tail.read()
    assert found.anew and steps(found) == [1, 2, 3]


def test_another_file_with_the_same_end_is_read_anew_too(tmp_path):
    log, tail = tmp_path / NAME, LogTail(tmp_path, NAME)
    end = line(2, text="x" * 300)
    log.write_text(line(1, loss=1.0) + end)
    assert steps(tail.read()) == [1, 2]
    (tmp_path / "other").write_text(line(1, loss=9.0) + end)
    os.replace(tmp_path / "other", log)
    assert [record.get("loss") for record in tail.read().records] == [9.0, None]


def test_a_file_that_was_cut_and_has_grown_beyond_is_read_anew(tmp_path):
    log, tail = tmp_path / NAME, LogTail(tmp_path, NAME)
    log.write_text(line(1) + line(2, loss=2.0) + line(3, loss=3.0))
    assert steps(tail.read()) == [1, 2, 3]
    with open(log, "r+") as file:  # the same file, as a resumed run cuts it
        file.truncate(len(line(1)))
        file.seek(0, os.SEEK_END)
        file.write(line(2, loss=5.0) + line(3, loss=6.0) + line(4, loss=7.0))
    found = tail.read()
    assert found.anew and [r.get("loss") for r in found.records] == [None, 5.0, 6.0, 7.0]
    assert not tail.read().anew


@pytest.mark.parametrize("form", ["lines", "array"])
def test_both_forms_of_the_run_s_own_writer_are_followed(tmp_path, form):
    writer, tail = JsonLogWriter("log", form), LogTail(tmp_path, "log")
    writer.open(tmp_path)
    found = []
    for step in range(1, 6):
        writer.write_record(step, 0.0, {"loss": float(step)})
        piece = tail.read()
        assert piece.anew == (step == 1)
        found += steps(piece)
    writer.close()
    assert found == [1, 2, 3, 4, 5]


def test_a_large_log_comes_in_pieces(tmp_path):
    (tmp_path / NAME).write_text("".join(line(n, text="x" * 200) for n in range(20_000)))
    tail, found, num_pieces = LogTail(tmp_path, NAME), [], 0
    while True:
        piece = tail.read()
        num_pieces += 1
        found += steps(piece)
        if piece.at_end:
            break
    assert found == list(range(20_000)) and num_pieces >= 4


# -- links and other things in the place of files ---------------------------------------------


def test_nothing_leads_out_of_the_folder(tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "run_folder"
    (outside / "run").mkdir(parents=True)
    run.mkdir()
    (outside / "run" / "config.json").write_text('{"secret": 1}')
    (outside / NAME).write_text(line(1))
    (run / NAME).symlink_to(outside / NAME)
    (run / "run").symlink_to(outside / "run")
    assert LogTail(run, NAME).read().records == []
    assert read_object(run, "run", "config.json") is None
    assert read_object(outside, "run", "config.json") == {"secret": 1}
    assert read_end(run, NAME, 100) == b""
    for parts in (("..", "outside", NAME), ("../outside/" + NAME,), ("",), ("a\0b",), (".",)):
        with pytest.raises(OSError):
            open_inside(run, *parts)
    os.mkfifo(run / "pipe")
    with pytest.raises(OSError):  # and at once: nobody writes to it
        open_inside(run, "pipe")
    with pytest.raises(OSError):
        open_inside(outside, "run")


# -- fewer points -----------------------------------------------------------------------------


@pytest.mark.parametrize("most", [10, 11, 300, 1500])
@pytest.mark.parametrize("strange", [False, True])
def test_extremes_ends_and_order_survive(most, strange):
    rng = np.random.default_rng(0)
    xs, ys = np.arange(100_000.0), rng.normal(size=100_000)
    ys[31_234], ys[71_111] = 50.0, -60.0
    if strange:
        ys[[5, 500, 99_000]] = [math.nan, math.inf, -math.inf]
        ys[40_000:60_000] = math.nan
    kept = choose_points(xs, ys, most)
    assert len(kept) <= most and (np.diff(kept) > 0).all()
    assert {0, 99_999, 31_234, 71_111} <= set(kept.tolist())
    if strange:
        assert not np.isfinite(ys[kept]).all()


def test_every_stretch_keeps_its_lowest_and_highest():
    rng = np.random.default_rng(1)
    xs, ys = np.sort(rng.uniform(0, 1000, 30_000)), rng.normal(size=30_000)
    kept = choose_points(xs, ys, 202)
    stretch = np.minimum((xs - xs[0]) / (xs[-1] - xs[0]) * 100, 99).astype(int)
    for number in range(100):
        inside = ys[stretch == number]
        chosen = ys[kept][stretch[kept] == number]
        assert chosen.min() == inside.min() and chosen.max() == inside.max()


@pytest.mark.parametrize("weight", [1e-6, 0.01, 0.5, 0.9, 0.99])
def test_a_running_mean_is_that_of_its_definition(weight):
    ys = np.random.default_rng(0).normal(size=25_000)
    ys[[0, 7, 24_000]] = math.nan, math.inf, -math.inf
    mean = mass = 0.0
    expected = []
    for y in ys.tolist():
        if math.isfinite(y):
            mean, mass = weight * mean + (1 - weight) * y, weight * mass + (1 - weight)
        expected.append(mean / mass if math.isfinite(y) else math.nan)
    np.testing.assert_allclose(smooth(ys, weight), expected, rtol=1e-9, atol=1e-12)
    assert smooth(np.empty(0), weight).tolist() == []


def test_few_points_all_of_one_place_and_all_strange():
    few = np.arange(5.0)
    assert choose_points(few, few, 10).tolist() == [0, 1, 2, 3, 4]
    same, values = np.zeros(1000), np.arange(1000.0)
    kept = choose_points(same, values, 50)
    assert len(kept) <= 50 and {0, 999} <= set(kept.tolist())
    assert 2 <= len(choose_points(values, np.full(1000, math.nan), 50)) <= 50


# -- columns ----------------------------------------------------------------------------------


def fill(columns, numbers, shift=0.0):
    for step in numbers:
        columns.add(Place(float(step), step * 10.0, float(step)), {"loss": step + shift})


def test_the_later_record_of_a_step_wins():
    columns = Columns()
    fill(columns, range(1, 9))
    fill(columns, range(5, 7), shift=100.0)
    xs, ys = columns.get("loss").points("step")
    assert xs.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ys.tolist() == [1, 2, 3, 4, 105, 106, 7, 8]
    assert columns.get("loss").num_recorded == 8


def test_what_comes_after_the_step_of_a_resume_did_not_happen():
    columns = Columns()
    fill(columns, range(1, 9))
    columns.cut(4)
    fill(columns, range(5, 6), shift=100.0)
    assert columns.get("loss").points("tokens")[0].tolist() == [10, 20, 30, 40, 50]
    columns.cut(0)
    assert columns.names() == [] and columns.get("loss") is None


def test_memory_is_bounded_and_the_extremes_stay(monkeypatch):
    monkeypatch.setattr("headway.control.dashboard.columns._MOST_POINTS", 1000)
    monkeypatch.setattr("headway.control.dashboard.columns._MOST_POINTS_IN_ALL", 20_000)
    monkeypatch.setattr("headway.control.dashboard.columns._LEAST_POINTS", 64)
    monkeypatch.setattr("headway.control.dashboard.columns._MOST_METRICS", 100)
    columns = Columns()
    names = [f"m{n}" for n in range(120)]
    for step in range(3000):
        value = 1e6 if step == 777 else float(step % 7)
        columns.add(Place(float(step), None, 0.0), dict.fromkeys(names, value))
        if step % 50 == 49:
            columns.limit()
    assert len(columns.names()) == 100
    held = [columns.get(name) for name in columns.names()]
    assert sum(map(len, held)) <= 20_000
    assert all(column.points("step")[1].max() == 1e6 for column in held)
    assert held[0].num_recorded == 3000
    assert held[0].points("tokens")[0].tolist() == []


# -- records ----------------------------------------------------------------------------------


def test_time_counts_while_a_process_trains():
    places = Places()
    log = [
        {"type": "start", "global_step": 0, "timestamp": 100.0},
        {"type": "train", "global_step": 1, "timestamp": 110.0, "total_tokens": 5},
        {"type": "resume", "global_step": 1, "timestamp": 5000.0},
        {"type": "eval", "global_step": 2, "timestamp": 5003.0},
        {"type": "train", "global_step": "x", "timestamp": 5004.0},
    ]
    found = [places.find(record) for record in log]
    assert found[0] is None and found[2] is None and found[4] is None
    assert (found[1].seconds, found[1].tokens) == (10.0, 5.0)
    assert (found[3].seconds, found[3].tokens, found[3].step) == (13.0, 5.0, 2.0)


def test_a_clock_that_was_set_back_makes_no_time_below_nothing():
    finder = IncidentFinder()
    finder.look({"type": "train", "global_step": 4, "timestamp": 5000.0})
    resume = {"type": "resume", "global_step": 4, "loaded_checkpoint": "checkpoint-4"}
    (found,) = finder.look({**resume, "timestamp": 1400.0})
    assert found.message == "resumed from checkpoint-4"
    (found,) = finder.look({**resume, "timestamp": 2600.0})
    assert found.message == "resumed from checkpoint-4, 1,200 s after the last record"


def test_numbers_in_records():
    assert number_of(10**400) is None and number_of(True) is None and number_of("x") is None
    assert math.isnan(number_of([1, "nan", 3])) and number_of([1, 3.5, None]) == 3.5
    assert math.isinf(number_of("-inf"))
    assert list(find_records('{"a": 1}{"b": 2}\nbroken {\n{"c": 3}')) == [
        {"a": 1},
        {"b": 2},
        None,
        {"c": 3},
    ]
