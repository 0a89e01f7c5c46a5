"""FP8 training against bf16: the 124M decoder on the standard library's source, 300 steps each.

Every variant starts from the same weights and sees the same data. Told are the training loss (mean
of the last steps), the loss on held-out files, tokens per second after the warm-up, and peak
memory; with blocks compiled and without. The data is on every machine with Python.

    python benchmarks/fp8.py [--steps 300] [--batch 16] [--only rowwise ...] [--no-eager] [--write]
    python benchmarks/fp8.py --tiny     # on a CPU, to see that it runs; its times mean nothing

Ends with 1 if the loss of a recipe is further than 1 % from that of bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.cli.demo_corpus import standard_library
from headway.models import Decoder
from headway.precision import fp8
from headway.precision.torchao_package import torchao_version

MOST_DIFFERENCE = 0.01
LAST_STEPS = 30
LARGE = {
    "vocab_size": 50304,
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "intermediate_size": 2048,
    "max_seq_len": 1024,
    "tie_embeddings": True,
}
TINY = {
    "vocab_size": 258,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 64,
    "max_seq_len": 64,
}


@dataclass
class Figures:
    loss: float
    eval_loss: float
    tokens_per_s: float
    peak_gib: float


class Watch(TrainerCallback):
    """Seconds between the end of the warm-up and the last step, and the losses of the last."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._start = 0.0
        self.seconds = math.nan
        self.losses: list[float] = []

    def on_step_end(self, state: Any) -> None:
        if state.global_step in (self._first, self._last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            if state.global_step == self._first:
                self._start = now
            else:
                self.seconds = now - self._start

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if step > self._last - LAST_STEPS and "train/CE loss" in metrics:
            self.losses.append(metrics["train/CE loss"])


def run(options: argparse.Namespace, recipe: str | None, compiled: bool, folder: str) -> Figures:
    model = TINY if options.tiny else LARGE
    length = model["max_seq_len"]
    warm_up = max(1, options.steps // 5)
    watch = Watch(warm_up, options.steps)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=folder,
            seed=0,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            per_device_eval_batch_size=options.batch,
            max_eval_steps=20,
            learning_rate=6e-4,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, options.steps // 10),
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            mixed_precision="bf16",
            fp8_recipe=recipe,
            torch_compile=compiled,
            torch_compile_dynamic=not compiled,
            logging_steps=10,
            save_strategy="no",
            dataloader_drop_last=True,
            use_cpu=options.tiny,
        ),
        model_init=lambda: Decoder(**model),
        train_dataset=standard_library(length),
        eval_dataset=standard_library(length, held_out=True),
        callbacks=[watch],
        default_callbacks=False,
    )
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else math.nan
    num_tokens = (options.steps - warm_up) * options.batch * length
    loss = sum(watch.losses) / len(watch.losses)
    return Figures(loss, evaluated, num_tokens / watch.seconds, peak)


def measure(options: argparse.Namespace) -> tuple[list[str], bool]:
    """The rows of the table, and whether every recipe is close enough to bf16."""
    recipes: list[str | None] = [None, *(options.only or sorted(fp8.RECIPES))]
    ways = [False, True] if options.compile else [False]
    ways = ways if options.eager else [True]
    rows, close = [], True
    for compiled in ways:
        base: Figures | None = None
        for recipe in recipes:
            with tempfile.TemporaryDirectory() as folder:
                found = run(options, recipe, compiled, folder)
            base = base or found
            loss, evaluated = found.loss / base.loss - 1, found.eval_loss / base.eval_loss - 1
            close &= max(abs(loss), abs(evaluated)) <= MOST_DIFFERENCE
            rows.append(
                f"| {recipe or 'bf16'} | {'blocks' if compiled else 'no'} | {found.loss:.4f} | "
                f"{loss:+.2%} | {found.eval_loss:.4f} | {evaluated:+.2%} | "
                f"{found.tokens_per_s:,.0f} | {found.tokens_per_s / base.tokens_per_s:.2f} | "
                f"{found.peak_gib:.1f} |"
            )
            print(rows[-1], flush=True)
    return rows, close


def report(options: argparse.Namespace, rows: list[str], close: bool) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    today = datetime.datetime.now(datetime.UTC).date()
    verdict = "All recipes lie" if close else "NOT all recipes lie"
    return "\n".join(
        [
            f"# FP8 training, {today}",
            "",
            f"`python benchmarks/fp8.py {' '.join(sys.argv[1:])}` on {device}; torch "
            f"{torch.__version__}, torchao {torchao_version()}.",
            f"{options.steps} steps of {options.batch} sequences; same seed and data in each row, "
            f"weights in float32, autocast to bfloat16. Loss: mean of the last {LAST_STEPS} steps; "
            "held out: files not trained on.",
            "",
            "| matrix products | compiled | loss | to bf16 | held out | to bf16 | tokens/s | "
            "speed | peak GiB |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"{verdict} within {MOST_DIFFERENCE:.0%} of bf16.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=sorted(fp8.RECIPES))
    parser.add_argument("--no-eager", dest="eager", action="store_false")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    options = parser.parse_args()
    with fp8.on_any_device() if options.tiny else contextlib.nullcontext():
        rows, close = measure(options)
    text = report(options, rows, close)
    print(f"\n{text}")
    if options.write:
        today = datetime.datetime.now(datetime.UTC).date()
        path = Path(__file__).parent / "results" / f"fp8-{today}.md"
        path.write_text(text, encoding="utf-8")
    return 0 if close else 1


if __name__ == "__main__":
    raise SystemExit(main())
