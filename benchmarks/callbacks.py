"""What callbacks add to a step: the default ones, the monitors and TensorBoard against none.

One tiny model and a log every ten steps in each run. What is measured is the time in which events
are delivered, handlers included: the work of the steps themselves varies by more than callbacks
cost. The sets of callbacks take turns for several rounds in one process, so that a slow moment of
the machine hits them alike. The figure of each is its best stretch of ten steps, with its log; what
it has above the run without callbacks is told in microseconds and as a share of a step of 20 ms.
The goal for the defaults is 1 %.

Also: how often the loggers of norms wait for the device in one logging, on a model of 1,000
parameters. The goal is once.

    python benchmarks/callbacks.py [--rounds 7] [--steps 200] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import io
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from headway import Trainer, TrainingArguments, callbacks
from headway.engine.events import EventBus
from headway.errors import ConfigError
from headway.testing import count_host_syncs, tiny_dataset, tiny_decoder

WARMUP_STEPS, STRETCH = 30, 10
STEP_S, GOAL = 20e-3, 0.01
NUM_PARAMETERS = 1000
NONE, DEFAULTS = "none", "the defaults"
OTHERS = (
    "SpeedMonitorCallback",
    "StabilityMonitorCallback",
    "GPUMemoryMonitorCallback",
    "PeakMemory",
    "TBLogger",
)
NORMS = ("GradNormLogger", "ParameterNormLogger")

Make = Callable[[TrainingArguments], list[Any]]


class Stopwatch:
    """Seconds per step spent in events, over each stretch of ten steps after the warm-up."""

    def __init__(self, bus: EventBus) -> None:
        self.seconds_per_step: list[float] = []
        self._fire, self._state = bus.fire, bus.state
        self._spent_s, self._depth = 0.0, 0
        bus.fire = self.fire  # type: ignore[method-assign]

    def fire(self, event: str, **extra: Any) -> None:
        if event == "on_step_begin" and self._state.global_step % STRETCH == 0:
            # The log of the last stretch is over, its first step not begun.
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


def make_trainer(
    folder: str, steps: int, make: Make, model: Callable[[], nn.Module], **options: Any
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=steps,
        save_strategy="no",
        use_cpu=True,
        seed=0,
        **options,
    )
    return Trainer(
        args=arguments,
        model_init=model,
        train_dataset=tiny_dataset(512, sequence_length=8),
        callbacks=make(arguments),
        default_callbacks=False,
    )


def sets_to_measure() -> dict[str, Make]:
    """Callbacks by the name under which their cost is told."""
    arguments = TrainingArguments(output_dir="unused", use_cpu=True)
    found: dict[str, Make] = {NONE: lambda args: [], DEFAULTS: callbacks.default_callbacks}
    for callback in callbacks.default_callbacks(arguments):
        kind = type(callback)
        found[f"{kind.__name__} alone"] = lambda args, kind=kind: [kind()]
    for name in OTHERS:
        found[name] = lambda args, name=name: [getattr(callbacks, name)()]
    return found


def measure(sets: dict[str, Make], rounds: int, steps: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in sets}
    for _ in range(rounds):
        for name, make in sets.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                contextlib.redirect_stderr(io.StringIO()),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                trainer = make_trainer(folder, steps, make, tiny_decoder, logging_steps=STRETCH)
                watch = Stopwatch(trainer.bus)
                trainer.train()
            found[name] += watch.seconds_per_step
    return found


class ManyParameters(nn.Module):
    """A thousand parameters, half of them matrices, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(258, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range((NUM_PARAMETERS - 2) // 2))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids) * self.scale
        for layer in self.layers:
            hidden = hidden + 0.01 * layer(hidden)
        return {"loss": hidden.square().mean()}


def count_waits(name: str) -> tuple[float, float] | None:
    """Waits for the device in one logging, milliseconds in its run; None: no such class."""
    try:
        kind = getattr(callbacks, name)
    except (AttributeError, ImportError):
        return None

    class Counted(kind):  # type: ignore[misc, valid-type]
        """Times its own handlers alone."""

        seconds = 0.0

    for event in [key for key in dir(kind) if key.startswith("on_")]:
        setattr(Counted, event, _timed(getattr(kind, event)))
    callback, first = Counted(log_steps=5), 0
    with tempfile.TemporaryDirectory() as folder, count_host_syncs(device_type="cpu") as syncs:
        make_trainer(folder, 5, lambda args: [callback], ManyParameters, logging_steps=50).train()
        first = len(_of_callbacks(syncs.records))
    with tempfile.TemporaryDirectory() as folder:
        callback = Counted(log_steps=5)
        make_trainer(folder, 5, lambda args: [callback], ManyParameters, logging_steps=50).train()
    return first, callback.seconds * 1e3


def _timed(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return handler(self, *args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - began

    return timed


def _of_callbacks(records: list[Any]) -> list[Any]:
    return [record for record in records if f"{os.sep}callbacks{os.sep}" in record.file]


def report(found: dict[str, list[float]], rounds: int, steps: int, load: float) -> str:
    base = min(found[NONE])
    lines = [
        f"# Callbacks, {datetime.date.today()}",
        "",
        f"`python benchmarks/callbacks.py --rounds {rounds} --steps {steps}` on "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 1 thread, "
        f"Python {platform.python_version()}, torch {torch.__version__}; "
        f"load at the start {load:.1f}.",
        "",
        "| callbacks | in events, best, us/step | median | best above none, us "
        f"| of a {STEP_S * 1e3:.0f} ms step |",
        "|---|---|---|---|---|",
    ]
    for name, times in found.items():
        best = min(times)
        lines.append(
            f"| {name} | {best * 1e6:.0f} | {statistics.median(times) * 1e6:.0f} "
            f"| {(best - base) * 1e6:+.0f} | {100 * (best - base) / STEP_S:.2f} % |"
        )
    share = (min(found[DEFAULTS]) - base) / STEP_S
    verdict = "met" if share <= GOAL else "not met"
    lines += [
        "",
        f"Goal for the defaults, at most {100 * GOAL:.0f} % of a step: {verdict}.",
        "",
        f"| one logging, {NUM_PARAMETERS} parameters | waits for the device "
        "| ms, all of a run of 5 steps |",
        "|---|---|---|",
    ]
    for name in NORMS:
        waits = count_waits(name)
        told = "missing | " if waits is None else f"{waits[0]:g} | {waits[1]:.1f}"
        lines.append(f"| {name} | {told} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="keep the result in results/")
    options = parser.parse_args()
    least = WARMUP_STEPS + 2 * STRETCH  # a stretch ends where the next one begins
    if options.steps < least or options.rounds < 1:
        sys.exit(f"--steps: {least} and more, --rounds: 1 and more")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    try:
        found = measure(sets_to_measure(), options.rounds, options.steps)
    except ConfigError as error:
        sys.exit(str(error))
    text = report(found, options.rounds, options.steps, load)
    print(text)
    if options.write:
        folder = Path(__file__).parent / "results"
        (folder / f"callbacks-{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
