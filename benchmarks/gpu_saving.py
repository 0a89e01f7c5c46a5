"""What saving in the background costs a run on one GPU, step by step.

Headway trains job B (gpu_jobs.py: 1.1 billion parameters, 4,096 tokens x 4) with its reference
decoder, compiled, default callbacks, a log record every ten steps. A checkpoint is written every
2 x N steps (`--every N`), so that stretches of N steps without a save and with one take turns in
one run: what the second take longer than the first is what saving every N steps costs. Only the
last checkpoint is kept. Three times of every step are taken on the device, by events that are read
when the run is over, and on the host; nobody waits for the device in between.

- begin to gradients: forward and backward, under which the state is copied to the host
- gradients to end: clipping and the update, which waits for the copy
- end to the next begin: log, save, data; on the device a wait for the host

Goals: stretches with a save take at most 1 % longer, and the step that saves at most 1.1 times a
plain one, which is the mean of the stretches without a save. With the last save the state is also
cloned on the device, in the step before; after the run the checkpoint is loaded and has to equal it
bit by bit. Measured besides: writing to the folder as fast as it goes, copying from the device to
page-locked memory, peaks of memory.

    python benchmarks/gpu_saving.py [--every 100] [--saves 2] [--folder DIR] [--limit-s 400]
                                    [--no-parity] [--write]
    python benchmarks/gpu_saving.py --tiny      # on a CPU, to see that it runs
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import TrainerControlCallback
from headway.checkpoint import CheckpointContents, CheckpointManager
from headway.cli.bench_job import (
    SEED,
    Plan,
    Stopwatch,
    as_samples,
    before_shuffling,
    describe_machine,
    token_rows,
)
from headway.cli.bench_systems import FIXED_SHAPES, common_arguments, with_decoder
from headway.engine.metrics import SAVE_ASYNC_DURATION, SAVE_DURATION, SAVE_WAIT

GIB = 2**30
MOST_COST, MOST_STEP = 0.01, 1.1
NUM_SHOWN = 5
NUM_WRITERS = 4
BEGIN, GRADIENTS, END = "begin", "gradients", "end"
Row = dict[str, float]


class Marks:
    """Points of every step, on the device where there is one, and on the host."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._device: dict[tuple[int, str], Any] = {}
        self.host: dict[tuple[int, str], float] = {}

    def add(self, step: int, point: str) -> None:
        self.host[step, point] = time.perf_counter()
        if self.on_gpu:
            event = self._device[step, point] = torch.cuda.Event(enable_timing=True)
            event.record()

    def ms(self, first: tuple[int, str], last: tuple[int, str], *, host: bool = False) -> float:
        if host or not self.on_gpu:
            return 1000 * (self.host[last] - self.host[first])
        took: float = self._device[first].elapsed_time(self._device[last])
        return took

    def row(self, step: int) -> Row:
        """Milliseconds of a step and its parts."""
        return {
            "step": self.ms((step - 1, END), (step, END)),
            "before": self.ms((step - 1, END), (step, BEGIN)),
            "passes": self.ms((step, BEGIN), (step, GRADIENTS)),
            "update": self.ms((step, GRADIENTS), (step, END)),
            "host": self.ms((step - 1, END), (step, END), host=True),
            "host before": self.ms((step - 1, END), (step, BEGIN), host=True),
        }


class Watch(TrainerCallback):
    """Marks steps, clones the state at one of them, and ends a run that takes too long."""

    def __init__(self, marks: Marks, options: argparse.Namespace, peaks: Stopwatch) -> None:
        self.marks, self._peaks = marks, peaks
        self._cloned_step = 2 * options.every * options.saves if options.parity else 0
        self._every, self._last_step = options.every, (2 * options.saves + 1) * options.every
        self._ends_s = time.monotonic() + options.limit_s
        self.clones: dict[str, torch.Tensor] = {}
        self.saves: dict[int, dict[str, float]] = {}
        self.peak_bytes: dict[int, tuple[int, int, int]] = {}
        self.last_step = self._active_bytes = 0

    def on_step_begin(self, state: Any) -> None:
        self.marks.add(state.global_step + 1, BEGIN)

    def on_gradients(self, state: Any) -> None:
        self.marks.add(state.global_step + 1, GRADIENTS)

    def on_step_end(self, state: Any, control: Any, model: Any, optimizer: Any) -> None:
        self.last_step = step = state.global_step
        if step % self._every == 0:
            self._note_active()
            self.peak_bytes[step] = (
                self._peaks.peak_bytes(),
                self._active_bytes,
                host_peak_bytes(),
            )
            self._active_bytes = 0
            print(f"step {step}", flush=True)
        if step == self._cloned_step:
            self.clones = clone_state(model, optimizer)
        self.marks.add(step, END)
        if step == self._last_step or time.monotonic() > self._ends_s:
            control.should_abort_without_save = True  # the save of an end is not what is measured

    def _note_active(self) -> None:
        """The most in use, clones included: torch counts them as freed while they are copied."""
        if self.marks.on_gpu:
            peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
            self._active_bytes = max(self._active_bytes, peak)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self._note_active()  # before the loop resets the peak for its next record
        for name in (SAVE_DURATION, SAVE_ASYNC_DURATION, SAVE_WAIT):
            if name in metrics:
                self.saves.setdefault(step, {})[name] = metrics[name]


def host_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def state_tensors(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Parameters and their optimizer state, by name."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            found[f"{key} of {name}"] = value
    return found


def clone_state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """A copy where the state is; empty if there is no room for it."""
    tensors = state_tensors(model, optimizer)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if any(t.is_cuda for t in tensors.values()) and torch.cuda.mem_get_info()[0] < 1.5 * size:
        print("no room on the device to clone the state; equality is not checked", flush=True)
        return {}
    return {name: tensor.clone() for name, tensor in tensors.items()}


# Raw rates


def measure_disk(folder: Path, file_bytes: int) -> float:
    """Bytes per second of writing and syncing files, as many at once as a save writes."""
    data = memoryview(bytearray(os.urandom(1 << 20) * max(1, min(file_bytes, 1 << 28) >> 20)))

    def write(path: Path) -> None:
        left = file_bytes
        with path.open("wb", buffering=0) as file:
            while left > 0:
                left -= file.write(data[:left])
            os.fsync(file.fileno())

    paths = [folder / f"raw-{number}" for number in range(NUM_WRITERS)]
    threads = [threading.Thread(target=write, args=(path,)) for path in paths]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = NUM_WRITERS * file_bytes / (time.perf_counter() - began)
    for path in paths:
        path.unlink()
    return rate


def measure_copy() -> float:
    """Bytes per second from the device to page-locked memory."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * GIB / (time.perf_counter() - began)


# The run


def train(plan: Plan, watch: Watch, options: argparse.Namespace, folder: Path) -> Trainer:
    arguments = {
        **common_arguments(plan, str(folder / "run")),
        "mixed_precision": plan.precision,
        "seed": SEED,
        "use_cpu": not plan.on_gpu,
        "construct_model_on": "device",
        "save_strategy": "steps",
        "save_steps": 2 * options.every,
        "save_total_limit": 1,
        **({"torch_compile": True, **FIXED_SHAPES} if plan.compiled else {}),
    }
    trainer = Trainer(
        args=TrainingArguments(**arguments),
        train_dataset=as_samples(before_shuffling(token_rows(plan))),
        callbacks=[TrainerControlCallback(), watch],
        **with_decoder(plan),
    )
    trainer.train()
    if plan.on_gpu:
        torch.cuda.synchronize()
    return trainer


def check_equal(trainer: Trainer, clones: dict[str, torch.Tensor], step: int) -> str:
    """Load the last checkpoint over the live state and compare it with what was cloned."""
    if not clones:
        return "Whether the checkpoint equals the state was not checked."
    manager = CheckpointManager(trainer.args.output_dir)
    path = Path(trainer.args.output_dir, f"checkpoint-{step}")
    began = time.perf_counter()
    contents = CheckpointContents(trainer.model, trainer.optimizer)
    manager.load(contents, path, components={"model", "optimizer"})
    took = time.perf_counter() - began
    loaded = state_tensors(trainer.model, trainer.optimizer)
    wrong = sorted(name for name, tensor in clones.items() if not torch.equal(tensor, loaded[name]))
    if wrong or clones.keys() != loaded.keys():
        return f"THE CHECKPOINT OF STEP {step} IS NOT THE STATE OF THAT STEP: {wrong[:5]}"
    return (
        f"The checkpoint of step {step}, loaded in {took:.1f} s, equals the state that was cloned "
        f"on the device at that step in all {len(clones)} tensors, bit by bit."
    )


# The report


def mean_row(rows: list[Row]) -> Row:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def step_line(name: str, row: Row, plain: Row) -> str:
    return (
        f"| {name} | {row['step']:.2f} | {row['step'] / plain['step']:.3f} | {row['before']:.2f} | "
        f"{row['passes']:.2f} | {row['update']:.2f} | {row['host']:.2f} | "
        f"{row['host before']:.2f} |"
    )


def tables(watch: Watch, options: argparse.Namespace) -> list[str]:
    """Steps around each save, stretches, and the verdicts."""
    every, marks, last = options.every, watch.marks, watch.last_step
    save_steps = [s for s in range(2 * every, last, 2 * every) if s + NUM_SHOWN <= last]
    if not save_steps:
        return [f"The run ended at step {last}, before there was a save to measure."]
    starts = plain_starts(watch, options)
    if not starts:
        return [f"The run ended at step {last}, before there was a stretch without a save."]
    # Not the last of a stretch: in one of them the state is cloned.
    plain_steps = [step for first in starts for step in range(first + 1, first + every)]
    plain = mean_row([marks.row(step) for step in plain_steps])
    lines = [
        "| step | ms | of plain | end to begin | forward and backward | update | on the host | of "
        "which end to begin |",
        "|---|---|---|---|---|---|---|---|",
        step_line(f"plain, mean of {len(plain_steps)}", plain, plain),
    ]
    logged = [marks.row(step) for step in plain_steps if step % 10 == 1]
    if logged:
        lines.append(
            step_line(f"of these after a log record, {len(logged)}", mean_row(logged), plain)
        )
    for step in save_steps:
        for number in range(1, NUM_SHOWN + 1):
            name = f"{number} after the save of step {step}"
            lines.append(step_line(name, marks.row(step + number), plain))
    lines += ["", *stretch_lines(watch, save_steps, options)]
    ratios = [marks.row(step + 1)["step"] / plain["step"] for step in save_steps]
    verdict = judge(max(ratios), MOST_STEP, marks)
    lines.append(
        f"Goal: the step that saves at most {MOST_STEP} times a plain one: "
        f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}: {verdict}."
    )
    return lines


def judge(found: float, most: float, marks: Marks) -> str:
    if not marks.on_gpu:
        return "not judged on a CPU"
    return "met" if found <= most else "missed"


def plain_starts(watch: Watch, options: argparse.Namespace) -> list[int]:
    """After which steps a whole stretch without a save begins; the first one warms the card up."""
    every = options.every
    return list(range(every, watch.last_step - every + 1, 2 * every))


def stretch_lines(watch: Watch, save_steps: list[int], options: argparse.Namespace) -> list[str]:
    """Whole stretches with and without a save, of the same steps after a multiple of N."""
    every, marks, last = options.every, watch.marks, watch.last_step

    def took(first: int) -> float:
        return marks.ms((first, END), (first + every - 1, END)) / (every - 1)

    # Without the last step of each, as above.
    with_save = [took(step) for step in save_steps if step + every <= last]
    without = [took(step) for step in plain_starts(watch, options)]
    if not with_save or not without:
        return ["The run was too short for a stretch with a save and one without.", ""]
    cost = statistics.fmean(with_save) / statistics.fmean(without) - 1
    verdict = judge(cost, MOST_COST, marks)
    shown = (", ".join(f"{ms:.2f}" for ms in found) for found in (without, with_save))
    return [
        "ms per step in stretches of {} steps: {} without a save, {} with one.".format(
            every, *shown
        ),
        "",
        f"Goal: saving every {every} steps costs at most {MOST_COST:.0%} of the time: "
        f"{cost:+.2%}: {verdict}.",
        "",
    ]


def save_lines(watch: Watch, num_bytes: int, disk: float, copy: float | None) -> list[str]:
    lines = [
        f"State: {num_bytes / 1e9:.2f} GB. Raw writing, {NUM_WRITERS} files at once, synced: "
        f"{disk / 1e9:.2f} GB/s, {num_bytes / disk:.1f} s for the state.",
    ]
    if copy is not None:
        lines[0] += (
            f" Raw copy to page-locked memory: {copy / 1e9:.1f} GB/s, "
            f"{1000 * num_bytes / copy:.0f} ms for the state."
        )
    for step, found in sorted(watch.saves.items()):
        if SAVE_DURATION in found:
            written = found.get(SAVE_ASYNC_DURATION)
            rate = "" if not written else f" ({num_bytes / written / 1e9:.2f} GB/s)"
            lines.append(
                f"Save of step {step}: the host was busy with it for "
                f"{1000 * found[SAVE_DURATION]:.1f} ms and waited "
                f"{1000 * found.get(SAVE_WAIT, 0.0):.1f} ms for the one before; written and "
                f"committed after {'?' if written is None else f'{written:.2f}'} s{rate}."
            )
    for step, (device, active, host) in sorted(watch.peak_bytes.items()):
        lines.append(
            f"Until step {step}: {device / GIB:.2f} GiB at most allocated on the device so far; "
            f"{active / GIB:.2f} in use, clones included, since the line before; "
            f"{host / GIB:.2f} GiB on the host so far."
        )
    return ["\n".join(f"- {line}" for line in lines), ""]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, help="a save every so many steps costs ... (100)")
    parser.add_argument("--saves", type=int, default=2, help="saves in the run (2)")
    parser.add_argument("--warmup", type=int, help="steps without a time (20)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to save (TMPDIR)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--no-parity", dest="parity", action="store_false")
    parser.add_argument("--limit-s", type=float, default=400.0, help="end training then (400)")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--write", action="store_true", help="the report into benchmarks/results/")
    options = parser.parse_args()
    options.every = options.every or (20 if options.tiny else 100)
    options.warmup = options.warmup or (10 if options.tiny else 20)
    for name, least in (("every", 2 * NUM_SHOWN), ("saves", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: {getattr(options, name)} given; allowed: at least {least}")
    if options.warmup > options.every:
        parser.error(f"--warmup: {options.warmup} given; allowed: at most --every")
    return options


def main() -> int:
    from gpu_jobs import JOBS, TINY, write_result

    options = read_options()
    on_gpu = torch.cuda.is_available() and not options.tiny
    if not on_gpu and not options.tiny:
        raise SystemExit("there is no CUDA device here; --tiny runs on a CPU")
    job = TINY["B"] if options.tiny else JOBS["B"]
    plan = Plan(
        system="decoder",
        job=job,
        compiled=on_gpu and not options.eager,
        steps=(2 * options.saves + 1) * options.every,
        warmup=options.warmup,
        device="cuda" if on_gpu else "cpu",
    )
    num_bytes = 12 * job.parameters  # weights and two moments in float32
    free = shutil.disk_usage(options.folder).free
    if free < 3 * num_bytes:
        raise SystemExit(
            f"--folder: {options.folder} has {free / GIB:.1f} GiB left; two checkpoints and the "
            f"raw files need {3 * num_bytes / GIB:.1f}"
        )
    machine = describe_machine(plan)
    head = [
        f"# Saving in the background, {datetime.date.today()}",
        "",
        f"`python benchmarks/gpu_saving.py {' '.join(sys.argv[1:])}` on {machine['device']}, "
        f"{os.cpu_count()} cores, torch {machine['torch']}, Python {machine['python']}; "
        f"{job.tell()}, {'compiled' if plan.compiled else 'eager'}.",
        "",
    ]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="headway-saving-") as place:
        folder = Path(place)
        disk = measure_disk(folder, GIB if on_gpu else 2**24)
        copy = measure_copy() if on_gpu else None
        print(f"raw writing {disk / 1e9:.2f} GB/s", flush=True)
        gc.collect()
        watch = Watch(Marks(on_gpu), options, Stopwatch(plan))
        trainer = train(plan, watch, options, folder)
        lines = [*head, *tables(watch, options), "", *save_lines(watch, num_bytes, disk, copy)]
        print("\n".join(lines), flush=True)
        if options.write:  # before the checkpoint is loaded: a run that is cut keeps what it has
            write_result("gpu_saving", "\n".join(lines) + "\n")
        lines.append(check_equal(trainer, watch.clones, 2 * options.every * options.saves))
        print(lines[-1], flush=True)
    if options.write:
        write_result("gpu_saving", "\n".join(lines) + "\n")
    return 1 if "IS NOT" in lines[-1] else 0


if __name__ == "__main__":
    raise SystemExit(main())
