"""`headway bench`: how fast this machine trains with Headway, and with what one would use instead.

Owns: the choice of a job that fits the device, a process for each system, the table. Does not own:
the systems (bench_systems.py), how time and memory are taken (bench_job.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from headway.cli.bench_job import STRETCH, Job, Plan
from headway.errors import ConfigError, unknown

Row = dict[str, Any]

# Largest first. The last is small enough for any GPU.
GPU_JOBS = (
    Job(
        name="1.1B parameters", width=2048, layers=16, heads=32, kv_heads=8, ffn=8192,
        vocabulary=32768, length=4096, batch=4,
    ),
    Job(
        name="135M parameters", width=768, layers=12, heads=12, kv_heads=12, ffn=2048,
        vocabulary=32768, length=1024, batch=32,
    ),
    Job(
        name="135M parameters, small batch", width=768, layers=12, heads=12, kv_heads=12, ffn=2048,
        vocabulary=32768, length=1024, batch=8,
    ),
    Job(
        name="29M parameters", width=384, layers=8, heads=6, kv_heads=6, ffn=1024,
        vocabulary=16384, length=512, batch=8,
    ),
)  # fmt: skip
CPU_JOB = Job(
    name="the demo's model", width=128, layers=4, heads=4, kv_heads=4, ffn=384, vocabulary=258,
    length=128, batch=8,
)  # fmt: skip
MODES = ("eager", "compiled")
QUICK_SYSTEMS = ("bare", "headway", "bare-decoder", "decoder")
FULL_SYSTEMS = ("bare", "headway", "transformers", "lightning", "bare-decoder", "decoder")
_LEAST_STRETCHES = 2
_ROOM = 0.85
"""Share of the free memory that a job may be estimated to take."""
_LIMIT_S = 1800.0
_SHOWN_LINES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--quick", action="store_true", help="bare loops and Headway alone, eager")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of each run")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="times that each system runs"
    )
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help=f"of {', '.join(FULL_SYSTEMS)}, accelerate"
    )
    parser.add_argument(
        "--modes", nargs="+", metavar="MODE", help="eager, compiled; both by default on a GPU"
    )
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Measure each system in turn and print the table."""
    if options.task is not None:
        return _be_measured(options)
    _check(options)
    systems, left_out = choose_systems(options.systems, quick=options.quick)
    steps, warmup = choose_steps(options.steps, quick=options.quick)
    modes = None if options.modes is None else tuple(dict.fromkeys(options.modes))

    import torch

    from headway.cli.messages import print_json, write_line

    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    job = choose_job(torch.cuda.mem_get_info()[0] if device == "cuda" else None, options.quick)
    if modes is None:
        modes = MODES if device == "cuda" and not options.quick else MODES[:1]
    rows: list[Row] = []
    is_whole = False
    try:
        with _ending_by_sigterm():
            for plan in plans(systems, modes, options.rounds, job, device, steps, warmup):
                if not options.quiet:
                    write_line(f"{plan.system}, {_mode(plan.compiled)} ...")
                rows.append(measure_apart(plan, [sys.executable, "-m", "headway", "bench"]))
        is_whole = True
    except KeyboardInterrupt:
        if not rows:  # what was measured took minutes; without any there is nothing to tell
            raise
    facts: dict[str, Any] = {
        "job": dataclasses.asdict(job) | {"parameters": job.parameters},
        "device": device,
        "left_out": left_out,
        "is_whole": is_whole,
        "rows": join_rounds(rows),
    }
    if options.json:
        print_json(facts)
    else:
        _print(job, facts)
    if not is_whole:
        return 128 + signal.SIGINT
    return 1 if any("error" in row for row in facts["rows"]) else 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what the words alone show to be wrong."""
    problems: list[str] = []
    for choose, given in ((choose_systems, options.systems), (choose_steps, options.steps)):
        try:
            choose(given, quick=options.quick)
        except ConfigError as error:
            problems += error.problems
    if options.rounds < 1:
        problems.append(f"--rounds: must be at least 1, got {options.rounds}")
    modes = options.modes or ()
    problems += [f"--modes: {unknown('mode', mode, MODES)}" for mode in modes if mode not in MODES]
    if problems:
        raise ConfigError(problems)


@contextmanager
def _ending_by_sigterm() -> Iterator[None]:
    """SIGTERM raises, so that the process of a system ends with this one."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def choose_systems(given: Sequence[str] | None, *, quick: bool) -> tuple[list[str], dict[str, str]]:
    """The systems to measure, and those left out for want of a package; one asked for must be."""
    from headway.cli.bench_systems import SYSTEMS, lacking_package

    names = list(dict.fromkeys(given or (QUICK_SYSTEMS if quick else FULL_SYSTEMS)))
    problems = [unknown("system", name, SYSTEMS) for name in names if name not in SYSTEMS]
    known = [name for name in names if name in SYSTEMS]
    lacks = {name: package for name in known if (package := lacking_package(name)) is not None}
    if given:
        problems += [f"{name} needs {lacks[name]}, which is not installed" for name in lacks]
    if problems:
        raise ConfigError([f"--systems: {problem}" for problem in problems])
    return [name for name in names if name not in lacks], lacks


def choose_steps(given: int | None, *, quick: bool) -> tuple[int, int]:
    """Steps of a run, and how many of them come before the first time that counts."""
    steps = given if given is not None else (30 if quick else 60)
    warmup = STRETCH if steps < 6 * STRETCH else 2 * STRETCH
    least = STRETCH * (1 + _LEAST_STRETCHES)
    if steps < least or steps % STRETCH:
        raise ConfigError(
            f"--steps: {steps} given; allowed: a multiple of {STRETCH}, {least} or more (times are "
            f"taken over {STRETCH} steps)"
        )
    return steps, warmup


def estimate_bytes(job: Job) -> int:
    """About what training a job takes in bf16 around a model that keeps whole logits."""
    state = 16 * job.parameters
    blocks = job.tokens_per_step * job.layers * (14 * job.width + 7 * job.ffn)
    logits = 14 * job.tokens_per_step * job.vocabulary
    return state + blocks + logits


def choose_job(free_bytes: int | None, quick: bool) -> Job:
    """The largest job that fits a GPU with so much memory left; None stands for a CPU."""
    if free_bytes is None:
        return dataclasses.replace(CPU_JOB, batch=2) if quick else CPU_JOB
    fitting = (job for job in GPU_JOBS if estimate_bytes(job) <= _ROOM * free_bytes)
    return next(fitting, GPU_JOBS[-1])


def plans(
    systems: Sequence[str],
    modes: Sequence[str],
    rounds: int,
    job: Job,
    device: str,
    steps: int,
    warmup: int,
) -> Iterator[Plan]:
    """Systems take turns, so that a slow moment of the machine does not hit one of them alone."""
    for _ in range(rounds):
        for mode in modes:
            for system in systems:
                yield Plan(
                    system=system,
                    job=job,
                    compiled=mode == "compiled",
                    steps=steps,
                    warmup=warmup,
                    device=device,
                    # Few CPUs multiply in bf16 as fast as in float32.
                    precision="bf16" if device == "cuda" else "no",
                )


def measure_apart(
    plan: Plan,
    command: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    limit_s: float = _LIMIT_S,
) -> Row:
    """The figures of a plan, from a process of its own; `error` in place of them if it fails.

    `command` gets `--task` with the plan, and `--result` with the path of what it has to write.
    """
    # On a busy machine, threads that spin while they wait for each other multiply every time.
    variables = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
    try:
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            return _measure_in(Path(folder), plan, command, variables, limit_s)
    except OSError as error:  # no room for its files: rows that are there must not be lost
        return _failed(plan, str(error), [])


def _measure_in(
    folder: Path, plan: Plan, command: Sequence[str], variables: dict[str, str], limit_s: float
) -> Row:
    result, output = folder / "result.json", folder / "output.txt"
    plan = dataclasses.replace(plan, started_s=time.time())
    words = [*command, "--task", json.dumps(plan.to_dict()), "--result", str(result)]
    with output.open("w", encoding="utf-8") as file:
        try:
            problem = f"exit code {_run_process(words, variables, file, limit_s)}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s:.0f} s"
    # Without room on the disk it is there, and empty.
    with suppress(FileNotFoundError, ValueError):
        row: Row = json.loads(result.read_text(encoding="utf-8"))
        return row
    said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return _failed(plan, f"{problem}: {said[-1] if said else 'no output'}", said[-_SHOWN_LINES:])


def _run_process(words: list[str], variables: dict[str, str], output: Any, limit_s: float) -> int:
    """The exit code of a process that does not outlive this call."""
    from headway.optim.preserved import uninterrupted

    process: subprocess.Popen[bytes] | None = None
    try:
        # A signal that came before it has a name here would leave it running.
        with uninterrupted():
            process = subprocess.Popen(
                words, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        return process.wait(limit_s)
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _failed(plan: Plan, problem: str, output: list[str]) -> Row:
    return {
        "system": plan.system,
        "job": plan.job.name,
        "compiled": plan.compiled,
        "error": problem,
        "output": output,
    }


def _be_measured(options: argparse.Namespace) -> int:
    """In the process of a system."""
    from headway.cli.bench_systems import measure

    row = measure(Plan.from_dict(json.loads(options.task)))
    Path(options.result).write_text(json.dumps(row), encoding="utf-8")
    return 0


def join_rounds(rows: Sequence[Row]) -> list[Row]:
    """One row per system and mode: its median stretch, and its time as a share of the bare loop's.

    The reference decoder is compared with a bare loop around it, where there is one. MFU is against
    one rate for all, so that its ratios are those of speed.
    """
    import statistics

    joined: dict[tuple[str, bool], Row] = {}
    for row in rows:
        kept = joined.setdefault((row["system"], row["compiled"]), dict(row))
        if "error" in row or "error" in kept:
            kept.update({name: row[name] for name in ("error", "output") if name in row})
            continue
        if kept["times_ms"] is not row["times_ms"]:
            kept["times_ms"] = kept["times_ms"] + row["times_ms"]
        middle_ms = statistics.median(kept["times_ms"])
        kept["tokens_per_s"] *= kept["step_ms"] / middle_ms
        kept["mfu"] *= kept["step_ms"] / middle_ms
        kept["step_ms"], kept["best_step_ms"] = middle_ms, min(kept["times_ms"])
        kept["peak_bytes"] = max(kept["peak_bytes"], row["peak_bytes"])
    good = [row for row in joined.values() if "error" not in row]
    for row in good:
        row["mfu_flops"] = statistics.median(one["matmul_flops"] for one in good)
        row["mfu"] *= row["matmul_flops"] / row["mfu_flops"]
    for (system, compiled), row in joined.items():
        own = "bare-decoder" if "decoder" in system else "bare"
        base = joined.get((own, compiled), {})
        if "step_ms" in row and "step_ms" in base:
            row["of_bare"] = row["step_ms"] / base["step_ms"]
    return list(joined.values())


def _mode(compiled: bool) -> str:
    return MODES[compiled]


def _print(job: Job, facts: dict[str, Any]) -> None:
    from headway.cli.bench_systems import NAMES
    from headway.cli.messages import spell_bytes

    rows = facts["rows"]
    good = [row for row in rows if "error" not in row]
    if good:
        machine = good[0]["machine"]
        print(f"{machine['device']}, torch {machine['torch']}; {job.name}: {job.tell()}\n")
    lines = [("", "", "ms per step", "of bare", "tokens/s", "MFU", "first step", "memory")]
    for row in rows:
        name = (NAMES[row["system"]], _mode(row["compiled"]))
        if "error" in row:
            lines.append((*name, "failed", "", "", "", "", ""))
            continue
        of_bare = f"{row['of_bare']:.3f}" if "of_bare" in row else ""
        speed = (f"{row['step_ms']:.2f}", of_bare, f"{row['tokens_per_s']:,.0f}")
        rest = (f"{row['mfu']:.1%}", f"{row['first_step_s']:.1f} s", spell_bytes(row["peak_bytes"]))
        lines.append((*name, *speed, *rest))
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        left = [word.ljust(width) for word, width in zip(line[:2], widths)]
        right = [word.rjust(width) for word, width in zip(line[2:], widths[2:])]
        print("  ".join([*left, *right]).rstrip())
    if good:
        rates = [row["matmul_flops"] / 1e12 for row in good]
        print(
            f"\nMFU: of {good[0]['mfu_flops'] / 1e12:.3g} TFLOP/s, the median of the rates of a "
            f"large matrix product in these processes ({min(rates):.3g} to {max(rates):.3g})"
        )
    for row in rows:
        if "error" in row:
            print(f"\n{NAMES[row['system']]}, {_mode(row['compiled'])}: {row['error']}")
            print("\n".join(f"  {line}" for line in row["output"]))
    for system, package in facts["left_out"].items():
        print(f"left out: {NAMES[system]} ({package} is not installed)")
    if not facts["is_whole"]:
        print("stopped before the rest was measured")
