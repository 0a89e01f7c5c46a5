"""What a strategy adds to a step on two gloo ranks, against bare torch and other trainers.

One Llama under torch's DDP in a bare loop, in Headway, in HF Trainer and in Lightning; the same
under `fully_shard` in a bare loop and in Headway; a decoder cut in two under a bare pipeline
schedule and in Headway. All systems take turns for several rounds in the same two processes; the
figure of each is its best stretch of five steps, and the ratios are between figures of one run.
Also: the small collective by which ranks agree, and the time to save by one rank and by several.

    python benchmarks/strategies.py [--rounds 5] [--steps 40] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import itertools
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from headway.models import Decoder, DecoderConfig
from headway.models.loss import chunked_cross_entropy, shift_labels
from headway.testing import run_ranks

WARMUP_STEPS, STRETCH = 5, 5
BATCH, LENGTH, VOCABULARY, LAYERS = 4, 128, 1024, 6
PIECES = 4


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def make_decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_layers=LAYERS,
            num_heads=4,
            max_seq_len=LENGTH,
        )
    )


def make_data(num_samples: int = 256) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


class Stopwatch:
    """Seconds per step over each stretch of steps after the warm-up."""

    def __init__(self) -> None:
        self.done, self.marks = 0, []

    def step(self) -> None:
        self.done += 1
        if self.done >= WARMUP_STEPS and self.done % STRETCH == 0:
            self.marks.append(time.perf_counter())

    @property
    def seconds_per_step(self) -> list[float]:
        return [(b - a) / STRETCH for a, b in itertools.pairwise(self.marks)]


def train_bare(model: nn.Module, wrapped: nn.Module, steps: int) -> list[float]:
    """The loop a careful person writes for data-parallel training."""
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    watch, done, epoch, total = Stopwatch(), 0, 0, torch.zeros(())
    wrapped.train()
    while done < steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            loss = wrapped(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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


def bare_ddp(steps: int, folder: str) -> list[float]:
    model = make_llama()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return train_bare(model, wrapped, steps)


def bare_fsdp(steps: int, folder: str) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    model = make_llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return train_bare(model, model, steps)


def bare_pipeline(steps: int, folder: str) -> list[float]:
    """Two stages of the decoder under torch's own schedule."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, model = dist.get_rank(), make_decoder()
    first = rank == 0

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack, self.head = model.model, model.lm_head
            self.stack.layers = (
                self.stack.layers[: LAYERS // 2] if first else (self.stack.layers[LAYERS // 2 :])
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from headway.models.attention import plan_attention

            x = self.stack.embed_tokens(x) if first else x
            plan = plan_attention(
                model.config, seq_len=LENGTH, past_len=0, device=x.device, dtype=x.dtype,
                document_ids=None, attention_mask=None, cached=False,
            )  # fmt: skip
            rope = self.stack.rotary_emb(LENGTH, 0, None, x.dtype)
            for layer in self.stack.layers:
                x = layer(x, rope, plan, None)
            return x if first else self.stack.norm(x)

    half = Half()
    unused = half.stack.norm if first else half.stack.embed_tokens
    unused.requires_grad_(False)
    if first:
        half.head.requires_grad_(False)
    batch = BATCH * dist.get_world_size()
    num_targets = batch * (LENGTH - 1)

    def loss_fn(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(
            hidden, half.head.weight, shift_labels(labels), num_items=num_targets,
            chunk_tokens=model.config.chunk_tokens,
        )  # fmt: skip

    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, PIECES, loss_fn=loss_fn, scale_grads=False)
    parameters = [p for p in half.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    loader = DataLoader(make_data(), batch_size=batch, shuffle=True, drop_last=True)
    batches = itertools.cycle(loader)
    watch = Stopwatch()
    for _ in range(steps):
        given = next(batches)
        if first:
            schedule.step(given["input_ids"])
        else:
            schedule.step(target=given["labels"], losses=[])
        square = nn.utils.get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())
        optimizer.step()
        rate.step()
        optimizer.zero_grad(set_to_none=True)
        watch.step()
    return watch.seconds_per_step


def run_headway(kind: str, steps: int, folder: str) -> list[float]:
    import headway
    from headway.dist import init_distributed

    init_distributed(use_cpu=True)
    watch = Stopwatch()

    class Watch(headway.TrainerCallback):
        def on_step_end(self) -> None:
            watch.step()

    pipeline = kind == "Pipeline"
    batch = BATCH * dist.get_world_size() if pipeline else BATCH
    settings: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "max_steps": steps,
        "num_train_epochs": 1000,
        "logging_steps": 10,
        "save_strategy": "no",
        "max_grad_norm": 1.0,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "seed": 0,
    }
    if pipeline:
        settings["n_microbatches"] = PIECES
    else:
        settings["dispatch_batches"] = False  # as the others do: each rank reads its share
    trainer = getattr(headway, f"{kind}Trainer")(
        args=getattr(headway, f"{kind}TrainingArguments")(**settings),
        model_init=make_decoder if pipeline else make_llama,
        train_dataset=make_data(),
        callbacks=[Watch()],
    )
    trainer.train()
    return watch.seconds_per_step


def run_transformers(steps: int, folder: str) -> list[float]:
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
        model=make_llama(),
        train_dataset=make_data(),
        callbacks=[Watch()],
    ).train()
    return watch.seconds_per_step


def run_lightning(steps: int, folder: str) -> list[float]:
    sys.path.insert(0, str(Path(__file__).parent))
    from overhead import import_lightning

    pl = import_lightning()
    watch = Stopwatch()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_llama().train()

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - s / steps)
            rate = {"scheduler": schedule, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": rate}

        def on_train_batch_end(self, *args) -> None:
            watch.step()

    pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=dist.get_world_size(),
        max_steps=steps,
        log_every_n_steps=10,
        logger=pl.loggers.CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    ).fit(Module(), DataLoader(make_data(), batch_size=BATCH, shuffle=True))
    return watch.seconds_per_step


def headway_of(kind: str) -> Callable[[int, str], list[float]]:
    return lambda steps, folder: run_headway(kind, steps, folder)


SYSTEMS: dict[str, dict[str, Callable[[int, str], list[float]]]] = {
    "DDP": {
        "bare loop": bare_ddp,
        "Headway": headway_of("DDP"),
        "HF Trainer": run_transformers,
        "Lightning": run_lightning,
    },
    "FSDP2": {"bare loop": bare_fsdp, "Headway": headway_of("FSDP2")},
    "pipeline": {"bare loop": bare_pipeline, "Headway": headway_of("Pipeline")},
}


@contextlib.contextmanager
def common_folder() -> Iterator[str]:
    """One new folder for all ranks."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    yield str(told[0])
    dist.barrier()
    shutil.rmtree(str(told[0]), ignore_errors=True)


def measure_steps(rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """On one of the two ranks: seconds per step by strategy and system."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, list[float]]] = {}
    for _, (kind, systems) in itertools.product(range(rounds), SYSTEMS.items()):
        for name, run in systems.items():
            with (
                common_folder() as folder,
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                times = run(steps, folder)
            found.setdefault(kind, {}).setdefault(name, []).extend(times)
    return found


def measure_agreement() -> float:
    """Seconds for all ranks to agree on one bit set."""
    from headway.dist.agreement import agree_bits

    group, best = dist.group.WORLD, float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(50):
            agree_bits(1, group)
        best = min(best, (time.perf_counter() - began) / 50)
    return best


def measure_save(folder: str, num_params_m: int) -> list[float]:
    """Seconds of each of five saves of a replicated model with AdamW state, on all ranks."""
    from headway.checkpoint import CheckpointContents, CheckpointManager
    from headway.checkpoint.distributed import DistributedRanks
    from headway.checkpoint.ranks import SoloRanks

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(num_params_m)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ranks = DistributedRanks() if dist.get_world_size() > 1 else SoloRanks()
    manager = CheckpointManager(folder, save_total_limit=1, ranks=ranks)
    contents = CheckpointContents(model, optimizer)
    manager.reserve(contents)
    times = []
    for step in range(5):
        pending = manager.stage(contents, step)
        dist.barrier()
        began = time.perf_counter()
        manager.write(pending)
        times.append(time.perf_counter() - began)
    return times


def time_saves(options: argparse.Namespace) -> list[str]:
    best = {}
    for num_ranks in (1, 4):
        folder = tempfile.mkdtemp(dir=options.folder)
        try:
            times = run_ranks(measure_save, num_ranks, folder, options.save_params_m, timeout_s=600)
        finally:
            shutil.rmtree(folder)
        best[num_ranks] = min(times[0])
    mb = options.save_params_m * 12
    return [
        f"Saving {mb} MB of replicated state: 1 rank {best[1]:.2f} s, 4 ranks {best[4]:.2f} s, "
        f"{best[1] / best[4]:.2f} times as fast (goal 1.5 where the disk allows)."
    ]


def report(
    found: dict[str, dict[str, list[float]]], agreement_s: float, options: argparse.Namespace
) -> list[str]:
    lines = [
        "| strategy | system | best, ms/step | median | best / bare |",
        "|---|---|---|---|---|",
    ]
    for kind, systems in found.items():
        bare = min(systems["bare loop"])
        for name, times in systems.items():
            best, median = min(times) * 1e3, statistics.median(times) * 1e3
            lines.append(
                f"| {kind} | {name} | {best:.2f} | {median:.2f} | {best / bare / 1e3:.3f} |"
            )
    lines += [
        "",
        "Goals: Headway at most 1.02 of the bare loop, and not behind HF Trainer or Lightning.",
        f"The agreement of a step: {agreement_s * 1e6:.0f} us.",
        f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{options.rounds} rounds of {options.steps} steps, one thread per rank.",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-params-m", type=int, default=60)
    parser.add_argument("--folder", default=".", help="where to save; must be on a real disk")
    parser.add_argument("--write", action="store_true", help="keep the result in results/")
    options = parser.parse_args()
    environ = {"TORCHELASTIC_RUN_ID": "benchmark"}  # tells Lightning that the ranks are there
    found = run_ranks(measure_steps, 2, options.rounds, options.steps, timeout_s=3600, env=environ)[
        0
    ]
    agreement_s = run_ranks(measure_agreement, 2, timeout_s=60)[0]
    lines = report(found, agreement_s, options) + time_saves(options)
    date = datetime.date.today()
    text = "\n".join(
        [f"# Strategies on two ranks, {date}", "", "`python benchmarks/strategies.py`", "", *lines]
    )
    print(text)
    if options.write:
        path = Path(__file__).parent / "results" / f"strategies-{date}.md"
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
