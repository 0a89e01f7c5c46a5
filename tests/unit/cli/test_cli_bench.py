"""`headway bench`: what is measured, how rows are joined, and one real measurement."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.cli import bench
from headway.cli.bench_job import Job, Plan, Stopwatch
from headway.cli.main import main
from headway.dist.processes import identify, look_at
from headway.models.config import DecoderConfig

JOB = Job(
    name="tiny", width=16, layers=1, heads=2, kv_heads=1, ffn=32, vocabulary=32, length=8, batch=2
)
PLAN = Plan(
    system="decoder", job=JOB, compiled=False, steps=30, warmup=10, device="cpu", precision="no"
)


def row(system: str, *times_ms: float, compiled: bool = False, **more: Any) -> dict[str, Any]:
    step_ms = sorted(times_ms)[len(times_ms) // 2]
    return {
        "system": system,
        "compiled": compiled,
        "times_ms": list(times_ms),
        "step_ms": step_ms,
        "best_step_ms": min(times_ms),
        "tokens_per_s": 1000 / step_ms,
        "mfu": 1 / step_ms,
        "peak_bytes": 100,
        "first_step_s": 1.0,
        "matmul_flops": 1e12,
        "machine": {"device": "CPU", "torch": "2"},
        **more,
    }


def test_operations_are_counted_as_the_decoder_counts_them() -> None:
    for job in (JOB, bench.CPU_JOB, *bench.GPU_JOBS):
        config = DecoderConfig(
            vocab_size=job.vocabulary,
            hidden_size=job.width,
            intermediate_size=job.ffn,
            num_layers=job.layers,
            num_heads=job.heads,
            num_kv_heads=job.kv_heads,
        )
        assert job.matmul_parameters == config.num_matmul_parameters()
        assert job.flops_per_token == config.flops_per_token(job.length)


def test_times_are_those_of_whole_stretches_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("headway.cli.bench_job.time.perf_counter", lambda: clock[0])
    watch = Stopwatch(replace(PLAN, steps=40, warmup=20))
    watch.begin()
    for step in range(1, 41):
        # A slow start, ten steps of 1 s, ten of 2 s.
        clock[0] += 9.0 if step <= 20 else 1.0 if step <= 30 else 2.0
        watch.step()
    assert watch.first_train_s == 9.0
    assert watch.step_times_ms() == [1000.0, 2000.0]


def test_rounds_are_joined_and_compared_with_the_loop_around_the_same_model() -> None:
    rows = [
        row("bare", 10.0, 10.0),
        row("headway", 20.0),
        row("bare-decoder", 5.0),
        row("decoder", 10.0),
        row("headway", 10.0, compiled=True),
        row("headway", 10.0, 20.0, 30.0, peak_bytes=300),
    ]
    joined = {(r["system"], r["compiled"]): r for r in bench.join_rounds(rows)}
    assert joined["headway", False]["times_ms"] == [20.0, 10.0, 20.0, 30.0]
    assert joined["headway", False]["of_bare"] == 2.0
    assert joined["headway", False]["best_step_ms"] == 10.0
    assert joined["headway", False]["peak_bytes"] == 300
    assert joined["decoder", False]["of_bare"] == 2.0
    assert "of_bare" not in joined["headway", True]
    assert rows[1]["times_ms"] == [20.0]


def test_mfu_is_against_one_rate_so_that_its_ratios_are_those_of_speed() -> None:
    # Each found another rate of products, by its own of which it has an MFU of 1.
    rows = [
        row("bare", 10.0, mfu=1.0, matmul_flops=1e12),
        row("headway", 10.0, mfu=1.0, matmul_flops=2e12),
        row("decoder", 10.0, mfu=1.0, matmul_flops=4e12),
        {"system": "bare-decoder", "compiled": False, "error": "exit code 1: boom", "output": []},
        row("decoder", 5.0, 5.0, mfu=1.0, matmul_flops=8e12),
    ]
    joined = {r["system"]: r for r in bench.join_rounds(rows)}
    assert joined["bare"]["mfu"] == pytest.approx(1 / 2)
    assert joined["headway"]["mfu"] == pytest.approx(1)
    assert joined["decoder"]["mfu"] == pytest.approx(4 / 2 * 10 / 5)
    assert joined["headway"]["mfu_flops"] == 2e12
    assert "mfu" not in joined["bare-decoder"]


def test_a_job_is_chosen_that_fits() -> None:
    gib = 2**30
    assert bench.choose_job(None, quick=False) is bench.CPU_JOB
    assert bench.choose_job(140 * gib, quick=False) is bench.GPU_JOBS[0]
    assert bench.choose_job(8 * gib, quick=False).parameters < bench.GPU_JOBS[0].parameters
    assert bench.choose_job(gib // 2, quick=False) is bench.GPU_JOBS[-1]
    needs = [bench.estimate_bytes(job) for job in bench.GPU_JOBS]
    assert needs == sorted(needs, reverse=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "35"], "--steps: 35 given; allowed: a multiple of 10"),
        (["--steps", "20"], "30 or more"),
        (["--rounds", "0"], "--rounds: must be at least 1"),
        (["--systems", "lightnin"], "did you mean 'lightning'?"),
        (["--modes", "compild"], "did you mean 'compiled'?"),
        (["--step", "30"], "did you mean --steps?"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "measure_apart", lambda *args: pytest.fail("was run"))
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_system_without_its_package_is_left_out_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headway.errors import ConfigError

    monkeypatch.setattr("headway.cli.bench_systems.importlib.util.find_spec", lambda name: None)
    systems, left_out = bench.choose_systems(None, quick=False)
    assert systems == ["bare-decoder", "decoder"]
    assert left_out["lightning"] == "transformers"
    with pytest.raises(ConfigError, match="--systems: bare needs transformers"):
        bench.choose_systems(["bare", "decoder"], quick=False)


def test_the_table_tells_every_system_also_one_that_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(plan: Plan, command: list[str]) -> dict[str, Any]:
        asked.append((plan.system, plan.compiled, plan.steps))
        if plan.system == "decoder":
            failed = {"error": "exit code 1: boom", "output": ["Traceback", "boom"]}
            return {"system": plan.system, "compiled": plan.compiled, **failed}
        return row(plan.system, 10.0)

    monkeypatch.setattr(bench, "measure_apart", measure)
    words = ["bench", "--cpu", "--steps", "40", "--systems", "bare-decoder", "decoder"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert asked == [("bare-decoder", False, 40), ("decoder", False, 40)]
    assert "10.00    1.000" in out
    assert "exit code 1: boom" in out
    assert "MFU: of 1 TFLOP/s, the median" in out

    assert main([*words, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert [found.get("error") for found in facts["rows"]] == [None, "exit code 1: boom"]
    assert facts["job"]["layers"] == 4


def test_an_interrupt_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = ["bare-decoder"]

    def measure(plan: Plan, command: list[str]) -> dict[str, Any]:
        if plan.system not in measured:
            raise KeyboardInterrupt
        return row(plan.system, 10.0)

    monkeypatch.setattr(bench, "measure_apart", measure)
    words = ["bench", "--cpu", "--systems", "bare-decoder", "decoder"]
    assert main(words) == 130
    out = capsys.readouterr().out
    assert "10.00    1.000" in out and "stopped before the rest was measured" in out
    assert main([*words, "--json"]) == 130
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["rows"]) == 1 and facts["is_whole"] is False
    measured.clear()
    assert main(words) == 130
    told = capsys.readouterr()
    assert "interrupted" in told.err and "ms per step" not in told.out


def test_a_process_of_its_own_measures_a_system(tmp_path: Path) -> None:
    """The command line that the verb gives to itself, run here."""
    result = tmp_path / "result.json"
    task = json.dumps(PLAN.to_dict())
    assert main(["bench", "--quiet", "--task", task, "--result", str(result)]) == 0
    found = json.loads(result.read_text())
    assert found["system"] == "decoder"
    assert len(found["times_ms"]) == 2
    assert found["step_ms"] > 0
    assert found["first_step_s"] > found["first_train_s"] > 0
    assert found["peak_bytes"] > 2**20
    assert 2.5 < found["last_loss"] < 4.5


def test_headway_computes_what_the_bare_loop_does(tmp_path: Path) -> None:
    from headway.cli.bench_systems import SYSTEMS

    pytest.importorskip("transformers")
    losses = {}
    for name in ("bare", "headway"):
        plan = replace(PLAN, system=name, learning_rate=1e-2, warmup_rate_steps=5)
        losses[name] = SYSTEMS[name](plan, Stopwatch(plan), str(tmp_path / name))
    assert len(losses["bare"]) == PLAN.steps
    assert losses["headway"] == pytest.approx(losses["bare"], abs=1e-5)
    assert losses["bare"][-1] != losses["bare"][0]


def test_a_process_that_fails_is_a_row_with_its_last_words() -> None:
    code = "import sys; print('out of luck'); sys.exit(3)"
    found = bench.measure_apart(PLAN, [sys.executable, "-c", code])
    assert found["error"] == "exit code 3: out of luck"
    assert found["system"] == "decoder"


def test_a_result_that_was_not_written_to_its_end_is_a_failure() -> None:
    """As on a full disk; other systems' rows must not be lost with it."""
    code = """import sys
with open(sys.argv[-1], "w") as file:
    file.write('{"system": ')
sys.exit("OSError: [Errno 28] No space left on device")"""
    found = bench.measure_apart(PLAN, [sys.executable, "-c", code])
    assert found["error"] == "exit code 1: OSError: [Errno 28] No space left on device"


def test_no_room_for_a_folder_is_a_failure_of_that_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bench.tempfile, "TemporaryDirectory", full)
    found = bench.measure_apart(PLAN, [])
    assert found["error"] == "[Errno 28] No space left on device" and found["output"] == []


def test_sigterm_while_a_process_is_started_ends_it_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Struck(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Struck)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    try:
        with pytest.raises(SystemExit), bench._ending_by_sigterm():
            bench.measure_apart(PLAN, command, limit_s=60)
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].wait()


def test_sigterm_ends_the_process_that_is_measured_too() -> None:
    words = ["bench", "--quick", "--cpu", "--systems", "bare-decoder", "--steps", "1000000"]
    command = [sys.executable, "-m", "headway", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 90
        while not (found := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.05)
        measured = identify(int(found[0]))
        process.terminate()
        assert process.wait(60) == 143
    try:
        assert look_at(measured) == "gone"
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(found[0]), signal.SIGKILL)
