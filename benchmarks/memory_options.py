"""What each memory option saves and costs, and how soon a compiled model takes its first step.

Trains the reference decoder in bf16 through `Trainer`, every row in a process of its own with an
empty compiler cache, and prints two tables: peak memory and step time by option, and the time of
the first step by what is compiled. Peaks need a CUDA device; `--tiny` runs on a CPU to try it.

    python benchmarks/memory_options.py [--write] [--table options|scopes] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECOMPUTE = {"gradient_checkpointing": True}
COMPILE = {"torch_compile": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute: every_2": {**RECOMPUTE, "gradient_checkpointing_policy": "every_2"},
    "recompute: selective": {**RECOMPUTE, "gradient_checkpointing_policy": "selective"},
    "recompute: block": RECOMPUTE,
    "offload": {"enable_activation_offloading": True},
    "offload, recompute: block": {"enable_activation_offloading": True, **RECOMPUTE},
    "compile": COMPILE,
    "compile, budget 0.5": {**COMPILE, "activation_memory_budget": 0.5},
    "compile, budget 0.1": {**COMPILE, "activation_memory_budget": 0.1},
    "compile, recompute: selective": {
        **COMPILE,
        **RECOMPUTE,
        "gradient_checkpointing_policy": "selective",
    },
    "compile, offload": {**COMPILE, "enable_activation_offloading": True},
    "optimizer in backward": {"fuse_optim_with_backward": True},
    "optimizer in backward, recompute: block": {"fuse_optim_with_backward": True, **RECOMPUTE},
    "weights in bfloat16": {"default_dtype": "bfloat16", "mixed_precision": "no"},
}
SCOPES = {"nothing": {}, "blocks": COMPILE, "model": {**COMPILE, "torch_compile_scope": "model"}}
LAYERS = (12, 24)
SIZES = {
    # (decoder, batch, length)
    "full": (
        {
            "vocab_size": 32768,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_layers": 16,
            "num_heads": 32,
            "num_kv_heads": 8,
        },
        4,
        2048,
    ),
    "small": (
        {"vocab_size": 32768, "hidden_size": 768, "num_layers": 12, "num_heads": 12},
        8,
        1024,
    ),
    "tiny": ({"vocab_size": 256, "hidden_size": 32, "num_layers": 2, "num_heads": 4}, 2, 32),
}
NUM_STEPS = 14


def run(size: str, options: dict[str, Any], num_layers: int | None) -> dict[str, float]:
    """Peak bytes, seconds of the first step and of a later one."""
    import torch

    from headway import Trainer, TrainerCallback, TrainingArguments
    from headway.data import SyntheticDataset
    from headway.models import Decoder, DecoderConfig

    shape, batch, length = SIZES[size]
    config = DecoderConfig(
        **{**shape, **({} if num_layers is None else {"num_layers": num_layers})}
    )
    on_gpu = torch.cuda.is_available()

    class Watch(TrainerCallback):
        """Waits for the device after each step, so that each has a time of its own."""

        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_train_begin(self) -> None:
            self.marks.append(self._now())

        def on_step_end(self) -> None:
            self.marks.append(self._now())

        def _now(self) -> float:
            if on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter()

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"mixed_precision": "bf16", "construct_model_on": "device", **options}
        Trainer(
            args=TrainingArguments(
                output_dir=folder,
                max_steps=NUM_STEPS,
                per_device_train_batch_size=batch,
                logging_strategy="no",
                save_strategy="no",
                seed=0,
                **settings,
            ),
            model_init=lambda: Decoder(config),
            train_dataset=SyntheticDataset(NUM_STEPS * batch, length, config.vocab_size, seed=0),
            callbacks=[watch],
            default_callbacks=False,
        ).train()
    steps = [later - earlier for earlier, later in zip(watch.marks, watch.marks[1:])]
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "first_s": steps[0],
        "step_s": statistics.median(steps[4:]),
    }


def measure(size: str, options: dict[str, Any], num_layers: int | None = None) -> dict[str, Any]:
    """`run` in a new process without compiled code of earlier ones."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": str(Path(cache) / "triton"),
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        }
        task = json.dumps([size, options, num_layers])
        done = subprocess.run(
            [sys.executable, __file__, "--task", task],
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table_of_options(size: str, names: list[str]) -> list[str]:
    """Peak memory and step time of each option against none."""
    lines = [
        "| option | peak, GiB | of none | step, ms | of none | first step, s |",
        "|---|---|---|---|---|---|",
    ]
    none = measure(size, OPTIONS["none"])
    for name in names:
        found = none if name == "none" else measure(size, OPTIONS[name])
        print(name, found, file=sys.stderr, flush=True)
        if "error" in found:
            lines.append(f"| {name} | {found['error']} | | | | |")
            continue
        peak, step = found["peak_bytes"], found["step_s"]
        share = f"{peak / none['peak_bytes']:.2f}" if none.get("peak_bytes") else "-"
        slower = f"{step / none['step_s']:.2f}" if "step_s" in none else "-"
        lines.append(
            f"| {name} | {peak / 2**30:.2f} | {share} | {1000 * step:.1f} | {slower} | "
            f"{found['first_s']:.1f} |"
        )
    return lines


def table_of_scopes(size: str) -> list[str]:
    """Seconds of the first step, by what is compiled and by the number of layers."""
    layers = (1, 2) if size == "tiny" else LAYERS
    lines = [
        "| compiled | "
        + " | ".join(f"{n} layers: first step, s | step, ms" for n in layers)
        + " |",
        "|---|" + "---|---|" * len(layers),
    ]
    for name, options in SCOPES.items():
        cells = []
        for num_layers in layers:
            found = measure("small" if size == "full" else size, options, num_layers)
            print(name, num_layers, found, file=sys.stderr, flush=True)
            if "error" in found:
                cells += [found["error"], ""]
            else:
                cells += [f"{found['first_s']:.1f}", f"{1000 * found['step_s']:.1f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep the result in results/")
    parser.add_argument("--tiny", action="store_true", help="a toy size, for a CPU")
    parser.add_argument("--table", choices=["options", "scopes"], help="one of the two alone")
    parser.add_argument("--only", nargs="+", choices=list(OPTIONS), help="these options alone")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(json.dumps(run(*json.loads(given.task))))
        return
    import torch

    size = "tiny" if given.tiny else "full"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shape, batch, length = SIZES[size]
    lines = [
        f"# Memory options and compilation, {datetime.date.today()}",
        "",
        f"`python benchmarks/memory_options.py` on {device}, torch {torch.__version__}; bf16, "
        f"fused AdamW, {NUM_STEPS} steps of {batch} x {length} tokens, decoder {shape}.",
    ]
    if given.table != "scopes":
        lines += ["", *table_of_options(size, given.only or list(OPTIONS))]
    if given.table != "options":
        title = "First step by what is compiled (smaller decoder, empty compiler caches):"
        lines += ["", title, "", *table_of_scopes(size)]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        folder = Path(__file__).parent / "results"
        (folder / f"memory-options-{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
