"""torch.compile over a model's blocks, or over the whole of it.

Owns: what is compiled and how often, the checks of backend and mode that need torch. Does not own:
process-wide compiler settings (torch_settings.py), recomputation inside a block (recompute.py).

Equal blocks share one compiled function, so that a model of many layers compiles as fast as one of
a single layer. What is compiled is a block's `forward` and not its call: hooks, such as those by
which FSDP2 gathers weights, run outside of it, and names in the state dict stay.
"""

from __future__ import annotations

import contextvars
import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from headway.args import FSDP2TrainingArguments, TrainingArguments
from headway.config.rules_values import GRAPH_MODES
from headway.errors import ConfigError, unknown
from headway.models.cache import KVCache
from headway.models.decoder import Decoder, DecoderLayer
from headway.models.kernels import triton_works
from headway.strategies.blocks import search_blocks
from headway.strategies.forwards import forward_of, leave_out_cache, mark_adds_nothing, stand_in

logger = logging.getLogger(__name__)

BLOCKS, MODEL = "blocks", "model"
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True)
class CompileOptions:
    """What `torch_compile` and its companions say."""

    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool = True
    full_graph: bool = False
    scope: str = BLOCKS
    has_gathered_blocks: bool = False
    """Whether hooks of the blocks gather their weights, as those of FSDP2 do."""

    @classmethod
    def from_args(cls, args: TrainingArguments) -> CompileOptions | None:
        """None where nothing is to be compiled."""
        if not args.torch_compile:
            return None
        mode = args.torch_compile_mode
        return cls(
            backend=args.torch_compile_backend or "inductor",
            mode=None if mode == "default" else mode,
            dynamic=args.torch_compile_dynamic,
            full_graph=args.torch_compile_full_graph,
            scope=args.torch_compile_scope,
            has_gathered_blocks=isinstance(args, FSDP2TrainingArguments)
            and args.fsdp2.shard_transformer_layers,
        )

    @property
    def replays(self) -> bool:
        """Whether results live in memory that the next step overwrites."""
        return self.backend == "inductor" and self.mode in GRAPH_MODES

    def check(self, device: torch.device) -> None:
        """Refuse a backend that this torch, or this machine, does not have, and a whole that is
        none."""
        if self.full_graph and self.scope == MODEL and self.has_gathered_blocks:
            raise ConfigError(
                "torch_compile_full_graph=True does not work with torch_compile_scope='model' "
                "under FSDP2, which gathers the weights of each block in the middle of the model; "
                "set torch_compile_scope='blocks', or torch_compile_full_graph=False"
            )
        # The list is made by importing every backend, which takes a while.
        names = () if self.backend == "inductor" else torch._dynamo.list_backends(exclude_tags=())
        if names and self.backend not in names:
            usual = [name for name in names if not name.endswith("_TESTING_ONLY")]
            raise ConfigError(unknown("torch_compile_backend", self.backend, usual, most=30))
        if self.backend == "inductor" and device.type == "cuda":
            from torch.utils._triton import has_triton

            if not has_triton():
                raise ConfigError(
                    "torch_compile_backend='inductor' needs triton on this GPU, and there is none "
                    "that works; install triton, or choose another backend ('aot_eager')"
                )

    def start_workers(self, device: torch.device) -> None:
        """Start the processes that make kernels: they take seconds until they can.

        The compiler starts them itself with its first graph, and makes kernels one after the other
        until they are there.
        """
        if self.backend != "inductor" or device.type != "cuda":
            return
        with suppress(ImportError):  # no public name; where it has gone they start later
            from torch._inductor.async_compile import maybe_warm_pool

            maybe_warm_pool()


def compile_module(
    module: nn.Module,
    options: CompileOptions,
    *,
    is_part: bool = False,
    device: torch.device | None = None,
) -> None:
    """Compile a model, or a part of one, in place, to be done at its first call.

    Of a part only blocks are compiled, whatever the scope; one without any, such as a pipeline's
    last stage, is left as it is. `device`: where the model will run.
    """
    leave_out_cache(module)
    if device is not None and device.type == "cuda":
        triton_works()  # graphs that are made only see what is known by then
    by_block = is_part or options.scope == BLOCKS
    blocks = [block for _, block in search_blocks(module)] if by_block else []
    if not blocks:
        if is_part:
            return
        if options.scope == BLOCKS:
            logger.info(
                "torch_compile: %s has no list of blocks; it is compiled as a whole",
                type(module).__name__,
            )
        blocks = [_find_whole(module, options)]
    elif isinstance(module, Decoder) and device is not None and device.type == "cuda":
        # Many small passes on a GPU without a compiler; on a CPU compiling it takes longer. Only
        # in training: sampling would have a graph for every length of a prompt.
        norm = module.model.norm
        stand_in(norm, _compiled(forward_of(norm), options, only_with_grads=True))
    made: dict[FunctionType, Callable[..., Any]] = {}
    plain_blocks = all(forward_of(block) is DecoderLayer.forward for block in blocks)
    for block in blocks:
        plain = forward_of(block)
        if plain not in made:
            made[plain] = _compiled(plain, options)
            mark_adds_nothing(made[plain], plain, block)
        stand_in(block, made[plain])
    if plain_blocks and isinstance(module, Decoder):
        follow = _compiled(cast(FunctionType, DecoderLayer.follow), options)
        for block in blocks:
            stand_in(block, follow, "follow")
        module.model.chain_blocks()
    logger.info(
        "torch_compile: %d modules, %d to compile (backend %s, mode %s)",
        len(blocks),
        len(made),
        options.backend,
        options.mode or "default",
    )


def _find_whole(module: nn.Module, options: CompileOptions) -> nn.Module:
    """What is compiled as a whole: the model, but not a loss in chunks, which cannot be traced.

    Headway's decoder makes such a loss, and so does the output layer that a fused loss stands in
    for; then all that comes before the output layer is compiled.
    """
    find = getattr(module, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module):
        return module
    if not isinstance(module, Decoder) and "forward" not in head.__dict__:
        return module
    rest = getattr(module, "base_model", None) or getattr(module, "model", None)
    is_before = isinstance(rest, nn.Module) and all(part is not head for part in rest.modules())
    if is_before and rest is not module:
        return cast(nn.Module, rest)
    if options.full_graph:
        raise ConfigError(
            f"torch_compile_full_graph: the loss of {type(module).__name__} is made in chunks by "
            "its output layer, which the compiler cannot trace and which is no module apart from "
            "the rest; set torch_compile_scope='blocks', or torch_compile_full_graph=False"
        )
    return module


def _compiled(
    plain: FunctionType, options: CompileOptions, *, only_with_grads: bool = False
) -> Callable[..., Any]:
    compiled = torch.compile(
        _own_copy(plain),
        backend=options.backend,
        mode=options.mode,
        dynamic=options.dynamic,
        fullgraph=options.full_graph,
    )

    settings = contextvars.copy_context()

    @functools.wraps(plain)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal settings
        if only_with_grads and not torch.is_grad_enabled():
            return plain(self, *args, **kwargs)
        # A cache grows by a token per call and is another one for every layer: not worth a graph.
        if any(kwargs.get(name) is not None for name in _CACHES) or any(
            isinstance(value, KVCache) for value in args
        ):
            return plain(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return compiled(self, *args, **kwargs)
        # The backward pass of a GPU has a thread of its own, and from torch 2.13 on the compiler's
        # settings are those of a thread: what is recomputed there is compiled with the forward's.
        if torch._C._current_graph_task_id() != -1:
            return settings.copy().run(compiled, self, *args, **kwargs)
        settings = contextvars.copy_context()
        return compiled(self, *args, **kwargs)

    return run


def _own_copy(plain: FunctionType) -> FunctionType:
    """The same function with code of its own.

    Graphs are kept with the code object. An earlier run of this process, with other settings, would
    otherwise lend its graphs to this one, and their number counts against the recompile limit.
    """
    copy = FunctionType(
        plain.__code__.replace(),
        plain.__globals__,
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    copy.__qualname__ = plain.__qualname__
    return copy
