"""torch's process-wide settings, for the time of a run and no longer.

Owns: setting what the arguments ask for and putting back what was there, also after an error;
whether an attention backend can run here. Does not own: autocast (precision/amp.py), which modules
are compiled (compilation.py).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.args import TrainingArguments
from headway.config.rules_values import FLASH4
from headway.errors import ConfigError
from headway.precision.amp import Context
from headway.strategies.compile_cache import compile_cache, usable_folder

logger = logging.getLogger(__name__)

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
# torch's words where none of the allowed kernels takes the inputs.
_NO_KERNEL = ("No available kernel", "No viable backend for scaled_dot_product_attention")
_PARETO = "PARTITIONER_MEMORY_BUDGET_PARETO"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


@contextmanager
def torch_settings(args: TrainingArguments) -> Iterator[None]:
    """Inside, torch is set as the arguments say; afterwards as it was."""
    with ExitStack() as stack:
        if args.float32_matmul_precision is not None:
            stack.callback(torch.set_float32_matmul_precision, _matmul_precision())
            torch.set_float32_matmul_precision(args.float32_matmul_precision)
        if args.detect_anomaly:
            logger.warning("detect_anomaly=True: every operation is watched, which is slow")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
        if args.dynamo_recompile_limit is not None:
            limit = args.dynamo_recompile_limit
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=limit))
        if args.torch_compile:
            # The graph of one block serves all: without these checks a hook inside another block,
            # or one set after the first step, is never called, and nobody is told.
            stack.enter_context(torch._dynamo.config.patch(skip_nnmodule_hook_guards=False))
        if args.torch_compile and args.torch_compile_dynamic:
            # With shapes that change the compiler also takes numbers, such as the epsilon of a
            # norm, for changing ones, finds that they cannot be, and does all of it again.
            stack.enter_context(torch._dynamo.config.patch(specialize_float=True))
        if args.activation_memory_budget is not None:
            from torch._functorch import config

            budget = args.activation_memory_budget
            stack.enter_context(config.patch(activation_memory_budget=budget))
        if args.torch_compile and os.environ.get(_PARETO):
            logger.warning(
                "%s is set: the compiler measures many memory budgets, which takes long", _PARETO
            )
        stack.enter_context(compile_cache(args))
        stack.enter_context(_attention(args))
        yield


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError as error:
        raise ConfigError(
            "float32_matmul_precision cannot be set: this process has used torch's newer "
            f"fp32_precision settings, and torch allows no mixture ({error})"
        ) from error


@contextmanager
def _attention(args: TrainingArguments) -> Iterator[None]:
    if args.sdpa_backend in (None, FLASH4):  # the latter is no kernel of torch's
        yield
        return
    with _kernels(_names(args), args.sdpa_set_priority):
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error) for words in _NO_KERNEL):
                raise
            raise ConfigError(
                f"sdpa_backend={args.sdpa_backend!r}: none of these kernels takes this model's "
                "attention (masks, such as those of packed documents or padding, are beyond "
                "'flash' on a GPU); add 'efficient' or 'math'"
            ) from error


def _names(args: TrainingArguments) -> list[str]:
    given = args.sdpa_backend
    return [given] if isinstance(given, str) else list(given or [])


def _kernels(names: list[str], priority: bool = False) -> Any:
    return sdpa_kernel([_BACKENDS[name] for name in names], set_priority=priority)


def check_attention(
    args: TrainingArguments, model: nn.Module, device: torch.device, context: Context
) -> None:
    """Refuse attention backends none of which can run here, before the first step.

    `context` is that of a forward: autocast decides about the dtype.
    """
    if args.sdpa_backend is None:
        return
    dtype = _compute_dtype(args, model)
    width = _head_width(getattr(model, "config", None))
    if args.sdpa_backend == FLASH4:
        _check_flash4(args, model, device, dtype)
        return

    def attend() -> Any:
        q = torch.zeros(1, 2, 16, width, device=device, dtype=dtype, requires_grad=True)
        with context():
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    if _runs(_names(args), attend):
        return
    able = [name for name in _BACKENDS if _runs([name], attend)]
    seen = {"bf16": "bfloat16", "fp16": "float16"}.get(args.mixed_precision or "", dtype)
    raise ConfigError(
        f"sdpa_backend={args.sdpa_backend!r} cannot run on {device} in "
        f"{str(seen).removeprefix('torch.')} with heads of width {width}; what can: "
        f"{', '.join(able) or 'none of them'}"
    )


def _check_flash4(
    args: TrainingArguments, model: nn.Module, device: torch.device, dtype: torch.dtype
) -> None:
    from headway.models.decoder import DecoderStack
    from headway.models.kernels import flash4

    option = f"sdpa_backend={FLASH4!r}"
    # In a pipeline a rank's stages stand beside the tree of its parameters.
    roots = (model, *getattr(model, "stages", ()))
    stacks = [part for root in roots for part in root.modules() if isinstance(part, DecoderStack)]
    if not stacks:
        kind = getattr(model, "stands_for", type(model)).__name__
        raise ConfigError(
            f"{option} is for Headway's decoder, not for {kind}; transformers' models have "
            "attn_implementation for such kernels"
        )
    config = stacks[0].config
    if config.attention == "flex":
        raise ConfigError(f"{option} and the model's attention='flex' ask for different kernels")
    is_known = device.type == "cuda" and torch.version.hip is None
    major = torch.cuda.get_device_capability(device)[0] if is_known else None
    if major not in flash4.CAPABILITIES:
        raise ConfigError(
            f"{option} cannot run on {device}: it needs an NVIDIA GPU of compute capability "
            f"{' or '.join(f'{known}.x' for known in flash4.CAPABILITIES)} (Hopper, or Blackwell "
            "for data centres)"
        )
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.mixed_precision or "", dtype)
    # Accelerate's precision is the Accelerator's.
    if mixed not in flash4.DTYPES and args.strategy_name != "accelerate":
        raise ConfigError(
            f"{option} needs half precision, and this run computes in "
            f"{str(mixed).removeprefix('torch.')}; set mixed_precision: bf16"
        )
    width = config.head_size
    if width % 8 or width > flash4.MAX_HEAD_SIZE:
        raise ConfigError(
            f"{option} cannot run with heads of width {width}; allowed: multiples of 8 up to "
            f"{flash4.MAX_HEAD_SIZE}"
        )
    flash4.load_flash4(option, usable_folder(args.torch_compile_cache, FLASH4, locks=True))


def _runs(names: list[str], attend: Callable[[], Any]) -> bool:
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")  # torch explains at length why each kernel is not for it
        with _kernels(names):
            attend()
        return True
    return False


def _compute_dtype(args: TrainingArguments, model: nn.Module) -> torch.dtype:
    gathered = getattr(getattr(args, "fsdp2", None), "param_dtype", None)
    if gathered is not None:
        return _DTYPES[_SHORT.get(gathered, gathered)]
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floating, torch.float32)


def _head_width(config: Any) -> int:
    for name in ("head_size", "head_dim"):
        width = getattr(config, name, None)
        if isinstance(width, int):
            return width
    hidden = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 64
