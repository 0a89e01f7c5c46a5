"""Looking at an Accelerator before training on it: whether it can be used, and whose word counts.

Owns: the refusals, the traps of Accelerate that would train something else than was asked for, and
the options that the Accelerator decides. Does not own: training with it (accelerate.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

DEEPSPEED = "DEEPSPEED"
_REFUSED = {
    "FSDP": "Accelerate's FSDP is not supported: use FSDP2Trainer, which shards with fully_shard",
    "MEGATRON_LM": "Megatron-LM is not supported: use PipelineTrainer or FSDP2Trainer",
    "XLA": "TPUs (XLA) are not supported",
    "TP": "tensor parallelism is not supported: use FSDP2Trainer",
}


def check_accelerator(accelerator: Any, environ: Mapping[str, str] | None = None) -> Accelerator:
    """The given Accelerator, if a run can trust it; else a ConfigError that says why not."""
    environ = os.environ if environ is None else environ
    try:
        import accelerate
    except ImportError as error:
        raise missing_extra("accelerate", "accelerate", "AccelTrainer") from error
    if not isinstance(accelerator, accelerate.Accelerator):
        raise ConfigError(
            f"accelerator: AccelTrainer needs an accelerate.Accelerator, got "
            f"{type(accelerator).__name__}"
        )
    problems = [*_find_unsupported(accelerator, environ), *_find_lost_ranks(accelerator, environ)]
    if problems:
        raise ConfigError([f"accelerator: {problem}" for problem in problems])
    if _asked_for_several_and_is_alone(accelerator, environ):
        logger.warning(
            "accelerate launch was asked for several processes and started one: without a GPU it "
            "does so silently. Start with torchrun (or headway train --nproc N) instead; this run "
            "goes on alone"
        )
    return accelerator


def distributed_type(accelerator: Accelerator) -> str:
    """Accelerate's name for its way of working, such as NO, MULTI_GPU or DEEPSPEED."""
    kind = accelerator.distributed_type
    return str(getattr(kind, "value", kind)).upper()


def _find_unsupported(accelerator: Accelerator, environ: Mapping[str, str]) -> list[str]:
    kind = distributed_type(accelerator)
    if kind in _REFUSED:
        return [_REFUSED[kind]]
    problems = []
    if _is_on(environ, "ACCELERATE_USE_FSDP"):
        # Without a GPU Accelerate drops the plugin and wraps with DDP, silently.
        problems.append(_REFUSED["FSDP"])
    if _is_on(environ, "ACCELERATE_USE_MEGATRON_LM"):
        problems.append(_REFUSED["MEGATRON_LM"])
    if _is_on(environ, "ACCELERATE_USE_DEEPSPEED") and kind != DEEPSPEED:
        problems.append(
            "a DeepSpeed plugin was given, but Accelerate dropped it and would train without "
            "ZeRO, as it does with cpu=True; on a machine without a GPU leave cpu=True away and "
            "pass kwargs_handlers=[InitProcessGroupKwargs(backend='gloo')]"
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    for axis in ("tp", "cp", "sp"):
        if parallel is not None and getattr(parallel, f"{axis}_size", 1) > 1:
            problems.append(f"parallelism_config with {axis}_size > 1 is not supported")
    return problems


def _find_lost_ranks(accelerator: Accelerator, environ: Mapping[str, str]) -> list[str]:
    text = environ.get("WORLD_SIZE", "").strip()
    num_launched = int(text) if text.isdigit() else 1
    if num_launched == accelerator.num_processes:
        return []
    hint = "pass cpu=True to it, or give each rank a GPU"
    if distributed_type(accelerator) == DEEPSPEED:
        hint = "pass kwargs_handlers=[InitProcessGroupKwargs(backend='gloo')] where there is no GPU"
    return [
        f"the launcher started {num_launched} processes (WORLD_SIZE), the Accelerator counts "
        f"{accelerator.num_processes}, so each would train on its own; {hint}"
    ]


def _asked_for_several_and_is_alone(accelerator: Accelerator, environ: Mapping[str, str]) -> bool:
    # accelerate launch names no number of processes to the one it starts; but only when it was
    # asked for several does it name a meeting place.
    launched = "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_PORT" in environ
    alone = not any(name in environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return launched and alone and accelerator.num_processes == 1


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def reconcile(accelerator: Accelerator, args: Any) -> None:
    """Let the Accelerator decide accumulation and precision; a different option is warned of.

    Changes `args`, so it comes before they are validated.
    """
    _reconcile_precision(accelerator, args)
    steps = accumulation_of(accelerator)
    if args.gradient_accumulation_steps != steps:
        logger.warning(
            "gradient_accumulation_steps=%d gives way to the Accelerator's %d; set it there",
            args.gradient_accumulation_steps,
            steps,
        )
        args.gradient_accumulation_steps = steps
    _check_global_batch(args, steps, accelerator.num_processes)
    if args.use_cpu and accelerator.device.type != "cpu":
        logger.warning(
            "use_cpu=True gives way to the Accelerator's device %s; pass cpu=True to it",
            accelerator.device,
        )


def _reconcile_precision(accelerator: Accelerator, args: Any) -> None:
    if args.mixed_precision not in (None, "no"):
        if args.mixed_precision != str(accelerator.mixed_precision):
            logger.warning(
                "mixed_precision=%r is ignored in AccelTrainer: the Accelerator's, %r, counts",
                args.mixed_precision,
                str(accelerator.mixed_precision),
            )
        args.mixed_precision = None
    lost = accelerator.mixed_precision == "fp16" and accelerator.scaler is None
    if lost and distributed_type(accelerator) != DEEPSPEED:
        logger.warning(
            "the Accelerator's mixed_precision='fp16' has no effect on the device %s: Accelerate "
            "trains in the model's own precision there",
            accelerator.device,
        )
    if accelerator.scaler is not None and args.nonfinite_action == "stop":
        logger.warning(
            "nonfinite_action='stop' becomes 'skip': with fp16 an overflow is how the loss scale "
            "is found, and such a step is withheld"
        )
        args.nonfinite_action = "skip"


def accumulation_of(accelerator: Accelerator) -> int:
    """Micro-batches per optimizer step; in DeepSpeed's configuration where there is one."""
    if distributed_type(accelerator) == DEEPSPEED:
        plugin = accelerator.deepspeed_plugin
        value = None if plugin is None else plugin.get_value("gradient_accumulation_steps")
        if isinstance(value, int):
            return value
    return int(accelerator.gradient_accumulation_steps)


def _check_global_batch(args: Any, steps: int, num_processes: int) -> None:
    if args.global_batch_tokens is not None:
        raise ConfigError(
            "global_batch_tokens would set the accumulation, which is the Accelerator's in "
            "AccelTrainer; set gradient_accumulation_steps on the Accelerator instead"
        )
    batch = args.per_device_train_batch_size * steps * num_processes
    if args.global_batch_size not in (None, batch):
        raise ConfigError(
            f"global_batch_size={args.global_batch_size} contradicts the Accelerator: "
            f"{args.per_device_train_batch_size} samples x gradient_accumulation_steps={steps} "
            f"(the Accelerator's) x {num_processes} processes = {batch}"
        )
