"""Packed documents with document masks against one full sequence of the same length, on one GPU.

The model is job B's (gpu_jobs.py) on one sequence of 16,384 tokens: bf16 autocast over float32
weights, fused AdamW, clipping at 1.0, cosine schedule, a log record every ten steps, compiled.

- `unpacked`: one causal sequence, SDPA. What the goal is measured against.
- `packed`: documents of log-normal lengths (mean 2,000, cut at 16,384) from a token file, with
  `document_ids` and `position_ids` from `TokenDataset`, through flex attention (`attention: flex`).
- `unpacked-flex`: the first through flex attention, which tells its kernel from what masks cost.

Operations of a step: 6 x matmul parameters x tokens + 12 x layers x width x attended pairs (a token
and one that it sees, itself included), so that a sequence without documents has the 6 x layers x
width x length for each token that gpu_training.py counts. The goal is about operations per second,
which is MFU up to the rate of a matrix product. Each row is a process of its own; time is taken as
in gpu_training.py, and each stretch of ten steps is held against its own pairs. The packed row
also runs one pack through the model as a whole and document by document, and compares.

    python benchmarks/gpu_packing.py [--only packed ...] [--steps 60] [--mean 2000] [--write]
    python benchmarks/gpu_packing.py --tiny    # on a CPU, to see that it runs; there with SDPA
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from headway.cli import bench
from headway.cli.bench_job import CLIP_NORM, SEED, STRETCH, Job, Plan, Stopwatch

GIB = 2**30
GOAL = 0.9
Row = dict[str, Any]
NAMES = {
    "unpacked": "unpacked, full causal attention (SDPA)",
    "packed": "packed documents with masks",
    "unpacked-flex": "unpacked, full causal attention (flex)",
}
SIGMA = 1.0
"""Of the logarithm of a document's length."""


def main() -> int:
    from gpu_jobs import write_result

    options = read_options()
    if options.task:
        run_task(Plan.from_dict(json.loads(options.task)), options)
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for plan in plans(options):
            print(f"{plan.system} ...", flush=True)
            row = measure_apart(plan, Path(options.cache or folder), options)
            rows.append(row)
            print(tell(row), flush=True)
            if options.write:  # after each row: a run that is cut short keeps what it has
                write_result("gpu_packing", report(rows, options))
    print(f"\n{report(rows, options)}", flush=True)
    return 1 if any("error" in row for row in rows) else 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(NAMES), metavar="ROW")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each row (60)")
    parser.add_argument("--warmup", type=int, default=20, help="steps without a time (20)")
    parser.add_argument("--mean", type=int, help="mean length of a document (2,000)")
    parser.add_argument("--packing", choices=["stream", "greedy", "best_fit"], default="stream")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--cache", metavar="DIR", help="keep compiler caches here between runs")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a row may take")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--write", action="store_true", help="the report into benchmarks/results/")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps % STRETCH or options.steps < options.warmup + STRETCH:
        parser.error(
            f"--steps: {options.steps} given; allowed: a multiple of {STRETCH}, at least "
            f"{STRETCH} more than --warmup ({options.warmup})"
        )
    options.mean = options.mean or (31 if options.tiny else 2000)
    if options.mean < 2:
        parser.error(f"--mean: {options.mean} given; allowed: at least 2")
    return options


def plans(options: argparse.Namespace) -> list[Plan]:
    import torch
    from gpu_jobs import LONG, TINY_LONG

    device = "cpu" if options.tiny or not torch.cuda.is_available() else "cuda"
    if device == "cpu" and not options.tiny:
        raise SystemExit("there is no CUDA device here; --tiny runs on a CPU")
    return [
        Plan(
            system=name,
            job=TINY_LONG if options.tiny else LONG,
            compiled=not (options.eager or options.tiny),
            steps=options.steps,
            warmup=options.warmup,
            device=device,
        )
        for name in options.only or NAMES
    ]


def measure_apart(plan: Plan, caches: Path, options: argparse.Namespace) -> Row:
    words = [sys.executable, __file__, "--mean", str(options.mean), "--packing", options.packing]
    row = bench.measure_apart(
        plan,
        words,
        environment={
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        },
        limit_s=options.timeout,
    )
    if "error" in row:
        print("\n".join(row["output"]), file=sys.stderr, flush=True)
    return row


# In the process of a row


def run_task(plan: Plan, options: argparse.Namespace) -> None:
    import gc

    from headway.cli.bench_job import describe_machine, measure_matmul_flops

    watch = Stopwatch(plan)
    with tempfile.TemporaryDirectory() as folder:
        dataset = new_dataset(plan, options, folder)
        trainer, losses = train(plan, watch, folder, dataset)
        peak_bytes, graphs = watch.peak_bytes(), num_graphs()
        state = {name: value.detach() for name, value in trainer.model.state_dict().items()}
        del trainer
        gc.collect()
        loads = [load_of(dataset[n]) for n in sample_order(len(dataset), plan)]
        apart = compare_documents(plan, state, dataset[0]) if plan.system == "packed" else None
    times_ms = watch.step_times_ms()
    stretches = stretch_loads(plan, loads)
    rates = [
        operations(plan.job, tokens, pairs) / (ms * STRETCH / 1000)
        for ms, (tokens, pairs) in zip(times_ms, stretches, strict=True)
    ]
    row = {
        "system": plan.system,
        "job": plan.job.name,
        "compiled": plan.compiled,
        "attention": attention_of(plan),
        "on_gpu": plan.on_gpu,
        "step_ms": statistics.median(times_ms),
        "times_ms": times_ms,
        "tokens_per_s": sum(tokens for tokens, _ in stretches) / sum(times_ms) / STRETCH * 1000,
        "pairs_per_token": sum(p for _, p in stretches) / sum(t for t, _ in stretches),
        "flops_per_s": statistics.median(rates),
        "rates": rates,
        "matmul_flops": measure_matmul_flops(plan),
        "peak_bytes": peak_bytes,
        "first_step_s": watch.first_step_s,
        "graphs": graphs,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "apart": apart,
        "blocks_share": blocks_share(dataset) if plan.system == "packed" else None,
        "documents": document_lengths(plan.job, options.mean).tolist()
        if plan.system == "packed"
        else None,
        "machine": describe_machine(plan),
    }
    Path(options.result).write_text(json.dumps(row), encoding="utf-8")


def num_graphs() -> int:
    """Compiled in this process; more than a few tell that masks are compiled for each batch."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def attention_of(plan: Plan) -> str:
    """Flex attention has no backward pass on a CPU."""
    return "flex" if plan.system != "unpacked" and plan.on_gpu else "sdpa"


@functools.cache
def document_lengths(job: Job, mean: int) -> np.ndarray[Any, Any]:
    """Enough documents for any number of steps that is asked for here."""
    drawn = np.random.default_rng(SEED).lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, 4096)
    return np.clip(drawn.astype(np.int64), 8, job.length)


def new_dataset(plan: Plan, options: argparse.Namespace, folder: str) -> Any:
    """As many samples as are trained on, each once."""
    from torch.utils.data import Subset

    from headway.cli.bench_job import as_samples, before_shuffling, token_rows
    from headway.data import TokenDataset, TokenFileWriter

    job, number = plan.job, plan.steps * plan.job.batch
    if plan.system != "packed":
        return as_samples(before_shuffling(token_rows(plan)))
    generator, path = np.random.default_rng(SEED + 1), Path(folder, "documents.hwt")
    left = number * job.length * 1.25 + 4 * job.length  # whole documents do not fill a pack
    with TokenFileWriter(path, dtype="uint16") as file:
        while left > 0:
            for length in document_lengths(job, options.mean).tolist():
                file.add_document(generator.integers(0, job.vocabulary, length))
                left -= length
                if left <= 0:
                    break
    return Subset(TokenDataset(path, job.length, packing=options.packing), range(number))


def train(plan: Plan, watch: Stopwatch, folder: str, dataset: Any) -> tuple[Any, list[float]]:
    from dataclasses import replace

    from headway import Trainer, TrainerCallback, TrainingArguments
    from headway.cli.bench_systems import FIXED_SHAPES, common_arguments, new_decoder_config
    from headway.models import Decoder

    losses: dict[int, float] = {}

    class Watch(TrainerCallback):
        def on_step_end(self) -> None:
            watch.step()

        def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
            losses[step] = metrics["train/CE loss"]

    config = replace(new_decoder_config(plan.job), attention=attention_of(plan))
    trainer = Trainer(
        args=TrainingArguments(
            **common_arguments(plan, f"{folder}/out"),
            mixed_precision=plan.precision,
            seed=SEED,
            use_cpu=not plan.on_gpu,
            construct_model_on="device",
            **({"torch_compile": True, **FIXED_SHAPES} if plan.compiled else {}),
        ),
        model_init=lambda: Decoder(config),
        train_dataset=dataset,
        callbacks=[Watch()],
    )
    watch.begin()
    trainer.train()
    return trainer, [losses[step] for step in sorted(losses)]


# Counting


def sample_order(num_samples: int, plan: Plan) -> list[int]:
    """The samples in the order in which they are trained on."""
    from headway.data.order import SampleOrder

    order: list[int] = SampleOrder(num_samples, SEED).indices(0, 0, num_samples).tolist()
    return order


def piece_lengths(sample: Any) -> list[int]:
    """Lengths of the documents in a sample; padding is none."""
    if "document_ids" not in sample:
        return [len(sample["input_ids"])]
    ids = np.asarray(sample["document_ids"])
    return [int((ids == number).sum()) for number in np.unique(ids[ids >= 0])]


def load_of(sample: Any) -> tuple[int, int]:
    """Tokens and attended pairs."""
    lengths = piece_lengths(sample)
    return sum(lengths), sum(n * (n + 1) // 2 for n in lengths)


def stretch_loads(plan: Plan, loads: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Tokens and pairs of each stretch that has a time."""
    batch = plan.job.batch
    begin = -(-plan.warmup // STRETCH) * STRETCH
    found = []
    for first in range(begin, plan.steps - STRETCH + 1, STRETCH):
        part = loads[first * batch : (first + STRETCH) * batch]
        found.append((sum(t for t, _ in part), sum(p for _, p in part)))
    return found


def operations(job: Job, tokens: int, pairs: int) -> int:
    return 6 * job.matmul_parameters * tokens + 12 * job.layers * job.width * pairs


def blocks_share(dataset: Any) -> float:
    """Pairs in the blocks that the kernel works on, as a multiple of the attended ones."""
    import torch

    from headway.models.block_mask import make_block_mask

    worked = attended = 0
    for number in range(min(10, len(dataset))):
        ids = torch.as_tensor(dataset[number]["document_ids"])[None]
        mask = make_block_mask(ids.shape[1], ids.device, None, ids, None)
        blocks = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
        worked += int(blocks) * mask.BLOCK_SIZE[0] * mask.BLOCK_SIZE[1]
        attended += load_of(dataset[number])[1]
    return worked / attended


def compare_documents(plan: Plan, state: dict[str, Any], sample: Any) -> float:
    """How far the last hidden states of a pack are from those of its documents one by one."""
    from dataclasses import replace

    import torch

    from headway.cli.bench_systems import new_decoder_config, under_autocast
    from headway.models import Decoder

    def new_model(attention: str) -> Any:
        with torch.device(plan.device):
            model = Decoder(replace(new_decoder_config(plan.job), attention=attention))
        model.load_state_dict(state)
        return model.eval().model

    inputs = {
        name: torch.as_tensor(sample[name], device=plan.device)[None]
        for name in ("input_ids", "document_ids", "position_ids")
    }
    with torch.no_grad(), under_autocast(plan):
        packed = new_model(attention_of(plan))(**inputs)
        alone_model, lengths = new_model("sdpa"), piece_lengths(sample)
        alone = [
            alone_model(part) for part in inputs["input_ids"][:, : sum(lengths)].split(lengths, 1)
        ]
    together = torch.cat(alone, dim=1).float()
    difference = packed[:, : together.shape[1]].float() - together
    return float(difference.norm() / together.norm())


# The report


def tell(row: Row) -> str:
    """A row as one line, as soon as it is there."""
    if "error" in row:
        return f"{row['system']:14} FAILED: {row['error']}"
    compared = "" if row["apart"] is None else f"  pack against documents {row['apart']:.2e}"
    return (
        f"{row['system']:14} {row['step_ms']:8.2f} ms  {row['tokens_per_s']:,.0f} tokens/s  "
        f"{row['flops_per_s'] / 1e12:.3g} TFLOP/s of {row['matmul_flops'] / 1e12:.3g}  "
        f"peak {row['peak_bytes'] / GIB:.2f} GiB  first step {row['first_step_s']:.1f} s, "
        f"{row['graphs']} graphs  loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}{compared}"
    )


def report(rows: list[Row], options: argparse.Namespace) -> str:
    import datetime

    good = {row["system"]: row for row in rows if "error" not in row}
    lines = [f"# Packed documents with masks, {datetime.date.today()}", ""]
    if good:
        some = next(iter(good.values()))
        job = plans(options)[0].job
        lines += [
            f"`python benchmarks/gpu_packing.py {' '.join(sys.argv[1:])}` on "
            f"{some['machine']['device']}, torch {some['machine']['torch']}, Python "
            f"{some['machine']['python']}; {job.tell()}; {options.steps} steps, the first "
            f"{options.warmup} without a time, {'compiled' if some['compiled'] else 'eager'}, "
            f"clipping at {CLIP_NORM}.",
            "",
        ]
    lines += [
        "| | attention | ms per step | tokens/s | attended pairs per token | TFLOP/s | MFU | of "
        "unpacked | peak GiB | first step, s | graphs |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = good.get("unpacked")
    rate = statistics.median(row["matmul_flops"] for row in good.values()) if good else 1.0
    for row in rows:
        if "error" in row:
            lines.append(f"| {NAMES[row['system']]} | failed: {row['error']} | | | | | | | | | |")
            continue
        share = "" if base is None else f"{row['flops_per_s'] / base['flops_per_s']:.3f}"
        lines.append(
            f"| {NAMES[row['system']]} | {row['attention']} | {row['step_ms']:.1f} | "
            f"{row['tokens_per_s']:,.0f} | {row['pairs_per_token']:,.0f} | "
            f"{row['flops_per_s'] / 1e12:.3g} | {row['flops_per_s'] / rate:.1%} | {share} | "
            f"{row['peak_bytes'] / GIB:.2f} | {row['first_step_s']:.1f} | {row['graphs']} |"
        )
    lines += ["", *goal_lines(good)]
    return "\n".join(lines) + "\n"


def goal_lines(good: dict[str, Row]) -> list[str]:
    lines = []
    packed, base = good.get("packed"), good.get("unpacked")
    if packed is not None:
        lengths = np.array(packed["documents"])
        lines += [
            f"Documents: {lengths.mean():,.0f} tokens on average, {np.median(lengths):,.0f} in the "
            f"middle, {lengths.max():,} at most; a token is in one of "
            f"{(lengths**2).sum() / lengths.sum():,.0f} on average. The kernel's blocks hold "
            f"{packed['blocks_share']:.2f} times the attended pairs. Hidden states of a pack are "
            f"{packed['apart']:.1e} (relative norm) from those of its documents one by one.",
            "",
        ]
    if packed is None or base is None:
        return [*lines, "The goal needs the rows `packed` and `unpacked`."]
    ratio = packed["flops_per_s"] / base["flops_per_s"]
    if not packed["on_gpu"]:
        return [*lines, f"On a CPU the goal is not judged: {ratio:.3f}."]
    verdict = "met" if ratio >= GOAL else "missed"
    return [*lines, f"Goal: MFU of packed at least {GOAL} of unpacked: {ratio:.3f}, {verdict}."]


if __name__ == "__main__":
    raise SystemExit(main())
