"""`headway diloco local`: a server and two workers as real processes, in one command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from launched import PROGRAM, started

from headway.checkpoint.tensors import read_shards

RUN = """\
model: {vocab_size: 64, hidden_size: 16, num_layers: 2, num_heads: 2, max_seq_len: 16}
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 64, sequence_length: 8, vocab_size: 64}
args:
  output_dir: out
  max_steps: 8
  per_device_train_batch_size: 2
  use_cpu: true
  seed: 1
"""
ENVIRON = {"OMP_NUM_THREADS": "1"}


def run_local(folder: Path, *words: str, more: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "run.yaml").write_text(RUN + more)
    return subprocess.run(
        [PROGRAM, "diloco", "local", "run.yaml", *words],
        cwd=folder,
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.timeout(200)
def test_two_workers_end_with_one_model(tmp_path: Path) -> None:
    done = run_local(tmp_path, "--workers", "2", "--sync-every", "4", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["num_rounds"] == 2 and facts["received_bytes"] > 0
    first, second = (
        read_shards(tmp_path / folder / "checkpoint-8", "model") for folder in facts["workers"]
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    logs = [
        [json.loads(line) for line in (tmp_path / w / "trainer_logs.jsonl").open()]
        for w in facts["workers"]
    ]
    losses = [[one["loss"] for one in log if "loss" in one] for log in logs]
    assert losses[0] != losses[1], "each worker has data of its own"
    assert any(one.get("diloco/sync_count") == 2 for one in logs[0])


@pytest.mark.timeout(200)
def test_what_the_run_file_and_the_environment_say_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_COMM", "int8")
    callback = "[{class_path: DiLoCoCallback, init_args: {sync_every: 4, num_fragments: 2}}]"
    done = run_local(tmp_path, "--workers", "2", "--json", more=f"callbacks: {callback}\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_rounds"] == 4, "two fragments, each twice in eight steps"
    ledger = [json.loads(line) for line in (tmp_path / "out/server/ledger.jsonl").open()]
    rounds = [line for line in ledger if line["kind"] == "round"]
    assert {one["comm"] for line in rounds for one in line["submissions"]} == {"int8"}


@pytest.mark.timeout(200)
def test_a_worker_that_fails_ends_all_with_its_code_and_words(tmp_path: Path) -> None:
    words = ("--workers", "2", "--sync-every", "8", "--num-fragments", "5")
    done = run_local(tmp_path, *words)
    assert done.returncode == 2
    assert "num_fragments=5: allowed are 1 to 2" in done.stderr
    assert "worker-" in done.stderr and "its log is out" in done.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_ctrl_c_and_a_lost_terminal_save_and_stop_all(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    command = (PROGRAM, "diloco", "local", "run.yaml", "--workers", "2", "--sync-every", "5")
    with started(*command, "--args.max_steps=1000000", environ=ENVIRON, cwd=tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "2/2 workers, round" in line and "round 1 has" not in line:
                break
        process.send_signal(sent)
        _, err = process.communicate(timeout=90)
    assert process.returncode == code, err
    for name in ("worker-0", "worker-1"):
        assert list((tmp_path / "out" / name).glob("checkpoint-*")), name
        log = (tmp_path / "out" / f"{name}.log").read_text()
        assert "stopped at step" in log and "Traceback" not in log
