"""What rare communication costs in quality, and saves in bytes: DiLoCo against data parallel.

The demo's data, run file and kind of model (smaller by default, to end in minutes). Four workers
under `headway diloco local`, an exchange every 50 steps, against a data-parallel run of as many
steps with the same four batches in each: the same tokens, the same recipe. That run is one process
with a four-fold batch, which computes the mean of the gradients that four ranks would all-reduce;
its bytes are those of real ranks (`--nproc 4`, DDP over gloo), counted over a few steps.

Bytes are what the loopback device carried, headers and all: everything runs in a network namespace
of its own where that is allowed (root), else the machine's other traffic is counted too. Beside
them stand the workers' own counters and, for DDP, the calculation.

    python benchmarks/diloco_quality.py [--steps 1000] [--comm bf16 float32] [--seeds 1] [--write]
        [--begin-steps 2000] [--outer-lr 0.7] [--momentum 0.5]
        [--override=--args.learning_rate=1e-3 ...] [--gpu]

Ends with 1 unless every run is within 2 % of data parallel with at most 1/40 of its bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import fcntl
import json
import math
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway import Trainer, TrainingArguments
from headway.cli.demo import prepare
from headway.data import TokenDataset
from headway.models import load_causal_lm

WORKERS, SYNC_EVERY = 4, 50
WITHIN, LEAST_FEWER = 0.02, 40
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
FEW, MORE = 10, 40
"""Steps of two runs of real ranks; what the longer one moved beyond the other is of its steps."""


@dataclass
class Run:
    """One training."""

    name: str
    seed: int
    checkpoint: Path
    loss: float = math.nan
    """On the held-out files."""
    wire_bytes: float = 0.0
    """Sent and received by one worker per step, on the wire."""
    counted_bytes: float = 0.0
    """The same by the workers' counters."""


def isolate() -> bool:
    """A network of our own; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    return True


def loopback_bytes() -> int:
    """Carried so far by the loopback device; each byte is counted once."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    raise SystemExit("there is no loopback device to count bytes on")


def headway(*words: str, threads: int) -> str:
    """A command, with so many threads in each process; its standard output."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "headway", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


class Comparison:
    """All runs on one folder of data."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options, self.root = options, root
        self.run_file = prepare(root / "demo", options.steps, 0)
        self.start_loss = math.nan
        self.held_out = root / "demo" / "data" / "held_out.hwt"
        self.num_parameters = 0
        length = options.length
        self.sizes = [
            f"--model.hidden_size={options.width}",
            f"--model.num_layers={options.layers}",
        ]
        self.overrides = [
            f"--data.train.init_args.sequence_length={length}",
            f"--data.eval.init_args.sequence_length={length}",
            f"--args.warmup_steps={min(options.warmup, options.steps // 4)}",
            f"--args.use_cpu={'false' if options.gpu else 'true'}",
        ]
        if options.begin_steps:
            self._begin()
        self.overrides += self.sizes + options.override

    def _begin(self) -> None:
        """What all runs begin from: one process, four-fold batches, the demo's recipe."""
        options, folder = self.options, self.root / "begin"
        checkpoint = folder / f"checkpoint-{options.begin_steps}"
        if options.begin:
            checkpoint = Path(options.begin)
        else:
            headway(
                *("train", str(self.run_file), *self.overrides, *self.sizes),
                f"--args.output_dir={folder}",
                f"--args.max_steps={options.begin_steps}",
                f"--args.save_steps={options.begin_steps}",
                f"--args.per_device_train_batch_size={WORKERS * options.batch}",
                # An order of the data that no run after it has.
                "--args.seed=1000",
                threads=1,
            )
        run = Run("the beginning", 0, checkpoint)
        self.evaluate(run)
        self.start_loss, self.sizes = run.loss, []
        text = self.run_file.read_text(encoding="utf-8")
        before, _, rest = text.partition("model:\n")
        tail = rest[rest.index("tokenizer:") :]
        self.run_file = self.root / "further.yaml"
        self.run_file.write_text(
            f"{before}model:\n  class_path: headway.models.load_pretrained\n"
            f"  init_args: {{directory: {json.dumps(str(checkpoint))}}}\n\n{tail}",
            encoding="utf-8",
        )

    def _checkpoint(self, folder: Path) -> Path:
        return folder / f"checkpoint-{self.options.steps}"

    def evaluate(self, run: Run) -> None:
        """Fill in its loss on all held-out files."""
        model = load_causal_lm(run.checkpoint)
        trainer = Trainer(
            args=TrainingArguments(
                output_dir=str(run.checkpoint / "eval"),
                per_device_eval_batch_size=64,
                use_cpu=not self.options.gpu,
            ),
            model=model,
            eval_dataset=TokenDataset(
                str(self.held_out), self.options.length, mask_documents=False
            ),
            default_callbacks=False,
        )
        run.loss = trainer.evaluate()["eval_loss"]
        self.num_parameters = sum(p.numel() for p in model.parameters())
        print(f"{run.name}, seed {run.seed}: loss {run.loss:.4f}", flush=True)

    def train_alone(self, name: str, seed: int, batch: int) -> Run:
        """One process."""
        folder = self.root / f"{name.replace(' ', '-')}-{seed}"
        headway(
            "train",
            str(self.run_file),
            *self.overrides,
            f"--args.output_dir={folder}",
            f"--args.seed={seed}",
            f"--args.per_device_train_batch_size={batch}",
            threads=1,
        )
        print(f"{name}, seed {seed}: trained", flush=True)
        return Run(name, seed, self._checkpoint(folder))

    def train_diloco(self, comm: str, seed: int) -> Run:
        """A server and four workers."""
        options, folder = self.options, self.root / f"{comm}-{seed}"
        before = loopback_bytes()
        headway(
            "diloco",
            "local",
            str(self.run_file),
            *(f"--workers={WORKERS}", f"--sync-every={SYNC_EVERY}", f"--comm={comm}"),
            *(f"--outer-lr={options.outer_lr}", f"--momentum={options.momentum}", "--quiet"),
            *self.overrides,
            f"--args.output_dir={folder}",
            # Workers add their number to it: no two runs have a worker's order in common.
            f"--args.seed={seed * WORKERS}",
            f"--args.per_device_train_batch_size={options.batch}",
            threads=1,
        )
        run = Run(f"DiLoCo, {comm}", seed, self._checkpoint(folder / "worker-0"))
        steps = WORKERS * options.steps
        # One end of each transfer is the server, the other a worker.
        run.wire_bytes = (loopback_bytes() - before) / steps
        for number in range(WORKERS):
            last = last_record(folder / f"worker-{number}", "diloco/sync_count")
            if last["diloco/sync_count"] != options.steps // SYNC_EVERY:
                raise SystemExit(f"worker {number} took part in {last['diloco/sync_count']} rounds")
            both = last["diloco/total_send_mb"] + last["diloco/total_recv_mb"]
            run.counted_bytes += both * 1e6 / steps
        print(f"{run.name}, seed {seed}: trained, {run.wire_bytes:,.0f} bytes/step", flush=True)
        return run

    def measure_ranks(self) -> float:
        """Bytes that one rank of DDP sends and receives in a step, on the wire."""
        found = []
        for steps in (FEW, MORE):
            before = loopback_bytes()
            headway(
                "train",
                str(self.run_file),
                f"--nproc={WORKERS}",
                "--trainer=ddp",
                *self.overrides,
                "--args.use_cpu=true",  # over gloo: one GPU cannot be two ranks of NCCL
                f"--args.output_dir={self.root / f'ranks-{steps}'}",
                f"--args.max_steps={steps}",
                "--args.warmup_steps=1",
                f"--args.per_device_train_batch_size={self.options.batch}",
                threads=1,
            )
            found.append(loopback_bytes() - before)
        # Both ends of each transfer are ranks.
        return 2 * (found[1] - found[0]) / (MORE - FEW) / WORKERS


def last_record(folder: Path, key: str) -> dict[str, Any]:
    """The last record of a run's log that has the key."""
    records = [
        json.loads(line)
        for log in sorted(folder.rglob("trainer_logs*.jsonl"))
        for line in log.read_text().splitlines()
    ]
    return [record for record in records if key in record][-1]


def report(
    options: argparse.Namespace, runs: list[Run], ranks_bytes: float, found: Comparison, alone: bool
) -> tuple[str, bool]:
    """The page, and whether the aims are met."""
    parameters = found.num_parameters
    device = torch.cuda.get_device_name() + ", shared by all" if options.gpu else "a CPU"
    calculated = 2 * 2 * (WORKERS - 1) / WORKERS * 4 * parameters
    tokens = options.steps * WORKERS * options.batch * options.length
    lines = [
        f"# DiLoCo against data parallel, {datetime.datetime.now(datetime.UTC).date()}",
        "",
        f"`python benchmarks/diloco_quality.py {' '.join(sys.argv[1:])}` on "
        f"{device} ({platform.machine()}, {os.cpu_count()} cores), torch {torch.__version__}.",
        f"The demo's data; a decoder of {parameters:,} parameters (width {options.width}, "
        f"{options.layers} layers), sequences of {options.length} bytes. {WORKERS} workers, each "
        f"with batches of {options.batch}, an exchange every {SYNC_EVERY} steps, outer rate "
        f"{options.outer_lr:g}, Nesterov momentum {options.momentum:g}; {options.steps:,} steps "
        f"({options.steps // SYNC_EVERY} rounds, {tokens:,} tokens over all workers). Data "
        f"parallel: one process, batches of {WORKERS * options.batch}, as many steps. Everything "
        "else of the recipe is the same and the demo's"
        + (f", but for `{' '.join(options.override)}`." if options.override else "."),
        f"All begin from one model that {options.begin_steps:,} steps of the demo's recipe in one "
        f"process have made, loss {found.start_loss:.4f}."
        if options.begin_steps
        else "All begin from nothing.",
        "",
        "| run | seed | held-out loss, nats per byte | against data parallel | bytes per worker "
        "and step, on the wire | by the workers' counters | DDP moves more by |",
        "|---|---|---|---|---|---|---|",
    ]
    bases = {run.seed: run.loss for run in runs if run.name == "data parallel"}
    good = True
    ratios: dict[str, list[float]] = {}
    for run in runs:
        ratio, cells = run.loss / bases[run.seed], ["", "", ""]
        if run.name == "data parallel":
            cells[0] = f"{ranks_bytes:,.0f} (DDP of {WORKERS} ranks)"
        if run.wire_bytes:
            fewer = ranks_bytes / run.wire_bytes
            cells = [f"{run.wire_bytes:,.0f}", f"{run.counted_bytes:,.0f}", f"{fewer:.0f} x"]
            good &= ratio <= 1 + WITHIN and fewer >= LEAST_FEWER
            ratios.setdefault(run.name, []).append(ratio)
        figures = [run.name, str(run.seed), f"{run.loss:.4f}", f"{100 * (ratio - 1):+.2f} %"]
        lines.append("| " + " | ".join([*figures, *cells]) + " |")
    lines += [
        "",
        "Bytes are those sent and received by one worker. DDP's were counted on the loopback "
        f"device over {MORE - FEW} steps of {WORKERS} real ranks (gloo); by calculation a ring "
        "sends and receives 2 (n - 1) / n times the gradients in each step: "
        f"2 x {2 * (WORKERS - 1) / WORKERS:g} x 4 bytes x {parameters:,} = {calculated:,.0f}. "
        "DiLoCo's have everything from the first registration to the last word in them: "
        "parameters at the start, heartbeats, headers, and the status that `diloco local` asks for "
        "every second.",
        "Everything ran in a network namespace of its own."
        if alone
        else "The machine's other traffic on the loopback device is in them too.",
        "",
        *(
            f"{name}: {100 * (statistics.mean(own) - 1):+.2f} % (mean of {len(own)})."
            for name, own in ratios.items()
        ),
        f"Aim: within {100 * WITHIN:g} %, at least {LEAST_FEWER} times fewer bytes: "
        + ("met by every run." if good else "NOT met by every run."),
        "",
    ]
    return "\n".join(lines), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--begin-steps", type=int, default=2000, help="0: all begin from nothing")
    parser.add_argument("--begin", metavar="FOLDER", help="a model that these steps have made")
    parser.add_argument("--batch", type=int, default=4, help="of one worker")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--comm", nargs="+", default=["bf16", "float32"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--override", action="append", default=[], help="of the demo's run file")
    parser.add_argument("--gpu", action="store_true", help="all workers share one GPU")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    options = parser.parse_args()
    if options.steps % SYNC_EVERY:
        parser.error(f"--steps: must be a multiple of {SYNC_EVERY}, so that it ends with a round")
    alone = isolate()
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(options, Path(folder))
        first, batch = options.first_seed, WORKERS * options.batch
        seeds = range(first, first + options.seeds)
        # Times are not compared, so that runs of one process, which move nothing, go beside.
        with ThreadPoolExecutor(1) as beside:
            alone_runs = [
                beside.submit(comparison.train_alone, "data parallel", seed, batch)
                for seed in seeds
            ]
            alone_runs.append(
                beside.submit(comparison.train_alone, "one worker alone", first, options.batch)
            )
            runs = [comparison.train_diloco(comm, seed) for comm in options.comm for seed in seeds]
            ranks_bytes = comparison.measure_ranks()
            runs = [*(run.result() for run in alone_runs), *runs]
        for run in runs:
            comparison.evaluate(run)
    text, good = report(options, runs, ranks_bytes, comparison, alone)
    print(f"\n{text}")
    if options.write:
        today = datetime.datetime.now(datetime.UTC).date()
        path = Path(__file__).parent / "results" / f"diloco-quality-{today}.md"
        path.write_text(text, encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
