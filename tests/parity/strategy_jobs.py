"""One small job under every strategy, and what must come out the same under all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway import (
    AccelTrainer,
    AccelTrainingArguments,
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    FSDP2TrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

GLOBAL_BATCH = 8
NUM_SAMPLES = 44  # not a multiple: the last window of an epoch is a short one
LAYERS = 8  # two for each of four stages, which some schedules need


@dataclass(frozen=True)
class Strategy:
    """A way of spreading the job over ranks."""

    num_ranks: int
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    shares: int = 0
    """Ranks, or groups of them, that read different data; 0: all ranks."""


def _pipeline(num_ranks: int, schedule: str, **arguments: Any) -> Strategy:
    return Strategy(num_ranks, "pipeline", {"pipe_schedule": schedule, **arguments}, shares=1)


SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
STRATEGIES = {
    "single": Strategy(1, "single"),
    "ddp2": Strategy(2, "ddp"),
    "ddp2-own": Strategy(2, "ddp", {"dispatch_batches": False}),
    "ddp4": Strategy(4, "ddp"),
    "fsdp2": Strategy(2, "fsdp2"),
    "fsdp4": Strategy(4, "fsdp2"),
    "hsdp2x2": Strategy(4, "fsdp2", {"fsdp2": {"shard_size": 2}}),
    "pp2": _pipeline(2, "ScheduleGPipe"),
    "pp4": _pipeline(4, "Schedule1F1B"),
    "dp2pp2": Strategy(4, "pipeline", {"pipeline_size": 2}, shares=2),
    "accel2": Strategy(2, "accelerate"),
    **{f"pp2-{name}": _pipeline(2, name) for name in SCHEDULES},
    **{f"pp4-{name}": _pipeline(4, name, n_microbatches=8) for name in SCHEDULES},
}
_CLASSES: dict[str, tuple[Any, Any]] = {
    "single": (Trainer, TrainingArguments),
    "ddp": (DDPTrainer, DDPTrainingArguments),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments),
    "pipeline": (PipelineTrainer, PipelineTrainingArguments),
    "accelerate": (AccelTrainer, AccelTrainingArguments),
}


class Record(TrainerCallback):
    """What came out of every step, over all ranks."""

    def __init__(self) -> None:
        self.samples: list[list[int] | None] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "optim/total grad norm" in metrics:
            self.losses.append(metrics["train/CE loss"])
            self.norms.append(metrics["optim/total grad norm"])


class RecordOfWindows(Record):
    """Also which samples this rank saw; windows that a callback looks at are counted anew."""

    def on_window(self, window: Any) -> None:
        ids = window.sample_ids
        self.samples.append(None if ids is None else ids.tolist())


@dataclass(frozen=True)
class Job:
    """One run: which strategy, how far, and what is special about it."""

    strategy: str
    max_steps: int = 20
    folder: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    watch_windows: bool = False
    resume: str | None = None
    """The checkpoint to go on from."""
    evaluate: bool = True


@dataclass
class Outcome:
    """What a run left behind on one rank."""

    losses: list[float]
    norms: list[float]
    samples: list[list[int] | None]
    tokens: int
    step: int
    eval_loss: float | None = None


def make_trainer(job: Job, record: TrainerCallback) -> Trainer:
    """The job's trainer on this rank."""
    strategy = STRATEGIES[job.strategy]
    trainer_class, arguments_class = _CLASSES[strategy.kind]
    shares = strategy.shares or strategy.num_ranks
    settings = {
        "output_dir": str(Path(job.folder) / "out"),
        "per_device_train_batch_size": GLOBAL_BATCH // shares,
        "per_device_eval_batch_size": GLOBAL_BATCH // shares,
        "num_train_epochs": 100,
        "max_steps": job.max_steps,
        "logging_steps": 5,
        "save_strategy": "no",
        "learning_rate": 3e-3,
        # With a smaller one Adam takes full steps along gradients that are rounding noise.
        "adam_epsilon": 1e-5,
        "max_grad_norm": 0.5,
        "seed": 0,
        "use_cpu": True,
        **strategy.arguments,
        **job.arguments,
    }
    given: dict[str, Any] = {}
    if strategy.kind == "accelerate":
        from accelerate import Accelerator

        accumulation = settings.get("gradient_accumulation_steps", 1)
        given["accelerator"] = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    return trainer_class(
        args=arguments_class.from_dict(settings),
        model_init=lambda: tiny_decoder(**{"num_layers": LAYERS, **job.model}),
        train_dataset=tiny_dataset(NUM_SAMPLES, sequence_length=12),
        eval_dataset=tiny_dataset(11, sequence_length=12, seed=1),
        callbacks=[record],
        default_callbacks=False,
        **given,
    )


def run_job(job: Job) -> Outcome:
    """Train on this rank, which is one of the strategy's."""
    init_distributed(use_cpu=True)
    record = RecordOfWindows() if job.watch_windows else Record()
    trainer = make_trainer(job, record)
    output = trainer.train(resume_from_checkpoint=job.resume)
    evaluated = trainer.evaluate() if job.evaluate else {}
    return Outcome(
        record.losses,
        record.norms,
        record.samples,
        trainer.state.num_input_tokens_seen,
        output.global_step,
        evaluated.get("eval_loss"),
    )


def run_jobs(jobs: list[Job]) -> list[Outcome]:
    """Several runs, one after another, on this rank."""
    return [run_job(job) for job in jobs]


def launch(jobs: list[Job], timeout_s: float = 300) -> list[list[Outcome]]:
    """By job and rank: what the jobs, all for the same number of ranks, left behind."""
    (num_ranks,) = {STRATEGIES[job.strategy].num_ranks for job in jobs}
    by_rank = run_ranks(run_jobs, num_ranks, jobs, timeout_s=timeout_s)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]
