"""The callback library, each class loaded when it is first used. Importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.callbacks.control.trainer_control import TrainerControlCallback
    from headway.callbacks.diloco.diloco_callback import DiLoCoCallback
    from headway.callbacks.evaluate.downstream_config import DownstreamEvaluatorCallbackConfig
    from headway.callbacks.evaluate.downstream_evaluator import DownstreamEvaluator
    from headway.callbacks.evaluate.evaluator import Evaluator
    from headway.callbacks.evaluate.evaluator_callback import EvaluatorCallback
    from headway.callbacks.evaluate.harness import LMHarnessCallback
    from headway.callbacks.evaluate.lm_config import LMEvaluatorCallbackConfig
    from headway.callbacks.evaluate.lm_evaluator import LMEvaluator
    from headway.callbacks.guard.divergence import DivergenceDetector
    from headway.callbacks.guard.early_stopping import EarlyStoppingCallback
    from headway.callbacks.guard.garbage_collector import GarbageCollectorCallback
    from headway.callbacks.guard.hang_watchdog import HangWatchdogCallback
    from headway.callbacks.guard.monkey_patcher import MonkeyPatcherCallback
    from headway.callbacks.guard.nan_guard import NaNGuardCallback
    from headway.callbacks.guard.preemption import PreemptionCallback
    from headway.callbacks.guard.replica_check import ReplicaCheckCallback
    from headway.callbacks.guard.step_skip import StepSkipRange
    from headway.callbacks.guard.time_limit import TimeLimitCallback
    from headway.callbacks.log.config_saver import ConfigSaverCallback
    from headway.callbacks.log.console_logger import ConsoleLoggerCallback
    from headway.callbacks.log.info import InfoCallback
    from headway.callbacks.log.json_logger import JsonLogger
    from headway.callbacks.log.metric_saver import MetricSaverCallback
    from headway.callbacks.log.progress import ProgressCallback
    from headway.callbacks.log.summary_writer import ResumableSummaryWriter
    from headway.callbacks.log.tb_logger import TBLogger
    from headway.callbacks.profile.malloc_trace import MallocTraceCallback
    from headway.callbacks.profile.memory_snapshot import MemorySnapshotCallback
    from headway.callbacks.profile.profiler import ProfilerCallback
    from headway.callbacks.remote.beaker import BeakerCallback
    from headway.callbacks.remote.comet_tracker import CometCallback, CometNotificationSetting
    from headway.callbacks.remote.mlflow_tracker import MLflowCallback
    from headway.callbacks.remote.slack import SlackNotificationSetting, SlackNotifierCallback
    from headway.callbacks.remote.trackio_tracker import TrackioCallback
    from headway.callbacks.remote.wandb_tracker import WandBCallback
    from headway.callbacks.remote.webhook import WebhookCallback
    from headway.callbacks.save.checkpointer import CheckpointerCallback
    from headway.callbacks.save.ema import EMACallback
    from headway.callbacks.save.hf_converter import HFConverterCallback
    from headway.callbacks.save.list_checkpointer import ListCheckpointerCallback
    from headway.callbacks.save.merge_windows import (
        compute_merge_steps_from_decay_schedule,
        compute_merge_window_starts,
    )
    from headway.callbacks.save.model_merge import ModelMergeCallback
    from headway.callbacks.save.removal import CheckpointRemovalStrategy
    from headway.callbacks.schedule.batch_size import BatchSizeSchedulerCallback
    from headway.callbacks.schedule.freeze import FreezeCallback
    from headway.callbacks.schedule.qat_switch import QATSwitchCallback
    from headway.callbacks.schedule.sequence_length import SequenceLengthSchedulerCallback
    from headway.callbacks.watch.default_metrics import DefaultMetrics
    from headway.callbacks.watch.gap_monitor import GAPMonitorCallback
    from headway.callbacks.watch.gpu_memory_monitor import GPUMemoryMonitorCallback
    from headway.callbacks.watch.grad_norm_logger import GradNormLogger
    from headway.callbacks.watch.parameter_norm_logger import ParameterNormLogger
    from headway.callbacks.watch.peak_memory import PeakMemory
    from headway.callbacks.watch.speed_monitor import SpeedMonitorCallback
    from headway.callbacks.watch.stability_monitor import StabilityMonitorCallback
    from headway.callbacks.watch.textgen import TextgenCallback
    from headway.callbacks.watch.weight_norm_logger import WeightNormLogger

__all__ = [
    "BatchSizeSchedulerCallback",
    "BeakerCallback",
    "CheckpointRemovalStrategy",
    "CheckpointerCallback",
    "CometCallback",
    "CometNotificationSetting",
    "ConfigSaverCallback",
    "ConsoleLoggerCallback",
    "DefaultMetrics",
    "DiLoCoCallback",
    "DivergenceDetector",
    "DownstreamEvaluator",
    "DownstreamEvaluatorCallbackConfig",
    "EMACallback",
    "EarlyStoppingCallback",
    "Evaluator",
    "EvaluatorCallback",
    "FreezeCallback",
    "GAPMonitorCallback",
    "GPUMemoryMonitorCallback",
    "GarbageCollectorCallback",
    "GradNormLogger",
    "HFConverterCallback",
    "HangWatchdogCallback",
    "InfoCallback",
    "JsonLogger",
    "LMEvaluator",
    "LMEvaluatorCallbackConfig",
    "LMHarnessCallback",
    "ListCheckpointerCallback",
    "MLflowCallback",
    "MallocTraceCallback",
    "MemorySnapshotCallback",
    "MetricSaverCallback",
    "ModelMergeCallback",
    "MonkeyPatcherCallback",
    "NaNGuardCallback",
    "ParameterNormLogger",
    "PeakMemory",
    "PreemptionCallback",
    "ProfilerCallback",
    "ProgressCallback",
    "QATSwitchCallback",
    "ReplicaCheckCallback",
    "ResumableSummaryWriter",
    "SequenceLengthSchedulerCallback",
    "SlackNotificationSetting",
    "SlackNotifierCallback",
    "SpeedMonitorCallback",
    "StabilityMonitorCallback",
    "StepSkipRange",
    "TBLogger",
    "TextgenCallback",
    "TimeLimitCallback",
    "TrackioCallback",
    "TrainerControlCallback",
    "WandBCallback",
    "WebhookCallback",
    "WeightNormLogger",
    "compute_merge_steps_from_decay_schedule",
    "compute_merge_window_starts",
    "default_callbacks",
    "reporting_callbacks",
]

SETTINGS = (
    "CheckpointRemovalStrategy",
    "CometNotificationSetting",
    "DownstreamEvaluator",
    "Evaluator",
    "LMEvaluator",
    "SlackNotificationSetting",
)
"""Exports that are values of a callback's option and no callbacks: a run file cannot make one."""

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "control.trainer_control": ("TrainerControlCallback",),
        "diloco.diloco_callback": ("DiLoCoCallback",),
        "evaluate.downstream_config": ("DownstreamEvaluatorCallbackConfig",),
        "evaluate.downstream_evaluator": ("DownstreamEvaluator",),
        "evaluate.evaluator": ("Evaluator",),
        "evaluate.evaluator_callback": ("EvaluatorCallback",),
        "evaluate.harness": ("LMHarnessCallback",),
        "evaluate.lm_config": ("LMEvaluatorCallbackConfig",),
        "evaluate.lm_evaluator": ("LMEvaluator",),
        "guard.divergence": ("DivergenceDetector",),
        "guard.early_stopping": ("EarlyStoppingCallback",),
        "guard.garbage_collector": ("GarbageCollectorCallback",),
        "guard.hang_watchdog": ("HangWatchdogCallback",),
        "guard.monkey_patcher": ("MonkeyPatcherCallback",),
        "guard.nan_guard": ("NaNGuardCallback",),
        "guard.preemption": ("PreemptionCallback",),
        "guard.replica_check": ("ReplicaCheckCallback",),
        "guard.step_skip": ("StepSkipRange",),
        "guard.time_limit": ("TimeLimitCallback",),
        "log.config_saver": ("ConfigSaverCallback",),
        "log.console_logger": ("ConsoleLoggerCallback",),
        "log.info": ("InfoCallback",),
        "log.json_logger": ("JsonLogger",),
        "log.metric_saver": ("MetricSaverCallback",),
        "log.progress": ("ProgressCallback",),
        "log.summary_writer": ("ResumableSummaryWriter",),
        "log.tb_logger": ("TBLogger",),
        "profile.malloc_trace": ("MallocTraceCallback",),
        "profile.memory_snapshot": ("MemorySnapshotCallback",),
        "profile.profiler": ("ProfilerCallback",),
        "remote.beaker": ("BeakerCallback",),
        "remote.comet_tracker": ("CometCallback", "CometNotificationSetting"),
        "remote.mlflow_tracker": ("MLflowCallback",),
        "remote.slack": ("SlackNotificationSetting", "SlackNotifierCallback"),
        "remote.trackio_tracker": ("TrackioCallback",),
        "remote.wandb_tracker": ("WandBCallback",),
        "remote.webhook": ("WebhookCallback",),
        "save.checkpointer": ("CheckpointerCallback",),
        "save.ema": ("EMACallback",),
        "save.hf_converter": ("HFConverterCallback",),
        "save.list_checkpointer": ("ListCheckpointerCallback",),
        "save.merge_windows": (
            "compute_merge_steps_from_decay_schedule",
            "compute_merge_window_starts",
        ),
        "save.model_merge": ("ModelMergeCallback",),
        "save.removal": ("CheckpointRemovalStrategy",),
        "schedule.batch_size": ("BatchSizeSchedulerCallback",),
        "schedule.freeze": ("FreezeCallback",),
        "schedule.qat_switch": ("QATSwitchCallback",),
        "schedule.sequence_length": ("SequenceLengthSchedulerCallback",),
        "watch.default_metrics": ("DefaultMetrics",),
        "watch.gap_monitor": ("GAPMonitorCallback",),
        "watch.gpu_memory_monitor": ("GPUMemoryMonitorCallback",),
        "watch.grad_norm_logger": ("GradNormLogger",),
        "watch.parameter_norm_logger": ("ParameterNormLogger",),
        "watch.peak_memory": ("PeakMemory",),
        "watch.speed_monitor": ("SpeedMonitorCallback",),
        "watch.stability_monitor": ("StabilityMonitorCallback",),
        "watch.textgen": ("TextgenCallback",),
        "watch.weight_norm_logger": ("WeightNormLogger",),
    },
)


def default_callbacks(args: Any) -> list[Any]:
    """What every run gets unless told otherwise."""
    from headway.callbacks.guard.garbage_collector import GarbageCollectorCallback
    from headway.callbacks.log.info import InfoCallback
    from headway.callbacks.log.json_logger import JsonLogger
    from headway.callbacks.log.progress import ProgressCallback
    from headway.callbacks.watch.default_metrics import DefaultMetrics

    return [
        DefaultMetrics(),
        ProgressCallback(),
        InfoCallback(),
        JsonLogger(),
        GarbageCollectorCallback(),
    ]


def reporting_callbacks(args: Any) -> list[Any]:
    """The trackers that `report_to` names; `all` are those whose packages are installed."""
    from headway.callbacks.remote.reporting import make_trackers

    return make_trackers(args.report_to)
