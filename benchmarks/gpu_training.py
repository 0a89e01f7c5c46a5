"""Training on one GPU: Headway beside what one would use instead, as ratios of one run.

Job A is a Llama shape 768 wide with 12 layers, job B 2,048 wide with 16 (sizes: gpu_jobs.py).
Recipe: bf16 autocast over float32 weights, fused AdamW, clipping at 1.0, cosine schedule, a log
record every ten steps. Each system trains in a process of its own, with the same random tokens in
the same order through its usual loader (no worker processes: a batch is a stack of ready rows, a
small part of a step), and for the systems around transformers' model the same weights; their losses
have to agree. Time is taken over stretches of ten steps, by events in the device's queue that are
read when the run is over; the figure is the median stretch, the best is told too. The first
round begins with empty compiler caches, later ones with those of the first. MFU is against the rate
of a bf16 matrix product, measured in each process right after training; operations of a token are
counted as 6 x matmul parameters (head included, embedding not) + 6 x layers x width x length.

    python benchmarks/gpu_training.py [--jobs A B] [--modes eager compiled] [--only bare ...]
                                      [--steps 60] [--rounds 1] [--append FILE.jsonl]
    python benchmarks/gpu_training.py --curve [--append FILE.jsonl]     # 1,000 steps on real text
    python benchmarks/gpu_training.py --report FILE.jsonl [--write]     # the tables, goals beside
    python benchmarks/gpu_training.py --tiny     # on a CPU, to see that it runs; times mean nothing
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.cli import bench
from headway.cli.bench_job import Plan

GIB = 2**30
Row = dict[str, Any]
CURVES = {
    # name: (system, compiled)
    "bare loop": ("bare", False),
    "bare loop, once more": ("bare", False),
    "bare loop, compiled": ("bare", True),
    "Headway, same model": ("headway", False),
    "Headway, reference decoder": ("curve-decoder", True),
    "Headway, reference decoder, `flash4`": ("curve-decoder-flash4", True),
    "Headway, reference decoder, FP8": ("curve-decoder-fp8", True),
}
BARE_CURVES = ("bare loop", "bare loop, once more")
SMOOTHING_STEPS = 50
WHOSE = {
    "bare": "the bare loop's",
    "transformers": "HF Trainer's",
    "lightning": "Lightning's",
    "careful": "the careful loop's",
}


def main() -> int:
    options = read_options()
    if options.task:
        run_task(json.loads(options.task), Path(options.result))
        return 0
    if options.report:
        rows = [json.loads(line) for line in Path(options.report).read_text().splitlines() if line]
        text = report(rows)
        print(text)
        if options.write:
            name = f"gpu-training-{datetime.date.today()}.md"
            (Path(__file__).parent / "results" / name).write_text(text, encoding="utf-8")
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for task in curve_tasks(options) if options.curve else tasks(options):
            row = measure_apart(task, Path(options.cache or folder), options.timeout)
            rows.append(row)
            print(tell(row), flush=True)
            if options.append:
                with open(options.append, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"\n{report(rows)}")
    return 1 if any("error" in row for row in rows) else 0


def read_options() -> argparse.Namespace:
    from gpu_jobs import ALL_SYSTEMS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=["A", "B"], default=["A", "B"])
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"])
    parser.add_argument("--only", nargs="+", choices=list(ALL_SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run (60)")
    parser.add_argument("--warmup", type=int, default=20, help="steps without a time")
    parser.add_argument("--rounds", type=int, default=1, help="times that each system runs")
    parser.add_argument("--append", metavar="FILE", help="add the rows to this file (JSON Lines)")
    parser.add_argument("--report", metavar="FILE", help="make tables of such a file; runs nothing")
    parser.add_argument("--write", action="store_true", help="the report into benchmarks/results/")
    parser.add_argument("--cache", metavar="DIR", help="keep compiler caches here between runs")
    parser.add_argument("--curve", action="store_true", help="losses on real text")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--timeout", type=float, default=480.0, help="seconds a run may take")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


# What is run


def tasks(options: argparse.Namespace) -> Iterator[Row]:
    """Systems take turns within a round, so that a slow moment of the machine is not one's own."""
    from gpu_jobs import ALL_SYSTEMS, JOBS, TINY, is_measured

    jobs = TINY if options.tiny else JOBS
    modes = options.modes or (["eager"] if options.tiny else ["eager", "compiled"])
    for number in range(options.rounds):
        for name in options.jobs:
            for mode in modes:
                for system in options.only or ALL_SYSTEMS:
                    compiled = mode == "compiled"
                    if options.only or is_measured(system, name, compiled):
                        plan = {"system": system, "job": jobs[name], "compiled": compiled}
                        yield new_task(options, plan, steps=60) | {"round": number}


def curve_tasks(options: argparse.Namespace) -> Iterator[Row]:
    from gpu_jobs import CURVE, TINY_CURVE

    for name, (system, compiled) in CURVES.items():
        if options.tiny and system.endswith("flash4"):  # has no kernels for a CPU
            continue
        plan = {
            "system": system,
            "job": TINY_CURVE if options.tiny else CURVE,
            "compiled": compiled and not options.tiny,
            "learning_rate": 1e-3,
            "warmup_rate_steps": 50,
            "text": True,
        }
        yield new_task(options, plan, steps=120 if options.tiny else 1000) | {"curve": name}


def new_task(options: argparse.Namespace, plan: Row, steps: int) -> Row:
    import torch

    steps = options.steps or steps
    warmup = min(options.warmup, steps - 20)
    if warmup < 1 or steps % 10:
        raise SystemExit(f"--steps: {steps} given; allowed: a multiple of 10, at least 30")
    device = "cpu" if options.tiny or not torch.cuda.is_available() else "cuda"
    return {"plan": Plan(**plan, steps=steps, warmup=warmup, device=device).to_dict()}


def measure_apart(task: Row, caches: Path, timeout_s: float) -> Row:
    """A task's row, from a process of its own; one that fails has the row of its error."""
    plan = task["plan"]
    mode = "compiled" if plan["compiled"] else "eager"
    cache = caches / f"{plan['system']}-{plan['job']['name']}-{mode}"
    is_kept = cache.exists()
    cache.mkdir(parents=True, exist_ok=True)
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    row = bench.measure_apart(
        Plan.from_dict(plan),
        [sys.executable, __file__],
        environment=environment,
        limit_s=timeout_s,
    )
    if "error" in row:
        print("\n".join(row["output"]), file=sys.stderr)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    known = {name: value for name, value in task.items() if name != "plan"}
    return known | {"date": date, "caches": "kept" if is_kept else "empty"} | row


def run_task(plan: Row, result: Path) -> None:
    """In the process of a task."""
    from gpu_jobs import ALL_SYSTEMS, CURVE_SYSTEMS

    from headway.cli.bench_systems import measure

    row = measure(Plan.from_dict(plan), {**ALL_SYSTEMS, **CURVE_SYSTEMS})
    result.write_text(json.dumps(row))


def tell(row: Row) -> str:
    """A row as one line, as soon as it is there."""
    mode = "compiled" if row["compiled"] else "eager"
    name = f"{row['job']} {mode:8} {row['system']:28}"
    if "error" in row:
        return f"{name} FAILED: {row['error']}"
    return (
        f"{name} {row['step_ms']:8.2f} ms (best {row['best_step_ms']:.2f})  "
        f"MFU {row['mfu']:6.2%} of {row['matmul_flops'] / 1e12:.0f} TFLOP/s  "
        f"first step {row['first_step_s']:.1f} s ({row['first_train_s']:.1f} of train(), "
        f"caches {row['caches']})  peak {row['peak_bytes'] / GIB:.2f} GiB  "
        f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
    )


# The report


class Table:
    """The figures of a file of rows, joined over rounds."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = [row for row in rows if "error" not in row and "curve" not in row]
        self.flops = statistics.median(row["matmul_flops"] for row in self.rows)

    def of(self, system: str, job: str, compiled: bool) -> list[Row]:
        key = (system, job, compiled)
        return [row for row in self.rows if (row["system"], row["job"], row["compiled"]) == key]

    def step_ms(self, system: str, job: str, compiled: bool) -> float | None:
        times = [t for row in self.of(system, job, compiled) for t in row["times_ms"]]
        return statistics.median(times) if times else None

    def ratio(self, system: str, other: str, job: str, compiled: bool) -> float | None:
        one, two = self.step_ms(system, job, compiled), self.step_ms(other, job, compiled)
        return None if one is None or two is None else one / two

    def mfu(self, row: Row, step_ms: float) -> float:
        """Against one rate for all, so that ratios of MFU are ratios of speed."""
        return row["mfu"] * row["matmul_flops"] / self.flops * row["step_ms"] / step_ms

    def first_s(self, system: str, job: str, compiled: bool, caches: str) -> float | None:
        found = [r["first_step_s"] for r in self.of(system, job, compiled) if r["caches"] == caches]
        return statistics.median(found) if found else None


def report(rows: list[Row]) -> str:
    lines = [f"# Training on one GPU, {datetime.date.today()}", ""]
    table = None
    if any("error" not in row and "curve" not in row for row in rows):
        table = Table(rows)
        lines += heading(table)
        for job in ("A", "B"):
            if any(row["job"] == job for row in table.rows):
                lines += ["", f"## Job {job}", "", *job_lines(table, job)]
        if all(row.get("on_gpu", True) for row in table.rows):
            lines += ["", "## Goals", "", *goal_lines(table)]
        lines += ["", *loss_lines(table)]
    curves = [row for row in rows if "losses" in row]
    if curves:
        lines += ["", "## Losses on real text", "", *curve_lines(curves)]
    failed = [row for row in rows if "error" in row]
    if failed:
        lines += ["", "## Failed", "", *(f"- {tell(row)}" for row in failed)]
    return "\n".join(lines) + "\n"


def heading(table: Table) -> list[str]:
    machine = table.rows[0]["machine"]
    rates = sorted(row["matmul_flops"] / 1e12 for row in table.rows)
    versions = ", ".join(f"{name} {text}" for name, text in machine.items() if name != "device")
    return [
        f"`python benchmarks/gpu_training.py` on {machine['device']}; {versions}.",
        "bf16 autocast over float32 weights, fused AdamW, clipping at 1.0, cosine schedule, a log "
        "record every ten steps; each system in a process of its own, without evaluation and "
        "checkpoints; Headway with its default callbacks, JSON Lines log and control server. "
        "Milliseconds: the median stretch of ten steps, the best in brackets.",
        f"MFU is against {table.flops / 1e12:.0f} TFLOP/s, the median of the bf16 matrix-product "
        f"rates measured in these processes ({rates[0]:.0f} to {rates[-1]:.0f}). First step: from "
        "the start of the process, with empty compiler caches / with kept ones.",
    ]


def job_lines(table: Table, job: str) -> list[str]:
    from gpu_jobs import NAMES

    lines = [
        "| | eager, ms | MFU | of bare | compiled, ms | MFU | of bare | first step compiled, s | "
        "peak eager, GiB | peak compiled, GiB | loss of the last step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for system, name in NAMES.items():
        cells, peaks, losses = [], [], []
        for compiled in (False, True):
            rows = table.of(system, job, compiled)
            step_ms, ratio = (
                table.step_ms(system, job, compiled),
                table.ratio(system, "bare", job, compiled),
            )
            if step_ms is None:
                cells += ["", "", ""]
                peaks.append("")
                continue
            best_ms = min(row["best_step_ms"] for row in rows)
            cells += [
                f"{step_ms:.1f} ({best_ms:.1f})",
                f"{table.mfu(rows[0], step_ms):.1%}",
                "" if ratio is None else f"{ratio:.3f}",
            ]
            peaks.append(f"{max(row['peak_bytes'] for row in rows) / GIB:.1f}")
            losses.append(f"{rows[0]['last_loss']:.4f}")
        if any(peaks):
            starts = [table.first_s(system, job, True, caches) for caches in ("empty", "kept")]
            start = " / ".join("-" if s is None else f"{s:.1f}" for s in starts)
            row = [name, *cells, start, *peaks, ", ".join(losses)]
            lines.append(f"| {' | '.join(row)} |")
    return lines


def goal_lines(table: Table) -> list[str]:
    from gpu_jobs import NAMES

    lines = ["| goal | wanted | measured | |", "|---|---|---|---|"]

    def judge(name: str, most: float, found: float | None, form: str) -> None:
        if found is not None:
            verdict = "met" if found <= most else "missed"
            lines.append(f"| {name} | at most {most:{form}} | {found:{form}} | {verdict} |")

    for job in ("A", "B"):
        for compiled in (False, True):
            where = f"job {job} {'compiled' if compiled else 'eager'}"
            for system, how in (("headway", ""), ("headway-whole", ", as a whole")):
                for other, most in (("bare", 1.005), ("transformers", 1.0), ("lightning", 1.0)):
                    ratio = table.ratio(system, other, job, compiled)
                    name = f"1: {where}{how}, same model, share of {WHOSE[other]} time"
                    judge(name, most, ratio, ".4f")
    for job, most in (("A", 56.0), ("B", 222.0)):
        judge(f"2: decoder, job {job}, ms", most, table.step_ms("decoder", job, True), ".1f")
        flash4_ms = table.step_ms("decoder-flash4", job, True)
        judge(f"2: decoder, `flash4`, job {job}, ms", most, flash4_ms, ".1f")
        for system, how in (("decoder", ""), ("decoder-flash4", ", `flash4`")):
            for other, share in (("transformers", 1 / 1.4), ("careful", 1.0)):
                ratio = table.ratio(system, other, job, True)
                name = f"2: decoder{how}, job {job}, share of {WHOSE[other]} time"
                judge(name, share, ratio, ".3f")
    for system in dict.fromkeys(row["system"] for row in table.rows if "fp8" in row["system"]):
        name = f"2: {NAMES[system].rpartition('decoder, ')[2]}, job B, ms"
        judge(name, 190.0, table.step_ms(system, "B", True), ".1f")
    for caches, most in (("empty", 25.0), ("kept", 10.0)):
        start = table.first_s("decoder", "B", True, caches)
        judge(f"3: decoder, job B, first step, caches {caches}, s", most, start, ".1f")
    whole = table.ratio("decoder", "decoder-whole", "B", True)
    judge("3: decoder, job B, blocks' share of the time compiled as a whole", 1.02, whole, ".3f")
    peaks = [row["peak_bytes"] / GIB for row in table.of("decoder", "B", True)]
    judge("4: decoder, job B, peak GiB", 30.0, max(peaks, default=None), ".1f")
    return lines if len(lines) > 2 else ["None of them is about these rows."]


def loss_lines(table: Table) -> list[str]:
    """Whether the systems around the same model computed the same."""
    from gpu_jobs import SAME_MODEL

    lines = []
    for job in ("A", "B"):
        for compiled in (False, True):
            bare = table.of("bare", job, compiled)
            others = [row for name in SAME_MODEL[1:] for row in table.of(name, job, compiled)]
            if not bare or not others:
                continue
            first = max(abs(row["first_loss"] - bare[0]["first_loss"]) for row in others)
            last = max(abs(row["last_loss"] - bare[0]["last_loss"]) for row in others)
            verdict = "they computed the same" if max(first, last) < 0.01 else "NOT THE SAME"
            lines.append(
                f"Job {job} {'compiled' if compiled else 'eager'}: losses around the same model "
                f"differ from the bare loop's by at most {first:.5f} in the first step and "
                f"{last:.5f} in the last: {verdict}."
            )
    return lines


def smoothed(losses: list[float]) -> list[float]:
    window = min(SMOOTHING_STEPS, len(losses))
    return [statistics.fmean(losses[n : n + window]) for n in range(len(losses) - window + 1)]


def curve_lines(rows: list[Row]) -> list[str]:
    """Distances of smoothed losses from those of the bare loop."""
    by_name = {row["curve"]: row for row in rows}
    bare = by_name.get("bare loop")
    if bare is None:
        return ["There is no curve of the bare loop to compare with."]
    bases = [smoothed(by_name[name]["losses"]) for name in BARE_CURVES if name in by_name]
    lines = [
        f"{len(bare['losses']):,} steps on the bytes of the standard library's source; the same "
        "initial weights, data and recipe. Losses are smoothed over "
        f"{min(SMOOTHING_STEPS, len(bare['losses']))} steps; distances are to the bare loop, and "
        "to its second run, which tells what chance makes of them.",
        "",
        "| | compiled | loss at the end | largest distance | mean distance | mean, with sign |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in by_name.items():
        found = smoothed(row["losses"])
        apart = [[a - b for a, b in zip(found, base, strict=True)] for base in bases]
        cells = [
            ", ".join(f"{max(map(abs, one)):.4f}" for one in apart),
            ", ".join(f"{statistics.fmean(map(abs, one)):.5f}" for one in apart),
            ", ".join(f"{statistics.fmean(one):+.5f}" for one in apart),
        ]
        compiled = "yes" if row["compiled"] else "no"
        lines.append(f"| {name} | {compiled} | {found[-1]:.4f} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
