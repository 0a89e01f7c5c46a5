"""What a trainer adds to a step: Headway, HF Trainer and Lightning against a bare loop.

One tiny transformers model, the same data, AdamW (fused), clipping, linear schedule and a log every
ten steps in each. The systems take turns for several rounds in one process, so that a slow moment
of the machine hits them alike. The figure of each is its best stretch of ten steps, with its log:
the stretch least disturbed by the rest of the machine.
Also: the cost of an event that nobody listens to, and of starting at sample 10^9.

    python benchmarks/overhead.py [--rounds 7] [--steps 300] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import io
import itertools
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

WARMUP_STEPS, STRETCH = 30, 10
BATCH, LENGTH, VOCABULARY = 4, 16, 256


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )


def make_data(num_samples: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(
        0, VOCABULARY, (num_samples, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    return [{"input_ids": row, "labels": row} for row in ids]


class Stopwatch:
    """Seconds per step over each stretch of ten steps, a log among them, after the warm-up."""

    def __init__(self) -> None:
        self.done, self.marks = 0, []

    def step(self) -> None:
        self.done += 1
        if self.done >= WARMUP_STEPS and self.done % STRETCH == 0:
            self.marks.append(time.perf_counter())

    @property
    def seconds_per_step(self) -> list[float]:
        return [(b - a) / STRETCH for a, b in itertools.pairwise(self.marks)]


def run_bare(data: list, steps: int, folder: str) -> list[float]:
    model = make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    watch, done, total = Stopwatch(), 0, torch.zeros(())
    while done < steps:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
            done += 1
            if done % 10 == 0:
                total.item()
                total.zero_()
            watch.step()
            if done == steps:
                break
    return watch.seconds_per_step


def run_headway(data: list, steps: int, folder: str) -> list[float]:
    from headway import Trainer, TrainerCallback, TrainingArguments

    watch = Stopwatch()

    class Watch(TrainerCallback):
        def on_step_end(self) -> None:
            watch.step()

    Trainer(
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            logging_steps=10,
            save_strategy="no",
            max_grad_norm=1.0,
            learning_rate=1e-3,
            use_cpu=True,
            seed=0,
        ),
        model=make_model(),
        train_dataset=data,
        callbacks=[Watch()],
    ).train()
    return watch.seconds_per_step


def run_transformers(data: list, steps: int, folder: str) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    watch = Stopwatch()

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            watch.step()

    Trainer(
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            logging_steps=10,
            save_strategy="no",
            max_grad_norm=1.0,
            learning_rate=1e-3,
            optim="adamw_torch_fused",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        model=make_model(),
        train_dataset=data,
        callbacks=[Watch()],
    ).train()
    return watch.seconds_per_step


def import_lightning() -> Any:
    """Lightning goes by two package names."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"{name}.loggers")
            return importlib.import_module(name)
    raise SystemExit("Lightning is not installed: pip install 'headway[bench]'")


def run_lightning(data: list, steps: int, folder: str) -> list[float]:
    pl = import_lightning()

    watch = Stopwatch()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model().train()

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - s / steps)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

        def on_train_batch_end(self, *args) -> None:
            watch.step()

    pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        log_every_n_steps=10,
        logger=pl.loggers.CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # The fused optimizer refuses Lightning's own clipping hook only under AMP; not here.
        gradient_clip_val=1.0,
    ).fit(Module(), DataLoader(data, batch_size=BATCH, shuffle=True))
    return watch.seconds_per_step


SYSTEMS: dict[str, Callable[[list, int, str], list[float]]] = {
    "bare loop": run_bare,
    "Headway": run_headway,
    "HF Trainer": run_transformers,
    "Lightning": run_lightning,
}


def measure(rounds: int, steps: int) -> dict[str, list[float]]:
    data = make_data(1024)
    found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(rounds):
        for name, run in SYSTEMS.items():
            quiet = contextlib.redirect_stderr(io.StringIO())
            with (
                tempfile.TemporaryDirectory() as folder,
                quiet,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                found[name] += run(data, steps, folder)
    return found


def idle_event_seconds() -> float:
    """An event with no handler, per call."""
    from headway.engine.events import EventBus
    from headway.engine.state import TrainerControl, TrainerState

    bus, calls = EventBus(None, TrainerState(), TrainerControl()), 200_000
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            bus.fire("on_step_begin")
        best = min(best, (time.perf_counter() - began) / calls)
    return best


def far_start_seconds() -> float:
    """From nothing to the first window at sample 10^9 of 10^12."""
    from headway.data import SyntheticDataset
    from headway.data.loader import WindowLoader

    began = time.perf_counter()
    dataset = SyntheticDataset(10**12, 128, 1000, seed=0)
    loader = WindowLoader(dataset, batch_size=8, accumulation=4, seed=0)
    loader.load_state_dict({**loader.state_dict(), "position": 10**9})
    next(iter(loader.windows()))
    return time.perf_counter() - began


def report(found: dict[str, list[float]], rounds: int, steps: int) -> str:
    bare = min(found["bare loop"])
    packages = ("torch", "transformers", import_lightning().__name__.split(".")[0])
    versions = ", ".join(f"{name} {importlib.import_module(name).__version__}" for name in packages)
    lines = [
        f"# Overhead per step, {datetime.date.today()}",
        "",
        f"`python benchmarks/overhead.py --rounds {rounds} --steps {steps}` on "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 1 thread, "
        f"Python {platform.python_version()}; {versions}.",
        "",
        "| system | best, us/step | median | best above the bare loop, us |",
        "|---|---|---|---|",
    ]
    for name, times in found.items():
        best, median = min(times) * 1e6, statistics.median(times) * 1e6
        lines.append(f"| {name} | {best:.0f} | {median:.0f} | {best - bare * 1e6:+.0f} |")
    lines += [
        "",
        f"An event without a handler: {idle_event_seconds() * 1e6:.2f} us.",
        f"Start at sample 10^9 of a synthetic dataset: {far_start_seconds() * 1e3:.1f} ms.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--write", action="store_true", help="keep the result in results/")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    text = report(measure(options.rounds, options.steps), options.rounds, options.steps)
    print(text)
    if options.write:
        folder = Path(__file__).parent / "results"
        (folder / f"overhead-{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
