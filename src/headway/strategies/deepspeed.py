"""DeepSpeed's configuration, written out in full from a few options.

Owns: `DeepSpeedConfig`, the mapping of options, optimizer, precision, clipping and accumulation to
DeepSpeed's own keys, and the plugin that hands them to Accelerate. Does not own: training with the
engine (zero.py).
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headway.dist.env import detect_env
from headway.errors import ConfigError, missing_extra, unknown

_PRECISIONS = ("bf16", "fp16", "fp32", "no")
# DeepSpeed's own names of optimizers it builds itself.
_OPTIMIZERS = ("Adam", "AdamW", "Lamb", "Lion", "Muon", "Adagrad", "SGD")
_TOTAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_COPIED_SETTINGS = ("lr", "betas", "eps", "weight_decay")


@dataclass
class DeepSpeedConfig:
    """ZeRO options; everything else DeepSpeed needs to know comes from the run."""

    config_file: str | None = None
    """JSON file with DeepSpeed's own keys. It replaces every other option here."""
    zero_stage: int = 2
    """What ranks share out: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in pinned host memory; from stage 1."""
    offload_param: bool = False
    """Keep parameters in pinned host memory between uses; stage 3 only."""
    overlap_comm: bool = True
    """Reduce gradients while the backward pass goes on."""
    contiguous_gradients: bool = True
    """Copy gradients to one buffer as they appear, against fragmentation."""
    reduce_bucket_size: int = 500_000_000
    """Elements reduced at a time."""
    stage3_prefetch_bucket_size: int = 50_000_000
    """Elements fetched ahead in stage 3."""
    stage3_param_persistence_threshold: int = 100_000
    """Parameters of fewer elements stay whole on every rank in stage 3."""

    def __post_init__(self) -> None:
        problems = list(_find_problems(self))
        if problems:
            raise ConfigError([f"DeepSpeedConfig.{problem}" for problem in problems])

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> DeepSpeedConfig:
        """Build from a mapping; an unknown key is refused with the nearest one."""
        allowed = [field.name for field in fields(cls)]
        strange = [
            unknown("DeepSpeedConfig option", key, allowed) for key in given.keys() - allowed
        ]
        if strange:
            raise ConfigError(sorted(strange))
        return cls(**given)


def _find_problems(config: DeepSpeedConfig) -> Iterator[str]:
    if config.config_file is not None and not isinstance(config.config_file, str | Path):
        yield f"config_file: a path, got {config.config_file!r}"
    stage = config.zero_stage
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield f"zero_stage: {stage!r} given; allowed: 0, 1, 2, 3"
        return
    for name in ("offload_optimizer", "offload_param", "overlap_comm", "contiguous_gradients"):
        if not isinstance(getattr(config, name), bool):
            yield f"{name}: True or False, got {getattr(config, name)!r}"
    for name, least in (
        ("reduce_bucket_size", 1),
        ("stage3_prefetch_bucket_size", 0),
        ("stage3_param_persistence_threshold", 0),
    ):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield f"{name}: a whole number from {least} up, got {value!r}"
    if config.offload_optimizer and stage == 0:
        yield "offload_optimizer: needs zero_stage 1, 2 or 3, got 0"
    if config.offload_param and stage != 3:
        yield f"offload_param: needs zero_stage 3, got {stage}"


def build_deepspeed_config(
    config: DeepSpeedConfig | Mapping[str, Any] | None = None,
    *,
    args: Any = None,
    micro_batch_size: int | None = None,
    accumulation: int | None = None,
    max_grad_norm: float | None = None,
    mixed_precision: str | None = None,
    optimizer: Any = None,
    world_size: int | None = None,
) -> dict[str, Any]:
    """DeepSpeed's configuration with every value decided: no `auto` is left in it.

    What is not given is taken from `args` (TrainingArguments) where these are. `optimizer` is a
    torch optimizer, or a mapping with `type` and `params`, that DeepSpeed shall build itself;
    None: the program brings its own, as Headway's trainer does. `world_size` is read from the
    launcher's variables by default.
    """
    config = _as_config(config)
    if args is not None:
        micro_batch_size = micro_batch_size or args.per_device_train_batch_size
        accumulation = accumulation or args.gradient_accumulation_steps
        max_grad_norm = args.max_grad_norm if max_grad_norm is None else max_grad_norm
        mixed_precision = mixed_precision or args.mixed_precision
    world_size = detect_env(use_cpu=True).world_size if world_size is None else world_size
    settled = _settle(
        micro_batch_size or 1, accumulation or 1, world_size, max_grad_norm, mixed_precision
    )
    described = None if optimizer is None else _describe_optimizer(optimizer)
    if config.config_file is not None:
        result = _fill_file(config, settled, described)
    else:
        result = {**settled, "zero_optimization": _describe_zero(config)}
        if described is not None:
            result["optimizer"] = described
    if "optimizer" not in result:
        # The program's own optimizer: neither refused nor replaced by DeepSpeed's for the CPU.
        result.setdefault("zero_allow_untested_optimizer", True)
        result.setdefault("zero_force_ds_cpu_optimizer", False)
    _check_result(result, world_size)
    return result


def _as_config(config: DeepSpeedConfig | Mapping[str, Any] | None) -> DeepSpeedConfig:
    if config is None:
        return DeepSpeedConfig()
    if isinstance(config, DeepSpeedConfig):
        config.__post_init__()  # fields may have been set since
        return config
    if isinstance(config, Mapping):
        return DeepSpeedConfig.from_dict(config)
    raise ConfigError(
        f"deepspeed_config: a DeepSpeedConfig or a mapping of its fields, got "
        f"{type(config).__name__}"
    )


def _settle(
    micro_batch_size: int,
    accumulation: int,
    world_size: int,
    max_grad_norm: float | None,
    mixed_precision: str | None,
) -> dict[str, Any]:
    counts = {
        "micro_batch_size": micro_batch_size,
        "accumulation": accumulation,
        "world_size": world_size,
    }
    problems = [
        f"{name}: a whole number from 1 up, got {value!r}"
        for name, value in counts.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    clipping = 0.0 if max_grad_norm is None else float(max_grad_norm)
    if not (math.isfinite(clipping) and clipping >= 0):
        problems.append(f"max_grad_norm: a number from 0 up, got {max_grad_norm!r}")
    if mixed_precision is not None and mixed_precision not in _PRECISIONS:
        problems.append(f"mixed_precision: {unknown('value', mixed_precision, _PRECISIONS)}")
    if problems:
        raise ConfigError(problems)
    return {
        _TOTAL: micro_batch_size * accumulation * world_size,
        _MICRO: micro_batch_size,
        _STEPS: accumulation,
        "gradient_clipping": clipping,
        # A scale of 0 is found while training. Overflow in bf16 is not looked for unless asked.
        "fp16": {"enabled": mixed_precision == "fp16", "loss_scale": 0},
        "bf16": {"enabled": mixed_precision == "bf16", "check_grad_overflow": True},
        # DeepSpeed would print a line of its own every 10 steps.
        "steps_per_print": 1_000_000_000,
    }


def _describe_zero(config: DeepSpeedConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "overlap_comm": config.overlap_comm,
        "contiguous_gradients": config.contiguous_gradients,
        "reduce_bucket_size": config.reduce_bucket_size,
    }
    on_host = {"device": "cpu", "pin_memory": True}
    if config.offload_optimizer:
        zero["offload_optimizer"] = dict(on_host)
    if config.offload_param:
        zero["offload_param"] = dict(on_host)
    if config.zero_stage == 3:
        zero["stage3_prefetch_bucket_size"] = config.stage3_prefetch_bucket_size
        zero["stage3_param_persistence_threshold"] = config.stage3_param_persistence_threshold
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return zero


def _describe_optimizer(optimizer: Any) -> dict[str, Any]:
    if isinstance(optimizer, Mapping):
        kind, params = optimizer.get("type"), dict(optimizer.get("params") or {})
        if set(optimizer) - {"type", "params"} or not isinstance(kind, str):
            raise ConfigError(
                f"optimizer: a mapping with 'type' and 'params', got the keys "
                f"{', '.join(map(repr, optimizer))}"
            )
    else:
        kind = type(optimizer).__name__
        settings = getattr(optimizer, "defaults", None)
        if settings is None:
            raise ConfigError(
                f"optimizer: a torch optimizer or a mapping with 'type' and 'params', got {kind}"
            )
        params = {key: settings[key] for key in _COPIED_SETTINGS if key in settings}
    names = {name.lower(): name for name in _OPTIMIZERS}
    if kind.lower() not in names:
        raise ConfigError(f"optimizer: {unknown('DeepSpeed optimizer', kind, _OPTIMIZERS)}")
    if "betas" in params:
        params["betas"] = list(params["betas"])
    return {"type": names[kind.lower()], "params": params}


def _fill_file(
    config: DeepSpeedConfig, settled: Mapping[str, Any], optimizer: dict[str, Any] | None
) -> dict[str, Any]:
    """The file's configuration, its `auto` values settled and what it does not say added."""
    path = Path(str(config.config_file))
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"DeepSpeedConfig.config_file: cannot read {path}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"DeepSpeedConfig.config_file: {path} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"DeepSpeedConfig.config_file: {path} holds no JSON object")
    known: dict[str, Any] = {**settled, "zero_optimization": _describe_zero(config)}
    if optimizer is not None:
        known["optimizer"] = optimizer
    result: dict[str, Any] = _resolve(read, known)
    left = list(_find_autos(result))
    if left:
        raise ConfigError(
            [
                f"DeepSpeedConfig.config_file: {path} has 'auto' for {key}, which nothing here "
                f"decides; write a value"
                for key in left
            ]
        )
    _complete_batches(result, settled)
    for key, value in settled.items():
        result.setdefault(key, copy.deepcopy(value))
    result.setdefault("zero_optimization", {"stage": 0})
    return result


def _complete_batches(result: dict[str, Any], settled: Mapping[str, Any]) -> None:
    """Derive the batch sizes the file leaves out from those it names: its word counts."""
    num_ranks = settled[_TOTAL] // (settled[_MICRO] * settled[_STEPS])
    if isinstance(result.get(_TOTAL), int):
        if _MICRO not in result:
            steps = result.setdefault(_STEPS, settled[_STEPS])
            result[_MICRO] = result[_TOTAL] // max(1, steps * num_ranks)
        result.setdefault(_STEPS, result[_TOTAL] // max(1, result[_MICRO] * num_ranks))
        return
    micro = result.setdefault(_MICRO, settled[_MICRO])
    result.setdefault(_TOTAL, micro * result.setdefault(_STEPS, settled[_STEPS]) * num_ranks)


def _resolve(value: Any, known: Any) -> Any:
    if isinstance(value, dict):
        inner = known if isinstance(known, Mapping) else {}
        return {key: _resolve(entry, inner.get(key)) for key, entry in value.items()}
    return copy.deepcopy(known) if value == "auto" and known is not None else value


def _find_autos(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _find_autos(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _find_autos(entry, f"{path}[{number}]")
    elif value == "auto":
        yield path


def _check_result(result: Mapping[str, Any], world_size: int) -> None:
    if result.get("fp16", {}).get("enabled") and result.get("bf16", {}).get("enabled"):
        raise ConfigError("fp16 and bf16 are both enabled in the DeepSpeed configuration; take one")
    total, micro, steps = (result[key] for key in (_TOTAL, _MICRO, _STEPS))
    problems = [
        f"{key}: a whole number from 1 up, got {result[key]!r}"
        for key in (_TOTAL, _MICRO, _STEPS)
        if not isinstance(result[key], int) or result[key] < 1
    ]
    if not problems and total != micro * steps * world_size:
        problems.append(
            f"{_TOTAL}={total} is not {_MICRO}={micro} x {_STEPS}={steps} x {world_size} ranks "
            f"= {micro * steps * world_size}"
        )
    if problems:
        raise ConfigError(problems)


def require_deepspeed(purpose: str) -> None:
    """Raise the error that names the extra, unless DeepSpeed is installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise missing_extra("deepspeed", "deepspeed", purpose)


def make_deepspeed_plugin(
    config: DeepSpeedConfig | Mapping[str, Any] | None = None, **settings: Any
) -> Any:
    """Accelerate's DeepSpeedPlugin for these options, to be given to `Accelerator`.

    `settings` are those of `build_deepspeed_config`.
    """
    built = build_deepspeed_config(config, **settings)
    if importlib.util.find_spec("accelerate") is None:
        raise missing_extra("accelerate", "accelerate", "DeepSpeed through Accelerate")
    require_deepspeed("DeepSpeed through Accelerate")
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin(hf_ds_config=built)
