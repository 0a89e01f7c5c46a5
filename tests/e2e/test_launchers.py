"""Every way of starting ranks: two machines, another number of them, Slurm, accelerate launch."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from launched import TRAIN, errors, losses, started

from headway.cli.main import main
from headway.dist.rendezvous import _PORTS

RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 2, num_heads: 2, max_seq_len: 32}
trainer: ddp
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 100000, sequence_length: 16, vocab_size: 258}
args: {output_dir: out, seed: 1, use_cpu: true, max_steps: 8, logging_steps: 1,
       lr_scheduler_type: constant, save_steps: 3, per_device_train_batch_size: 2,
       global_batch_size: 8}
"""

# The last rank says that it has come to a step, and waits there.
HOLD = """\
import os, sys
from headway import TrainerCallback

class Hold(TrainerCallback):
    def on_step_end(self, state):
        last = os.environ["RANK"] == "1"
        if state.global_step == 5 and last and os.path.exists("gate"):
            while not os.path.exists("out/checkpoint-3"):
                pass  # it is written in the background
            open("held", "w").write(str(os.getpid()))
            open("gate").read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "holding.py").write_text(HOLD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_all(*commands: tuple[tuple[str, ...], dict[str, str]]) -> list[tuple[int, str, str]]:
    """Commands side by side: the exit code and what each of them said."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(*words, environ=environ)) for words, environ in commands
        ]
        said = [process.communicate(timeout=200) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, said)]


def run(*words: str, **environ: str) -> tuple[int, str, str]:
    return run_all((words, environ))[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process, without ranks."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "run.yaml").write_text(RUN)
    words = ("--trainer=single", f"--args.output_dir={folder}/out")
    assert main(["-q", "train", str(folder / "run.yaml"), *words]) == 0
    found = losses(folder / "out")
    assert sorted(found) == list(range(1, 9))
    return found


def test_two_machines_meet_at_an_endpoint(folder: Path, alone: dict[int, float]) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    words = (*TRAIN, "--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", endpoint)
    said = run_all((words, {}), (words, {}))
    assert [code for code, _, _ in said] == [0, 0], said
    out, err = "".join(out for _, out, _ in said), "".join(err for _, _, err in said)
    assert out.count("trained 8 steps") == 1, "one report"
    assert err.count("step 8/8") == 1
    assert err.count(f"--nnodes 2 --rdzv-backend c10d --rdzv-id headway --rdzv-endpoint {endpoint}")
    assert losses(folder / "out") == pytest.approx(alone, rel=1e-5)


def test_a_rank_that_fails_on_one_machine_is_named_on_both(folder: Path) -> None:
    (folder / "holding.py").write_text(HOLD.replace('open("gate").read()', "os.abort()"))
    os.mkfifo(folder / "gate")
    endpoint = f"127.0.0.1:{free_port()}"
    words = (*TRAIN, "--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", endpoint)
    command = ((*words, "--callbacks=[holding.Hold]"), {})
    for code, _, err in run_all(command, command):
        last = errors(err)[-1]
        # The launcher of the lost rank knows only its own.
        assert code == 1 and re.search("rank 1 (of 2 )?was lost: its process is gone", last), err


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_machine_that_leaves_is_done_without(folder: Path, alone: dict[int, float]) -> None:
    """Two machines, then one: the run goes on from its newest checkpoint by itself."""
    os.mkfifo(folder / "gate")
    endpoint = f"127.0.0.1:{free_port()}"
    words = (*TRAIN, "--nproc", "1", "--nnodes", "1:2", "--rdzv-endpoint", endpoint,
             "--max-restarts", "3", "--callbacks=[holding.Hold]")  # fmt: skip
    # How long torchrun waits for further machines once it has enough.
    quick = {"PET_RDZV_CONF": "last_call_timeout=3"}
    with started(*words, environ=quick) as first, started(*words, environ=quick) as second:
        held = folder / "held"
        while not (held.exists() and held.read_text()):
            assert first.poll() is None and second.poll() is None
            signal.sigtimedwait([], 0.05)
        # Which of the two has rank 1 is torchrun's choice; that one goes, with all it started.
        rank = int(held.read_text())
        leaves, stays = (first, second) if launcher_of(rank) == first.pid else (second, first)
        os.killpg(torchrun_of(rank), signal.SIGKILL)
        leaves.kill()
        out, err = stays.communicate(timeout=200)
    assert stays.returncode == 0, err
    assert "rank 1 of 2 was lost" in err
    assert "resuming from" in err and "out/checkpoint-3" in err, err
    assert "trained 8 steps" in out
    assert losses(folder / "out") == pytest.approx(alone, rel=1e-5)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def torchrun_of(rank: int) -> int:
    return parent_of(rank)


def launcher_of(rank: int) -> int:
    return parent_of(torchrun_of(rank))


@pytest.mark.slow
def test_a_run_stopped_on_four_ranks_goes_on_with_two(
    folder: Path, alone: dict[int, float]
) -> None:
    words = (*TRAIN, "--trainer=fsdp2")
    code, out, err = run(*words, "--nproc", "4", "--args.stop_at=4 steps")
    assert code == 0 and "checkpoint-4" in out, err
    code, out, err = run(*words, "--nproc", "2")
    assert code == 0 and "out/checkpoint-4" in err, err
    assert losses(folder / "out") == pytest.approx(alone, rel=1e-5)


def slurm_task(rank: int, job: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
    }


def free_job() -> int:
    """A job from whose number a free port follows."""
    for number in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", _PORTS[number % len(_PORTS)])) != 0:
                return number
    raise AssertionError("no free port")


def test_tasks_of_a_slurm_job_are_ranks(folder: Path, alone: dict[int, float]) -> None:
    job = free_job()
    said = run_all(*((TRAIN, slurm_task(rank, job)) for rank in range(2)))
    assert [code for code, _, _ in said] == [0, 0], said
    assert said[0][1].count("trained 8 steps") == 1 and said[1][1] == ""
    assert losses(folder / "out") == pytest.approx(alone, rel=1e-5)


def test_a_mistake_in_a_slurm_job_is_told_once(folder: Path) -> None:
    job, words = free_job(), (*TRAIN, "--args.per_device_train_batch_size=3")
    said = run_all(*((words, slurm_task(rank, job)) for rank in range(2)))
    assert [code for code, _, _ in said] == [2, 2], said
    told = [line for _, _, err in said for line in errors(err)]
    assert len(told) == 1 and "global_batch_size" in told[0], said


@pytest.mark.parametrize("trainer", [pytest.param("ddp", marks=pytest.mark.slow), "accelerate"])
def test_accelerate_launch_starts_ranks(
    trainer: str, folder: Path, alone: dict[int, float]
) -> None:
    pytest.importorskip("accelerate")
    if trainer == "accelerate":  # there the accumulation is the Accelerator's
        settings = yaml.safe_load(RUN)
        settings["args"].pop("global_batch_size")
        settings["args"]["gradient_accumulation_steps"] = 2
        (folder / "run.yaml").write_text(json.dumps(settings))
    # With --cpu it would silently start one process; the run file says that no GPU is used.
    code, out, err = run(
        str(Path(sys.executable).with_name("accelerate")), "launch", "--multi_gpu",
        "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0",
        "-m", "headway", "train", "run.yaml", f"--trainer={trainer}",
    )  # fmt: skip
    assert code == 0, err
    assert out.count("trained 8 steps") == 1
    assert "parallel_layout: " in err and ", 2 ranks" in err
    assert losses(folder / "out") == pytest.approx(alone, rel=1e-5)
