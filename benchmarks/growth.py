"""How a step grows with the job, and that nothing in the loop grows with the steps done.

The tables: step time against parameters, layers, sequence length, callbacks and metrics. Each row
is a run of its own; the rows of a table take turns for several rounds in one process, so that a
slow moment of the machine hits them alike. "Outside" is what is left of a step when forward,
backward, clipping, update and schedule are taken off: data, events, metrics, logs. On a GPU the
host waits in it, once per log, for the device; the median step has no log. On a CPU with one thread
the times are processor time: what else the machine does is not in them.

With `--long`: 10,000 steps of one run with the default callbacks, a log every 10 steps and a
checkpoint every 1,000. Told by thousands: step time and the part outside (medians of stretches of
ten steps), memory of process and device, Python's objects, what the log files grew by, how long a
save held training up and how large its `trainer_state.json` is.

    python benchmarks/growth.py [--device cpu] [--rounds 3] [--steps 60] [--long [10000]] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import io
import itertools
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.data import SyntheticDataset
from headway.models import Decoder, DecoderConfig

STRETCH, WARMUP_STEPS = 10, 20
VOCABULARY = 256
BASE = {
    "cpu": {"width": 64, "layers": 2, "length": 32, "batch": 4},
    "cuda": {"width": 512, "layers": 4, "length": 512, "batch": 8},
}
ROWS: dict[str, dict[str, list[int]]] = {
    "cpu": {
        "width": [64, 128, 256, 512],
        "layers": [1, 2, 4, 8, 16],
        "length": [16, 32, 64, 128, 256, 512],
    },
    "cuda": {
        "width": [256, 512, 1024, 2048],
        "layers": [1, 2, 4, 8, 16, 32],
        "length": [256, 512, 1024, 2048, 4096],
    },
}
CALLBACKS, METRICS = (0, 10, 40), (1, 10, 100, 1000)


class Stopwatch(TrainerCallback):
    """When each step began, and how much of the time before was spent inside the calls watched."""

    priority = 1000

    def __init__(self, clock: Callable[[], float]) -> None:
        # Arrays, so that the measure adds no objects to those it counts.
        self.began, self.inside, self.wall = array("d"), array("d"), array("d")
        self.clock, self._inside_s = clock, 0.0

    def on_train_begin(self, trainer: Any, lr_scheduler: Any) -> None:
        for owner, name in (
            (trainer.strategy, "forward_backward"),
            (trainer.strategy, "clip"),
            (trainer.strategy, "apply"),
            (lr_scheduler, "step"),
        ):
            setattr(owner, name, self._watch(getattr(owner, name)))

    def _watch(self, act: Callable[..., Any]) -> Callable[..., Any]:
        # `torch.optim` asks a scheduler's `step` whether it was wrapped, by its attributes.
        @functools.wraps(act)
        def watched(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return act(*args, **kwargs)
            finally:
                self._inside_s += self.clock() - began

        return watched

    def on_step_begin(self) -> None:
        self.began.append(self.clock())
        self.inside.append(self._inside_s)
        self.wall.append(time.perf_counter())

    def stretches(self, first: int, last: int | None = None) -> list[tuple[float, float]]:
        """(step, outside) in seconds per step, over each stretch of ten of these steps."""
        ends = list(range(first, len(self.began) if last is None else last + 1, STRETCH))
        found = []
        for a, b in itertools.pairwise(ends):
            whole = self.began[b] - self.began[a]
            found.append((whole / STRETCH, (whole - self.inside[b] + self.inside[a]) / STRETCH))
        return found

    def wall_stretches(self, first: int, last: int) -> list[float]:
        """Seconds per step on the wall's clock."""
        return [
            (self.wall[step + STRETCH] - self.wall[step]) / STRETCH
            for step in range(first, last - STRETCH + 1, STRETCH)
        ]

    def outside(self, first: int) -> list[float]:
        """Seconds outside the watched calls, of each single step."""
        return [
            self.began[i + 1] - self.began[i] - self.inside[i + 1] + self.inside[i]
            for i in range(first, len(self.began) - 1)
        ]


class Listener(TrainerCallback):
    """Listens to what comes in every step, and does nothing."""

    def __init__(self, number: int) -> None:
        self._name = f"listener {number}"

    @property
    def name(self) -> str:
        return self._name

    def on_step_begin(self, args: Any, state: Any, control: Any) -> None:
        pass

    def on_step_end(self, args: Any, state: Any, control: Any) -> None:
        pass

    def on_metrics(self, args: Any, state: Any, control: Any, step: int, metrics: Any) -> None:
        pass


class Recorder(TrainerCallback):
    """Records so many numbers of the device in every step."""

    def __init__(self, num_metrics: int) -> None:
        self._num_metrics = num_metrics

    def on_train_begin(self, trainer: Any) -> None:
        values = torch.rand(self._num_metrics, device=trainer.strategy.device).unbind()
        self._values = {f"own/{number}": value for number, value in enumerate(values)}

    def on_step_end(self, trainer: Any) -> None:
        for name, value in self._values.items():
            trainer.record_metric(name, value)


def make_trainer(
    folder: str,
    device: str,
    steps: int,
    callbacks: list[Any],
    *,
    width: int,
    layers: int,
    length: int,
    batch: int,
    **arguments: Any,
) -> Trainer:
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_layers=layers,
        num_heads=max(1, width // 64),
        max_seq_len=length,
    )
    settings: dict[str, Any] = {
        "logging_steps": 10,
        "save_strategy": "no",
        "default_callbacks": False,
        **arguments,
    }
    default_callbacks = settings.pop("default_callbacks")
    return Trainer(
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            max_steps=steps,
            learning_rate=1e-4,
            max_grad_norm=1.0,
            mixed_precision="bf16" if device == "cuda" else None,
            use_cpu=device == "cpu",
            seed=0,
            **settings,
        ),
        model_init=lambda: Decoder(config),
        train_dataset=SyntheticDataset(100_000, length, VOCABULARY, seed=0),
        callbacks=callbacks,
        default_callbacks=default_callbacks,
    )


@contextlib.contextmanager
def quiet() -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def find_jobs(device: str) -> dict[str, dict[str, tuple[dict[str, int], Callable[[], list[Any]]]]]:
    """What each table's rows are: the sizes of the job, and its callbacks."""
    base, none = BASE[device], list
    tables: dict[str, Any] = {}
    for name, values in ROWS[device].items():
        title = {"width": "parameters", "layers": "layers", "length": "sequence length"}[name]
        tables[title] = {str(value): ({**base, name: value}, none) for value in values}
    tables["callbacks"] = {
        str(count): (base, lambda count=count: [Listener(n) for n in range(count)])
        for count in CALLBACKS
    }
    tables["metrics recorded in each step"] = {
        f"{count:,}": (base, lambda count=count: [Recorder(count), Listener(0)])
        for count in METRICS
    }
    return tables


def count_parameters(sizes: dict[str, int]) -> int:
    with torch.device("meta"):
        config = DecoderConfig(
            vocab_size=VOCABULARY, hidden_size=sizes["width"], num_layers=sizes["layers"],
            num_heads=max(1, sizes["width"] // 64),
        )  # fmt: skip
        return sum(p.numel() for p in Decoder(config).parameters())


def choose_clock(device: str) -> Callable[[], float]:
    alone = device == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def tabulate(device: str, rounds: int, steps: int) -> list[str]:
    lines = []
    for title, rows in find_jobs(device).items():
        found: dict[str, list[Stopwatch]] = {name: [] for name in rows}
        for _ in range(rounds):
            for name, (sizes, make) in rows.items():
                watch = Stopwatch(choose_clock(device))
                with tempfile.TemporaryDirectory() as folder, quiet():
                    make_trainer(folder, device, steps, [watch, *make()], **sizes).train()
                found[name].append(watch)
        sizes = ", ".join(f"{value} {name}" for name, value in BASE[device].items())
        lines += [
            f"## {title[0].upper()}{title[1:]}",
            "",
            f"Otherwise {sizes}.",
            "",
            f"| {'width' if title == 'parameters' else title} | parameters | ms per step, best "
            "stretch | median | outside, us, best stretch | median step |",
            "|---|---|---|---|---|---|",
        ]
        for name, watches in found.items():
            stretches = [s for watch in watches for s in watch.stretches(WARMUP_STEPS)]
            single = [s for watch in watches for s in watch.outside(WARMUP_STEPS)]
            lines.append(
                f"| {name} | {count_parameters(rows[name][0]):,} | "
                f"{min(s for s, _ in stretches) * 1e3:.2f} | "
                f"{statistics.median(s for s, _ in stretches) * 1e3:.2f} | "
                f"{min(o for _, o in stretches) * 1e6:.0f} | "
                f"{statistics.median(single) * 1e6:.0f} |"
            )
        lines.append("")
        print("\n".join(lines[-len(found) - 7 :]), file=sys.stderr)
    return lines


class Ledger(TrainerCallback):
    """At every thousandth step: what the process holds. After every save: what it cost."""

    priority = -1000  # after the garbage is collected

    def __init__(self, folder: Path, every: int, watch: Stopwatch) -> None:
        self.folder, self.every, self.watch = folder, every, watch
        self.rows: list[dict[str, float]] = []
        self.held_s: dict[int, float] = {}
        self._metric = "checkpoint/save_duration_s"

    def on_step_begin(self, state: Any, trainer: Any) -> None:
        if state.global_step % self.every == 0:
            # Counting the objects is no part of the run.
            with trainer.timing.aside():
                self.rows.append(self._look(state))
                self.watch.began[-1] = self.watch.clock()
                self.watch.wall[-1] = time.perf_counter()

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if self._metric in metrics:
            self.held_s[step] = metrics[self._metric]

    def _look(self, state: Any) -> dict[str, float]:
        # What a checkpoint writes beside training would be counted at random: its objects come
        # and go. A full collection leaves what is really held.
        gc.collect()
        logs = self.folder.glob("trainer_logs*.jsonl")
        states = self.folder.glob("checkpoint-*/trainer_state.json")
        on_gpu = torch.cuda.is_available()
        return {
            "step": state.global_step,
            "resident": resident_bytes(),
            "device": torch.cuda.memory_allocated() if on_gpu else 0,
            "reserved": torch.cuda.memory_reserved() if on_gpu else 0,
            "objects": len(gc.get_objects()),
            "blocks": sys.getallocatedblocks(),
            "records": len(state.log_history),
            "log": sum(path.stat().st_size for path in logs),
            "state": max((path.stat().st_size for path in states), default=0),
        }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_long(device: str, steps: int) -> list[str]:
    sizes = {"cpu": {"width": 32, "layers": 1, "length": 8, "batch": 2}, "cuda": BASE["cuda"]}
    every, watch = steps // 10, Stopwatch(choose_clock(device))
    with tempfile.TemporaryDirectory() as folder, quiet():
        ledger = Ledger(Path(folder), every, watch)
        make_trainer(
            folder,
            device,
            steps + 1,  # so that one more step begins when the last of them is over
            [watch, ledger],
            save_strategy="steps",
            save_steps=every,
            save_total_limit=2,
            default_callbacks=True,
            **sizes[device],
        ).train()
    lines = [
        f"## {steps:,} steps of one run",
        "",
        ", ".join(f"{value} {name}" for name, value in sizes[device].items())
        + f"; default callbacks, a log every 10 steps, a checkpoint every {every:,}.",
        "",
        "| steps | ms per step, median of stretches | on the wall's clock | outside, us | "
        "resident MiB at the end | device MiB | reserved | objects | memory blocks | log records | "
        "log, KiB more | save held training up, ms | trainer_state.json, KiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for before, after in itertools.pairwise(ledger.rows):
        first, last = int(before["step"]), int(after["step"])
        stretches = watch.stretches(max(first, WARMUP_STEPS), last)
        wall = statistics.median(watch.wall_stretches(max(first, WARMUP_STEPS), last))
        held = ledger.held_s.get(last)
        lines.append(
            f"| {first:,} to {last:,} | {statistics.median(s for s, _ in stretches) * 1e3:.3f} | "
            f"{wall * 1e3:.3f} | {statistics.median(o for _, o in stretches) * 1e6:.0f} | "
            f"{after['resident'] / 2**20:.1f} | {after['device'] / 2**20:.1f} | "
            f"{after['reserved'] / 2**20:.1f} | {after['objects']:,} | {after['blocks']:,} | "
            f"{after['records']:,} | {(after['log'] - before['log']) / 2**10:.1f} | "
            f"{'' if held is None else f'{held * 1e3:.1f}'} | {after['state'] / 2**10:.1f} |"
        )
    lines.append("")
    print("\n".join(lines), file=sys.stderr)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--long", type=int, nargs="?", const=10_000, metavar="STEPS")
    parser.add_argument("--only-long", action="store_true", help="without the tables")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU's kernels")
    parser.add_argument("--write", action="store_true", help="keep the result in results/")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    where = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    lines = [
        f"# Growth, {datetime.date.today()}",
        "",
        f"`python benchmarks/growth.py {' '.join(sys.argv[1:])}` on {where}, {os.cpu_count()} "
        f"cores, {options.threads} thread(s), Python {platform.python_version()}, torch "
        f"{torch.__version__}; load of the machine when it began: {os.getloadavg()[0]:.1f}.",
        "",
    ]
    if not options.only_long:
        lines += tabulate(device, options.rounds, options.steps)
    if options.long or options.only_long:
        lines += run_long(device, options.long or 10_000)
    text = "\n".join(lines)
    print(text)
    if options.write:
        name = f"growth-{device}-{datetime.date.today()}.md"
        (Path(__file__).parent / "results" / name).write_text(text)


if __name__ == "__main__":
    main()
