"""Losses of 1,000 steps on real text with the decoder's GPU kernels, where there is no GPU.

Triton's interpreter runs the kernels on the CPU, one program after the other; the graphs around
them are those of a compiled decoder on a GPU: chained blocks, heads turned where the joined product
put them, the gated MLP's gradient, the loss with its gradient, AdamW with clipping. What a GPU does
differently (its matrix products, its rounding, the order of its sums) does not show here:
gpu_training.py has curves of a GPU.

    python benchmarks/kernel_curve.py [--steps 1000] [--write]     # about an hour on 2 cores

Needs Triton 3.7 or newer; `make triton` puts it where this script looks as well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path += [str(HERE.parent / "tests/unit/kernels"), str(Path(sys.prefix, "triton"))]

# The environment comes before Triton, and this before the modules of the kernels.
# ruff: noqa: E402
# ruff: isort: off
import kernels_on_cpu
# ruff: isort: on

import argparse
import multiprocessing
import statistics
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from gpu_jobs import TINY_CURVE, with_converted_decoder, write_result
from gpu_training import smoothed

from headway.cli.bench_job import Plan, Stopwatch
from headway.cli.bench_systems import System, headway_system, run_bare
from headway.models import loss, projections
from headway.models.decoder import DecoderStack
from headway.models.kernels import cross_entropy, heads, linear, scaling, swiglu
from headway.optim import adamw_step

# The interpreter takes milliseconds for each token and layer.
JOB = replace(TINY_CURVE, length=32, batch=2)
PRECISIONS = {"no": "float32", "bf16": "bf16 autocast"}
BARE, EAGER = "bare loop, transformers' Llama", "Headway, reference decoder, eager"
KERNELS = "Headway, reference decoder, compiled, with the kernels"
SYSTEMS: dict[str, System] = {
    BARE: run_bare,
    EAGER: headway_system(with_converted_decoder),
    # The graphs of a GPU; code for them is what Triton's kernels stand for here.
    KERNELS: headway_system(with_converted_decoder, torch_compile_backend="aot_eager"),
}
Launches = Counter[str]


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, launches: Launches) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        self._launches[self._kernel.fn.__name__] += 1
        return self._kernel[grid]


def count_launches(module: ModuleType, launches: Launches) -> None:
    kernels_on_cpu.open_kernels(module)
    if hasattr(module, "_kernels"):
        several = module._kernels()
        counted: Any = type(several)(*(Counted(kernel, launches) for kernel in several))
        vars(module)["_kernels"] = lambda: counted
    else:
        one = Counted(module._kernel(), launches)
        vars(module)["_kernel"] = lambda: one


def take_the_way_of_a_gpu(launches: Launches) -> None:
    """Kernels for what lies on the CPU, for the rest of this process."""
    for module in (cross_entropy, heads, linear, scaling, swiglu, adamw_step):
        count_launches(module, launches)
    run_chain = DecoderStack._run_chain

    def counted_chain(*given: Any) -> torch.Tensor:
        launches["chain of blocks"] += 1
        return run_chain(*given)

    DecoderStack._run_chain = counted_chain
    projections._has_kernels = lambda x: True
    loss.can_use_kernel = lambda logits: True
    adamw_step.triton_works = lambda: True
    adamw_step._send = lambda values, device: values.to(device)  # there is no pinned memory
    adamw_step._is_plain = lambda tensor, like: tensor.dtype == torch.float32
    # As long as the process: an operation ends with the library that it is in.
    library = torch.library.Library("headway", "FRAGMENT")
    vars(kernels_on_cpu)["library"] = library

    def cast_again(weights: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        joined = linear._fake_cast(weights, dtype)
        linear._cast_by_kernel(weights, joined)
        return joined

    library.impl("cast_again", cast_again, "CPU")


def train(system: str, precision: str, steps: int) -> tuple[list[float], Launches]:
    torch.set_num_threads(1)
    launches: Launches = Counter()
    if system == KERNELS:
        take_the_way_of_a_gpu(launches)
    plan = Plan(
        system=system,
        job=JOB,
        compiled=system == KERNELS,
        steps=steps,
        warmup=1,
        device="cpu",
        precision=precision,
        learning_rate=1e-3,
        warmup_rate_steps=min(50, steps // 2),
        text=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        return SYSTEMS[system](plan, Stopwatch(plan), folder), launches


def report(steps: int, rows: dict[tuple[str, str], tuple[list[float], Launches]]) -> str:
    lines = [
        f"`python benchmarks/kernel_curve.py --steps {steps}`, torch {torch.__version__}; "
        f"{steps:,} steps on the bytes of the standard library's source; {JOB.tell()}; the same "
        "initial weights, data and recipe. Distances between single steps, and between losses "
        "smoothed over 50.",
        "",
        "| precision | | loss at the end | largest distance from the bare loop | smoothed "
        "| from the eager decoder | smoothed |",
        "|---|---|---|---|---|---|---|",
    ]
    for (precision, system), (losses, _) in rows.items():
        cells = [PRECISIONS[precision], system, f"{smoothed(losses)[-1]:.4f}"]
        for base in (BARE, EAGER):
            other = rows[precision, base][0]
            for found, wanted in ((losses, other), (smoothed(losses), smoothed(other))):
                apart = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
                cells.append(f"{max(apart):.2e} (mean {statistics.fmean(apart):.2e})")
        lines.append(f"| {' | '.join(cells)} |")
    for precision, words in PRECISIONS.items():
        launched = rows[precision, KERNELS][1].most_common()
        told = ", ".join(f"{name} {number:,}" for name, number in launched)
        lines += ["", f"Launches, {words}: {told}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--write", action="store_true", help="the report into benchmarks/results/")
    options = parser.parse_args()
    tasks = [(precision, system) for precision in PRECISIONS for system in SYSTEMS]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:
        made = {key: pool.submit(train, key[1], key[0], options.steps) for key in tasks}
        rows = {key: future.result() for key, future in made.items()}
    text = report(options.steps, rows)
    print(text)
    if options.write:
        write_result("kernel_curve", f"# The kernels' losses on real text\n\n{text}\n")


if __name__ == "__main__":
    main()
