"""What each memory option saves and costs, and how soon a compiled model takes its first step.

Trains the reference decoder at the size of job B (gpu_jobs.py: 1.1 billion parameters, 4,096
tokens x 4) in bf16 through `Trainer`, and prints two tables. The first: peak memory and time of a
step for each option, on top of a compiled model, and for some without compilation; all rows in one
process, one after the other, the memory of each given back before the next. The second, with
`--table scopes`: the time of the first step by what is compiled, each row in a process of its own
with an empty compiler cache. Peaks need a CUDA device; `--tiny` runs on a CPU to try it.

A row that fails has its error in the table. With `--write` the report is written after every row.

    python benchmarks/memory_options.py [--table scopes] [--only N ...] [--limit-s 240] [--write]
    python benchmarks/memory_options.py --list      # the rows and their numbers
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMPILE = {"torch_compile": True, "torch_compile_dynamic": False}
RECOMPUTE = {"gradient_checkpointing": True}
OFFLOAD = {"enable_activation_offloading": True}
IN_BACKWARD = {"fuse_optim_with_backward": True, "max_grad_norm": 0.0}
HALF = {"default_dtype": "bfloat16", "mixed_precision": "no"}
EAGER = {"torch_compile": False}


def policy(name: str) -> dict[str, Any]:
    return {**RECOMPUTE, "gradient_checkpointing_policy": name}


# What a user adds to a compiled run, in the order in which it is measured: a cut run has the most
# important ones. Keys that begin with `model.` are the decoder's.
OPTIONS: list[dict[str, Any]] = [
    {},
    RECOMPUTE,
    policy("selective"),
    policy("every_2"),
    {"activation_memory_budget": 0.5},
    {"activation_memory_budget": 0.1},
    IN_BACKWARD,
    {**IN_BACKWARD, **RECOMPUTE},
    {**OFFLOAD, **RECOMPUTE},
    OFFLOAD,
    HALF,
    {**HALF, "optim": "adamw_bf16"},
    {"model.loss_chunk_tokens": 1024},
    {"model.loss_chunk_tokens": 16384},
    EAGER,
    {**EAGER, **RECOMPUTE},
    {**EAGER, **policy("selective")},
    {**EAGER, **OFFLOAD, **RECOMPUTE},
    {"optim": "adamw_8bit"},
    {"optim": "adamw_4bit"},
    {"fp8_recipe": "tensorwise"},
    {"mixed_precision": "no"},
    {"mixed_precision": "no", "float32_matmul_precision": "high"},
    {"optim": "adamw_fp8"},
    {"fused_loss": "liger"},
    {"fused_loss": "cut_cross_entropy"},
]
SCOPES = {"nothing": {}, "blocks": COMPILE, "model": {**COMPILE, "torch_compile_scope": "model"}}
LAYERS = (12, 24)
SIZES = {
    # (decoder, batch, length)
    "B": (
        {
            "vocab_size": 32768,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_layers": 16,
            "num_heads": 32,
            "num_kv_heads": 8,
            "max_seq_len": 4096,
        },
        4,
        4096,
    ),
    "small": (
        {"vocab_size": 32768, "hidden_size": 768, "num_layers": 12, "num_heads": 12},
        8,
        1024,
    ),
    "tiny": ({"vocab_size": 256, "hidden_size": 32, "num_layers": 2, "num_heads": 4}, 2, 32),
}
NUM_STEPS, WARM_UP = 14, 4
GIB = 2**30


def name_of(options: dict[str, Any]) -> str:
    """An option as one writes it in a run file."""
    if not options:
        return "none of them"
    return ", ".join(
        f"`{key}: {json.dumps(value)}`".replace('"', "") for key, value in options.items()
    )


def run(size: str, options: dict[str, Any], num_layers: int | None = None) -> dict[str, float]:
    """Peak bytes, seconds of the first step and of a later one."""
    import torch

    from headway import Trainer, TrainerCallback, TrainingArguments
    from headway.data import SyntheticDataset
    from headway.models import Decoder, DecoderConfig

    shape, batch, length = SIZES[size]
    own = {key.removeprefix("model."): v for key, v in options.items() if key.startswith("model.")}
    if num_layers is not None:
        own["num_layers"] = num_layers
    config = DecoderConfig(**{**shape, **own})
    on_gpu = torch.cuda.is_available()

    class Watch(TrainerCallback):
        """Waits for the device before the first step, after it, and around those that count."""

        def __init__(self) -> None:
            self.marks: dict[int, float] = {}

        def on_train_begin(self) -> None:
            self._mark(0)

        def on_step_end(self, state: Any) -> None:
            if state.global_step in (1, WARM_UP, NUM_STEPS):
                self._mark(state.global_step)

        def _mark(self, step: int) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            self.marks[step] = time.perf_counter()

    watch = Watch()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    settings = {"mixed_precision": "bf16", "construct_model_on": "device", **options}
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            args=TrainingArguments(
                output_dir=folder,
                max_steps=NUM_STEPS,
                per_device_train_batch_size=batch,
                logging_strategy="no",
                save_strategy="no",
                seed=0,
                **{key: value for key, value in settings.items() if not key.startswith("model.")},
            ),
            model_init=lambda: Decoder(config),
            train_dataset=SyntheticDataset(NUM_STEPS * batch, length, config.vocab_size, seed=0),
            callbacks=[watch],
            default_callbacks=False,
        ).train()
    marks = watch.marks
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "first_s": marks[1] - marks[0],
        "step_s": (marks[NUM_STEPS] - marks[WARM_UP]) / (NUM_STEPS - WARM_UP),
    }


def run_here(size: str, options: dict[str, Any]) -> dict[str, Any]:
    """`run`, or its error; afterwards nothing of it is left on the device."""
    import torch

    base = {**COMPILE, "torch_compile_backend": "aot_eager"} if size == "tiny" else COMPILE
    found: dict[str, Any]
    try:
        found = run(size, {**base, **options})
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]}
    # The error's frames held the model until here.
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        found["left_bytes"] = torch.cuda.memory_allocated()
    return found


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


class Report:
    """Lines that are told as they come, and kept in results/ if asked to."""

    def __init__(self, *lines: str, keep: bool) -> None:
        self._lines: list[str] = []
        self._keep = keep
        self.add(*lines)

    def add(self, *lines: str) -> None:
        self._lines += lines
        print("\n".join(lines), flush=True)
        if self._keep:
            from gpu_jobs import write_result

            write_result("memory_options", "\n".join(self._lines) + "\n")


def table_of_options(size: str, numbers: list[int], report: Report, limit_s: float) -> None:
    """Peak memory and step time of each option against none of them."""
    began, none = time.monotonic(), None
    report.add(
        "",
        "| on top of `torch_compile: true` | peak, GiB | of none | step, ms | of none | first "
        "step, s |",
        "|---|---|---|---|---|---|",
    )
    for number in numbers:
        options = OPTIONS[number]
        name = name_of(options)
        if time.monotonic() - began > limit_s:
            report.add(f"| {name} | not measured: {limit_s:.0f} s were over | | | | |")
            continue
        found = run_here(size, options)
        if not options:
            none = found
        if found.get("left_bytes", 0) > GIB // 16:
            print(f"left on the device: {found['left_bytes'] / GIB:.2f} GiB", file=sys.stderr)
        if "error" in found:
            report.add(f"| {name} | {found['error']} | | | | |")
            continue
        peak, step, has_base = found["peak_bytes"], found["step_s"], "step_s" in (none or {})
        share = f"{peak / none['peak_bytes']:.2f}" if has_base and none["peak_bytes"] else "-"
        slower = f"{step / none['step_s']:.2f}" if has_base else "-"
        report.add(
            f"| {name} | {peak / GIB:.2f} | {share} | {1000 * step:.1f} | {slower} | "
            f"{found['first_s']:.1f} |"
        )


def table_of_scopes(size: str, report: Report) -> None:
    """Seconds of the first step, by what is compiled and by the number of layers."""
    layers = (1, 2) if size == "tiny" else LAYERS
    report.add(
        "",
        "First step by what is compiled (smaller decoder, empty compiler caches):",
        "",
        "| compiled | "
        + " | ".join(f"{n} layers: first step, s | step, ms" for n in layers)
        + " |",
        "|---|" + "---|---|" * len(layers),
    )
    for name, options in SCOPES.items():
        cells = []
        for num_layers in layers:
            found = measure("small" if size == "B" else size, options, num_layers)
            if "error" in found:
                cells += [found["error"], ""]
            else:
                cells += [f"{found['first_s']:.1f}", f"{1000 * found['step_s']:.1f}"]
        report.add(f"| {name} | " + " | ".join(cells) + " |")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep the result in results/")
    parser.add_argument("--tiny", action="store_true", help="a toy size, for a CPU")
    parser.add_argument("--table", choices=["options", "scopes"], default="options")
    parser.add_argument(
        "--only",
        nargs="+",
        type=int,
        choices=range(len(OPTIONS)),
        metavar="N",
        help="these rows alone, by their numbers in --list; 0 is what all are compared with",
    )
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    parser.add_argument(
        "--limit-s", type=float, default=480.0, help="begin no row after so many seconds (480)"
    )
    parser.add_argument("--task", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = read_options()
    if given.task:
        print(json.dumps(run(*json.loads(given.task))))
        return
    if given.list:
        print("\n".join(f"{number:3} {name_of(one)}" for number, one in enumerate(OPTIONS)))
        return
    import torch

    size = "tiny" if given.tiny else "B"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shape, batch, length = SIZES[size]
    report = Report(
        f"# Memory options and compilation, {datetime.date.today()}",
        "",
        f"`python benchmarks/memory_options.py {' '.join(sys.argv[1:])}` on {device}, torch "
        f"{torch.__version__}; bf16, fused AdamW, {NUM_STEPS} steps of {batch} x {length:,} "
        f"tokens, the first {WARM_UP} without a time, decoder {shape}.",
        keep=given.write,
    )
    if given.table == "scopes":
        table_of_scopes(size, report)
        return
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        table_of_options(size, given.only or list(range(len(OPTIONS))), report, given.limit_s)


if __name__ == "__main__":
    main()
