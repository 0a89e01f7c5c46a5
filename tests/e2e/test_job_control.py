"""A real training process, steered by real `headway job` commands: every verb, to its effect."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import PROGRAM, started, wait_for

from headway.cli.job import COMMANDS
from headway.control import list_jobs

pytest.importorskip("aiohttp")

# Three runs one after the other in one process: the last two are there to be ended.
SCRIPT = '''\
import json
import time
from headway import Trainer
from headway.callbacks import TrainerControlCallback
from headway.data import ByteTokenizer, SyntheticDataset
from headway.models import Decoder, DecoderConfig

class Unhurried(SyntheticDataset):
    """While nothing is asked of the run it leaves the processor to others."""
    def __getitem__(self, index):
        time.sleep(0.005)
        return super().__getitem__(index)

data = Unhurried(num_samples=100000, sequence_length=16, vocab_size=258)
for name in ("steered-1", "stopped-1", "aborted-1"):
    config = DecoderConfig(vocab_size=258, hidden_size=16, num_layers=1, num_heads=2,
                           max_seq_len=64)
    trainer = Trainer(
        model=Decoder(config),
        args={"output_dir": name, "seed": 1, "use_cpu": True, "max_steps": 10**6,
              "lr_scheduler_type": "constant", "learning_rate": 1e-3, "logging_steps": 10**5,
              "save_steps": 10**6, "save_total_limit": None, "eval_strategy": "no",
              "max_eval_steps": 2, "per_device_train_batch_size": 2},
        train_dataset=data, eval_dataset=data, processing_class=ByteTokenizer(),
        callbacks=[TrainerControlCallback(job_id=name)],
    )
    trainer.train()
    print(json.dumps({"name": name, "step": trainer.state.global_step,
                      "outcome": trainer.state.outcome}), flush=True)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def call(*words: str, code: int = 0) -> tuple[str, str]:
    done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def send(*words: str, code: int = 0) -> dict[str, Any]:
    """A command's receipt, or the refusal."""
    return json.loads(call("job", *words, "--json", code=code)[0])


def status(job: str = "steered") -> dict[str, Any]:
    return send("status", job)


def wait_for_job(process: subprocess.Popen[str], name: str) -> None:
    """The job is served before its first step."""
    while not any(job.endpoint.job_id == name and job.alive for job in list_jobs()):
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)


def saved(name: str) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in Path(name).glob("checkpoint-*"))


@pytest.fixture
def process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with started(sys.executable, "train.py", cwd=folder, ask=False) as process:
        wait_for_job(process, "steered-1")
        yield process


@pytest.mark.timeout(300)
def test_every_verb_steers_a_run(folder: Path, process: subprocess.Popen[str]) -> None:
    tail = subprocess.Popen([PROGRAM, "job", "tail", "steered", "--json"], stdout=subprocess.PIPE)
    used = {"status", "tail"}

    def use(*words: str, code: int = 0) -> dict[str, Any]:
        used.add(words[0])
        return send(*words, code=code)

    listed, _ = call("jobs")
    assert "steered-1  training" in listed and str(folder / "steered-1") in listed

    receipt = use("save", "st")
    assert receipt["state"] == "applied" and saved("steered-1") == [receipt["step"]]

    paused = use("pause", "steered-1")["step"]
    assert (status()["status"], status()["global_step"]) == ("paused", paused)
    assert "paused already" in use("pause", "steered-1", code=4)["error"]
    receipt = use("save", "steered-1")
    assert receipt["step"] == paused, "a run that is held can be saved"
    assert use("resume", "steered-1")["step"] == paused
    assert use("set-lr", "steered-1", "0.002")["step"] > paused
    assert status()["learning_rate"] == pytest.approx(0.002)
    use("set-lr", "steered-1", "--scale", "0.5", "--once")
    assert status()["learning_rate"] == pytest.approx(0.001)

    assert "eval_loss" in use("eval", "steered-1")["message"]
    drawn = use("generate", "--prompt", "ab", "--max-new-tokens", "3")["message"]
    assert "1 sample is written" in drawn
    use("profile", "steered-1", "--steps", "2")
    use("extend", "steered-1", "2000000")
    assert status()["max_steps"] == 2_000_000
    assert use("extend", "steered-1", "1", code=4)["error"]
    use("log-level", "steered-1", "debug")

    # Mistakes, and commands that the run cannot follow, change nothing.
    before = status()
    for words, told in (
        (("set-lr", "steered-1", "fast"), "value must be a number"),
        (("resume", "steered-1"), "not paused"),
        (("save", "nobody"), "there is no job 'nobody'"),
    ):
        assert told in send(*words, code=4 if words[0] == "resume" else 2)["error"]
    after = status()
    assert after["global_step"] >= before["global_step"] and after["status"] == "training"
    assert after["learning_rate"] == before["learning_rate"]

    receipt = use("save-stop", "steered-1")
    assert saved("steered-1")[-1] == receipt["step"]
    assert tail.wait(60) == 0, "it ends with the run"
    assert tail.stdout is not None
    events = [json.loads(line) for line in tail.stdout]
    tail.stdout.close()
    told = {event["command"] for event in events if event["event"] == "command"}
    assert told == {COMMANDS[word] for word in used - {"status", "tail"}}
    assert events[-1]["event"] in ("end", "phase") and any(e["event"] == "end" for e in events)
    assert list(Path("steered-1").rglob("*trace*")), "profile wrote a trace"

    wait_for_job(process, "stopped-1")
    assert "there is no job 'steered-1'" in send("save", "steered-1", code=2)["error"]
    # The only one that runs need not be named.
    out, err = call("job", "stop")
    assert out.startswith("graceful_stop took effect") and "job: stopped-1" in err
    wait_for_job(process, "aborted-1")
    call("job", "abort", "ab")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    ends = {end["name"]: end for end in map(json.loads, out.splitlines())}
    assert [ends[name]["outcome"] for name in ends] == ["stopped", "stopped", "aborted"]
    assert ends["steered-1"]["step"] == receipt["step"]
    assert saved("stopped-1")[-1:] == [ends["stopped-1"]["step"]] and saved("aborted-1") == []
    assert call("jobs")[0] == "no job is running\n"
    assert {*used, "stop", "abort"} == {*COMMANDS, "status", "tail"}


def test_a_killed_job_misleads_nobody_and_its_successor_is_found(
    folder: Path, process: subprocess.Popen[str]
) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert "is gone" in send("save", "steered-1", code=3)["error"]
    assert "JOB is missing, and no job is running" in send("save", code=2)["error"]
    (gone,) = json.loads(call("jobs", "--json")[0])["jobs"]
    assert gone["status"] == "gone" and gone["post_mortem"]["error_type"] == "lost"
    with started(sys.executable, "train.py", cwd=folder, ask=False) as again:
        wait_for_job(again, "steered-1")
        (found,) = json.loads(call("jobs", "--json")[0])["jobs"]
        assert (found["job_id"], found["pid"], found["alive"]) == ("steered-1", again.pid, True)
        send("abort", "steered-1")


RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
trainer: ddp
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 100000, sequence_length: 16, vocab_size: 258}
args: {output_dir: out, seed: 1, use_cpu: true, max_steps: 1000000, logging_steps: 100000,
       lr_scheduler_type: constant, save_steps: 1000000, save_total_limit: null,
       per_device_train_batch_size: 2}
callbacks:
  control: {class_path: TrainerControlCallback, init_args: {job_id: pair}}
"""


@pytest.mark.timeout(300)
def test_two_ranks_under_the_launcher_by_commands_and_by_signals(folder: Path) -> None:
    (folder / "run.yaml").write_text(RUN)
    with started(PROGRAM, "train", "run.yaml", "--nproc", "2", cwd=folder) as process:
        wait_for(process, "job pair:")
        paused = send("pause", "pair")["step"]
        process.send_signal(signal.SIGUSR1)  # to the launcher, which asks one rank to save
        wait_for(process, "SIGUSR1: saving")
        assert send("resume", "pair")["step"] == paused
        receipt = send("save", "pair")
        assert receipt["step"] in saved("out")
        (early,) = set(saved("out")) - {receipt["step"]}
        assert early <= paused + 1, "SIGUSR1 saved and the run went on"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert f"stopped at step {saved('out')[-1]:,} by SIGTERM" in out
    assert call("jobs")[0] == "no job is running\n"
