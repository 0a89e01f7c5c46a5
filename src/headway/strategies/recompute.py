"""Activations that the backward pass makes again in place of keeping them.

Owns: the policies of `gradient_checkpointing_policy`, for models with Hugging Face's switch and for
any model that has blocks. Does not own: the search for blocks (blocks.py), moving activations to
the host (offload.py), the compiler's own choice (torch_settings.py).
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from headway.config.components import load_target
from headway.errors import ConfigError, unknown
from headway.models.decoder import draws_numbers
from headway.models.kernels.flash4 import flash4_operation
from headway.models.kernels.heads import project_operation
from headway.models.recomputed import recomputed
from headway.strategies.blocks import search_blocks
from headway.strategies.forwards import forward_of, leave_out_cache, mark_adds_nothing, stand_in

logger = logging.getLogger(__name__)

BLOCK, SELECTIVE = "block", "selective"
_EVERY = re.compile(r"every_(\d+)")
_OPTION = "gradient_checkpointing_kwargs"
_DETERMINISM_CHECKS = ("default", "none")

# Products of matrices and attention: most of a block's time, and only a part of its memory.
_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def enable(
    module: nn.Module,
    policy: str = BLOCK,
    options: Mapping[str, Any] | None = None,
    *,
    may_lack_blocks: bool = False,
) -> None:
    """Recompute activations of a model, or of a part of one, as the policy says.

    `options` are torch's for checkpointing. `may_lack_blocks`: a part may have none to recompute.
    """
    given = {"use_reentrant": False, **check_options(options or {})}
    if any(isinstance(part, _BatchNorm) for part in module.modules()):
        logger.warning(
            "gradient_checkpointing: the model has batch normalisation, and where a block with it "
            "is recomputed its running means see each batch twice"
        )
    leave_out_cache(module)
    if policy == BLOCK and _switch_on(module, given):
        return
    blocks = [block for _, block in search_blocks(module)]
    if not blocks:
        if may_lack_blocks:
            return
        raise ConfigError(
            f"gradient_checkpointing=True, but {type(module).__name__} has neither "
            "gradient_checkpointing_enable() nor a list of blocks (a ModuleList of modules of one "
            "class) to recompute; pass enable_activation_checkpoint_fn, or set it to False"
        )
    if given["use_reentrant"]:
        raise ConfigError(
            f"{_OPTION}: use_reentrant=True is only for models that switch "
            f"recomputation on by themselves, and for policy {BLOCK!r}; leave it out"
        )
    if policy == SELECTIVE:
        given["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)
    every = _EVERY.fullmatch(policy)
    chosen = blocks[:: int(every[1])] if every else blocks
    made: dict[FunctionType, Callable[..., Any]] = {}
    for block in chosen:
        plain = forward_of(block)
        if plain not in made:
            made[plain] = _recomputing(plain, given)
            mark_adds_nothing(made[plain], plain, block)
        stand_in(block, made[plain])
    logger.info("gradient_checkpointing: %s, %d of %d blocks", policy, len(chosen), len(blocks))


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """`gradient_checkpointing_kwargs` as torch takes them; `ConfigError` for what it would not.

    A run file names a `context_fn` by its dotted path.
    """
    found = dict(options)
    problems = [
        f"{_OPTION}.{name} must be True or False, got {found[name]!r}"
        for name in ("preserve_rng_state", "use_reentrant")
        if name in found and not isinstance(found[name], bool)
    ]
    checks = found.get("determinism_check", "default")
    if checks not in _DETERMINISM_CHECKS:
        problems.append(f"{_OPTION}: {unknown('determinism_check', checks, _DETERMINISM_CHECKS)}")
    if "context_fn" in found:
        try:
            found["context_fn"] = _find_contexts(found["context_fn"])
        except ConfigError as error:
            problems += error.problems
        if found.get("use_reentrant") is True:
            problems.append(
                f"{_OPTION}: context_fn cannot be used with use_reentrant=True; leave one out"
            )
    if problems:
        raise ConfigError(problems)
    return found


def _find_contexts(given: Any) -> Callable[[], Any]:
    """The function that `context_fn` is, or names."""
    where = f"{_OPTION}.context_fn"
    wanted = "a function without arguments that returns two contexts, or its dotted path"
    function = given
    if isinstance(given, str) and "." in given:
        try:
            function = load_target(given, where)
        except ConfigError as error:
            raise ConfigError([f"{where}: {problem}" for problem in error.problems]) from error
    if not callable(function):
        raise ConfigError(
            f"{where} must be {wanted} ('package.module.function'), got {given!r}; "
            "gradient_checkpointing_policy='selective' keeps products and attention without one"
        )
    try:
        forward, again = function()
        fits = all(hasattr(context, "__enter__") for context in (forward, again))
    except Exception as error:
        raise ConfigError(f"{where}={given!r}: calling it failed: {error}") from error
    if not fits:
        raise ConfigError(f"{where} must be {wanted}; {given!r} returns {forward!r} and {again!r}")
    return function  # type: ignore[no-any-return]


def _switch_on(module: nn.Module, options: dict[str, Any]) -> bool:
    """Use the model's own switch, where it has one that works."""
    switch = getattr(module, "gradient_checkpointing_enable", None)
    if not callable(switch) or getattr(module, "supports_gradient_checkpointing", True) is False:
        return False
    switch(gradient_checkpointing_kwargs=options)
    return True


def _recomputing(plain: FunctionType, options: Mapping[str, Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def recompute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return plain(self, *args, **kwargs)
        given = dict(options)
        # Saving random states takes the host longer than starting a block. Graphs save them only
        # where they draw.
        if not torch.compiler.is_compiling():
            given.setdefault("preserve_rng_state", draws_numbers(self))
        return recomputed(functools.partial(plain, self), *args, **given, **kwargs)

    return recompute


@functools.cache
def _kept_operations() -> frozenset[Any]:
    found: set[Any] = set()
    for name in _KEPT_NAMES:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found.update(getattr(packet, overload) for overload in packet.overloads())
    found |= {flash4_operation, project_operation}
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    return frozenset(found if flex is None else found | {flex})


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the output of an operation is kept."""
    if operation in _kept_operations():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
