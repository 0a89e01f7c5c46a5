"""What a user can get wrong about callbacks, and what can be wrong around them.

Mistakes in their options are told before the first step, by parameter and value. What goes wrong
later (a folder that cannot be written, a server that is away) costs no run.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from callback_cases import CASES, callback_classes, is_there, need
from callback_lives import LAST_STEP, Witness, component, run_file

from headway import ConfigError
from headway.config import load_run
from headway.trainers.from_config import build_trainer

WHOLE = (0, -1, 1.5, True, "many")
"""None of these is a number of things."""
FLAGS = (None, 1, "yes")
NAMED = ("guard", "save", "schedule", "evaluate")
"""Their options have names that others have too: a message begins with the callback."""


def each(
    name: str, parameter: str, values: Any, **others: Any
) -> list[tuple[str, dict[str, Any], Any]]:
    return [(name, {**others, parameter: value}, (parameter, value)) for value in values]


PROMPTS = {"prompts": ["a"]}
NOT_A_MAPPING = ("TBLogger", {"scalars": {"loss": 3}})
POST = {"url": "http://127.0.0.1:1/hook"}
SLACK = {"webhook_url": "http://127.0.0.1:1/hook"}

WRONG: list[tuple[str, dict[str, Any], Any]] = [
    *each("DefaultMetrics", "peak_hardware_flops", (0, -1.0, math.nan, math.inf, True, "much")),
    *each("ProgressCallback", "use_tqdm", ("yes", 2)),
    *each("ProgressCallback", "output_stream", ("stdrr", 3)),
    *each("ProgressCallback", "header_interval", WHOLE),
    *each("ProgressCallback", "show_eta", ("soon",)),
    ("ProgressCallback", {"step_columns": {"loss": 3}}, ("step_columns", "loss")),
    ("ProgressCallback", {"step_columns": {"loss": {"widht": 3}}}, ("widht", "width")),
    ("ProgressCallback", {"step_columns": {"loss": {"width": 0}}}, ("loss", "width", 0)),
    ("ProgressCallback", {"final_metrics": ["epoch"]}, ("final_metrics",)),
    *each("InfoCallback", "verbose", FLAGS),
    *each("JsonLogger", "format", ("json",)),
    *each("JsonLogger", "format", (["lines"],)),
    *each("JsonLogger", "file_name", ("a/b.jsonl", "", 3, ["a"])),
    *each("ConsoleLoggerCallback", "log_interval", WHOLE),
    *each("ConsoleLoggerCallback", "metrics_log_interval", WHOLE),
    *each("ConsoleLoggerCallback", "metrics", ("train/*", [1], 3, False)),
    *each("MetricSaverCallback", "save_interval", WHOLE),
    *each("MetricSaverCallback", "fixed_steps", (3, [0], ["a"])),
    *each("MetricSaverCallback", "metrics_to_capture", ("train/*", [1], 3)),
    *each("MetricSaverCallback", "history_fname", ("a/b.jsonl", "", 3)),
    *each("MetricSaverCallback", "final_metrics_fname", ("", "a/b.json", 3)),
    *each("MetricSaverCallback", "step_metrics_fname", ("one.json",), save_interval=1),
    *each("MetricSaverCallback", "enabled", FLAGS),
    *each("ConfigSaverCallback", "fname", ("", "../config.json", 3)),
    *each("ConfigSaverCallback", "save_data_paths", ("yes", 1)),
    *each("ResumableSummaryWriter", "log_dir", (3,)),
    ("ResumableSummaryWriter", {"log_dir": ""}, ("log_dir", "empty")),
    *each("TBLogger", "summary_writer", (3,)),
    *each("TBLogger", "scalars", ("loss", ["loss"], 3)),
    *each("TBLogger", "experiment_info", ("kite", 3)),
    *each("TBLogger", "step_metrics", FLAGS),
    ("TBLogger", {"scalars": {"loss": {"sorce": "loss"}}}, ("loss", "sorce", "source")),
    ("TBLogger", {"scalars": {"loss": {"source": 3}}}, ("loss", "source", 3)),
    ("TBLogger", {"scalars": {"loss": {"transform": 3}}}, ("loss", "transform", 3)),
    (*NOT_A_MAPPING, ("loss", 3)),
    *each("GradNormLogger", "log_steps", WHOLE),
    *each("GradNormLogger", "include", (3, [], [1])),
    ("GradNormLogger", {"format": "aray"}, ("format", "aray", "array")),
    *each("ParameterNormLogger", "log_steps", WHOLE),
    *each("ParameterNormLogger", "power_iter_steps", WHOLE),
    *each("ParameterNormLogger", "log_norms", FLAGS),
    *each("ParameterNormLogger", "log_spectral_norms", FLAGS),
    (
        "ParameterNormLogger",
        {"log_norms": False, "log_spectral_norms": False},
        ("log_norms", "log_spectral_norms", False),
    ),
    *each("GAPMonitorCallback", "interval", WHOLE),
    *each("GAPMonitorCallback", "enabled", FLAGS),
    *each("GAPMonitorCallback", "monitor", ("yes",)),
    *each("GAPMonitorCallback", "dump_gradients_start_step", (-1, 1.5)),
    *each("GAPMonitorCallback", "dump_gradients_end_step", (2,), dump_gradients_start_step=3),
    *each("GAPMonitorCallback", "dump_gradients_step_interval", WHOLE),
    *each("GAPMonitorCallback", "dump_gradients_save_first_n", WHOLE),
    ("GAPMonitorCallback", {"enabled": False, "monitor": True}, ("enabled", "monitor", True)),
    ("GAPMonitorCallback", {"monitor": False}, ("monitor", False)),
    *each("StabilityMonitorCallback", "window_size", (*WHOLE, 1)),
    *each("StabilityMonitorCallback", "rolling_window", WHOLE),
    *each("StabilityMonitorCallback", "threshold_std", (0, -1.0, math.nan, "far")),
    *each("StabilityMonitorCallback", "loss_metric_name", ("", 3)),
    *each("SpeedMonitorCallback", "num_flops_per_token", (0, -1.0, math.inf, "much")),
    *each("SpeedMonitorCallback", "num_params", WHOLE),
    *each("SpeedMonitorCallback", "device_peak_flops_per_second", (0, -1.0, "much")),
    *each("GPUMemoryMonitorCallback", "device_id", (-1, 0.5, "cuda:0")),
    *each("GPUMemoryMonitorCallback", "enabled", FLAGS),
    *each("PeakMemory", "do_log", FLAGS),
    *each("PeakMemory", "enable_memory_snapshot", FLAGS),
    *each("PeakMemory", "file_prefix", ("", "a/b", 3)),
    ("PeakMemory", {"summary_writer": 3}, ("summary_writer", "3 given")),
    *each("TextgenCallback", "prompts", (3, [3])),
    ("TextgenCallback", {"prompts": []}, ("prompts", "empty")),
    *each("TextgenCallback", "generation_config", ("warm",), **PROMPTS),
    *each("TextgenCallback", "generation_steps", WHOLE, **PROMPTS),
    *each("TextgenCallback", "max_new_tokens", WHOLE, **PROMPTS),
    *each("TextgenCallback", "file_name", (3, "", "a/b"), **PROMPTS),
    *each("ProfilerCallback", "start_step", (-1, 1.5, "late")),
    *each("ProfilerCallback", "num_steps", WHOLE),
    *each("ProfilerCallback", "active", WHOLE),
    *each("ProfilerCallback", "wait", (-1, 1.5)),
    *each("ProfilerCallback", "ranks", (-1, "some", [], [0, -1], True)),
    *each("ProfilerCallback", "with_stack", FLAGS),
    ("ProfilerCallback", {"start_step": 1, "wait": 1}, ("start_step", "wait")),
    *each("MallocTraceCallback", "interval", WHOLE),
    *each("MallocTraceCallback", "top", WHOLE),
    *each("MallocTraceCallback", "frames", WHOLE),
    *each("MallocTraceCallback", "ranks", ("some",)),
    *each("MemorySnapshotCallback", "max_entries", WHOLE),
    *each("MemorySnapshotCallback", "steps", (0, -1, 1.5, [1.5], "1")),
    *each("MemorySnapshotCallback", "output_dir", (3, "", None)),
    *each("ProfilerCallback", "output_dir", (3, "", None)),
    ("MemorySnapshotCallback", {"steps": None, "on_oom": False}, ("steps", "on_oom")),
    *each("MemorySnapshotCallback", "file_prefix", ("a/b",)),
    *each("WandBCallback", "mode", ("ofline", 3)),
    *each("WandBCallback", "rewind", FLAGS),
    *each("CometCallback", "notifications", ("always", 3)),
    *each("CometCallback", "failure_tag", ("", 3)),
    *each("CometCallback", "auto_resume", FLAGS),
    *each("CometCallback", "offline", ("yes", 1)),
    *each("MLflowCallback", "tags", (["a"],)),
    *each("MLflowCallback", "experiment", ("", 3)),
    *each("TrackioCallback", "space_id", ("", 3)),
    *[
        entry
        for name in ("WandBCallback", "CometCallback", "MLflowCallback", "TrackioCallback")
        for entry in (
            *each(name, "enabled", FLAGS),
            *each(name, "name", ("", 3)),
            *each(name, "config", (["a"],)),
            *each(name, "queue_size", WHOLE),
            *each(name, "close_timeout_s", (0, -1.0, True, "long")),
        )
    ],
    *[
        entry
        for name in ("WandBCallback", "CometCallback", "MLflowCallback")
        for entry in (
            *each(name, "cancel_check_interval", WHOLE),
            *each(name, "cancel_tags", ("cancel", [3])),
        )
    ],
    *each("WandBCallback", "tags", ("one", [3])),
    *each("CometCallback", "tags", ("one", [3])),
    *each("SlackNotifierCallback", "notifications", ("always", 3), **SLACK),
    *each("WebhookCallback", "events", ("end", [], ["ends"]), **POST),
    ("WebhookCallback", {"url": "hook"}, ("url",)),
    ("SlackNotifierCallback", {"webhook_url": "hook"}, ("webhook_url",)),
    ("WebhookCallback", {**POST, "secret": ""}, ("secret",)),
    ("WebhookCallback", {**POST, "headers": {"a:b": "c"}}, ("headers", "a:b")),
    *[
        entry
        for name, others in (("SlackNotifierCallback", SLACK), ("WebhookCallback", POST))
        for entry in (
            *each(name, "enabled", FLAGS, **others),
            *each(name, "name", ("", 3), **others),
            *each(name, "timeout_s", (0, -1.0, "long"), **others),
            *each(name, "max_retries", (-1, 1.5), **others),
            *each(name, "queue_size", WHOLE, **others),
        )
    ],
    *each("DiLoCoCallback", "sync_every", WHOLE),
    *each("DiLoCoCallback", "num_fragments", WHOLE),
    *each("DiLoCoCallback", "timeout", (0, -1.0, math.nan, math.inf, True, "long")),
    *each("DiLoCoCallback", "bf16_comm", (1, "yes")),
    *each("DiLoCoCallback", "comm", ("bfloat16", 16)),
    *each("DiLoCoCallback", "server_addr", ("kite", "kite:0", 7650)),
    *each("EMACallback", "decay", (1.0, -0.1, math.nan, True, "0.9")),
    *each("EMACallback", "update_every", WHOLE),
    *each("EMACallback", "start_step", (-1, 1.5, "soon")),
    ("EMACallback", {"device": "cuda"}, ("device", "cuda", "cpu")),
    *each("EMACallback", "export", FLAGS),
    *each("EMACallback", "output_suffix", ("", "a/b", "1st")),
    *each("ModelMergeCallback", "merge_step", (0, "4", [3, 0], [True])),
    *each("ModelMergeCallback", "merge_interval", WHOLE),
    *each("ModelMergeCallback", "merge_last_n_steps", WHOLE, merge_step=9),
    *each("ModelMergeCallback", "output_suffix", ("", "a/b"), merge_step=600),
    ("ModelMergeCallback", {"merge_step": [600, 800]}, ("600", "800", "overlap")),
    ("ModelMergeCallback", {"merge_interval": 4}, ("merge_interval", "overlap")),
    ("ModelMergeCallback", {}, ("merge_step", "merge_interval")),
]
EVALUATORS = {"evaluators": [{"class_path": "callback_cases.Measures"}]}
WRONG += [
    *each("EvaluatorCallback", "eval_interval", WHOLE, **EVALUATORS),
    *each("EvaluatorCallback", "log_interval", WHOLE, **EVALUATORS),
    *each("EvaluatorCallback", "fixed_steps", (3, [0], ["a"]), **EVALUATORS),
    *each("EvaluatorCallback", "eval_on_startup", FLAGS, **EVALUATORS),
    *each("EvaluatorCallback", "eval_on_finish", FLAGS, **EVALUATORS),
    *each("EvaluatorCallback", "cancel_after_first_eval", FLAGS, **EVALUATORS),
    *each("EvaluatorCallback", "time_budget_s", (0, -1, "soon"), **EVALUATORS),
    ("EvaluatorCallback", {**EVALUATORS, "eval_duration": "1 epok"}, ("eval_duration", "epok")),
    ("EvaluatorCallback", {**EVALUATORS, "evaluator_errors": "skp"}, ("skp", "skip")),
    *each("LMHarnessCallback", "tasks", ("arc_easy", [], 3)),
    *each("LMHarnessCallback", "eval_interval", WHOLE, tasks=["arc_easy"]),
    *each("LMHarnessCallback", "fixed_steps", (3, [0], ["a"]), tasks=["arc_easy"]),
    *each("LMHarnessCallback", "batch_size", WHOLE, tasks=["arc_easy"]),
    *each("LMHarnessCallback", "timeout_s", (0, -1, "soon"), tasks=["arc_easy"]),
    *each("LMHarnessCallback", "keep_models", FLAGS, tasks=["arc_easy"]),
    *each("BeakerCallback", "update_interval", WHOLE),
    *each("BeakerCallback", "enabled", (1, "yes")),
    *each("BeakerCallback", "experiment_id", ("", 3)),
    *each("BeakerCallback", "description", ("", 3)),
    *each("BeakerCallback", "config", (["a"],)),
    *each("BeakerCallback", "result_dir", (3,)),
    *each("BeakerCallback", "close_timeout_s", (0, -1.0, "long")),
]
WRONG += [
    *each("DivergenceDetector", "smoothing", (0, -0.1, 1.5, math.nan, True, "fast")),
    *each("DivergenceDetector", "threshold", (0, -1.0, math.inf, "far")),
    *each("DivergenceDetector", "relative_threshold", (1, 0.5, "far")),
    ("DivergenceDetector", {"threshold": None}, ("threshold", "relative_threshold", None)),
    *each("DivergenceDetector", "patience", WHOLE),
    *each("DivergenceDetector", "warmup", (-1, 1.5, "long")),
    *each("DivergenceDetector", "cooldown", (-1, 1.5, "long")),
    ("DivergenceDetector", {"action": "stopp"}, ("action", "stopp", "'stop'", "rollback")),
    *each("DivergenceDetector", "action", (None, 3)),
    *each("DivergenceDetector", "use_eval_loss", FLAGS),
    *each("DivergenceDetector", "greater_is_better", FLAGS),
    *each("DivergenceDetector", "every_step", FLAGS),
    *each("DivergenceDetector", "every_step", (True,), use_eval_loss=True),
    *each("DivergenceDetector", "metric_key", ("", 3)),
    *each("EarlyStoppingCallback", "early_stopping_patience", WHOLE),
    *each("EarlyStoppingCallback", "patience", WHOLE),
    *each("EarlyStoppingCallback", "early_stopping_threshold", (-1, math.nan, "much", True)),
    *each("EarlyStoppingCallback", "min_delta", (-1, math.inf, "much")),
    *each("EarlyStoppingCallback", "patience", (3,), early_stopping_patience=2),
    *each("EarlyStoppingCallback", "metric", ("", 3)),
    *each("EarlyStoppingCallback", "greater_is_better", (1, "yes")),
    ("NaNGuardCallback", {"action": "skpi"}, ("action", "skpi", "'skip'")),
    *each("NaNGuardCallback", "watch_loss", FLAGS),
    *each("NaNGuardCallback", "watch_grad_norm", FLAGS),
    *each("NaNGuardCallback", "parameter_interval", WHOLE),
    *each("NaNGuardCallback", "max_consecutive", WHOLE),
    (
        "NaNGuardCallback",
        {"watch_loss": False, "watch_grad_norm": False},
        ("watch_loss", "watch_grad_norm", False, "parameter_interval"),
    ),
    *[
        entry
        for name in ("DivergenceDetector", "NaNGuardCallback")
        for entry in (
            *each(name, "max_rollbacks", WHOLE),
            *each(name, "skip_batches", ("some", None)),
            *each(name, "learning_rate_factor", (0, -1.0, 1.5, math.nan, True, "half")),
        )
    ],
    *each("StepSkipRange", "start", WHOLE, stop=9),
    *each("StepSkipRange", "stop", (*WHOLE, 3, 5), start=5),
]
WRONG += [
    *each("CheckpointerCallback", "save_interval", (0, -1, "0s", "5 parsecs", True)),
    *each("CheckpointerCallback", "ephemeral_save_interval", (0, -1, "soon", True)),
    ("CheckpointerCallback", {"ephemeral_save_interval": 250}, ("ephemeral_save_interval", 250)),
    *each("CheckpointerCallback", "ephemeral_cooldown", (0, -1, "soon")),
    *each("CheckpointerCallback", "pre_train_checkpoint", ("yes", 1)),
    *each("CheckpointerCallback", "save_async", ("yes", 1)),
    ("CheckpointerCallback", {"remove": "nevr"}, ("remove", "nevr", "'never'")),
    *each("CheckpointerCallback", "fixed_steps", (7, ["7"], [True])),
    *each("CheckpointerCallback", "max_checkpoints", WHOLE),
    *each("CheckpointerCallback", "enabled", FLAGS),
    *each("ListCheckpointerCallback", "save_steps", (7, ["7"], [True])),
    ("ListCheckpointerCallback", {"save_steps": []}, ("save_steps", "empty")),
    *each("HFConverterCallback", "enabled", FLAGS),
    *each("HFConverterCallback", "validate", FLAGS),
    *each("HFConverterCallback", "debug", FLAGS),
    ("HFConverterCallback", {"debug": True}, ("debug", "validate")),
    ("HFConverterCallback", {"dtype": "bfloat"}, ("dtype", "bfloat", "'bfloat16'")),
    ("HFConverterCallback", {"checkpoints": "lst"}, ("checkpoints", "lst", "'last'")),
    *each("HFConverterCallback", "output_folder", ("", 3)),
    *each("HFConverterCallback", "tokenizer_id", ("", 3)),
    *each("HFConverterCallback", "device", ("", 3)),
    *each("HFConverterCallback", "max_sequence_length", WHOLE),
    *each("HFConverterCallback", "moe_capacity_factor", (1.5,)),
]

WRONG += [
    *each("BatchSizeSchedulerCallback", "batch_sizes", (8, [0], [2, 2], [2.5], [True])),
    *each("BatchSizeSchedulerCallback", "schedule", (3, [5], ["soon"], ["10s"]), batch_sizes=[2]),
    ("BatchSizeSchedulerCallback", {"batch_sizes": [2, 4], "schedule": [0]}, ("schedule", 2)),
    (
        "BatchSizeSchedulerCallback",
        {"batch_sizes": [2, 4, 2], "schedule": [0, 9, 5]},
        ("schedule", "5 steps"),
    ),
    (
        "BatchSizeSchedulerCallback",
        {"batch_sizes": [2, 4, 2], "schedule": [0, "9 steps", "1 epochs"]},
        ("schedule", "epochs and steps"),
    ),
    ("BatchSizeSchedulerCallback", {"lr_scaling": "sqr"}, ("lr_scaling", "sqr", "sqrt")),
    *each("BatchSizeSchedulerCallback", "enabled", FLAGS),
    *each("FreezeCallback", "patterns", ("(", [], [3], "", 3)),
    *each("FreezeCallback", "since", ("soon", "10s", True), patterns="a"),
    *each("FreezeCallback", "until", (0, 4, "5 minutes"), patterns="a", since=4),
    *each("QATSwitchCallback", "start", (0, "10s", "soon", 1.5)),
    *each("QATSwitchCallback", "enabled", FLAGS, start=1),
    *each("SequenceLengthSchedulerCallback", "min_sequence_length", (*WHOLE, 1)),
    *each("SequenceLengthSchedulerCallback", "warmup_steps", WHOLE),
    *each("SequenceLengthSchedulerCallback", "truncate", FLAGS),
    *each("SequenceLengthSchedulerCallback", "keep_multiple_of", WHOLE),
    *each("SequenceLengthSchedulerCallback", "enabled", FLAGS),
    *each("SequenceLengthSchedulerCallback", "max_sequence_length", (0, 1, 1.5, True)),
    (
        "SequenceLengthSchedulerCallback",
        {"min_sequence_length": 96, "max_sequence_length": 512},
        ("min_sequence_length", 96, 512, 256),
    ),
    (
        "SequenceLengthSchedulerCallback",
        {"min_sequence_length": 100, "truncate": True},
        ("min_sequence_length", 100, "keep_multiple_of"),
    ),
]
SECONDS = (0, -1.0, math.nan, math.inf, True, "long")
LIMIT = {"limit": "01:00:00"}
WRONG += [
    *each("GarbageCollectorCallback", "gc_interval", WHOLE),
    *each("GarbageCollectorCallback", "full_every", WHOLE),
    *each("GarbageCollectorCallback", "enabled", FLAGS),
    *each("TrainerControlCallback", "job_id", ("../etc", "", 3)),
    *each("TrainerControlCallback", "port", (-1, 65536, True, "8900")),
    *each("TrainerControlCallback", "enable_http", ("yes", 1)),
    *each("TrainerControlCallback", "host", ("", 3)),
    *each("TrainerControlCallback", "unix_socket", ("", 3)),
    *each("TrainerControlCallback", "disable_auth", FLAGS),
    *each("TrainerControlCallback", "dashboard", FLAGS),
    *each("TrainerControlCallback", "extra_hosts", ("example.org", [3], 3, None)),
    *each("TrainerControlCallback", "tls_key", ("no.pem",), tls_certificate=__file__),
    *each("HangWatchdogCallback", "limit_s", SECONDS),
    *each("HangWatchdogCallback", "step_factor", SECONDS),
    *each("HangWatchdogCallback", "first_step_limit_s", SECONDS),
    *each("HangWatchdogCallback", "other_limit_s", SECONDS),
    ("HangWatchdogCallback", {"action": "abrot"}, ("action", "abrot", "'abort'")),
    *each("MonkeyPatcherCallback", "enabled", FLAGS[1:]),
    *each("MonkeyPatcherCallback", "max_slices", WHOLE),
    *each("PreemptionCallback", "signals", ("SIGTERM", 15)),
    ("PreemptionCallback", {"signals": ["SIGTRM"]}, ("signals", "SIGTRM", "'SIGTERM'")),
    *each("PreemptionCallback", "file", ("", 3)),
    ("PreemptionCallback", {"cloud": "azur"}, ("cloud", "azur", "'azure'")),
    ("PreemptionCallback", {"metadata_url": "ftp://a"}, ("metadata_url", "http://")),
    (
        "PreemptionCallback",
        {"metadata_url": "http://a", "cloud": "aws"},
        ("metadata_url", "cloud"),
    ),
    ("PreemptionCallback", {"metadata_pattern": "x"}, ("metadata_pattern", "metadata_url")),
    *each("PreemptionCallback", "metadata_pattern", ("(", 3), metadata_url="http://a"),
    *each("PreemptionCallback", "metadata_headers", ("x", {"a": 1}), metadata_url="http://a"),
    *each("PreemptionCallback", "poll_interval_s", SECONDS),
    *each("ReplicaCheckCallback", "interval", WHOLE),
    *each("ReplicaCheckCallback", "optimizer_state", FLAGS),
    *each("ReplicaCheckCallback", "max_recoveries", WHOLE),
    ("ReplicaCheckCallback", {"action": "resnyc"}, ("action", "resnyc", "'resync'")),
    *each(
        "TimeLimitCallback",
        "limit",
        (0, -5, math.inf, True, None, "1:2:3", "500 steps", "0s", "soon", [60], 30),
    ),
    ("TimeLimitCallback", {"limit": "SLURM"}, ("limit", "SLURM", "'slurm'")),
    *each("TimeLimitCallback", "margin_s", SECONDS, **LIMIT),
    *each("TimeLimitCallback", "safety_factor", (*SECONDS, 0.5), **LIMIT),
]
WITHOUT_OPTIONS = {"WeightNormLogger"}


def label(entry: Any) -> str:
    return "-".join(str(part) for part in (entry[0], *entry[1].items()))


@pytest.mark.parametrize(("name", "arguments", "told"), WRONG, ids=map(label, WRONG))
def test_a_wrong_value_is_told_with_its_parameter(
    name: str, arguments: dict[str, Any], told: tuple[Any, ...]
) -> None:
    # What is no mapping at all is a TypeError by the specification of TBLogger.
    error = TypeError if (name, arguments) == NOT_A_MAPPING else ConfigError
    with pytest.raises(error) as caught:
        callback_classes()[name](**arguments)
    message = str(caught.value)
    group = callback_classes()[name].__module__.split(".")[2]
    assert message.startswith((f"{name}: ", f"{name} ")) or group not in NAMED
    for part in told:
        # Of a list it is enough to show the wrong entry.
        shown = part[0] if isinstance(part, list) and part else part
        assert is_told(part, message) or is_told(shown, message)


def is_told(part: Any, message: str) -> bool:
    """Whether a word is in a message, or a value stands there by itself."""
    if isinstance(part, str) and part:
        return part in message
    return re.search(rf"(?<![\w.-]){re.escape(repr(part))}(?!\w|\.\d)", message) is not None


def test_wrong_values_of_every_callback_are_tried() -> None:
    assert {name for name, *_ in WRONG} | WITHOUT_OPTIONS == set(callback_classes())


@pytest.mark.parametrize("name", sorted(callback_classes()))
def test_an_unknown_argument_in_a_run_file_is_told(name: str, tmp_path: Path) -> None:
    need(name)
    if name == "JsonLogger":
        pytest.skip("takes any argument and records it")
    given = {"class_path": name, "init_args": {"surprize": 1}}
    with pytest.raises(ConfigError, match="surprize"):
        load_run(run_file(tmp_path, [given]))


# What is missing


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.package])
def test_a_missing_package_is_told_with_the_extra_that_brings_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = CASES[name].package
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"comet_ml": "comet", "lm_eval": "lm-eval"}.get(str(package), package)
    with pytest.raises(ConfigError, match=rf"{package}.*\[{extra}\]"):
        callback_classes()[name](**CASES[name].arguments("", ""))


def test_beaker_s_package_is_needed_in_its_jobs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "beaker", None)
    callback_classes()["BeakerCallback"](enabled=False)
    with pytest.raises(ConfigError, match=r"beaker.*\[beaker\]"):
        callback_classes()["BeakerCallback"](enabled=True, experiment_id="01")


@pytest.mark.parametrize(
    ("name", "arguments", "variable"),
    [
        ("WandBCallback", {"mode": "online"}, "WANDB_API_KEY"),
        ("CometCallback", {}, "COMET_API_KEY"),
        ("SlackNotifierCallback", {}, "SLACK_WEBHOOK_URL"),
        ("WebhookCallback", {}, "HEADWAY_WEBHOOK_URL"),
        ("BeakerCallback", {"enabled": True}, "BEAKER_EXPERIMENT_ID"),
    ],
)
def test_a_missing_key_is_told_before_the_first_step(
    name: str,
    arguments: dict[str, Any],
    variable: str,
    tmp_path: Path,
    offline: Any,
) -> None:
    need(name)
    run = load_run(run_file(tmp_path, [{"class_path": name, "init_args": arguments}]))
    with pytest.raises(ConfigError, match=variable):
        build_trainer(run).train()
    assert not (tmp_path / "out" / "checkpoint-2").exists()


def test_two_callbacks_of_one_name_are_refused(tmp_path: Path) -> None:
    trainer = build_trainer(load_run(run_file(tmp_path, {"mine": "WeightNormLogger"})))
    with pytest.raises(ConfigError, match="two callbacks have the name 'mine'"):
        trainer.add_callback(callback_classes()["JsonLogger"](), name="mine")
    path = tmp_path / "twice.yaml"
    text = run_file(tmp_path, []).read_text()
    path.write_text(
        text.replace("callbacks: []", "callbacks:\n  mine: JsonLogger\n  mine: TBLogger")
    )
    with pytest.raises(ConfigError, match="mine"):
        load_run(path)


def test_unnamed_callbacks_of_one_class_get_names_of_their_own(tmp_path: Path) -> None:
    run = load_run(run_file(tmp_path, ["WeightNormLogger", "WeightNormLogger"]))
    assert list(build_trainer(run).callbacks) == ["WeightNormLogger", "WeightNormLogger_2"]


def test_a_misspelt_column_is_told_with_the_nearest(tmp_path: Path) -> None:
    columns = {"step_columns": {"learning_rat": {"width": 8}}}
    run = load_run(run_file(tmp_path, [{"class_path": "ProgressCallback", "init_args": columns}]))
    with pytest.raises(ConfigError, match=r"callbacks\.0: .*'learning_rat'.*'learning_rate'"):
        build_trainer(run)


@pytest.mark.parametrize("content", ["prompts: [a]", "just a text", "[a, 3]", "[]", "[a", None])
def test_a_prompt_file_that_is_no_list_is_told(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "prompts.yaml"
    if content is not None:
        path.write_text(content)
    options = {"class_path": "TextgenCallback", "init_args": {"prompts": str(path)}}
    run = load_run(run_file(tmp_path, [options]))
    with pytest.raises(ConfigError, match=r"prompts.*prompts\.yaml"):
        build_trainer(run)


# What goes wrong later


def train(folder: Path, callbacks: Any, **args: Any) -> tuple[Any, Witness]:
    """A run that must come to its end."""
    trainer = build_trainer(load_run(run_file(folder, callbacks, **args)))
    witness = Witness()
    trainer.add_callback(witness)
    assert trainer.train().global_step == LAST_STEP
    assert trainer.state.outcome == "completed"
    assert [step for step, _ in witness.losses] == list(range(1, LAST_STEP + 1))
    return trainer, witness


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(
        record.getMessage() + str(record.exc_info[1] if record.exc_info else "")
        for record in caplog.records
        if record.levelno >= logging.WARNING
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start_step": LAST_STEP + 1}, "past the end"),
        ({"start_step": LAST_STEP - 1, "num_steps": 5}, "cut short"),
        ({"wait": LAST_STEP, "warmup": 0, "active": 1}, "past the end"),
    ],
)
def test_a_window_past_the_end_is_a_warning(
    options: dict[str, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**options, "with_stack": False, "table_rows": 1}
    train(tmp_path, [{"class_path": "ProfilerCallback", "init_args": options}])
    assert told in warnings_of(caplog)


WRITERS = {
    "JsonLogger": "trainer_logs.jsonl",
    "GradNormLogger": "gradient_norms.jsonl",
    "ParameterNormLogger": "parameter_norms.jsonl",
    "TBLogger": "events",
    "TextgenCallback": "eval_text.jsonl",
}


def test_a_log_folder_that_cannot_be_written_costs_the_logs_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in the folder's place stops every user, root too."""
    place = tmp_path / "logs"
    place.write_text("not a folder")
    names = [name for name in WRITERS if is_there(name)]
    given = [component(n, "", tmp_path) for n in names]
    trainer, _ = train(tmp_path, given, logging_dir=str(place))
    told = warnings_of(caplog)
    for name in names:
        assert name in trainer.bus.disabled or name in told or WRITERS[name] in told, name
    assert place.read_text() == "not a folder"


def test_an_output_folder_with_things_in_the_way_costs_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where each writer wants to put something there is something else already."""
    output = tmp_path / "out"
    for folder in ("metrics.json", "metrics_step2.json", "malloc_trace_rank0.txt"):
        (output / folder / "full").mkdir(parents=True)
    for file in ("benchmarks", "gradients"):
        (output / file).write_text("in the way")
    names = ["MetricSaverCallback", "ProfilerCallback", "MallocTraceCallback", "GAPMonitorCallback"]
    given = [component(n, "", tmp_path) for n in names]
    trainer, _ = train(tmp_path, given)
    told = warnings_of(caplog)
    for name in names:
        assert name in trainer.bus.disabled or name in told, name


def test_a_server_that_is_away_costs_neither_the_run_nor_much_time(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    offline: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_there("MLflowCallback"):  # its import is not the time that is measured
        import mlflow.tracking  # noqa: F401
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        options = {
            "MLflowCallback": {"tracking_uri": url},
            "SlackNotifierCallback": {"webhook_url": url, "notifications": "all"},
            "WebhookCallback": {"url": url},
        }
        given = [
            {"class_path": name, "init_args": {**arguments, "close_timeout_s": 20.0}}
            for name, arguments in options.items()
            if is_there(name)
        ]
        began_s = time.monotonic()
        train(tmp_path, given)
    told = warnings_of(caplog)
    for name in options:
        assert name in told or not is_there(name)
    assert time.monotonic() - began_s < 15
