"""A real run steered from a real browser, by its own server and by `headway dashboard`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pages import wait_until

from headway.control.discovery import find_job, list_jobs

expect = pytest.importorskip("playwright.sync_api").expect

_HERE = Path(__file__).parent
_PROGRAM = Path(sys.executable).with_name("headway")


@contextmanager
def started(*command: Any, jobs: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HEADWAY_JOBS_DIR": str(jobs)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@contextmanager
def dashboard(*folders: Path, jobs: Path, options: tuple[str, ...] = ()) -> Iterator[str]:
    """The address that `headway dashboard` prints."""
    with started(_PROGRAM, "dashboard", *folders, *options, jobs=jobs) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("dashboard: ").strip()


def curve(key: str) -> str:
    return f"(document.querySelector('.plot[data-key={key}]')?.data?.at(-1) ?? {{x: [], y: []}})"


def watch_growth(page: Any, by: int) -> None:
    """Wait until the curve of the loss has more points than now."""
    wait_until(page, f"() => {curve('loss')}.x.length > 0")
    now = page.evaluate(f"{curve('loss')}.x.length")
    wait_until(page, f"least => {curve('loss')}.x.length >= least", now + by)


def command(page: Any, name: str, **fields: str) -> None:
    """Press a button, fill its dialog, send it and wait until the run has done it."""
    before = page.locator(f"#receipts li[data-command={name}]").count()
    page.click(f"[data-command={name}]")
    for field, value in fields.items():
        page.fill(f"#field-{field}", value)
    page.click("#ask-send")
    receipts = page.locator(f"#receipts li[data-command={name}]")
    expect(receipts).to_have_count(before + 1)
    expect(receipts.first).to_contain_text("applied after step")


def step_of(page: Any) -> int:
    return int(page.locator("#run-steps").get_attribute("data-step"))


def look_again(page: Any, times: int) -> None:
    """Until the page has asked for the status so many times more."""
    asked = [url for url in page.watched.requests if url.endswith("/status")]
    for _ in range(times):
        with page.expect_response(lambda answer: answer.url.endswith("/status")):
            pass
    assert len([u for u in page.watched.requests if u.endswith("/status")]) >= len(asked) + times


def test_a_run_is_watched_paused_changed_saved_and_stopped(
    open_page: Any, shoot: Any, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    program = (sys.executable, _HERE / "paced_run.py", tmp_path, 100_000, 0.03)
    with (
        started(*program, jobs=jobs) as run,
        dashboard(tmp_path, jobs=jobs) as address,
    ):
        beside = open_page(allow=("410",))
        beside.goto(address)
        # Through the dashboard, which finds the job when it has begun.
        expect(beside.locator("#run-state")).to_have_text("training", timeout=90_000)
        job = find_job("watched", jobs)
        # Through the run's own server.
        own = open_page(scheme="dark", allow=("net::ERR_",))
        own.goto(f"http://127.0.0.1:{job.endpoint.port}/#token={job.token()}")
        expect(own.locator("#run-state")).to_have_text("training")
        expect(own.locator("#run-list")).to_be_hidden()
        watch_growth(own, by=15)
        watch_growth(beside, by=15)
        shoot(own, "live-own")

        command(own, "pause")
        for page in (own, beside):
            expect(page.locator("#run-state")).to_have_text("paused")
            expect(page.locator("#run-note")).to_contain_text("Nothing is computed")
        held = step_of(own)
        look_again(own, 2)
        assert step_of(own) == held
        assert step_of(beside) == held
        shoot(own, "live-paused")

        command(beside, "resume")
        for page in (own, beside):
            expect(page.locator("#run-state")).to_have_text("training")
        watch_growth(own, by=5)
        assert step_of(own) > held

        command(own, "set_learning_rate", scale="0.5")
        expect(own.locator("#tiles [data-key=learning_rate] dd")).to_have_text("5.00e-4")
        wait_until(beside, f"() => Math.abs({curve('learning_rate')}.y.at(-1) - 5e-4) < 1e-9")
        assert beside.evaluate(f"{curve('learning_rate')}.y[0]") == pytest.approx(1e-3)
        own.locator(".plot[data-key=learning_rate]").scroll_into_view_if_needed()
        shoot(own, "live-learning-rate")

        command(own, "save_checkpoint")
        own.click("#tab-checkpoints")
        expect(own.locator("#panel-checkpoints tbody tr")).to_have_count(1)
        expect(own.locator("#panel-checkpoints")).to_contain_text("complete")
        shoot(own, "live-checkpoints")
        beside.click("#tab-checkpoints")
        beside.click("#panel-checkpoints button")
        expect(beside.locator("#panel-checkpoints")).to_contain_text("verified")
        beside.click("#tab-config")
        expect(beside.locator("#panel-config")).to_contain_text("args.learning_rate")

        beside.click("[data-command=graceful_stop]")
        beside.click("#ask-send")
        assert run.wait(timeout=60) == 0
        stopped = beside.locator("#receipts li[data-command=graceful_stop]")
        expect(stopped).to_contain_text("applied")
        expect(beside.locator("#run-state")).to_have_text("stopped")
        expect(beside.locator("#commands")).to_be_hidden()
        expect(own.locator("#trouble")).to_contain_text("headway dashboard")
        shoot(beside, "live-stopped")
        assert list_jobs(jobs) == []


def write_run(folder: Path, num_points: int, name: str = "loss", **config: Any) -> None:
    """The files of a run that has ended."""
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "config.json").write_text(json.dumps({"args": config}))
    start = {"type": "start", "timestamp": 1.79e9, "global_step": 0, "max_steps": num_points}
    with (folder / "trainer_logs.jsonl").open("w") as log:
        log.write(json.dumps(start) + "\n")
        for step in range(1, num_points + 1):
            values = {name: 8.0 / (1 + step / num_points) + (step % 7) / 50, "learning_rate": 1e-3}
            record = {"type": "train", "timestamp": 1.79e9 + step, "global_step": step, **values}
            log.write(json.dumps(record) + "\n")


def test_finished_runs_are_compared_however_long_and_whatever_they_hold(
    open_page: Any, shoot: Any, tmp_path: Path
) -> None:
    runs, evil = tmp_path / "runs", "<img src=x onerror=alert(1)>"
    write_run(runs / "long", 100_000, learning_rate=1e-3)
    write_run(runs / "short", 2_000, learning_rate=2e-3)
    write_run(runs / evil, 50, evil, note=evil, **{evil: evil})
    sample = {"global_step": 5, "prompt": evil, "text": evil, "output": evil}
    (runs / evil / "eval_text.jsonl").write_text(json.dumps(sample) + "\n")
    (runs / evil / f"checkpoint-5{evil}").mkdir()
    report = {"time": 1.79e9, "culprit_rank": evil, "error": evil, "traceback": evil}
    (runs / evil / "post_mortem.json").write_text(json.dumps(report))
    with dashboard(runs, jobs=tmp_path / "jobs") as address:
        page = open_page()
        page.goto(address)
        page.locator(".run").filter(has_text="long").locator(".run-open").click()
        wait_until(page, f"() => {curve('loss')}.x.at(-1) === 100000")
        assert 500 < page.evaluate(f"{curve('loss')}.x.length") < 4000
        expect(page.locator("figcaption").first).to_contain_text("of 100,000 points")
        page.locator(".run").filter(has_text="short").locator("input").check()
        traces = "document.querySelector('.plot[data-key=loss]').data.length"
        wait_until(page, f"() => {traces} === 2")
        shoot(page, "standalone-comparison")
        page.click("#tab-config")
        expect(page.locator(".diff")).to_contain_text("args.learning_rate")
        expect(page.locator(".diff")).to_contain_text("0.002")

        page.locator(".run").filter(has_text=evil).locator(".run-open").click()
        expect(page.locator("#run-name")).to_have_text(evil)
        for tab in ("config", "checkpoints", "samples", "incidents", "post_mortem", "charts"):
            page.click(f"#tab-{tab}")
            expect(page.locator(f"#panel-{tab} > *").first).to_be_attached()
        wait_until(page, "key => document.querySelectorAll('.plot .trace').length > 0", evil)
        shoot(page, "standalone-hostile")
        assert page.locator("img").count() == 0
        host = address.partition("/#")[0]
        assert all(url.startswith(host) for url in page.watched.requests)


def test_a_dashboard_that_only_shows_has_no_buttons(open_page: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", 10)
    with dashboard(tmp_path / "runs", jobs=tmp_path / "jobs", options=("--read-only",)) as address:
        page = open_page(allow=("401",))
        page.goto(address)
        expect(page.locator("#role")).to_have_text("read only")
        expect(page.locator("#run-name")).to_have_text("one")
        page.click("#tab-checkpoints")
        expect(page.locator("#panel-checkpoints button")).to_have_count(0)
        other = open_page(allow=("401",))
        other.goto(address.partition("#")[0] + "#token=" + "0" * 64)
        expect(other.locator("#sign-in-why")).to_contain_text("does not accept this token")
