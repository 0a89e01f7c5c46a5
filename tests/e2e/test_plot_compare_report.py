"""`headway plot`, `compare` and `report` tell what the log of a run says."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import pytest

from headway.cli.main import main
from headway.testing import assert_no_import

START_S = 1_700_000_000


def write_run(folder, losses, *, learning_rate=0.1, extra=(), seconds_per_step=36):
    """A run that logged each of these losses, a step apart."""
    (folder / "run").mkdir(parents=True)
    config = {"args": {"learning_rate": learning_rate, "output_dir": folder.name}}
    (folder / "run/config.json").write_text(json.dumps(config))
    (folder / "run/environment.json").write_text(json.dumps({"versions": {"torch": "2.13"}}))
    records = [{"type": "start", "timestamp": START_S, "global_step": 0}]
    for step, loss in enumerate(losses, 1):
        records.append(
            {
                "type": "train",
                "timestamp": START_S + seconds_per_step * step,
                "global_step": step,
                "loss": loss,
                "total_tokens": 100 * step,
            }
        )
    records += extra
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "trainer_logs.jsonl").write_text(lines)


def run(capsys, *words, code=0):
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def curve(capsys, *words):
    return json.loads(run(capsys, "plot", *words, "--json"))["curves"][0]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "slow", [5.0, 4.0, 3.0, 2.0])
    write_run(tmp_path / "fast", [4.0, 2.0, 1.0], learning_rate=0.3, seconds_per_step=72)
    return tmp_path


def test_the_curve_is_that_of_the_log_on_every_axis(runs, capsys):
    found = curve(capsys, "slow")
    assert (found["x"], found["y"]) == ([1, 2, 3, 4], [5, 4, 3, 2])
    assert curve(capsys, "slow", "--by", "tokens")["x"] == [100, 200, 300, 400]
    hours = curve(capsys, "slow/trainer_logs.jsonl", "--by", "time")["x"]
    assert hours == pytest.approx([0.01, 0.02, 0.03, 0.04])
    smooth = curve(capsys, "slow", "--smooth", "0.5")["y"]
    assert smooth == pytest.approx([5, 13 / 3, 25 / 7, 41 / 15])


def test_the_time_between_a_stop_and_a_resume_is_not_training(runs, capsys):
    late_s = START_S + 10**6
    later = [
        {"type": "resume", "timestamp": late_s, "global_step": 2, "loaded_checkpoint": "ckpt"},
        {"type": "train", "timestamp": late_s + 36, "global_step": 3, "loss": "nan"},
        {"type": "eval", "timestamp": late_s + 36, "global_step": 3, "eval_loss": 2.5},
    ]
    write_run(runs / "resumed", [3.0, 2.0], extra=later)
    found = curve(capsys, "resumed", "--by", "time")
    assert found["x"] == pytest.approx([0.02 / 2, 0.02, 0.03]) and found["y"][2] is None
    by_tokens = curve(capsys, "resumed", "--metric", "eval_loss", "--by", "tokens")
    assert by_tokens["x"] == [200] and by_tokens["y"] == [2.5]


def test_curves_in_the_terminal(runs, capsys):
    text = run(capsys, "plot", "slow", "fast")
    assert "* slow" in text and "o fast" in text and "4 steps" in text
    rows = [line.split("|")[1] for line in text.splitlines() if "|" in line]
    assert rows[0].startswith("*") and rows[-1].rstrip().endswith("o")
    # A line falls from the upper left to the lower right without a gap.
    columns = {at for row in rows for at, mark in enumerate(row) if mark in "*o"}
    assert columns == set(range(max(columns) + 1))


def test_a_log_that_is_still_being_written(runs, capsys):
    with (runs / "slow/trainer_logs.jsonl").open("a") as file:
        file.write('{"type": "train", "global_st')
    assert curve(capsys, "slow")["y"] == [5, 4, 3, 2]


@pytest.mark.parametrize("name", ["curves.png", "deep/er/curves.html"])
def test_curves_in_a_file(runs, capsys, name):
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    assert name in run(capsys, "plot", "slow", "fast", "--output", name)
    data = (runs / name).read_bytes()
    if name.endswith(".png"):
        assert data.startswith(b"\x89PNG")
    else:
        assert b"slow" in data and b"fast" in data and b'src="http' not in data


def test_compare_tells_settings_and_curves(runs, capsys):
    facts = json.loads(run(capsys, "compare", "slow", "fast", "--json"))
    assert facts["config"] == {"args.learning_rate": [0.1, 0.3]} and facts["environment"] == {}
    by = {curve["by"]: curve for curve in facts["curves"]}
    assert by["step"]["at"] == 3 and by["step"]["values"] == [3, 1]
    assert by["step"]["difference"] == -2
    # Both reach 2: one in its fourth step after 0.04 hours, the other in its second.
    assert by["step"]["level"] == 2 and by["step"]["reached_at"] == [4, 2]
    assert by["time"]["reached_at"] == pytest.approx([0.04, 0.04])
    assert by["tokens"]["reached_at"] == [400, 200]
    text = run(capsys, "compare", "slow", "fast")
    assert "args.learning_rate  0.1  ->  0.3" in text and "output_dir" not in text


@pytest.mark.parametrize("losses", [[4.0, 3.0, "nan"], ["nan", 4.0, 3.0], [4.0, "inf", 3.0]])
def test_values_that_are_not_finite_are_told_and_are_no_best(runs, capsys, losses):
    write_run(runs / "strange", losses)
    (facts, *_) = json.loads(run(capsys, "compare", "slow", "strange", "--json"))["curves"]
    assert facts["level"] == 3 and facts["reached_at"] == [3, 1 + losses.index(3)]
    told = run(capsys, "compare", "slow", "strange")
    assert f"at 3 steps{'':4}3  ->  {losses[-1] if losses[-1] == 'nan' else 3}" in told
    write_run(runs / "hopeless", ["nan", "inf"])
    assert "never  ->  never" in run(capsys, "compare", "slow", "hopeless")


def test_of_two_records_of_one_step_the_later_one_counts(runs, capsys):
    """A command that changes the rate is recorded before the step after which it came."""
    rates = [(1, 0.1), (2, 0.05), (2, 0.1), (3, 0.05)]
    times = {"type": "train", "timestamp": START_S}
    extra = [{**times, "global_step": step, "learning_rate": rate} for step, rate in rates]
    write_run(runs / "steered", [], extra=extra)
    found = curve(capsys, "steered", "--metric", "learning_rate")
    assert (found["x"], found["y"]) == ([1, 2, 3], [0.1, 0.1, 0.05])


def test_what_was_rolled_back_is_in_no_curve(runs, capsys):
    def train(step, loss):
        tokens, seconds = 100 * step, START_S + 200 + step
        facts = {"type": "train", "global_step": step, "loss": loss, "total_tokens": tokens}
        return {**facts, "timestamp": seconds}

    rollback = {"type": "rollback", "timestamp": START_S + 190, "global_step": 2}
    extra = [train(6, 9.0), rollback, train(3, 2.5), train(5, 1.5)]
    write_run(runs / "back", [5.0, 4.0, 7.0, 8.0], extra=extra)
    found = curve(capsys, "back")
    assert (found["x"], found["y"]) == ([1, 2, 3, 5], [5, 4, 2.5, 1.5])
    assert curve(capsys, "back", "--by", "tokens")["x"] == [100, 200, 300, 500]
    hours = curve(capsys, "back", "--by", "time")["x"]
    assert hours == sorted(hours)


def test_a_log_elsewhere_is_found_from_anywhere(runs, capsys, monkeypatch):
    pytest.importorskip("plotly")
    elsewhere = runs / "logs"
    elsewhere.mkdir()
    (runs / "slow/trainer_logs.jsonl").rename(elsewhere / "trainer_logs.jsonl")
    sample = {"global_step": 2, "samples": [{"prompt": "once", "text": " upon"}]}
    (elsewhere / "eval_text.jsonl").write_text(json.dumps(sample) + "\n")
    config = {"args": {"logging_dir": "logs"}}
    (runs / "slow/run/config.json").write_text(json.dumps(config))
    (runs / "slow/run/environment.json").write_text(json.dumps({"directory": str(runs)}))
    monkeypatch.chdir(runs / "fast")
    assert curve(capsys, runs / "slow")["y"] == [5, 4, 3, 2]
    run(capsys, "report", runs / "slow")
    assert "once upon" in Page((runs / "slow/report.html").read_text()).texts["Samples"]


def test_levels_of_a_narrow_axis_can_be_told_apart(runs, capsys):
    write_run(runs / "narrow", [5.5401, 5.5412, 5.5423])
    text = run(capsys, "plot", "narrow")
    labels = [line.split("|")[0].strip() for line in text.splitlines() if "|" in line]
    assert len({label for label in labels if label}) == 3


class Page(HTMLParser):
    """Text by heading, and what the page would load."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.texts, self._heading, self._inside = [], {}, "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        self.loads += [v for k, v in attrs if k in ("src", "href")]

    def handle_data(self, data):
        if self._inside == "h2" and data.strip():
            self._heading = data
        elif self._inside not in ("script", "style"):
            self.texts[self._heading] = self.texts.get(self._heading, "") + data


def test_a_report_holds_all_and_loads_nothing(runs, capsys):
    pytest.importorskip("plotly")
    later = [
        {"type": "resume", "timestamp": START_S + 500, "global_step": 2, "loaded_checkpoint": "ck"},
        {"type": "train", "timestamp": START_S + 536, "global_step": 3, "loss": "nan"},
        {"type": "summary", "timestamp": START_S + 540, "global_step": 3, "train_runtime": 40.5},
    ]
    write_run(runs / "odd", [3.0, 2.0], extra=later)
    dump = {"global_step": 1, "error": "OSError: no disk"}
    (runs / "odd/last_metrics-rank1.json").write_text(json.dumps(dump))
    sample = {"prompt": "<script>alert(1)</script>", "text": "once upon"}
    record = {"type": "text", "global_step": 2, "samples": [sample]}
    (runs / "odd/eval_text.jsonl").write_text(json.dumps(record) + "\n")
    run(capsys, "report", "odd")
    page = Page((runs / "odd/report.html").read_text())
    assert page.loads == []
    assert "train_runtime" in page.texts[""] and "40.5" in page.texts[""]
    incidents = page.texts["Incidents"]
    assert (
        "resumed from ck, 428 s after the last record" in incidents
        and "not finite: loss" in incidents
    )
    assert incidents.strip().startswith("step 1a process failed and left last_metrics-rank1.json")
    assert "OSError: no disk" in incidents
    assert "<script>alert(1)</script>once upon" in page.texts["Samples"]
    assert "args.learning_rate" in page.texts["Configuration"]
    assert "versions.torch" in page.texts["Environment"]


def test_a_report_of_damaged_files_tells_what_can_be_read(runs, capsys):
    strange = [
        {"type": "train", "global_step": 5, "loss": 0.5, "timestamp": "soon"},
        {"type": "train", "global_step": None, "loss": 0.25, "timestamp": 1e300},
    ]
    write_run(runs / "damaged", [3.0, 2.0], extra=strange)
    samples = [{"global_step": 1, "samples": None}, {"samples": [{"text": "as it was"}, 7]}]
    text = "".join(json.dumps(one) + "\n" for one in samples)
    (runs / "damaged" / "eval_text.jsonl").write_text(text)
    (runs / "damaged" / "post_mortem.json").write_text('{"time": 1e300}')
    assert "written" in run(capsys, "report", "damaged")
    page = (runs / "damaged" / "report.html").read_text()
    assert "as it was" in page and "post_mortem.json cannot be read" in page


def test_a_report_of_a_real_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly")
    from headway.callbacks import JsonLogger
    from headway.testing import tiny_trainer

    monkeypatch.chdir(tmp_path)
    trainer = tiny_trainer(
        ".", [JsonLogger()], max_steps=4, logging_steps=1, save_strategy="steps", save_steps=2
    )
    trainer.train()
    text = run(capsys, "plot", "out")
    assert "4 steps" in text
    run(capsys, "report", "out", "--output", "page.html")
    page = Page((tmp_path / "page.html").read_text())
    listed = page.texts["Checkpoints"]
    assert "checkpoint-2" in listed and "checkpoint-4" in listed
    assert "None." in page.texts["Incidents"]


MISTAKES = {
    "a run that is not there": (["plot", "slw"], "did you mean slow"),
    "a folder without a log": (["report", "."], "holds no trainer_logs.jsonl"),
    "a metric that is not there": (["plot", "slow", "--metric", "los"], "did you mean 'loss'"),
    "an axis that is not there": (["plot", "slow", "--by", "tokn"], "did you mean 'tokens'"),
    "too much smoothing": (["plot", "slow", "--smooth", "1"], "--smooth"),
    "another kind of file": (["plot", "slow", "--output", "x.pdf"], "--output"),
    "a report as a picture": (["report", "slow", "--output", "x.png"], "Allowed: .html"),
    "an empty log": (["compare", "slow", "empty"], "holds no record"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(runs, capsys, name):
    (runs / "empty").mkdir()
    (runs / "empty/trainer_logs.jsonl").write_text("")
    before = sorted(runs.rglob("*"))
    words, message = MISTAKES[name]
    assert message in run(capsys, *words, code=2)
    assert sorted(runs.rglob("*")) == before


def test_curves_need_no_torch(runs):
    assert_no_import(["headway", "compare", "slow", "fast"], cwd=runs)


def test_many_points_keep_their_extremes():
    from headway.cli.charts import Line, _thin

    ys = [math.sin(x / 50) for x in range(40_000)]
    ys[12_345] = 9.0
    kept = _thin(Line("", range(40_000), ys).points())
    assert len(kept) < 6000 and (12_345, 9.0) in kept and kept == sorted(kept)
