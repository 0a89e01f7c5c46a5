"""What quantization-aware training is worth: low-bit models of runs with it and without it.

A small decoder learns the standard library's source (bytes). Two runs then go on from that one
checkpoint for the same steps on the same data, one plain, one with the recipe. Both are finalized
with the recipe, and the loss of each low-bit folder is measured on held-out files. A CPU is enough.

    python benchmarks/qat.py [--steps 1000] [--more 500] [--seeds 3] [--write]

Ends with 1 unless the run with the recipe gives the lower loss, in every recipe and seed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from headway import Trainer, TrainingArguments
from headway.cli.demo_corpus import standard_library
from headway.cli.main import main as headway
from headway.models import Decoder, load_causal_lm
from headway.precision.torchao_package import torchao_version

# Recipe and group size (None: the recipe's own, which may be more than the model is wide).
RECIPES: list[tuple[str, int | None]] = [
    ("int8-dynamic-act-int4-weight", None),
    ("int4-weight-only", 64),
]
LENGTH = 64
MODEL = {
    "vocab_size": 258,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 192,
    "max_seq_len": LENGTH,
}


def evaluate(folder: Path) -> float:
    """The loss of a model folder on held-out files."""
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder / "eval"),
            per_device_eval_batch_size=16,
            max_eval_steps=40,
            use_cpu=True,
        ),
        model=load_causal_lm(folder),
        eval_dataset=standard_library(LENGTH, held_out=True),
        default_callbacks=False,
    )
    loss: float = trainer.evaluate()["eval_loss"]
    return loss


def train(
    options: argparse.Namespace,
    folder: Path,
    seed: int,
    resume: Path | None = None,
    **given: Any,
) -> Path:
    """Train the first part, or from `resume` to the end; returns the checkpoint.

    The rate falls to zero at the end, so that runs differ by more than the noise of their last
    steps.
    """
    total = options.steps + options.more
    steps = total if resume else options.steps
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder),
            seed=seed,
            max_steps=total,
            stop_at=f"{steps} steps",
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            lr_scheduler_type="linear",
            warmup_steps=20,
            max_grad_norm=1.0,
            save_strategy="steps",
            save_steps=steps,
            logging_steps=50,
            use_cpu=True,
            **given,
        ),
        model_init=lambda: Decoder(**MODEL),
        train_dataset=standard_library(LENGTH),
        default_callbacks=False,
    )
    trainer.train(resume_from_checkpoint=str(resume) if resume else False)
    return folder / f"checkpoint-{steps}"


def finalize(source: Path, target: Path, recipe: str, group_size: int | None) -> Path:
    words = ["finalize", str(source), str(target), "--quantize", recipe]
    words += [] if group_size is None else ["--group-size", str(group_size)]
    with contextlib.redirect_stdout(io.StringIO()):
        code = headway(words)
    if code:
        raise SystemExit(code)
    return target


def compare(options: argparse.Namespace, root: Path) -> dict[str, list[tuple[float, ...]]]:
    """By recipe and seed: the loss whole, rounded, and rounded after training for it."""
    found: dict[str, list[tuple[float, ...]]] = {recipe: [] for recipe, _ in RECIPES}
    for seed in range(options.seeds):
        base = train(options, root / f"base-{seed}", seed)
        plain = train(options, root / f"plain-{seed}", seed, base)
        whole = evaluate(plain)
        for recipe, group_size in RECIPES:
            name = f"{recipe}-{seed}"
            aware = train(
                options,
                root / f"qat-{name}",
                seed,
                base,
                qat_recipe=recipe,
                qat_group_size=group_size,
            )
            rounded = evaluate(finalize(plain, root / f"a-{name}", recipe, group_size))
            trained = evaluate(finalize(aware, root / f"b-{name}", recipe, group_size))
            found[recipe].append((whole, rounded, trained))
            figures = f"whole {whole:.4f}, rounded {rounded:.4f}, trained {trained:.4f}"
            print(f"{name}: {figures}", flush=True)
    return found


def report(options: argparse.Namespace, found: dict[str, list[tuple[float, ...]]]) -> str:
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [
        f"# Quantization-aware training, {today}",
        "",
        f"`python benchmarks/qat.py {' '.join(sys.argv[1:])}` on a CPU ({platform.machine()}), "
        f"torch {torch.__version__}, torchao {torchao_version()}.",
        f"A decoder of {sum(p.numel() for p in Decoder(**MODEL).parameters()):,} parameters; "
        f"{options.steps} steps plain, then {options.more} more on the same data, plain or with "
        "the recipe, the rate falling to zero; losses on held-out files, in nats per byte.",
        "",
        "| recipe | seed | whole weights | rounded after training | trained for it, finalized | "
        "lower by |",
        "|---|---|---|---|---|---|",
    ]
    for recipe, by_seed in found.items():
        for seed, (whole, rounded, trained) in enumerate(by_seed):
            gain = rounded - trained
            lines.append(
                f"| {recipe} | {seed} | {whole:.4f} | {rounded:.4f} | {trained:.4f} | {gain:.4f} |"
            )
        means = [statistics.mean(figures) for figures in zip(*by_seed)]
        cells = " | ".join(f"{mean:.4f}" for mean in (*means, means[1] - means[2]))
        lines.append(f"| {recipe} | mean | {cells} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--more", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(options, Path(folder))
    text = report(options, found)
    print(f"\n{text}")
    if options.write:
        today = datetime.datetime.now(datetime.UTC).date()
        path = Path(__file__).parent / "results" / f"qat-{today}.md"
        path.write_text(text, encoding="utf-8")
    better = all(trained < rounded for runs in found.values() for _, rounded, trained in runs)
    return 0 if better else 1


if __name__ == "__main__":
    raise SystemExit(main())
