"""`headway dashboard` and the dashboard of a run's own server, beside a real training."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headway.control import Client
from headway.control.discovery import list_jobs

pytest.importorskip("aiohttp")
WAIT_S = 240

TRAIN = """\
import pathlib
import sys
import time
from headway import Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import TrainerControlCallback
from headway.testing import tiny_dataset, tiny_decoder

out, max_steps, control = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "control"


class Hold(TrainerCallback):
    "Waits in the middle for a file that the last argument names."

    def on_step_end(self, state):
        while sys.argv[4:] and state.global_step == 100 and not pathlib.Path(sys.argv[4]).exists():
            time.sleep(0.01)


trainer = Trainer(
    args=TrainingArguments(
        output_dir=out,
        run_name="harbour",
        per_device_train_batch_size=2,
        max_steps=max_steps,
        logging_steps=1,
        save_strategy="no",
        lr_scheduler_type="constant",
        use_cpu=True,
        seed=3,
    ),
    model_init=tiny_decoder,
    train_dataset=tiny_dataset(64, sequence_length=16),
    callbacks=[Hold(), TrainerControlCallback()] if control else [],
)
trainer.train()
"""


class Dashboard:
    """The command in a process of its own."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "headway", "dashboard", *map(str, words)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        found = re.fullmatch(r"dashboard: http://127\.0\.0\.1:(\d+)/#token=([0-9a-f]{64})\n", line)
        assert found, (line, self.process.stderr.read() if not line else "")
        self.port, self.token = int(found[1]), found[2]

    def get(self, path):
        status, answer = ask(self.port, "GET", path, self.token)
        assert status == 200, (path, status, answer)
        return answer

    def post(self, path, body):
        status, answer = ask(self.port, "POST", path, self.token, body)
        assert status == 200, (path, status, answer)
        return answer

    def end(self, number=signal.SIGINT):
        if self.process.poll() is None:
            self.process.send_signal(number)
        said = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, said


def ask(port, method, path, token, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    headers = {"Authorization": f"Bearer {token}"}
    if body is not None:
        body, headers["Content-Type"] = json.dumps(body), "application/json"
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def wait_until(look):
    """What `look` returns once it is true."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        threading.Event().wait(0.05)
    raise AssertionError("it did not happen")


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts processes; ends those that are left."""
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    processes = []

    def start(kind, *words):
        if kind == "dashboard":
            found = Dashboard(*words)
            processes.append(found.process)
            return found
        command = [sys.executable, str(script), *map(str, words)]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def steer(dashboard, run, command, **data):
    """Send a command and wait for its receipt to be settled."""
    body = {"command": command, "data": data, "id": f"{command}-{len(data)}"}
    dashboard.post(f"/api/runs/{run}/control", body)
    path = f"/api/runs/{run}/commands/{body['id']}"
    return wait_until(lambda: (found := dashboard.get(path))["settled_at"] and found)


def test_a_training_is_watched_steered_and_unhurt(started, tmp_path):
    (tmp_path / "runs").mkdir()
    training = started("train", tmp_path / "runs" / "live", 1_000_000, "control")
    dashboard = started("dashboard", tmp_path / "runs")

    def listed():
        runs = dashboard.get("/api/runs")["runs"]
        return runs[0] if runs and runs[0]["step"] and runs[0]["latest"] else None

    first = wait_until(listed)
    assert first["state"] == "running" and first["controllable"]
    run = f"{first['id']}"

    def last_x():
        curve = dashboard.get(f"/api/runs/{run}/series?keys=loss")["series"]["loss"]
        assert len(curve["x"]) <= 1500
        return curve["x"][-1] if curve["x"] else 0

    seen = last_x()
    wait_until(lambda: last_x() > seen)
    receipt = steer(dashboard, run, "pause")
    assert receipt["state"] == "applied" and receipt["step"] >= seen
    wait_until(lambda: listed()["state"] == "paused")
    receipt = steer(dashboard, run, "set_learning_rate", scale=0.5)
    assert receipt["state"] == "applied", receipt
    assert steer(dashboard, run, "resume")["state"] == "applied"
    wait_until(lambda: listed()["state"] == "running")
    maps = Path(f"/proc/{dashboard.process.pid}/maps").read_text()
    assert "numpy" in maps and "libtorch" not in maps

    # The dashboard is killed; the run does not notice.
    assert dashboard.end(signal.SIGKILL)[0] == -signal.SIGKILL
    client = Client(list_jobs()[0])
    step = client.status()["global_step"]
    wait_until(lambda: client.status()["global_step"] > step)
    assert training.poll() is None

    # The run serves the same page about itself, and only itself.
    job = list_jobs()[0]
    port, token = job.endpoint.port, job.token("read")
    status, answer = ask(port, "GET", "/api/runs", token)
    assert status == 200 and [one["id"] for one in answer["runs"]] == [run]
    status, answer = ask(port, "GET", f"/api/runs/{run}/series?keys=loss,learning_rate", token)
    assert status == 200 and answer["series"]["loss"]["total"] >= step
    status, _ = ask(port, "POST", f"/api/runs/{run}/control", token, {"command": "abort"})
    assert status == 403

    dashboard = started("dashboard", tmp_path / "runs")
    assert steer(dashboard, run, "save_and_stop")["state"] == "applied"
    error = training.communicate(timeout=WAIT_S)[1]
    assert training.returncode == 0, error
    ended = wait_until(lambda: (found := listed())["state"] != "running" and found)
    assert ended["state"] == "stopped" and not ended["controllable"]
    (checkpoint,) = dashboard.get(f"/api/runs/{run}/checkpoints")["checkpoints"]
    assert checkpoint["state"] == "complete" and checkpoint["step"] == ended["step"]
    path = f"/api/runs/{run}/checkpoints/{checkpoint['name']}/verify"
    assert dashboard.post(path, {})["state"] == "verified"
    weights = next(Path(checkpoint["path"]).glob("model-*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert dashboard.post(path, {})["state"] == "damaged"
    (checkpoint,) = dashboard.get(f"/api/runs/{run}/checkpoints")["checkpoints"]
    assert checkpoint["state"] == "damaged" and weights.name in checkpoint["message"]
    said = dashboard.get(f"/api/runs/{run}/config")
    assert said["config"]["args.run_name"] == "harbour" and len(said["files"]) == 2
    status, answer = ask(
        dashboard.port, "POST", f"/api/runs/{run}/control", dashboard.token, {"command": "pause"}
    )
    assert status == 410 and "has ended" in answer["error"]

    code, (out, err) = dashboard.end()
    assert code == 130 and "Traceback" not in err
    assert dashboard.token not in err


def test_a_flood_of_its_dashboard_changes_nothing_in_a_run(started, tmp_path):
    seen = tmp_path / "seen"
    flooded = started("train", tmp_path / "flooded", 150, "control", seen)
    job = wait_until(lambda: next(iter(list_jobs()), None))
    port, token = job.endpoint.port, job.token("read")
    counts, over = {}, threading.Event()

    def flood():
        while not over.is_set():
            try:
                run = ask(port, "GET", "/api/runs", token)[1]["runs"][0]["id"]
                status, _ = ask(port, "GET", f"/api/runs/{run}/series?keys=loss,epoch", token)
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                status = None
            counts[status] = counts.get(status, 0) + 1
            if status == 200:
                seen.touch()

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        error = flooded.communicate(timeout=WAIT_S)[1]
    finally:
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert flooded.returncode == 0, error
    assert counts.get(200), counts
    assert list_jobs() == []
    quiet = started("train", tmp_path / "quiet", 150, "no control")
    assert quiet.wait(WAIT_S) == 0
    assert losses(tmp_path / "flooded") == losses(tmp_path / "quiet")
    assert len(losses(tmp_path / "quiet")) == 150


def losses(folder):
    lines = (folder / "trainer_logs.jsonl").read_text().splitlines()
    return [(r["global_step"], r["loss"]) for r in map(json.loads, lines) if r["type"] == "train"]


def test_mistakes_are_told_and_nothing_is_served(tmp_path):
    (tmp_path / "runs").mkdir()
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen()
    taken = str(held.getsockname()[1])
    cases = {
        (str(tmp_path / "rums"),): f"did you mean {tmp_path / 'runs'}?",
        ("--port", "70000"): "--port: must be 0 to 65535",
        ("--port", taken): "Address already in use",
        ("--host", "no.such.host.invalid"): "is no address of this machine",
        ("--red-only",): "did you mean --read-only?",
    }
    for words, message in cases.items():
        command = [sys.executable, "-m", "headway", "dashboard", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 2 and message in done.stderr, (words, done.stderr)
        assert done.stdout == "" and "Traceback" not in done.stderr
    held.close()
