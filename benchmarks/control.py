"""What a run pays for being steerable while nobody steers it.

On one rank: the time in which events are delivered and the loop looks for commands, with
TrainerControlCallback against without, its server up. Both take turns for several rounds in one
process; the figure of each is its best stretch of ten steps. The goal is less than 20 us a step.

On two ranks: how many collectives a step has with it and without. The goal is not one more. Also
how long a command takes, from the request to the receipt that says that it took effect, and how
long a step is meanwhile.

    python benchmarks/control.py [--rounds 7] [--steps 300] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import logging
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from headway import DDPTrainer, DDPTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import TrainerControlCallback
from headway.control.client import Client
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

WARMUP_STEPS, STRETCH = 30, 10
GOAL_S = 20e-6
NUM_COMMANDS = 20


class Stopwatch:
    """Seconds per step in events and in looking for commands, over each stretch of ten steps."""

    def __init__(self, trainer: Trainer) -> None:
        self.seconds_per_step: list[float] = []
        self._state, self._spent_s, self._depth = trainer.state, 0.0, 0
        self._fire, self._look = trainer.bus.fire, trainer.commands.look
        trainer.bus.fire = self.fire  # type: ignore[method-assign]
        trainer.commands.look = self.look  # type: ignore[method-assign]

    def look(self) -> bool:
        began = time.perf_counter()
        found = self._look()
        self._spent_s += time.perf_counter() - began
        return found

    def fire(self, event: str, **extra: Any) -> None:
        if event == "on_step_begin" and self._state.global_step % STRETCH == 0:
            if self._state.global_step > WARMUP_STEPS:
                self.seconds_per_step.append(self._spent_s / STRETCH)
            self._spent_s = 0.0
        self._depth += 1
        began = time.perf_counter()
        try:
            self._fire(event, **extra)
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._spent_s += time.perf_counter() - began


def settings(folder: str, steps: int) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": 2, "max_steps": steps, "seed": 0,
        "save_strategy": "no", "logging_strategy": "no", "use_cpu": True,
    }  # fmt: skip


def given(callbacks: list[Any]) -> dict[str, Any]:
    return {
        "model_init": tiny_decoder, "train_dataset": tiny_dataset(512, sequence_length=8),
        "callbacks": callbacks, "default_callbacks": False,
    }  # fmt: skip


def measure_events(rounds: int, steps: int) -> dict[bool, list[float]]:
    """Seconds per step that are no step, with control and without."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for steered, times in found.items():
            with tempfile.TemporaryDirectory() as folder:
                callbacks = [TrainerControlCallback(dashboard=False)] if steered else []
                trainer = Trainer(
                    args=TrainingArguments(**settings(folder, steps)), **given(callbacks)
                )
                watch = Stopwatch(trainer)
                trainer.train()
            times += watch.seconds_per_step
    return found


class Counts(TrainerCallback):
    """Collectives of each step, as the steps in the middle of a run have them."""

    def __init__(self) -> None:
        self.num_calls, self.by_step = 0, {}

    def on_train_begin(self) -> None:
        from torch import distributed

        for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
            self._count(distributed, name)

    def _count(self, module: Any, name: str) -> None:
        call = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            return call(*args, **kwargs)

        setattr(module, name, counted)

    def on_step_begin(self, state: Any) -> None:
        self.by_step[state.global_step] = self.num_calls

    @property
    def per_step(self) -> float:
        steps = sorted(self.by_step)[3:]
        return (self.by_step[steps[-1]] - self.by_step[steps[0]]) / (len(steps) - 1)


def count_collectives(folder: str, steered: bool) -> tuple[float, float]:
    """(collectives a step, the median of seconds a step) on one of several ranks."""
    init_distributed(use_cpu=True)
    counts, times = Counts(), []

    class Times(TrainerCallback):
        def on_step_begin(self) -> None:
            times.append(time.perf_counter())

    callbacks: list[Any] = [TrainerControlCallback(dashboard=False)] if steered else []
    trainer = DDPTrainer(
        args=DDPTrainingArguments(**settings(folder, 60)), **given([*callbacks, counts, Times()])
    )
    trainer.train()
    gaps = [b - a for a, b in itertools.pairwise(times[10:])]
    return counts.per_step, statistics.median(gaps)


def measure_latency() -> tuple[list[float], float]:
    """(seconds of each command over HTTP, the median of seconds a step) on one rank."""
    taken: list[float] = []
    times: list[float] = []

    class Sends(TrainerCallback):
        thread: threading.Thread | None = None

        def on_step_begin(self, state: Any, trainer: Any) -> None:
            times.append(time.perf_counter())
            if state.global_step == WARMUP_STEPS:
                self.thread = threading.Thread(target=self.send, args=(trainer,))
                self.thread.start()

        def send(self, trainer: Any) -> None:
            try:
                client = Client(control.board.job_id)
                for _ in range(NUM_COMMANDS):
                    began = time.perf_counter()
                    client.send("status")
                    taken.append(time.perf_counter() - began)
            finally:
                trainer.cancel_run("measured")

    control = TrainerControlCallback(dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(**settings(folder, 10**6))
        sends = Sends()
        Trainer(args=args, **given([control, sends])).train()
        if sends.thread is not None:
            sends.thread.join()
    return taken, statistics.median(b - a for a, b in itertools.pairwise(times))


def report(rounds: int, steps: int) -> str:
    load = os.getloadavg()[0]
    found = measure_events(rounds, steps)
    idle = min(found[True]) - min(found[False])
    lines = [
        f"# Control, {datetime.date.today()}",
        "",
        f"`python benchmarks/control.py --rounds {rounds} --steps {steps}` on "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 1 thread, Python "
        f"{platform.python_version()}, torch {torch.__version__}; load at the start {load:.1f}.",
        "",
        "| one rank, nobody steers: events and the look for commands | best, us/step | median |",
        "|---|---|---|",
    ]
    for steered, words in ((False, "without control"), (True, "with control")):
        times = found[steered]
        lines.append(f"| {words} | {min(times) * 1e6:.1f} | {statistics.median(times) * 1e6:.1f} |")
    verdict = "met" if idle < GOAL_S else "not met"
    lines += [
        "",
        f"Goal, less than {GOAL_S * 1e6:.0f} us a step more: {verdict} ({idle * 1e6:+.1f} us).",
        "",
        "| two ranks (DDP, gloo) | collectives a step | ms a step, median |",
        "|---|---|---|",
    ]
    ranks = {}
    for steered in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            ranks[steered] = run_ranks(count_collectives, 2, folder, steered, timeout_s=120)[0]
        words = "with control" if steered else "without control"
        lines.append(f"| {words} | {ranks[steered][0]:g} | {ranks[steered][1] * 1e3:.2f} |")
    same = "met" if ranks[True][0] <= ranks[False][0] else "not met"
    taken, step_s = measure_latency()
    lines += [
        "",
        f"Goal, not one collective more: {same}.",
        "",
        f"A command over HTTP, until its receipt says that it took effect: median "
        f"{statistics.median(taken) * 1e3:.0f} ms, at most {max(taken) * 1e3:.0f} ms (the client "
        f"looks every 50 ms), while a step takes {step_s * 1e3:.1f} ms.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--write", action="store_true", help="write into benchmarks/results")
    options = parser.parse_args()
    logging.getLogger("headway").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HEADWAY_JOBS_DIR"] = folder
        text = report(options.rounds, options.steps)
    print(text)
    if options.write:
        name = f"control-{datetime.date.today()}.md"
        Path(__file__).with_name("results").joinpath(name).write_text(text)


if __name__ == "__main__":
    main()
