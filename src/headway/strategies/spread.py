"""Initial values on their way into a sharded model.

Owns: filling each rank's slices from streamed values; making ranks that built whole models agree.
Does not own: the values (models/initial.py) or the cut (fsdp2.py).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

from headway.checkpoint.model import clean_name
from headway.checkpoint.rng import RNGState
from headway.checkpoint.sharding import local_part, local_tensor
from headway.dist.agreement import require_equal
from headway.models.initial import can_stream, initial_tensors
from headway.strategies.blank import build_blank, fill_buffers, unstored_buffers
from headway.strategies.source import ModelSource

logger = logging.getLogger(__name__)


@dataclass
class StreamingPlan:
    """A model whose values can be had tensor by tensor."""

    source: ModelSource
    blank: nn.Module
    """As it was made on the meta device: nothing wrapped, nothing cut."""
    awaits_values: bool = False
    """A checkpoint is about to bring them: only what no checkpoint holds has to be filled."""


def plan_streaming(source: ModelSource) -> StreamingPlan | None:
    """How to initialise without a whole model on any rank; None where that cannot be."""
    if source.ready:
        return None
    if source.make_blank is not None:
        blank = build_blank(source)
        if blank is not None:
            return StreamingPlan(source, blank, awaits_values=True)
        source.make_blank = None
    generators = RNGState()
    before = generators.state_dict()
    try:
        blank = source.build_meta()
    except Exception as error:
        logger.info(
            "model_init does not run on the meta device (%s: %s)", type(error).__name__, error
        )
        return None
    finally:
        # It may draw numbers by other ways than a tensor's; the real construction draws them anew.
        generators.load_state_dict(before)
    return StreamingPlan(source, blank) if can_stream(source, blank) else None


@torch.no_grad()
def fill_shards(model: nn.Module, plan: StreamingPlan, device: torch.device) -> None:
    """Give a sharded model on the meta device memory on `device` and its initial values."""
    model.to_empty(device=device)
    if plan.awaits_values:
        fill_buffers(model, plan.source, unstored_buffers(plan.blank))
        return
    targets: dict[str, Tensor] = {
        clean_name(name): tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    parts = {name: local_part(tensor) for name, tensor in targets.items()}
    for name, value in initial_tensors(plan.source, plan.blank, list(targets), parts):
        local_tensor(targets[name]).copy_(value)


@torch.no_grad()
def same_on_all_ranks(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank's whole model the values of rank 0's, one tensor at a time."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    layout = {name: f"{list(t.shape)} of {t.dtype}" for name, t in tensors.items()}
    require_equal({"model": json.dumps({"model": layout})}, group)
    for tensor in tensors.values():
        if tensor.numel() == 0:
            continue
        value = tensor.detach().contiguous().cpu()
        dist.broadcast(value.reshape(-1).view(torch.uint8), 0, group=group)
        tensor.copy_(value)
