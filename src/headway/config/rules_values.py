"""The rules on one option each: names it may take, and the range of its number.

Owns: what a value of the right type may be. Does not own: combinations (rules_pairs).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from headway.config.duration import Duration
from headway.config.pipe_schedules import FACTS, NAMES
from headway.config.rules import Check, Rule, get
from headway.errors import ConfigError, unknown

STRATEGIES = ("epoch", "no", "steps")
MIXED_PRECISIONS = ("bf16", "fp16", "no")
FP8_RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")
QAT_RECIPES = (
    "float8-dynamic-act-float8-weight",
    "int4-weight-only",
    "int8-dynamic-act-int4-weight",
)
FLASH4 = "flash4"
SDPA_BACKENDS = ("cudnn", "efficient", "flash", FLASH4, "math")
CONSTRUCT_ON = ("default", "device", "meta")
COMPONENTS = ("dataset", "model", "optimizer", "rng", "scheduler", "trainer")
LOADABLE = ("callbacks", *COMPONENTS)
DAMAGED_POLICIES = ("fallback", "stop")
FUSED_LOSSES = ("chunked", "liger", "cut_cross_entropy")
DTYPES = ("bfloat16", "float16", "float32")
DTYPE_SPELLINGS = ("bf16", "bfloat16", "float16", "float32", "fp16", "fp32", "half")
STAGE_TYPES = ("loop", "v")
MATMUL_PRECISIONS = ("high", "highest", "medium")
COMPILE_MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead")
GRAPH_MODES = {"max-autotune": "max-autotune-no-cudagraphs", "reduce-overhead": "default"}
"""Those that replay CUDA graphs on a GPU, each with the one that comes nearest without them."""
TRACKERS = ("comet_ml", "mlflow", "tensorboard", "trackio", "wandb")
NONFINITE_ACTIONS = ("raise", "skip", "stop")
LR_SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_warmup_with_min_lr",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "infinite",
    "inverse_sqrt",
    "linear",
    "polynomial",
    "sequential",
    "warmup_stable_decay",
    "wsd",
)
REFUSED_SCHEDULES = {
    "reduce_lr_on_plateau": "needs a metric at each step and the loop gives none; call torch's "
    "ReduceLROnPlateau from a callback's on_evaluate instead",
    "greedy": "follows a metric at each step and the loop gives none; choose a schedule of the "
    "step, such as 'cosine'",
}
SCHEDULE_UNITS = ("steps", "tokens")
_DEVICE = re.compile(r"[a-z]+(:\d+)?")


def one_of(option: str, names: tuple[str, ...], *, may_be_empty: bool = False) -> Check:
    """A check that a text option, or each item of a list, is one of `names` where not None."""

    def check(args: Any) -> str | None:
        value = get(args, option)
        if value == [] and not may_be_empty:
            return f"{option} is an empty list; name at least one of {', '.join(names)}"
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item not in names:
                return unknown(option, item, names)
        return None

    return check


def in_range(option: str, low: float, high: float = math.inf, *, open_high: bool = False) -> Check:
    """A check that a number, where not None, lies in [low, high], or [low, high) when open."""
    finite = math.isfinite(high)
    if finite:
        allowed = f"must lie in [{low:g}, {high:g}{')' if open_high else ']'}"
    else:
        allowed = f"must be {low:g} or more"

    def check(args: Any) -> str | None:
        value = get(args, option)
        if value is None:
            return None
        fits = (
            math.isfinite(value) and low <= value and (value < high if open_high else value <= high)
        )
        return None if fits else f"{option} {allowed}, got {value!r}"

    return check


def _unlimited_or(option: str) -> Check:
    def check(args: Any) -> str | None:
        value = get(args, option)
        if value >= 1 or value == -1:
            return None
        return f"{option} must be 1 or more, or -1 for no limit, got {value}"

    return check


def _epochs(args: Any) -> str | None:
    value = args.num_train_epochs
    if math.isfinite(value) and value != 0:
        return None
    return f"num_train_epochs must be above 0, or negative for no limit, got {value:g}"


def _positive(option: str) -> Check:
    def check(args: Any) -> str | None:
        value = get(args, option)
        if math.isfinite(value) and value > 0:
            return None
        return f"{option} must be above 0, got {value!r}"

    return check


def _duration(option: str) -> Check:
    def check(args: Any) -> str | None:
        value = get(args, option)
        if value is None:
            return None
        try:
            duration = Duration.parse(value)
        except ConfigError as error:
            return f"{option}: {error}"
        return None if duration.value > 0 else f"{option} must be above 0, got {value!r}"

    return check


def _safetensors(args: Any) -> str | None:
    if args.save_safetensors:
        return None
    return (
        "save_safetensors=False is not supported: checkpoints never hold pickles. "
        "Convert a finished one with: headway checkpoint convert --to bin"
    )


def _nonempty(option: str) -> Check:
    def check(args: Any) -> str | None:
        value = get(args, option)
        if not isinstance(value, str) or value.strip():
            return None
        return f"{option} must not be empty"

    return check


def _no_address(args: Any) -> str | None:
    if "://" not in str(args.output_dir):
        return None
    return (
        f"output_dir={args.output_dir!r} is an address, and a run writes its logs into a folder; "
        f"set checkpoint_address={args.output_dir!r} for the checkpoints, and output_dir to a "
        "local folder"
    )


def _address(args: Any) -> str | None:
    address = args.checkpoint_address
    if address is None or re.fullmatch(r"[^:/\s]+://.*[^/\s].*", address):
        return None
    return (
        f"checkpoint_address must look like 's3://bucket/run', got {address!r}; in a folder, "
        "checkpoints are where output_dir says"
    )


def _device_name(args: Any) -> str | None:
    if args.device is None or _DEVICE.fullmatch(str(args.device)):
        return None
    return f"device must look like 'cpu' or 'cuda:0', got {args.device!r}"


def _reshard(args: Any) -> str | None:
    value = args.fsdp2.reshard_after_forward
    if isinstance(value, bool) or value >= 2:
        return None
    return f"fsdp2.reshard_after_forward must be True, False or 2 and more ranks, got {value}"


def _shard_size(args: Any) -> str | None:
    value = args.fsdp2.shard_size
    if value is None or value >= 2:
        return None
    return f"fsdp2.shard_size must be 2 and more ranks, or None for all of them, got {value}"


def _number_rules() -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Options, description and maker of a check, for the plain ranges."""
    yield (
        ("per_device_train_batch_size", "per_device_eval_batch_size", "global_batch_size",
         "global_batch_tokens", "epoch_train_steps", "save_total_limit", "preserve_n_best",
         "keep_every_n_steps", "metrics_collect_interval", "ddp_timeout",
         "dataloader_prefetch_factor", "dynamo_recompile_limit", "n_microbatches",
         "stages_per_rank", "ddp.bucket_cap_mb", "post_local_sgd.period"),
        "1 or more.",
        lambda option: in_range(option, 1),
    )  # fmt: skip
    yield (
        ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "warmup_tokens",
         "eval_delay",
         "dataloader_num_workers", "fp8_dim_alignment", "speed_metrics_start_step",
         "post_local_sgd.start_step"),
        "0 or more.",
        lambda option: in_range(option, 0),
    )  # fmt: skip
    yield ("max_steps", "max_eval_steps"), "1 or more, or -1.", _unlimited_or
    yield (
        ("adam_beta1", "adam_beta2"),
        "0 or more and below 1.",
        lambda option: in_range(option, 0, 1, open_high=True),
    )
    yield (
        ("gc_threshold", "activation_memory_budget", "warmup_ratio"),
        "Between 0 and 1.",
        lambda option: in_range(option, 0, 1),
    )
    yield ("adam_epsilon",), "Above 0.", _positive
    yield ("seed",), "-1 or more.", lambda option: in_range(option, -1, 2**63 - 1)
    yield (
        ("save_every", "eval_every", "log_every", "train_for", "stop_at"),
        "A duration above 0 in steps, epochs, tokens or wall time.",
        _duration,
    )
    yield (
        ("output_dir", "resume_from_checkpoint", "metric_for_best_model", "best_model_metric",
         "torch_compile_cache"),
        "Not empty.",
        _nonempty,
    )  # fmt: skip


def _own_rules() -> Iterator[Rule]:
    number = 20
    for options, description, make in _number_rules():
        for option in options:
            yield Rule(f"H{number}", (option,), "args", f"{option}: {description}", make(option))
        number += 1
    yield Rule("H40", ("num_train_epochs",), "args", "num_train_epochs is not 0.", _epochs)
    yield Rule("H41", ("save_safetensors",), "args", "Weights are safetensors.", _safetensors)
    yield Rule("H54", ("output_dir", "checkpoint_address"), "args",
               "output_dir is a folder, no address.", _no_address)  # fmt: skip
    yield Rule("H55", ("checkpoint_address",), "args",
               "checkpoint_address is an address, no folder.", _address)  # fmt: skip
    yield Rule("H42", ("device",), "args", "device is a device name.", _device_name)
    names = (
        ("H43", "nonfinite_action", NONFINITE_ACTIONS),
        ("H44", "default_dtype", DTYPES),
        ("H45", "torch_compile_mode", COMPILE_MODES),
        ("H46", "float32_matmul_precision", MATMUL_PRECISIONS),
        ("H49", "on_damaged_checkpoint", DAMAGED_POLICIES),
        ("H52", "fused_loss", FUSED_LOSSES),
        ("H50", "load_components", LOADABLE),
    )
    for label, option, allowed in names:
        text = f"{option} is one of {', '.join(allowed)}."
        yield Rule(label, (option,), "args", text, one_of(option, allowed))
    trackers = ("all", "none", *TRACKERS)
    yield Rule("H53", ("report_to",), "args",
               f"report_to names some of {', '.join(trackers)}.",
               one_of("report_to", trackers, may_be_empty=True))  # fmt: skip
    yield Rule("H70", ("pipe_schedule",), "args",
               f"pipe_schedule is one of {', '.join(FACTS)}, or one of them after 'Schedule'.",
               one_of("pipe_schedule", NAMES))  # fmt: skip
    yield Rule("H71", ("pipeline_size",), "args", "A pipeline has 2 ranks or more.",
               in_range("pipeline_size", 2))  # fmt: skip
    yield Rule("H47", ("fsdp2.reshard_after_forward",), "args",
               "A number of ranks to reshard over is 2 or more.", _reshard)  # fmt: skip
    yield Rule("H51", ("fsdp2.shard_size",), "args",
               "A number of ranks that share a copy is 2 or more.", _shard_size)  # fmt: skip


def _reference_rules() -> Iterator[Rule]:
    steps = "gradient_accumulation_steps"
    yield Rule("2", (steps,), "args", f"{steps} is 1 or more.", in_range(steps, 1))
    names = [
        ("5", "mixed_precision", MIXED_PRECISIONS),
        ("6", "fp8_recipe", FP8_RECIPES),
        ("7", "qat_recipe", QAT_RECIPES),
        ("32", "construct_model_on", CONSTRUCT_ON),
        ("33", "checkpoint_components", COMPONENTS),
        ("48", "pp_stage_type", STAGE_TYPES),
        ("68", "sdpa_backend", SDPA_BACKENDS),
    ]
    names += [
        ("60", f"fsdp2.{part}_dtype", DTYPE_SPELLINGS) for part in ("param", "reduce", "buffer")
    ]
    names += [("67", f"{what}_strategy", STRATEGIES) for what in ("eval", "logging", "save")]
    for number, option, allowed in names:
        text = f"{option} is one of {', '.join(allowed)}."
        yield Rule(number, (option,), "args", text, one_of(option, allowed))
    for what in ("eval", "logging", "save"):
        option = f"{what}_steps"
        yield Rule("67", (option,), "args", f"{option} is above 0.", in_range(option, 1))


RULES: list[Rule] = [*_reference_rules(), *_own_rules()]
