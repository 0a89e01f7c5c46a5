"""Every callback of the library with arguments to make it from, and what it may leave behind.

A class that `headway.callbacks` exports and that is not in `CASES` fails the contract suite.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import headway.callbacks as library
from headway import CallbackConfig, TrainerCallback
from headway.callbacks import Evaluator

URL = "{url}"
"""Stands for the local HTTP server in the arguments of a case."""
RESULTS = "{results}"
"""Stands for a folder in the run's output folder."""


class BeakerStandIn:
    """As much of a client of Beaker as is used."""

    def __init__(self) -> None:
        self.workload = self
        self.said: list[str] = []

    def get(self, workload: str) -> str:
        return workload

    def update(self, workload: str, *, description: str) -> None:
        self.said.append(description)


class Measures(Evaluator):
    """The loss on two batches."""

    def __init__(self) -> None:
        super().__init__("kite", batches_factory=self._make)
        self.losses: list[Any] = []

    @staticmethod
    def _make() -> list[dict[str, Any]]:
        import torch

        ids = torch.arange(16).reshape(2, 8)
        return [{"input_ids": ids, "labels": ids}, {"input_ids": ids + 1, "labels": ids + 1}]

    def reset_metrics(self) -> None:
        self.losses.clear()

    def update_metrics(self, batch: Any, scores: Any) -> None:
        self.losses.append(scores.loss_sum)

    def compute_metrics(self, join: Any) -> dict[str, float]:
        import torch

        return {"loss": float(join(torch.stack([*self.losses, torch.zeros(())]).sum()))}


@dataclass(frozen=True)
class Case:
    """How to make one callback from a run file, and what its run leaves in the output folder."""

    init_args: dict[str, Any] = field(default_factory=dict)
    package: str | None = None
    """The optional package it needs."""
    writes: tuple[str, ...] = ()
    """Patterns of files that a run leaves; each must match one."""
    writes_on_ranks: tuple[str, ...] = ()
    """Patterns of files that ranks other than the first may write."""
    prints: bool = False
    """Whether it writes to the console by itself, on the first rank."""
    posts: bool = False
    """Whether it calls the local server."""
    sparse: dict[str, Any] = field(default_factory=dict)
    """Arguments under which it has nothing due between two records."""
    records: tuple[str, ...] = ()
    """Names of figures that it adds to a run's records or metrics."""
    changes_run: bool = False
    """Whether a run with it, made like this, has other losses, weights or steps than without."""

    def arguments(self, url: str, output_dir: str | Path) -> dict[str, Any]:
        places = {URL: url, RESULTS: str(Path(output_dir, "results"))}
        return {
            name: places.get(value, value) if isinstance(value, str) else value
            for name, value in self.init_args.items()
        }


_TRACKER = {"name": "kite", "close_timeout_s": 60.0}

CASES: dict[str, Case] = {
    # In every run
    "DefaultMetrics": Case({"peak_hardware_flops": 1e12}, records=("tok_per_sec",)),
    "ProgressCallback": Case({"header_interval": 2}, prints=True),
    "InfoCallback": Case({"verbose": False}, prints=True),
    "JsonLogger": Case({"note": "kite"}, writes=("trainer_logs.jsonl",)),
    # log
    "ConsoleLoggerCallback": Case({"metrics_log_interval": 1}, prints=True),
    "MetricSaverCallback": Case(
        {"save_interval": 2, "history_fname": "history.jsonl"},
        writes=("metrics.json", "metrics_step2.json", "history.jsonl"),
    ),
    "ConfigSaverCallback": Case(writes=("checkpoint-2/run/experiment/config.json",)),
    "TBLogger": Case(package="tensorboard", writes=("runs/**/events.out.tfevents.*",)),
    "ResumableSummaryWriter": Case(package="tensorboard"),
    # watch
    "GradNormLogger": Case(
        {"log_steps": 1}, writes=("gradient_norms.jsonl",), sparse={"log_steps": 1000}
    ),
    "ParameterNormLogger": Case({"power_iter_steps": 2}, writes=("parameter_norms.jsonl",)),
    "WeightNormLogger": Case(records=("weight_norm",)),
    "GAPMonitorCallback": Case(
        {"include": ["*norm*"], "dump_gradients": True},
        writes=("gradients/step1/*",),
        sparse={"dump_gradients": False},
    ),
    "StabilityMonitorCallback": Case(
        {"window_size": 2, "rolling_window": 2}, records=("spike/SpikeScore",)
    ),
    "SpeedMonitorCallback": Case(records=("throughput/device/TPS",)),
    "GPUMemoryMonitorCallback": Case({"enabled": True}),
    "PeakMemory": Case({"do_log": True}, records=("peak_mem_host",)),
    "TextgenCallback": Case(
        {"prompts": ["ab", "a longer one"], "max_new_tokens": 3, "generation_steps": 1},
        writes=("eval_text.jsonl",),
        prints=True,
        sparse={"generation_steps": 1000},
    ),
    # profile
    "ProfilerCallback": Case(
        {
            "start_step": 1,
            "num_steps": 1,
            "ranks": "all",
            "with_stack": False,
            "with_flops": False,
            "record_shapes": False,
            "table_rows": 3,
        },
        writes=("benchmarks/profiles/rank-0-*.chrome_trace.json.gz",),
        writes_on_ranks=("benchmarks/profiles/*rank-1-*",),
    ),
    "MallocTraceCallback": Case(
        {"start_step": 2, "interval": 1, "num_steps": 1},
        writes=("malloc_trace_rank0.txt",),
        sparse={"start_step": 1000},
    ),
    "MemorySnapshotCallback": Case({"steps": [2]}),
    # guard
    "DivergenceDetector": Case(),
    "EarlyStoppingCallback": Case(
        {"early_stopping_patience": 9}, sparse={"metric": "train/CE loss"}
    ),
    "NaNGuardCallback": Case({"parameter_interval": 1}, records=("guard/parameters not finite",)),
    "StepSkipRange": Case({"start": 100, "stop": 101}),
    "GarbageCollectorCallback": Case({"gc_interval": 1}, records=("garbage_collector/duration_s",)),
    "HangWatchdogCallback": Case({"limit_s": 600.0}),
    # control
    "TrainerControlCallback": Case({"port": 0}),
    "MonkeyPatcherCallback": Case({"enabled": True}),
    "PreemptionCallback": Case({"file": "no-such-notice", "poll_interval_s": 0.1}),
    "ReplicaCheckCallback": Case({"interval": 1, "optimizer_state": True}, sparse={"interval": 9}),
    "TimeLimitCallback": Case({"limit": "24:00:00"}),
    # schedule
    "BatchSizeSchedulerCallback": Case(
        {"batch_sizes": [4, 8], "schedule": [0, "2 steps"]},
        sparse={"batch_sizes": [2, 4], "schedule": [0, 1000]},
        records=("train/global batch size",),
        changes_run=True,
    ),
    "FreezeCallback": Case(
        {"patterns": ["mlp"], "since": 1, "until": "3 steps"},
        sparse={"since": 1000, "until": None},
        changes_run=True,
    ),
    "QATSwitchCallback": Case({"start": 2, "enabled": False}),
    "SequenceLengthSchedulerCallback": Case(
        {"min_sequence_length": 2, "warmup_steps": 3},
        sparse={"warmup_steps": 1},
        records=("train/sequence length",),
        changes_run=True,
    ),
    # save: averages
    "CheckpointerCallback": Case(
        {"save_interval": 2, "ephemeral_save_interval": 1},
        writes=("checkpoint-0/config.json", "checkpoint-4/config.json"),
        records=("checkpoint/save_wait_s",),
    ),
    "HFConverterCallback": Case(
        {"tokenizer_id": "bytes"}, writes=("checkpoint-4-hf/model.safetensors.index.json",)
    ),
    # Of two that decide about saves, one has to stand back.
    "ListCheckpointerCallback": Case({"save_steps": [2], "enabled": False}),
    "EMACallback": Case(
        {"decay": 0.9, "export": True}, writes=("checkpoint-4-ema/checkpoint_manifest.json",)
    ),
    "ModelMergeCallback": Case(
        {"merge_step": [4], "merge_last_n_steps": 3},
        writes=("checkpoint-4-merged/checkpoint_manifest.json",),
        sparse={"merge_step": 1000, "merge_last_n_steps": 1000},
        records=("eval/merged_loss",),
    ),
    # Without a server it is not active.
    "DiLoCoCallback": Case({"sync_every": 2}),
    # evaluate
    "EvaluatorCallback": Case(
        {
            "evaluators": [{"class_path": "callback_cases.Measures"}],
            "eval_interval": 1,
            "eval_on_startup": True,
            "with_evaluation": True,
        },
        sparse={"eval_interval": 1000, "eval_on_startup": False, "with_evaluation": None},
        records=("eval/kite/loss", "throughput/in-loop eval batches"),
    ),
    "LMHarnessCallback": Case({"tasks": ["arc_easy"], "eval_on_finish": False}, package="lm_eval"),
    # remote
    "WandBCallback": Case(
        {**_TRACKER, "mode": "offline"}, package="wandb", writes=("wandb/offline-run-*/*.wandb",)
    ),
    "CometCallback": Case(
        {**_TRACKER, "offline": True}, package="comet_ml", writes=("comet/*.zip",)
    ),
    "MLflowCallback": Case(_TRACKER, package="mlflow", writes=("mlruns/**/*loss*",)),
    "TrackioCallback": Case(_TRACKER, package="trackio"),
    "SlackNotifierCallback": Case({"webhook_url": URL, "notifications": "all"}, posts=True),
    "WebhookCallback": Case({"url": URL}, posts=True),
    "BeakerCallback": Case(
        {
            "enabled": True,
            "experiment_id": "01",
            "result_dir": RESULTS,
            "client": {"class_path": "callback_cases.BeakerStandIn"},
        },
        writes=("results/requirements.txt",),
    ),
}


def callback_classes() -> dict[str, type]:
    """The callback classes that the library exports."""
    exported = {name: getattr(library, name) for name in library.__all__}
    return {
        name: value
        for name, value in exported.items()
        if isinstance(value, type) and issubclass(value, TrainerCallback)
    }


def config_classes() -> dict[str, type]:
    """The configurations that the library exports, from which a trainer builds a callback."""
    exported = {name: getattr(library, name) for name in library.__all__}
    return {
        name: value
        for name, value in exported.items()
        if isinstance(value, type) and issubclass(value, CallbackConfig)
    }


def other_exports() -> dict[str, Any]:
    """Exports that are neither callbacks, nor configurations, nor the settings of one."""
    return {
        name: getattr(library, name)
        for name in library.__all__
        if name not in {*callback_classes(), *config_classes()}
        and not (
            isinstance(getattr(library, name), type)
            and issubclass(getattr(library, name), (Enum, Evaluator))
        )
    }


def is_there(name: str) -> bool:
    """Whether the package that a callback needs is installed."""
    package = CASES[name].package
    return package is None or importlib.util.find_spec(package) is not None


def need(name: str) -> None:
    if not is_there(name):
        pytest.skip(f"needs {CASES[name].package}")
